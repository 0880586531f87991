//! What every running VM has, whatever its VMM: a folder, a process, a turn for each verb, and an end that is waited for.

use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use space_hostd::process::{Exit, VmmProcess};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::{ExitReason, VmDir, VmmError, within};

/// After how many questions without an answer a VMM is ended.
const SILENCES_MAX: u32 = 3;

/// How long a VMM that was told to end, or killed, may take.
pub(crate) const END_PATIENCE: Duration = Duration::from_secs(10);

/// The VMM's process in its folder.
pub(crate) struct Machine {
    /// Where the folder is now: a parked VM's is renamed when a sandbox takes it.
    dir: RwLock<VmDir>,
    pub process: VmmProcess,
    /// One save at a time, and no resume in the midst of it.
    pub verbs: tokio::sync::Mutex<()>,
}

impl Machine {
    pub fn new(dir: VmDir, process: VmmProcess) -> Machine {
        Machine { dir: RwLock::new(dir), process, verbs: tokio::sync::Mutex::new(()) }
    }

    pub fn dir(&self) -> VmDir {
        self.dir.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn moved(&self, dir: &VmDir) {
        *self.dir.write().unwrap_or_else(PoisonError::into_inner) = dir.clone();
    }

    /// Ends the process at once and waits for that. No error when it is gone.
    pub async fn kill(&self) -> Result<(), VmmError> {
        self.process.kill()?;
        within("SIGKILL", END_PATIENCE, self.process.wait()).await.map(drop)
    }
}

/// A VMM that can be asked whether it is there.
pub(crate) trait Answers: Sync {
    /// One cheap question, with a limit. A VMM that is not expected to answer now is taken to have answered.
    fn answers(&self) -> impl Future<Output = Result<(), VmmError>> + Send;
}

impl Machine {
    /// The watchdog: waits for the process to end, and ends one that no longer answers, since nothing of it could be
    /// saved or stopped any more. A question takes at most `patience`, and three in a row must fail, with a third of that before
    /// each; so a VMM that falls silent is gone after four times `patience`, not counting verbs under way, which have bounds of
    /// their own.
    pub async fn watch(&self, patience: Duration, vmm: &impl Answers) -> Exit {
        let pid = self.process.identity().pid;
        let mut silences = 0;
        loop {
            tokio::select! {
                ended = self.process.wait() => return ended,
                () = tokio::time::sleep(patience / SILENCES_MAX) => {}
            }
            // During a save nothing else may be answered.
            let Ok(_verb) = self.verbs.try_lock() else { continue };
            match vmm.answers().await {
                Ok(()) => silences = 0,
                Err(error) => {
                    silences += 1;
                    tracing::warn!(%error, silences, pid, "a VMM does not answer");
                }
            }
            if silences >= SILENCES_MAX {
                tracing::error!(pid, "ending a VMM that does not answer");
                let _ = self.process.kill();
            }
        }
    }
}

/// The task that sees to a VM's end and says why it came. Dropped, it lets go of the VM, which goes on.
pub(crate) struct Supervisor {
    exit: watch::Receiver<Option<ExitReason>>,
    task: JoinHandle<()>,
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Closes the connections to the VMM, so that the VM can be adopted.
        self.task.abort();
    }
}

impl Supervisor {
    /// `supervise` returns when the VM has ended.
    pub fn start(supervise: impl Future<Output = ExitReason> + Send + 'static) -> Supervisor {
        let (sender, exit) = watch::channel(None);
        let task = tokio::spawn(async move {
            sender.send_replace(Some(supervise.await));
        });
        Supervisor { exit, task }
    }

    pub fn has_ended(&self) -> bool {
        self.exit.borrow().is_some()
    }

    pub async fn ended(&self) -> ExitReason {
        let mut exit = self.exit.clone();
        exit.wait_for(Option::is_some).await.ok().and_then(|exit| exit.clone()).unwrap_or(ExitReason::Unknown)
    }
}

/// Work on files, away from the runtime's own threads.
pub(crate) async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, VmmError> + Send + 'static,
) -> Result<T, VmmError> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(VmmError::Disconnected { command: what }))
}

/// Writes files of the folder to storage, in order.
pub(crate) async fn sync_files(dir: VmDir, names: &'static [&'static str]) -> Result<(), VmmError> {
    blocking("sync", move || {
        names.iter().try_for_each(|name| {
            let file = dir.open(name, std::fs::OpenOptions::new().read(true))?;
            file.sync_data().map_err(dir.error("write", name))
        })
    })
    .await
}
