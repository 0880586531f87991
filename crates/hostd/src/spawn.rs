//! The few lines that run in the child between clone and exec, and the watch on its pidfd.
//!
//! Only system calls, and of the C library only functions that are no more than one: no allocation, no locks, no formatting. All
//! memory and all descriptors are made in the parent. What the child cannot do it reports through a pipe that exec closes,
//! and then it ends: a program never runs with less around it than was asked for.
#![allow(unsafe_code, reason = "clone3, the raw system calls after it, and the registration of a descriptor")]

use std::ffi::{CStr, CString};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use nix::libc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::cgroup::Entry;
use crate::jail::mounts::{self, Kind};
use crate::jail::{self, Jail};
use crate::process::Rights;
use crate::seccomp;

/// The number of the first inherited descriptor in the program; the others follow.
pub const FIRST_INHERITED: RawFd = 3;
/// Of the kernel's interface; the C library's bindings have it as a type that does not hold it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// Where descriptors wait in the child until the low numbers are free.
const HIGH: RawFd = 200;
const NAMESPACES: libc::c_int =
    libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWNET;

/// What the child does to itself before it becomes the program. All descriptors are open in the parent.
pub(crate) struct Child {
    pub program: CString,
    pub args: Vec<CString>,
    /// Standard input, output and error.
    pub stdio: [OwnedFd; 3],
    /// Entered as it is; a jailed program begins in its own folder instead.
    pub cwd: OwnedFd,
    pub uid: libc::uid_t,
    pub gid: libc::gid_t,
    pub group: Option<Entry>,
    /// The program finds them from [`FIRST_INHERITED`] on.
    pub inherited: Vec<OwnedFd>,
    pub limits: Vec<(libc::__rlimit_resource_t, u64)>,
    pub env: Vec<CString>,
    pub rights: Rights,
    pub filter: Option<Vec<libc::sock_filter>>,
    pub cage: Option<Cage>,
}

/// The mounts of a jail, not yet in place.
pub(crate) struct Cage {
    root: OwnedFd,
    /// A folder that the root is put on in the child's own namespace; it is left behind at once.
    stage: CString,
    inner: Vec<Inner>,
    namespaces: libc::c_int,
    /// Where it begins.
    folder: &'static CStr,
    /// Whether it gets a `/proc` of its own and a `/tmp`.
    workshop: bool,
    own_core: bool,
}

/// A detached mount and its place, relative to the root.
pub(crate) type Inner = (OwnedFd, CString);

impl Cage {
    pub(crate) fn new(jail: &Jail) -> io::Result<Cage> {
        let root = jail.root.path();
        let mut inner = vec![
            (mounts::detached(&root.join("dev"), Kind::Devices)?, c"dev".to_owned()),
            (mounts::detached(&jail.folder, Kind::Folder)?, c"vm".to_owned()),
        ];
        if let Some((kernel, initramfs)) = &jail.boot {
            for (file, place) in [(kernel, jail::KERNEL), (initramfs, jail::INITRAMFS)] {
                // The configuration's files may be named by links; what they lead to is mounted.
                let tree = mounts::detached(&file.canonicalize()?, Kind::ReadOnly)?;
                inner.push((tree, c_string(Path::new(&place[1..]))?));
            }
        }
        let (root, stage) = (mounts::detached(root, Kind::Root)?, c_string(root)?);
        Ok(Cage {
            root,
            stage,
            inner,
            namespaces: NAMESPACES,
            folder: c"/vm",
            workshop: false,
            own_core: jail.own_core,
        })
    }

    /// Of a build.
    pub(crate) fn workshop(root: &Path, inner: Vec<Inner>, network: bool) -> io::Result<Cage> {
        let namespaces = if network { NAMESPACES & !libc::CLONE_NEWNET } else { NAMESPACES };
        let (root, stage) = (mounts::detached(root, Kind::Root)?, c_string(root)?);
        Ok(Cage { root, stage, inner, namespaces, folder: c"/", workshop: true, own_core: false })
    }

