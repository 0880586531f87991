//! Processes that outlive their maker: started detached, under their own user and in their own cgroup, and found again
//! later by pid **and** start time, so that a pid the kernel gave to somebody else is never signalled.
//!
//! All signals and waits go through a pidfd. Nothing here knows what the process does.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::libc;
use rustix::process::{PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::cgroup::Cgroup;
use crate::host::Host;
use crate::jail::Jail;
use crate::seccomp::{self, Profile};
pub use crate::spawn::FIRST_INHERITED;
use crate::spawn::{Cage, Child, c_string, watch_fd};

/// What a thread may take to come out of a system call when its process is stopped.
const STOP_PATIENCE: Duration = Duration::from_secs(10);
const STOP_POLL: Duration = Duration::from_millis(1);

/// Names one process for as long as the host runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub pid: u32,
    /// Clock ticks since the host's boot, field 22 of `/proc/<pid>/stat`.
    pub start_time: u64,
}

/// Where a program's standard output and error go.
#[derive(Debug)]
pub enum Output {
    Null,
    /// A file, started anew. It is the program's file size limit that bounds it, so it needs `file_size_bytes`.
    File(PathBuf),
    /// A descriptor, such as the writing end of a pipe.
    Fd(OwnedFd),
}

/// Resource limits set in the child. `None` leaves the caller's.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rlimits {
    pub open_files: Option<u64>,
    /// Largest file the program may write, which bounds disk images too.
    pub file_size_bytes: Option<u64>,
}

/// A program to start. The environment is empty, the core size 0, new privileges and all capabilities are off.
#[derive(Debug)]
pub struct SpawnSpec {
    /// Absolute; never looked up. In a jail: the path there.
    pub program: PathBuf,
    pub args: Vec<String>,
    /// Entered before the user changes, so its parents need not be open to that user. A jailed program begins in
    /// [`crate::jail::FOLDER`] instead.
    pub cwd: PathBuf,
    pub uid: u32,
    pub gid: u32,
    /// Joined before the program begins.
    pub cgroup: Option<Cgroup>,
    pub output: Output,
    pub limits: Rlimits,
    /// Descriptors the program finds from [`FIRST_INHERITED`] on, in this order. Closed here after the start.
    pub inherited: Vec<OwnedFd>,
    /// `NAME=value`; there is nothing else in the environment.
    pub env: Vec<String>,
    pub rights: Rights,
    /// The filter of system calls, if any.
    pub profile: Option<Profile>,
    pub jail: Option<Jail>,
}

/// What a program may do beyond its user's rights. New privileges are off in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// No capability, now or later.
    None,
    /// Root's, cut down to these capabilities (their kernel numbers).
    Root(&'static [u8]),
}

#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("the program path {0} is not absolute")]
    NotAbsolute(PathBuf),
    #[error("cannot start {program}: {source}")]
    Spawn { program: PathBuf, source: io::Error },
    #[error("process {pid} is gone")]
    Gone { pid: u32 },
    #[error("cannot {action} process {pid}: {source}")]
    Control { action: &'static str, pid: u32, source: io::Error },
}

/// What may be done to a VMM from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    Kill,
    /// All its threads stand where they are.
    Stop,
    GoOn,
}

