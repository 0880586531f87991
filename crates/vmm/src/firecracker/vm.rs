//! A Firecracker that runs: the verbs, and the task that notices its end and its silence.
//!
//! A pause stops the process by a signal and not through Firecracker's interface: when 1.16 resumes a VM it expects the
//! guest to confirm that its vsock connections were reset, which the guest is told by a snapshot only. After a pause
//! without one nothing reaches the guest any more. A signal also keeps the connections, takes no round trip, and holds
//! a VMM that has other plans. Firecracker's own pause is left to saves.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use space_hostd::process::{Exit, VmmProcess};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::api::{self, Api};
use super::saved::{self, DIFF, Kind, NEW_MEMORY, NEW_STATE};
use super::{AGENT_PORT, VSOCK_SOCKET};
use crate::dir::DISK;
use crate::machine::{Answers, Machine, Supervisor, blocking, sync_files};
use crate::{ExitReason, ProcessIdentity, SaveError, SaveKind, Vm, VmDir, VmStatus, VmmError, console, within};

/// A full snapshot writes all memory; a slow disk has a few MiB a millisecond, a terrible one this much time.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(600);
/// What a guest that takes the connection needs for it; Firecracker itself gives up after two seconds.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
const CONNECT_PAUSE: Duration = Duration::from_millis(2);
const CONNECT_PAUSE_MAX: Duration = Duration::from_millis(200);
/// Firecracker's answer is `OK` and a port number.
const ANSWER_MAX_BYTES: usize = 32;
/// What one fetch of the console takes: all that the kernel keeps in a pipe.
const CONSOLE_BYTES: u64 = 64 << 10;

struct Inner {
    machine: Machine,
    api: Api,
    console: File,
    /// Saved, and not run since: the state on disk is the current one.
    saved: AtomicBool,
    /// Paused by Firecracker, and the guest will learn that its connections are gone: resuming is safe.
    reset_announced: AtomicBool,
}

pub(super) struct FirecrackerVm {
    inner: Arc<Inner>,
    supervisor: Supervisor,
}

/// Firecracker ends with success when the guest reset itself, which a panic does too.
pub(super) fn exit_reason(exit: Exit) -> ExitReason {
    match exit {
        Exit::Code(0) => ExitReason::GuestEnded,
        Exit::Code(code) => ExitReason::Failed { code },
        Exit::Signal(signal) => ExitReason::Killed { signal },
        Exit::Unknown => ExitReason::Unknown,
    }
}

impl Answers for Inner {
    async fn answers(&self) -> Result<(), VmmError> {
        // Paused by a signal: it cannot answer.
        if self.machine.process.is_stopped() {
            return Ok(());
        }
        self.api.state(&self.machine.dir()).await.map(drop)
    }
}

async fn supervise(inner: Arc<Inner>) -> ExitReason {
    let machine = &inner.machine;
    let ended = machine.watch(inner.api.patience, &*inner).await;
    if let Err(error) = inner.drain_console() {
        tracing::debug!(%error, "the console of a VM that ended is lost");
    }
    exit_reason(ended)
}

impl FirecrackerVm {
    /// `reset_announced`: it was just loaded from a snapshot, and may be paused.
    pub(super) fn new(dir: VmDir, process: VmmProcess, api: Api, console: File, reset_announced: bool) -> Self {
        let inner = Inner {
            machine: Machine::new(dir, process),
            api,
            console,
            saved: AtomicBool::new(false),
            reset_announced: AtomicBool::new(reset_announced),
        };
        let inner = Arc::new(inner);
        let supervisor = Supervisor::start(supervise(inner.clone()));
        FirecrackerVm { inner, supervisor }
    }
}

impl Inner {
    async fn is_running(&self) -> Result<bool, VmmError> {
        match self.api.state(&self.machine.dir()).await?.as_str() {
            "Running" => Ok(true),
            "Paused" => Ok(false),
            other => {
                let message =
                    format!("the VM is in the unknown state {:?}", other.chars().take(64).collect::<String>());
                Err(VmmError::Refused { command: "the state", message })
            }
        }
    }

    /// Firecracker's own pause, to be followed by a snapshot.
    async fn pause_for_save(&self) -> Result<(), VmmError> {
        self.reset_announced.store(false, Ordering::Release);
        self.api.patch(&self.machine.dir(), "pause", "/vm", &api::VmState { state: "Paused" }).await
    }

    async fn resume(&self) -> Result<(), VmmError> {
        if self.machine.process.is_stopped() {
            self.machine.process.go_on()?;
        }
        if self.is_running().await? {
            return Ok(());
        }
        if !self.reset_announced.load(Ordering::Acquire) {
            // Somebody died between the pause and the snapshot of a save.
            self.write_state(SaveKind::Changed).await?;
        }
        self.saved.store(false, Ordering::Release);
        self.api.patch(&self.machine.dir(), "resume", "/vm", &api::VmState { state: "Resumed" }).await
    }

