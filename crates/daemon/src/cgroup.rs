//! Control groups of the guest: all programs below one group that leaves the daemon room to live, each command in a group
//! of its own, so that it can be ended as a whole and its end for want of memory be told from any other.
//!
//! ```text
//! /sys/fs/cgroup            the daemon, never limited
//!   └ space                 memory.max, pids.max; frozen before a snapshot
//!       └ <command id>
//! ```
//! On a host (tests) there are groups only below a folder given for it; without them a command is its process group.
//!
//! While the programs are frozen none can be started: the start of a program waits for its exec, which a frozen group
//! never reaches, and the daemon with it.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Mode;

const ROOT: &str = "/sys/fs/cgroup";
const FREEZE_PATIENCE: Duration = Duration::from_secs(10);
const RESERVE_MIN_BYTES: u64 = 32 << 20;
const PIDS_MAX: u64 = 4096;

pub struct Groups {
    space: Option<PathBuf>,
    /// Held over every start, so that none is under way when the programs are told to stand still.
    frozen: Mutex<bool>,
}

/// One command's group.
#[derive(Clone)]
pub struct Group {
    path: PathBuf,
}

fn number(path: &str) -> u64 {
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn cpu_us(group: &Path) -> u64 {
    let text = fs::read_to_string(group.join("cpu.stat")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
    line.and_then(|number| number.parse().ok()).unwrap_or(0)
}

pub fn memory(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}

impl Groups {
    pub fn open(mode: &Mode) -> Self {
        let root = match mode {
            Mode::Guest => Some(Path::new(ROOT)),
            Mode::Host { cgroup, .. } => cgroup.as_deref(),
        };
        let space = root.and_then(|root| match Self::set_up(root) {
            Ok(space) => Some(space),
            Err(error) => {
                crate::log::say(&format!("no control groups: {error}"));
                None
            }
        });
        Self { space, frozen: Mutex::default() }
    }

    fn set_up(root: &Path) -> io::Result<PathBuf> {
        let space = root.join("space");
        for controller in ["+memory", "+pids", "+cpu"] {
            // A kernel without one of them is poorer, not unusable.
            let _ = fs::write(root.join("cgroup.subtree_control"), controller);
        }
        fs::create_dir_all(&space)?;
        for controller in ["+memory", "+pids", "+cpu"] {
            let _ = fs::write(space.join("cgroup.subtree_control"), controller);
        }
        let total = memory("MemTotal");
        let limit = total.saturating_sub((total / 16).max(RESERVE_MIN_BYTES));
        let _ = fs::write(space.join("memory.max"), limit.to_string());
        let threads = number("/proc/sys/kernel/threads-max");
        let _ = fs::write(space.join("pids.max"), (threads * 3 / 4).clamp(64, PIDS_MAX).to_string());
        Ok(space)
    }

    pub fn create(&self, id: &str) -> io::Result<Option<Group>> {
        let Some(space) = &self.space else { return Ok(None) };
        let path = space.join(id);
        fs::create_dir(&path)?;
        Ok(Some(Group { path }))
    }

    /// For the length of a start. `None`: the programs stand still, and one more could not begin.
    pub fn while_running(&self) -> Option<MutexGuard<'_, bool>> {
        Some(self.frozen.lock().unwrap_or_else(PoisonError::into_inner)).filter(|frozen| !**frozen)
    }

    fn set_frozen(&self, frozen: bool) -> io::Result<()> {
        let Some(space) = &self.space else { return Ok(()) };
        let mut state = self.frozen.lock().unwrap_or_else(PoisonError::into_inner);
        fs::write(space.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
        *state = frozen;
        Ok(())
    }

    /// CPU time of all programs since the boot; 0 without control groups.
    pub fn cpu_us(&self) -> u64 {
        self.space.as_deref().map_or(0, cpu_us)
    }

    pub fn thaw(&self) -> io::Result<()> {
        self.set_frozen(false)
    }

    /// Stops every program. Blocks until all stand still; on failure they run again.
    pub fn freeze(&self) -> io::Result<()> {
        let Some(space) = &self.space else { return Ok(()) };
        self.set_frozen(true)?;
        let begun = Instant::now();
        while !fs::read_to_string(space.join("cgroup.events"))?.contains("frozen 1") {
            if begun.elapsed() > FREEZE_PATIENCE {
                self.set_frozen(false)?;
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the programs did not stand still in time"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Group {
    /// Where a process writes itself in.
    pub fn procs(&self) -> io::Result<OwnedFd> {
        Ok(fs::File::options().write(true).open(self.path.join("cgroup.procs"))?.into())
    }

    pub fn cpu_us(&self) -> u64 {
        cpu_us(&self.path)
    }

    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.kill"), "1")
    }

    /// Whether the kernel killed one of its processes for memory.
    pub fn ran_out_of_memory(&self) -> bool {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        events.lines().any(|line| line.strip_prefix("oom_kill ").is_some_and(|count| count != "0"))
    }

    /// False while processes are in it.
    pub fn remove(&self) -> bool {
        match fs::remove_dir(&self.path) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }
}
