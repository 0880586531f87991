//! A QEMU that runs: the verbs, and the task that notices its end.

use std::fs::OpenOptions;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use space_hostd::process::{Exit, VmmProcess};
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::console;
use super::qmp::Qmp;
use crate::dir::{AGENT_SOCKET, DEVICE_STATE, DISK, MEMORY};
use crate::machine::{Answers, END_PATIENCE, Machine, Supervisor, sync_files};
use crate::{ExitReason, ProcessIdentity, SaveError, SaveKind, Vm, VmDir, VmStatus, VmmError, within};

const NEW_STATE: &str = "device.state.new";
/// The shutdown reason of a guest that ended while nobody listened.
const MISSED: &str = "missed";

struct Inner {
    machine: Machine,
    qmp: Qmp,
}

pub(super) struct QemuVm {
    inner: Arc<Inner>,
    missed_shutdown: watch::Sender<bool>,
    supervisor: Supervisor,
}

/// Why the VM ended, from how its process did and what the guest had announced.
pub(super) fn exit_reason(exit: Exit, shutdown: Option<&str>) -> ExitReason {
    match (shutdown, exit) {
        (Some("guest-shutdown"), _) => ExitReason::GuestShutdown,
        (Some("guest-reset" | "guest-panic"), _) => ExitReason::GuestReset,
        (Some(MISSED), _) => ExitReason::GuestEnded,
        (_, Exit::Signal(signal)) => ExitReason::Killed { signal },
        (_, Exit::Code(0)) => ExitReason::Quit,
        (_, Exit::Code(code)) => ExitReason::Failed { code },
        (Some(_), Exit::Unknown) => ExitReason::Quit,
        (None, Exit::Unknown) => ExitReason::Unknown,
    }
}

impl Answers for Inner {
    async fn answers(&self) -> Result<(), VmmError> {
        self.run_state().await.map(drop)
    }
}

/// Waits for the guest's shutdown or QEMU's end. A guest that shut down leaves QEMU standing: fetch the console, end it.
async fn supervise(inner: Arc<Inner>, mut missed: watch::Receiver<bool>) -> ExitReason {
    let process = &inner.machine.process;
    let mut seen = inner.qmp.seen();
    let shutdown = tokio::select! {
        _ = inner.machine.watch(inner.qmp.patience, &*inner) => inner.qmp.seen().borrow().shutdown.clone(),
        Ok(_) = missed.wait_for(|missed| *missed) => Some(MISSED.to_owned()),
        seen = seen.wait_for(|seen| seen.shutdown.is_some()) => seen.ok().and_then(|seen| seen.shutdown.clone()),
    };
    if shutdown.is_some() && process.is_alive() {
        if let Err(error) = console::drain(&inner.qmp, &inner.machine.dir()).await {
            tracing::debug!(%error, "the console of a guest that shut down is lost");
        }
        // It may be gone before it answers, and one that does not obey is killed.
        let _ = within("quit", END_PATIENCE, inner.qmp.call("quit", Value::Null)).await;
        if within("the end", END_PATIENCE, process.wait()).await.is_err() {
            let _ = process.kill();
        }
    }
    let ended = process.wait().await;
    exit_reason(ended, shutdown.as_deref())
}

impl QemuVm {
    pub(super) fn new(dir: VmDir, process: VmmProcess, qmp: Qmp) -> Self {
        let inner = Arc::new(Inner { machine: Machine::new(dir, process), qmp });
        let missed_shutdown = watch::Sender::new(false);
        let supervisor = Supervisor::start(supervise(inner.clone(), missed_shutdown.subscribe()));
        QemuVm { inner, missed_shutdown, supervisor }
    }

    /// The guest had shut down before this side came.
    pub(super) fn note_shutdown(&self) {
        self.missed_shutdown.send_replace(true);
    }
}

impl Inner {
    async fn run_state(&self) -> Result<String, VmmError> {
        let status = self.qmp.call("query-status", Value::Null).await?;
        Ok(status["status"].as_str().unwrap_or_default().chars().take(64).collect())
    }