    /// In the child, in its own namespaces: from the host's tree to the jail's.
    fn enter(&self) -> Result<(), Fault> {
        // SAFETY: plain system calls on memory that the parent made; every string ends with NUL.
        unsafe {
            // Nothing done here is seen outside.
            let flags = libc::MS_REC | libc::MS_PRIVATE;
            check(1, libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null()))?;
            mounts::attach(self.root.as_raw_fd(), libc::AT_FDCWD, &self.stage).map_err(|e| fault(2, &e))?;
            for (tree, target) in &self.inner {
                mounts::attach(tree.as_raw_fd(), self.root.as_raw_fd(), target).map_err(|e| fault(3, &e))?;
            }
            check(4, libc::fchdir(self.root.as_raw_fd()))?;
            // The old root ends up on top of the new one, and is let go with all that hangs on it.
            let pivoted = libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr());
            check(5, pivoted as libc::c_int)?;
            check(6, libc::umount2(c".".as_ptr(), libc::MNT_DETACH))?;
            if self.workshop {
                let flags = libc::MS_NOSUID | libc::MS_NODEV;
                let (proc, tmp) = (c"proc".as_ptr(), c"tmpfs".as_ptr());
                check(3, libc::mount(proc, c"/proc".as_ptr(), proc, flags | libc::MS_NOEXEC, std::ptr::null()))?;
                let options = c"mode=1777,size=1g".as_ptr().cast();
                check(3, libc::mount(tmp, c"/tmp".as_ptr(), tmp, flags, options))?;
            }
            if self.own_core {
                check(16, share_no_core())?;
            }
            check(7, libc::chdir(self.folder.as_ptr()))?;
            check(8, libc::sethostname(c"vm".as_ptr(), 2))
        }
    }
}

/// What the child could not do: the number of the step, and the system's reason.
type Fault = (u8, i32);

const STEPS: [&str; 17] = [
    "begin",
    "make the mounts private",
    "mount the root of the jail",
    "mount into the jail",
    "enter the root of the jail",
    "change the root",
    "leave the old root",
    "enter the folder",
    "set the host name",
    "join the cgroup",
    "set a limit",
    "place the descriptors",
    "give up capabilities",
    "change the user",
    "install the system call filter",
    "execute the program",
    "get a core of its own",
];

/// A cookie of this process's own. Without threads that share a core the kernel says so, or has no such thing: who asks for it
/// looks first.
fn share_no_core() -> libc::c_int {
    // SAFETY: numbers only; it changes how this process is scheduled.
    let made = unsafe { libc::prctl(libc::PR_SCHED_CORE, libc::PR_SCHED_CORE_CREATE, 0, PIDTYPE_TGID, 0) };
    if made == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ENODEV) { 0 } else { made }
}

/// Whether the kernel can keep processes apart: `None` when no two threads of this machine share a core.
pub(crate) fn core_scheduling() -> Option<bool> {
    let mut cookie: u64 = 0;
    // SAFETY: it writes one number, and only this.
    let read = unsafe { libc::prctl(libc::PR_SCHED_CORE, libc::PR_SCHED_CORE_GET, 0, PIDTYPE_PID, &raw mut cookie) };
    match read {
        -1 if io::Error::last_os_error().raw_os_error() == Some(libc::ENODEV) => None,
        -1 => Some(false),
        _ => Some(true),
    }
}

/// Of the kernel's interface: one thread, and a whole process.
const PIDTYPE_PID: libc::c_int = 0;
const PIDTYPE_TGID: libc::c_int = 1;

fn fault(step: u8, error: &io::Error) -> Fault {
    (step, error.raw_os_error().unwrap_or(libc::EINVAL))
}

fn check(step: u8, result: libc::c_int) -> Result<(), Fault> {
    if result == -1 { Err(fault(step, &io::Error::last_os_error())) } else { Ok(()) }
}

pub(crate) fn c_string(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Becomes the user, with no capability but those given, now or later, and no new privileges.
fn drop_rights(uid: libc::uid_t, gid: libc::gid_t, rights: Rights) -> Result<(), Fault> {
    let kept: &[u8] = match rights {
        Rights::None => &[],
        Rights::Root(capabilities) => capabilities,
    };
    // SAFETY: plain system calls with numbers.
    unsafe {
        if libc::geteuid() == 0 {
            // Until the kernel says that there is no such capability.
            for capability in (0..64).filter(|number| !kept.contains(number)) {
                if libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability), 0, 0, 0) == -1 {
                    break;
                }
            }
            check(13, libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) as libc::c_int)?;
        }
        // Not through the C library: its functions would have all threads of this process change, of which there is one here,
        // and take a lock for that which another thread of the parent may have held.
        check(13, libc::syscall(libc::SYS_setresgid, gid, gid, gid) as libc::c_int)?;
        check(13, libc::syscall(libc::SYS_setresuid, uid, uid, uid) as libc::c_int)?;
        check(12, libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}

/// A copy of a descriptor that is out of the way of the numbers the program gets.
fn high(fd: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, HIGH)?)
}