impl Order {
    fn signal(self) -> (Signal, &'static str) {
        match self {
            Order::Kill => (Signal::KILL, "kill"),
            Order::Stop => (Signal::STOP, "stop"),
            Order::GoOn => (Signal::CONT, "let go on"),
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// It was not our child, so only its end is known.
    Unknown,
}

/// A process that runs, or ran. Dropping it leaves the process alone; a child is reaped all the same.
#[derive(Clone, Debug)]
pub struct VmmProcess {
    identity: ProcessIdentity,
    pidfd: Arc<OwnedFd>,
    keeper: Keeper,
    exit: watch::Receiver<Option<Exit>>,
}

/// Who can signal and reap a process.
#[derive(Clone, Debug)]
enum Keeper {
    /// We started it.
    Parent,
    /// Somebody did who is gone: only its end will be known.
    Nobody,
    /// The root process, whose child it is or was.
    Host(Host),
}

/// Starts a program. Must be called on a tokio runtime, which then reaps the child.
pub fn spawn(spec: SpawnSpec) -> Result<VmmProcess, ProcessError> {
    let (identity, pidfd) = start(spec)?;
    VmmProcess::watch(identity, pidfd, Keeper::Parent)
}

/// Starts a program, which the caller reaps.
pub(crate) fn start(spec: SpawnSpec) -> Result<(ProcessIdentity, OwnedFd), ProcessError> {
    start_in(spec, None)
}

/// Starts a program in a cage that is made already.
pub(crate) fn start_in(spec: SpawnSpec, cage: Option<Cage>) -> Result<(ProcessIdentity, OwnedFd), ProcessError> {
    if !spec.program.is_absolute() {
        return Err(ProcessError::NotAbsolute(spec.program));
    }
    let program = spec.program.clone();
    let failed = |source| ProcessError::Spawn { program: program.clone(), source };
    let (pid, pidfd) = prepare(spec, cage).and_then(Child::start).map_err(failed)?;
    // The pid stays ours, even after an early death, until this side reaps it.
    Ok((ProcessIdentity { pid, start_time: start_time(pid).map_err(failed)? }, pidfd))
}

fn prepare(spec: SpawnSpec, cage: Option<Cage>) -> io::Result<Child> {
    let program = c_string(&spec.program)?;
    let args = spec.args.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?;
    let mut limits = vec![(libc::RLIMIT_CORE, 0)];
    limits.extend(spec.limits.open_files.map(|value| (libc::RLIMIT_NOFILE, value)));
    limits.extend(spec.limits.file_size_bytes.map(|value| (libc::RLIMIT_FSIZE, value)));
    let (stdout, stderr) = open_output(spec.output)?;
    Ok(Child {
        args: std::iter::once(program.clone()).chain(args).collect(),
        program,
        stdio: [File::open("/dev/null")?.into(), stdout, stderr],
        cwd: File::open(&spec.cwd)?.into(),
        uid: spec.uid,
        gid: spec.gid,
        group: spec.cgroup.as_ref().map(Cgroup::entry).transpose()?,
        inherited: spec.inherited,
        limits,
        env: spec.env.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?,
        rights: spec.rights,
        filter: spec.profile.map(seccomp::program),
        cage: spec.jail.as_ref().map(Cage::new).transpose()?.or(cage),
    })
}

fn open_output(output: Output) -> io::Result<(OwnedFd, OwnedFd)> {
    let fd: OwnedFd = match output {
        Output::Null => OpenOptions::new().write(true).open("/dev/null")?.into(),
        Output::File(path) => {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_APPEND);
            options.open(path)?.into()
        }
        Output::Fd(fd) => fd,
    };
    Ok((fd.try_clone()?, fd))
}

pub(crate) fn open_pidfd(pid: u32) -> io::Result<OwnedFd> {
    let raw = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    let pid = raw.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// When a process started, in clock ticks since boot; also says whether it is there at all.
fn start_time(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything, so count from its end: field 22 is the 20th after it.
    let fields = stat.rfind(')').and_then(|end| stat.get(end + 2..));
    let field = fields.and_then(|rest| rest.split_ascii_whitespace().nth(19));
    field.and_then(|text| text.parse().ok()).ok_or_else(|| io::Error::other("unexpected form of /proc/<pid>/stat"))
}

/// A pidfd of a process that is alive and the one that is meant. `Gone` when it ended or the pid is another's now.
pub(crate) fn find(identity: ProcessIdentity) -> Result<OwnedFd, ProcessError> {
    let pid = identity.pid;
    let pidfd = open_pidfd(pid).map_err(|_| ProcessError::Gone { pid })?;
    // The pidfd was opened first: if the start time still matches now, it is on the right process.
    if start_time(pid).ok() != Some(identity.start_time) || has_ended(&pidfd) {
        return Err(ProcessError::Gone { pid });
    }
    Ok(pidfd)
}

/// The identity of a process that runs now.
pub(crate) fn identity(pid: u32) -> io::Result<ProcessIdentity> {
    Ok(ProcessIdentity { pid, start_time: start_time(pid)? })
}

/// The user a process runs as.
pub(crate) fn user(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Takes hold of a process started earlier, perhaps by another process.
pub fn open_existing(identity: ProcessIdentity) -> Result<VmmProcess, ProcessError> {
    VmmProcess::watch(identity, find(identity)?, Keeper::Nobody)
}

/// No error when it has ended already.
pub(crate) fn order(pidfd: &OwnedFd, pid: u32, order: Order) -> Result<(), ProcessError> {
    let (signal, action) = order.signal();
    match pidfd_send_signal(pidfd, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(errno) => Err(ProcessError::Control { action, pid, source: errno.into() }),
    }
}

impl VmmProcess {
    /// Of a process that the root process started.
    pub(crate) fn of_host(host: Host, identity: ProcessIdentity, pidfd: OwnedFd) -> Result<Self, ProcessError> {
        Self::watch(identity, pidfd, Keeper::Host(host))
    }

    fn watch(identity: ProcessIdentity, pidfd: OwnedFd, keeper: Keeper) -> Result<Self, ProcessError> {
        let pidfd = Arc::new(pidfd);
        let (sender, exit) = watch::channel(None);
        let process = VmmProcess { identity, pidfd: pidfd.clone(), keeper: keeper.clone(), exit };
        let waiter =
            watch_fd(pidfd).map_err(|source| ProcessError::Control { action: "watch", pid: identity.pid, source })?;
        tokio::spawn(async move {
            let ended = waiter.readable().await.is_ok();
            let exit = match keeper {
                Keeper::Parent if ended => reap(waiter.get_ref()),
                Keeper::Host(host) if ended => {
                    tokio::task::spawn_blocking(move || host.exit(identity)).await.unwrap_or(Exit::Unknown)
                }
                _ => Exit::Unknown,
            };
            sender.send_replace(Some(exit));
        });
        Ok(process)
    }

    /// What to remember to find this process again.
    pub fn identity(&self) -> ProcessIdentity {
        self.identity
    }

    /// Whether it has not ended yet.
    pub fn is_alive(&self) -> bool {
        !has_ended(&self.pidfd)
    }

    fn order(&self, wanted: Order) -> Result<(), ProcessError> {
        let pid = self.identity.pid;
        match &self.keeper {
            Keeper::Host(host) => host.order(self.identity, wanted).map_err(|error| ProcessError::Control {
                action: wanted.signal().1,
                pid,
                source: io::Error::other(error),
            }),
            _ => order(&self.pidfd, pid, wanted),
        }
    }

    /// Sends SIGKILL. No error when it has ended already.
    pub fn kill(&self) -> Result<(), ProcessError> {
        self.order(Order::Kill)
    }

    /// Stops all its threads where they are; returns when they stand. No error when it has ended already.
    pub async fn stop(&self) -> Result<(), ProcessError> {
        self.order(Order::Stop)?;
        let begun = Instant::now();
        while self.is_alive() && !self.is_stopped() {
            if begun.elapsed() > STOP_PATIENCE {
                let source = io::Error::from(io::ErrorKind::TimedOut);
                return Err(ProcessError::Control { action: "stop", pid: self.identity.pid, source });
            }
            tokio::time::sleep(STOP_POLL).await;
        }
        Ok(())
    }

    /// Lets it go on after a [`VmmProcess::stop`]. No error when it runs, or has ended already.
    pub fn go_on(&self) -> Result<(), ProcessError> {
        self.order(Order::GoOn)
    }

    /// Whether all its threads stand, stopped by us or by an earlier service.
    pub fn is_stopped(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.identity.pid));
        let stands = |thread: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            let state = stat.rfind(')').and_then(|end| stat[end..].split_ascii_whitespace().nth(1));
            // One that has just ended does not run either.
            matches!(state, Some("T") | None)
        };
        self.is_alive() && threads.is_ok_and(|threads| threads.flatten().all(stands))
    }

