//! Virtual machine monitors behind one trait, so that the node does not know which one runs a sandbox.
//!
//! A driver starts one process per VM in a folder of its own ([`VmDir`]), detached: it goes on when the node service
//! ends and is adopted by the next one. Nothing here knows sandboxes, templates or the network; nothing here trusts the
//! VMM: what a process of it says is bounded in size and time, since a guest may have taken it over.

mod choice;
mod console;
mod cpu;
pub mod dir;
pub mod firecracker;
pub mod guest_kernel;
pub mod initramfs;
mod machine;
pub mod qemu;
mod reflink;
mod said;
mod started;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
pub use space_hostd::process::ProcessIdentity;
use space_hostd::protocol::HostError;
use space_hostd::uids::Slot;
use tokio::net::UnixStream;

pub use crate::choice::DriverConfig;
pub use crate::console::CONSOLE_LOG_BYTES;
pub use crate::dir::VmDir;

/// How long a VMM may take for an answer, unless a driver is told otherwise: every call of [`Driver`] and [`Vm`] that asks one
/// thing of it ends within that time, with [`VmmError::Timeout`] when it is silent. A save asks a few things and writes; see the
/// drivers. Generous: fifty may start at once on two cores.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(60);

/// What a VM is made of. A restore needs the same values as the boot whose memory it continues.
#[derive(Clone, Debug)]
pub struct VmSpec {
    pub memory_mib: u32,
    pub vcpus: u8,
    /// Added to the driver's own kernel command line. Used by a boot only.
    pub cmdline: String,
    pub jail: Jail,
}

/// Who the VMM process is on the host.
#[derive(Clone, Debug)]
pub struct Jail {
    /// Its user. No other living VMM of the node has it.
    pub slot: Slot,
    /// The name of its cgroup, which is there.
    pub group: String,
}

/// What a restored VM does once its state is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRestore {
    Run,
    StayPaused,
}

/// How much a save writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveKind {
    Full,
    /// What changed since the last save; a driver whose memory file is always current does the same for both.
    Changed,
}

/// Whether the virtual CPUs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmStatus {
    Running,
    Paused,
    /// The disk or the pool ran out of space: the VM waits, and [`Vm::resume`] tries again.
    PausedByIoError,
    /// The guest shut itself down; the end of the process follows.
    Ended,
}

/// Why a VM is no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The guest powered itself off.
    GuestShutdown,
    /// The guest rebooted or its kernel panicked.
    GuestReset,
    /// One of the two, while no service of ours listened.
    GuestEnded,
    /// The VMM ended on request.
    Quit,
    /// The VMM was killed by a signal: by us, by the kernel for memory, or for a page of a full pool (SIGBUS).
    Killed { signal: i32 },
    /// The VMM failed by itself.
    Failed { code: i32 },
    /// The VMM ended while no service of ours was its parent.
    Unknown,
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitReason::GuestShutdown => f.write_str("the guest powered off"),
            ExitReason::GuestReset => f.write_str("the guest rebooted or its kernel panicked"),
            ExitReason::GuestEnded => f.write_str("the guest powered off or rebooted"),
            ExitReason::Quit => f.write_str("the VM was ended"),
            ExitReason::Killed { signal } => write!(f, "the VMM was killed by signal {signal}"),
            ExitReason::Failed { code } => write!(f, "the VMM failed with status {code}"),
            ExitReason::Unknown => f.write_str("the VMM ended"),
        }
    }
}