    async fn write_state(&self, wanted: SaveKind) -> Result<(), VmmError> {
        let dir = self.machine.dir();
        let kind = blocking("save", move || saved::prepare(&dir, wanted)).await?;
        let (snapshot_type, memory) = match kind {
            Kind::Full => ("Full", NEW_MEMORY),
            Kind::Diff => ("Diff", DIFF),
        };
        let create = api::CreateSnapshot { snapshot_type, snapshot_path: NEW_STATE, mem_file_path: memory };
        let dir = self.machine.dir();
        let made = self.api.put_within(SNAPSHOT_PATIENCE, &dir, "the snapshot", "/snapshot/create", &create).await;
        // The guest's connections are reset before the device state is written.
        if made.is_ok() || std::fs::metadata(dir.file(NEW_STATE)).is_ok_and(|meta| meta.len() > 0) {
            self.reset_announced.store(true, Ordering::Release);
        }
        blocking("save", move || {
            if let Err(error) = made {
                // Which of the changes were reported is not known.
                saved::mark_stale(&dir)?;
                return Err(error);
            }
            saved::commit(&dir, kind)
        })
        .await
    }

    /// After a save that failed: back to what the VM did before.
    async fn recover(&self, was_running: bool, error: VmmError) -> SaveError {
        if matches!(error, VmmError::Timeout { .. }) {
            return SaveError::Terminal(error);
        }
        let back = if was_running { self.resume().await } else { Ok(()) };
        match (back, self.is_running().await) {
            (Ok(()), Ok(running)) if running == was_running => SaveError::Recoverable(error),
            _ => SaveError::Terminal(error),
        }
    }

    fn drain_console(&self) -> Result<(), VmmError> {
        let mut bytes = Vec::new();
        // The end of what is there is an error: the pipe does not wait.
        let _ = (&self.console).take(CONSOLE_BYTES).read_to_end(&mut bytes);
        console::append(&self.machine.dir(), &bytes)
    }

    /// One attempt to reach the guest's port.
    async fn connect_agent(&self) -> Result<UnixStream, VmmError> {
        const COMMAND: &str = "the guest's channel";
        let mut stream = self.machine.dir().connect_owned(VSOCK_SOCKET).await?;
        let lost = |_| VmmError::Disconnected { command: COMMAND };
        stream.write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes()).await.map_err(lost)?;
        let mut answer = Vec::new();
        // Byte by byte: what follows the line is the guest's.
        while answer.last() != Some(&b'\n') && answer.len() < ANSWER_MAX_BYTES {
            answer.push(stream.read_u8().await.map_err(lost)?);
        }
        if answer.starts_with(b"OK ") {
            return Ok(stream);
        }
        let message = String::from_utf8_lossy(&answer).trim().to_owned();
        Err(VmmError::Refused { command: COMMAND, message })
    }
}

#[async_trait]
impl Vm for FirecrackerVm {
    fn identity(&self) -> ProcessIdentity {
        self.inner.machine.process.identity()
    }

    async fn pause(&self) -> Result<(), VmmError> {
        let _verb = self.inner.machine.verbs.lock().await;
        Ok(self.inner.machine.process.stop().await?)
    }

    async fn resume(&self) -> Result<(), VmmError> {
        let _verb = self.inner.machine.verbs.lock().await;
        self.inner.resume().await
    }

    async fn status(&self) -> Result<VmStatus, VmmError> {
        if self.supervisor.has_ended() {
            return Ok(VmStatus::Ended);
        }
        let running = !self.inner.machine.process.is_stopped() && self.inner.is_running().await?;
        Ok(if running { VmStatus::Running } else { VmStatus::Paused })
    }

    async fn sync_ahead(&self) -> Result<(), VmmError> {
        sync_files(self.inner.machine.dir(), &[DISK]).await
    }

    async fn save(&self, kind: SaveKind) -> Result<(), SaveError> {
        let _verb = self.inner.machine.verbs.lock().await;
        let stopped = self.inner.machine.process.is_stopped();
        if stopped {
            // It runs for the moment that Firecracker's own pause takes.
            self.inner.machine.process.go_on().map_err(|error| SaveError::Terminal(error.into()))?;
        }
        let running = self.inner.is_running().await.map_err(SaveError::Terminal)?;
        if !running && self.inner.saved.load(Ordering::Acquire) {
            return Ok(());
        }
        if running {
            self.inner.pause_for_save().await.map_err(SaveError::Terminal)?;
        }
        match self.inner.write_state(kind).await {
            Ok(()) => {
                self.inner.saved.store(true, Ordering::Release);
                Ok(())
            }
            Err(error) => Err(self.inner.recover(running && !stopped, error).await),
        }
    }

    async fn kill(&self) -> Result<(), VmmError> {
        self.inner.machine.kill().await
    }

    async fn wait(&self) -> ExitReason {
        self.supervisor.ended().await
    }

    /// Tries until the guest takes the connection or the VM ends.
    async fn agent(&self) -> Result<UnixStream, VmmError> {
        let mut pause = CONNECT_PAUSE;
        loop {
            match within("a connection", CONNECT_PATIENCE, self.inner.connect_agent()).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) | Err(error) if !self.inner.machine.process.is_alive() => return Err(error),
                _ => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(CONNECT_PAUSE_MAX);
        }
    }

    fn agent_connects(&self) -> bool {
        true
    }

    fn moved(&self, dir: &VmDir) {
        self.inner.machine.moved(dir);
    }

    async fn drain_console(&self) -> Result<(), VmmError> {
        self.inner.drain_console()
    }
}