    /// Asks it to end (SIGTERM). No error when it has ended already.
    pub fn terminate(&self) -> Result<(), ProcessError> {
        match pidfd_send_signal(&self.pidfd, Signal::TERM) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => {
                Err(ProcessError::Control { action: "terminate", pid: self.identity.pid, source: errno.into() })
            }
        }
    }

    /// Waits for the end; any number of callers, any number of times. May be cancelled.
    pub async fn wait(&self) -> Exit {
        let mut exit = self.exit.clone();
        // An error means that the runtime that watched is shutting down: then nobody learns more.
        exit.wait_for(Option::is_some).await.ok().and_then(|exit| *exit).unwrap_or(Exit::Unknown)
    }
}

/// Whether the process is dead, reaped or not: its pidfd becomes readable then.
pub(crate) fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut poll = [nix::poll::PollFd::new(pidfd.as_fd(), nix::poll::PollFlags::POLLIN)];
    nix::poll::poll(&mut poll, nix::poll::PollTimeout::ZERO) != Ok(0)
}

pub(crate) fn reap(pidfd: &OwnedFd) -> Exit {
    match waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED) {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Exit::Code(code),
            (_, Some(signal)) => Exit::Signal(signal),
            _ => Exit::Unknown,
        },
        _ => Exit::Unknown,
    }
}