impl Child {
    /// Everything up to the program. Returns only when a step failed.
    fn become_program(&self, args: &[*const libc::c_char], env: &[*const libc::c_char]) -> Result<(), Fault> {
        // SAFETY: plain system calls on memory made before the clone; every string and list ends with NUL.
        unsafe {
            check(0, libc::setsid())?;
            if let Some(Entry::Joins(files)) = &self.group {
                for tasks in files {
                    check(9, (libc::write(tasks.as_raw_fd(), c"0".as_ptr().cast(), 1) as libc::c_int).min(0))?;
                }
            }
            match &self.cage {
                Some(cage) => cage.enter()?,
                None => check(7, libc::fchdir(self.cwd.as_raw_fd()))?,
            }
            for (number, fd) in (0..).zip(self.stdio.iter().chain(&self.inherited)) {
                check(11, libc::dup2(fd.as_raw_fd(), number))?;
            }
            let first = FIRST_INHERITED as libc::c_uint + self.inherited.len() as libc::c_uint;
            check(11, libc::close_range(first, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int))?;
            for (resource, value) in &self.limits {
                let limit = libc::rlimit { rlim_cur: *value, rlim_max: *value };
                check(10, libc::setrlimit(*resource, &limit))?;
            }
            // What a VMM makes is for everybody who gets into its folder: itself and the node. What a service makes is its own.
            libc::umask(match (self.rights, &self.cage) {
                (Rights::Root(_), _) => 0o022,
                (Rights::None, Some(_)) => 0,
                (Rights::None, None) => 0o077,
            });
            drop_rights(self.uid, self.gid, self.rights)?;
            // Rust ignores it, and what is ignored stays so.
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            check(0, libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()))?;
            if let Some(filter) = &self.filter {
                seccomp::install(filter).map_err(|e| fault(14, &e))?;
            }
            check(15, libc::execve(self.program.as_ptr(), args.as_ptr(), env.as_ptr()))
        }
    }

    /// Starts the program. Returns its process id and a pidfd, once it runs: from then on it has all its limits.
    pub(crate) fn start(mut self) -> io::Result<(u32, OwnedFd)> {
        let (mut read, write) = std::io::pipe()?;
        let write = high(&write.into())?;
        self.stdio = [high(&self.stdio[0])?, high(&self.stdio[1])?, high(&self.stdio[2])?];
        self.inherited = self.inherited.iter().map(high).collect::<io::Result<_>>()?;
        let list = |words: &[CString]| words.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect();
        let (args, env): (Vec<_>, Vec<_>) = (list(&self.args), list(&self.env));
        let mut pidfd: RawFd = -1;
        // SAFETY: without shared memory the child is as after a fork, with a copy of all this; it makes system calls only and ends
        // in exec or _exit. Signals are blocked, so that no handler of ours runs in it. The kernel writes one descriptor.
        let pid = unsafe {
            let mut request: libc::clone_args = std::mem::zeroed();
            let namespaces = self.cage.as_ref().map_or(0, |cage| cage.namespaces);
            request.flags = (libc::CLONE_PIDFD | namespaces) as u64;
            request.pidfd = &raw mut pidfd as u64;
            request.exit_signal = libc::SIGCHLD as u64;
            if let Some(Entry::Born(folder)) = &self.group {
                request.flags |= CLONE_INTO_CGROUP;
                request.cgroup = folder.as_raw_fd() as u64;
            }
            let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            let pid = libc::syscall(libc::SYS_clone3, &request, size_of::<libc::clone_args>());
            if pid == 0 {
                if let Err((step, errno)) = self.become_program(&args, &env) {
                    let [a, b, c, d] = errno.to_ne_bytes();
                    libc::write(write.as_raw_fd(), [step, a, b, c, d].as_ptr().cast(), 5);
                }
                libc::_exit(127);
            }
            let error = io::Error::last_os_error();
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
            if pid == -1 {
                return Err(error);
            }
            pid as u32
        };
        // SAFETY: the kernel has just made this descriptor for us.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        drop(write);
        let mut said = [0; 5];
        match read.read_exact(&mut said) {
            // The pipe closed: the program runs.
            Err(_) => Ok((pid, pidfd)),
            Ok(()) => {
                let _ = rustix::process::waitid(
                    rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&pidfd)),
                    rustix::process::WaitIdOptions::EXITED,
                );
                let error = io::Error::from_raw_os_error(i32::from_ne_bytes([said[1], said[2], said[3], said[4]]));
                let step = STEPS.get(usize::from(said[0])).copied().unwrap_or("start");
                Err(io::Error::new(error.kind(), format!("cannot {step}: {error}")))
            }
        }
    }
}

/// Registers a descriptor with the runtime, to wait until it is readable.
pub(crate) fn watch_fd(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the `Arc` holds the descriptor open and the same for as long as it is registered.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

/// No program started from here on inherits any of our descriptors but the standard ones.
pub(crate) fn keep_descriptors() {
    // SAFETY: marks descriptors; it closes none.
    unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
}

/// A descriptor that this process was started with.
pub(crate) fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a look at a number that may be a descriptor.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and whoever started us gave it to the one who asks here, once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