/// What a driver can say when something does not work.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    #[error("the VMM program {0} is missing or not executable: install it, or name another one in the configuration")]
    MissingProgram(PathBuf),
    #[error("{program} is version {version}, which cannot be used: {why}")]
    UnfitVersion { program: PathBuf, version: String, why: String },
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("cannot start the VMM, or it is gone")]
    Host(#[from] HostError),
    #[error("cannot control the VMM")]
    Process(#[from] space_hostd::process::ProcessError),
    #[error("the VMM ended before it was ready: {reason}; it said: {said}")]
    Died { reason: ExitReason, said: String },
    #[error("the VMM did not answer {what} within {limit:?}")]
    Timeout { what: &'static str, limit: Duration },
    #[error("the VMM refused {command}: {message}")]
    Refused { command: &'static str, message: String },
    #[error("the connection to the VMM broke during {command}")]
    Disconnected { command: &'static str },
    #[error("the saved state cannot be loaded: {message}")]
    BadState { message: String },
}

/// A save that did not work: the caller's next move depends on whether the VM survived.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The VM is as it was before the attempt, running or paused.
    #[error("the state was not saved; the VM goes on")]
    Recoverable(#[source] VmmError),
    /// What the VM does now is not known: kill it.
    #[error("the state was not saved and the VM cannot go on")]
    Terminal(#[source] VmmError),
}

impl SaveError {
    pub fn is_recoverable(&self) -> bool {
        matches!(self, SaveError::Recoverable(_))
    }
}

/// Starts VMs of one kind.
#[async_trait]
pub trait Driver: Send + Sync {
    /// `qemu` or `firecracker`.
    fn name(&self) -> &'static str;

    /// Version of the program, as it reports it.
    async fn version(&self) -> Result<String, VmmError>;

    /// Two drivers with the same text can load each other's saved states. Stored with each template and checkpoint. Words of
    /// the form `key=value`, so that what differs can be named: see [`differences`].
    async fn compatibility(&self) -> Result<String, VmmError>;

    /// Starts the kernel on `dir`'s `disk.img`, with new memory. Returns when the virtual CPUs run, not when the guest is up.
    async fn boot(&self, spec: &VmSpec, dir: &VmDir) -> Result<Box<dyn Vm>, VmmError>;

    /// Continues the VM whose memory, disk and device state are in `dir`.
    async fn restore(&self, spec: &VmSpec, dir: &VmDir, then: AfterRestore) -> Result<Box<dyn Vm>, VmmError>;

    /// Takes over a VM that an earlier service started in `dir`. An error that it ended is [`VmmError::Host`] with `Gone`.
    async fn adopt(&self, dir: &VmDir, identity: ProcessIdentity) -> Result<Box<dyn Vm>, VmmError>;
}

/// One VM. Dropping it leaves the VM running.
#[async_trait]
pub trait Vm: Send + Sync {
    /// What to remember for [`Driver::adopt`].
    fn identity(&self) -> ProcessIdentity;

    /// Stops the virtual CPUs; no error when they stand.
    async fn pause(&self) -> Result<(), VmmError>;

    /// Lets the virtual CPUs run; no error when they do.
    async fn resume(&self) -> Result<(), VmmError>;

    async fn status(&self) -> Result<VmStatus, VmmError>;

    /// Writes what the guest changed to storage **while it runs**, so that a following [`Vm::save`] stands still for less long.
    async fn sync_ahead(&self) -> Result<(), VmmError>;

    /// Pauses and writes the device state next to memory and disk, then leaves the VM paused: the caller takes its snapshot
    /// of the folder and calls [`Vm::resume`].
    async fn save(&self, kind: SaveKind) -> Result<(), SaveError>;

    /// Ends the VMM at once. No error when it is gone.
    async fn kill(&self) -> Result<(), VmmError>;

    /// Waits for the end of the VM; any number of callers, may be cancelled.
    async fn wait(&self) -> ExitReason;

    /// A new byte stream to the guest's channel. There is one at a time: drop the old one first, or this one stays silent
    /// until that happens. Bytes the guest sent to an earlier stream may still arrive first. May wait until the guest
    /// takes the connection, so give it a limit. A [`Vm::save`] may end the streams that were there before.
    async fn agent(&self) -> Result<UnixStream, VmmError>;

    /// Whether each stream of [`Vm::agent`] is a connection of its own, which the guest sees begin and end.
    fn agent_connects(&self) -> bool;

    /// The VM's folder was renamed to this one.
    fn moved(&self, dir: &VmDir);

    /// Moves what the guest wrote to its console since the last call into `console.log`, whose size stays bounded.
    async fn drain_console(&self) -> Result<(), VmmError>;
}

/// What is different between two texts of [`Driver::compatibility`], for a message; empty when nothing is.
pub fn differences(made: &str, now: &str) -> String {
    let lacks = |text: &str, word: &str| !text.split_whitespace().any(|other| other == word);
    let only = |text: &str, other: &str| -> Vec<String> {
        text.split_whitespace().filter(|word| lacks(other, word)).map(str::to_owned).collect()
    };
    let (made_only, now_only) = (only(made, now), only(now, made));
    if made_only.is_empty() && now_only.is_empty() {
        return String::new();
    }
    format!("it was made with {} and this is {}", made_only.join(" "), now_only.join(" "))
}

/// The processor of this host, for [`Driver::compatibility`].
fn own_cpu() -> Result<String, VmmError> {
    cpu::fingerprint().map_err(|source| VmmError::File { action: "read", path: "/proc/cpuinfo".into(), source })
}

/// Waits at most so long.
async fn within<T>(what: &'static str, limit: Duration, act: impl Future<Output = T>) -> Result<T, VmmError> {
    tokio::time::timeout(limit, act).await.map_err(|_| VmmError::Timeout { what, limit })
}

#[cfg(test)]
mod tests {
    use super::differences;

    #[test]
    fn only_what_differs_is_named() {
        assert_eq!(differences("a=1 b=2", "a=1 b=2"), "");
        let text = differences("vmm=x state=10 cpu=y", "vmm=x state=11 cpu=z");
        assert_eq!(text, "it was made with state=10 cpu=y and this is state=11 cpu=z");
    }
}