/// A descriptor that this process was started with. To be taken once, before anything else is opened.
///
/// # Errors
/// When there is none of that number.
pub fn inherited(fd: i32) -> io::Result<OwnedFd> {
    crate::spawn::inherited(fd)
}

/// Whether the kernel can give each VMM threads of a core that no other process gets (core scheduling), so that no guest
/// watches another through what they share. `None`: no two threads of this machine share a core.
pub fn core_scheduling() -> Option<bool> {
    let shared = std::fs::read_to_string("/sys/devices/system/cpu/smt/active");
    if shared.is_ok_and(|active| active.trim() == "1") { crate::spawn::core_scheduling() } else { None }
}

/// No program started from here on by this process inherits its descriptors, nor those that it was given by whoever started
/// it: a server that lives for weeks would hold their files and locks. The standard ones stay.
pub fn keep_descriptors() {
    crate::spawn::keep_descriptors();
}

/// The capabilities of `space-hostd`: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, SYS_CHROOT,
/// SYS_ADMIN, SYS_RESOURCE, MKNOD, SETFCAP.
pub const HOST_CAPABILITIES: &[u8] = &[0, 1, 3, 4, 5, 6, 7, 8, 18, 21, 24, 27, 31];

/// What `space up` keeps: what it gives `space-hostd`, and NET_BIND_SERVICE for a low port.
pub const STARTER_CAPABILITIES: &[u8] = &[0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 21, 24, 27, 31];

/// Takes from this process, which is root, every capability but these (their kernel numbers), for good, and turns new
/// privileges off. To be called while it has one thread: others would keep theirs.
///
/// # Errors
/// When the kernel refuses.
pub fn keep_only(capabilities: &[u8]) -> io::Result<()> {
    use rustix::thread::{CapabilitySet, set_capabilities, set_no_new_privs};
    let mut kept = CapabilitySet::empty();
    for number in 0..64u32 {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if capabilities.iter().any(|kept| u32::from(*kept) == number) {
            kept |= one;
        } else if rustix::thread::remove_capability_from_bounding_set(one).is_err() {
            // The kernel has no more.
            break;
        }
    }
    let mut now = rustix::thread::capabilities(None)?;
    now.effective &= kept;
    now.permitted &= kept;
    now.inheritable = CapabilitySet::empty();
    set_capabilities(None, now)?;
    Ok(set_no_new_privs(true)?)
}

/// Whether a program file is there and may be run.
pub fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.is_absolute() && path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}