    /// Lets QEMU write the device state into a new file and puts it in place.
    async fn write_state(&self) -> Result<(), VmmError> {
        let options = &mut OpenOptions::new();
        let file = self.machine.dir().open(NEW_STATE, options.write(true).create(true).truncate(true))?;
        self.qmp.reset_migration();
        // All three are on their way at once; the answers come in order.
        let stop = self.qmp.send("stop", Value::Null, None).await?;
        let pass = self.qmp.send("getfd", json!({"fdname": "s"}), Some(file.into())).await?;
        let migrate = self.qmp.send("migrate", json!({"uri": "fd:s"}), None).await?;
        stop.answer().await?;
        pass.answer().await?;
        migrate.answer().await?;
        if !self.qmp.migrated("migrate").await? {
            let info = self.qmp.call("query-migrate", Value::Null).await?;
            let message = info["error-desc"].as_str().unwrap_or("no reason given").chars().take(500).collect();
            return Err(VmmError::Refused { command: "migrate", message });
        }
        // Its event comes a moment before QEMU lets the VM go on.
        let finalized = async {
            while self.run_state().await? == "finish-migrate" {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Ok::<(), VmmError>(())
        };
        within("the end of a save", END_PATIENCE, finalized).await??;
        let renamed = std::fs::rename(self.machine.dir().file(NEW_STATE), self.machine.dir().file(DEVICE_STATE));
        renamed.map_err(self.machine.dir().error("put in place", DEVICE_STATE))
    }

    /// After a save that failed: back to what the VM did before.
    async fn recover(&self, was_running: bool, error: VmmError) -> SaveError {
        if matches!(error, VmmError::Timeout { .. }) {
            // It is silent: to ask more of it only takes longer.
            return SaveError::Terminal(error);
        }
        // A leftover is replaced by the next save and never read.
        let _ = std::fs::remove_file(self.machine.dir().file(NEW_STATE));
        let back = if was_running { self.qmp.call("cont", Value::Null).await.map(drop) } else { Ok(()) };
        match (back, self.run_state().await.as_deref()) {
            (Ok(()), Ok("running")) if was_running => SaveError::Recoverable(error),
            (Ok(()), Ok("paused" | "prelaunch" | "postmigrate" | "io-error")) if !was_running => {
                SaveError::Recoverable(error)
            }
            _ => SaveError::Terminal(error),
        }
    }
}

#[async_trait]
impl Vm for QemuVm {
    fn identity(&self) -> ProcessIdentity {
        self.inner.machine.process.identity()
    }

    async fn pause(&self) -> Result<(), VmmError> {
        let _verb = self.inner.machine.verbs.lock().await;
        self.inner.qmp.call("stop", Value::Null).await.map(drop)
    }

    async fn resume(&self) -> Result<(), VmmError> {
        let _verb = self.inner.machine.verbs.lock().await;
        self.inner.qmp.call("cont", Value::Null).await.map(drop)
    }

    async fn status(&self) -> Result<VmStatus, VmmError> {
        if self.supervisor.has_ended() {
            return Ok(VmStatus::Ended);
        }
        Ok(match self.inner.run_state().await?.as_str() {
            "running" => VmStatus::Running,
            "io-error" => VmStatus::PausedByIoError,
            "shutdown" | "internal-error" | "guest-panicked" => VmStatus::Ended,
            _ => VmStatus::Paused,
        })
    }

    async fn sync_ahead(&self) -> Result<(), VmmError> {
        sync_files(self.inner.machine.dir(), &[MEMORY, DISK]).await
    }

    async fn save(&self, _kind: SaveKind) -> Result<(), SaveError> {
        let _verb = self.inner.machine.verbs.lock().await;
        let state = self.inner.run_state().await.map_err(SaveError::Terminal)?;
        match state.as_str() {
            // Saved, and not run since: the state on disk is the current one.
            "postmigrate" => return Ok(()),
            "running" | "paused" | "io-error" => {}
            _ => {
                let message = format!("a VM in state {state} cannot be saved");
                return Err(SaveError::Terminal(VmmError::Refused { command: "save", message }));
            }
        }
        match self.inner.write_state().await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.inner.recover(state == "running", error).await),
        }
    }

    async fn kill(&self) -> Result<(), VmmError> {
        self.inner.machine.kill().await
    }

    async fn wait(&self) -> ExitReason {
        self.supervisor.ended().await
    }

    async fn agent(&self) -> Result<UnixStream, VmmError> {
        self.inner.machine.dir().connect(AGENT_SOCKET)
    }

    fn agent_connects(&self) -> bool {
        false
    }

    fn moved(&self, dir: &VmDir) {
        self.inner.machine.moved(dir);
    }

    async fn drain_console(&self) -> Result<(), VmmError> {
        console::drain(&self.inner.qmp, &self.inner.machine.dir()).await
    }
}
