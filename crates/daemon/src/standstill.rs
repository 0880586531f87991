//! Standing still for a snapshot: programs frozen, the disk synced and frozen, so that what is on the disk at that instant is a
//! clean file system that also boots from cold.
//!
//! ```text
//! before-checkpoint hooks ─▶ programs frozen ─▶ synced ─▶ disk frozen ═▶ (snapshot) ═▶ refresh ─▶ disk thawed ─▶ programs thawed
//! ```
//! Only a refresh ends it: a guest without the right clock and randomness must not run programs. From the freeze to the thaw the
//! daemon itself must not write to the disk from its one thread: that write, and with it the thaw, would wait for ever.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use space_proto::guest::{QuiesceReply, QuiesceRequest};

use crate::{Daemon, Mode, hooks, sys};

/// The file system that programs write to.
pub struct Disk {
    /// A folder of it; none on a host, whose own file systems are left alone.
    root: Option<PathBuf>,
    /// Held over freeze and thaw, so that they cannot overtake each other.
    frozen: Mutex<bool>,
}

impl Disk {
    pub fn of(mode: &Mode) -> Self {
        let root = match mode {
            Mode::Guest => Some("/".into()),
            Mode::Host { disk, .. } => disk.clone(),
        };
        Self { root, frozen: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.frozen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes out what programs have written; with `freeze`, nothing more follows it. Answers whether the disk is frozen.
    fn settle(&self, freeze: bool) -> io::Result<bool> {
        let mut frozen = self.lock();
        let Some(root) = self.root.as_deref().filter(|_| !*frozen) else { return Ok(*frozen) };
        let root = File::open(root)?;
        rustix::fs::syncfs(&root)?;
        if freeze {
            sys::freeze_filesystem(root.as_fd())?;
            *frozen = true;
        }
        Ok(*frozen)
    }

    /// A disk that is not frozen is no fault: refresh is idempotent.
    pub fn thaw(&self) -> io::Result<()> {
        let mut frozen = self.lock();
        if let Some(root) = self.root.as_deref().filter(|_| *frozen) {
            match sys::thaw_filesystem(File::open(root)?.as_fd()) {
                Err(error) if error.raw_os_error() != Some(nix::libc::EINVAL) => return Err(error),
                _ => *frozen = false,
            }
        }
        Ok(())
    }
}

impl Daemon {
    /// Idempotent. On failure everything runs again.
    pub async fn stand_still(self: &Arc<Self>, request: QuiesceRequest) -> Result<QuiesceReply, String> {
        let hook_failures = match request.hooks {
            true => hooks::run(self, hooks::When::BeforeCheckpoint, request.hooks_ms).await,
            false => Vec::new(),
        };
        let daemon = self.clone();
        let work = tokio::task::spawn_blocking(move || {
            let settled = daemon.settle(&request);
            if settled.is_err() {
                daemon.disk.thaw()?;
                daemon.table.groups.thaw()?;
            }
            settled
        });
        let done = work.await.map_err(|_| "interrupted".to_owned())?;
        let disk_frozen = done.map_err(|error| format!("cannot stand still: {error}"))?;
        Ok(QuiesceReply { frozen_processes: self.table.running() as u64, disk_frozen, hook_failures })
    }

    fn settle(&self, request: &QuiesceRequest) -> io::Result<bool> {
        if request.freeze {
            self.table.groups.freeze()?;
        }
        if request.drop_caches {
            // What is dirty cannot be dropped.
            self.disk.settle(false)?;
            std::fs::write("/proc/sys/vm/drop_caches", "1")?;
        }
        self.disk.settle(request.freeze_disk)
    }
}
