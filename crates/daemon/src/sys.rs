//! System calls that no crate offers without `unsafe`.
#![allow(unsafe_code, reason = "ioctl, prctl, setfsuid and what must be done between fork and exec")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::libc;

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Orphans of our children become ours, also when we are not PID 1.
pub fn become_subreaper() {
    // SAFETY: takes plain numbers.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
}

/// Credits the bytes to the kernel's pool and makes it reseed from it at once.
pub fn add_entropy(device: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    let len = i32::try_from(bytes.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut buffer = Vec::with_capacity(8 + bytes.len());
    buffer.extend_from_slice(&(len * 8).to_ne_bytes());
    buffer.extend_from_slice(&len.to_ne_bytes());
    buffer.extend_from_slice(bytes);
    // SAFETY: the buffer is a struct rand_pool_info: bit count, byte count, bytes; the kernel only reads it.
    check(unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY as _, buffer.as_ptr()) })?;
    // SAFETY: takes no argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG as _, 0) })
}

/// Nothing is written to the file system until it is thawed; what is on its disk then is clean.
pub fn freeze_filesystem(folder: BorrowedFd<'_>) -> io::Result<()> {
    const FIFREEZE: libc::c_ulong = 0xC004_5877;
    // SAFETY: the kernel looks at no argument.
    check(unsafe { libc::ioctl(folder.as_raw_fd(), FIFREEZE as _, 0) })
}

pub fn thaw_filesystem(folder: BorrowedFd<'_>) -> io::Result<()> {
    const FITHAW: libc::c_ulong = 0xC004_5878;
    // SAFETY: the kernel looks at no argument.
    check(unsafe { libc::ioctl(folder.as_raw_fd(), FITHAW as _, 0) })
}

pub fn set_window_size(terminal: BorrowedFd<'_>, cols: u16, rows: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the kernel only reads the struct.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) })
}

/// Switches the loopback interface on.
pub fn loopback_up() -> io::Result<()> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    // SAFETY: an all-zero ifreq is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the kernel reads the struct, which lives until the call returns.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) })
}

/// Loads a module from an open file.
pub fn load_module(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a descriptor, an empty string and flags.
    let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// File rights of this thread only, as a user; undone when dropped. Must stay on the thread that made it.
pub struct FileRights {
    uid: u32,
    gid: u32,
    groups: Vec<libc::gid_t>,
    _thread: std::marker::PhantomData<*const ()>,
}

fn thread_groups(groups: &[libc::gid_t]) -> io::Result<()> {
    // The raw call is of this thread; the C library's would change all threads.
    // SAFETY: a length and a pointer to that many numbers.
    let result = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl FileRights {
    pub fn of(uid: u32, gid: u32, groups: &[u32]) -> io::Result<Self> {
        let before = nix::unistd::getgroups().map_err(io::Error::from)?.iter().map(|g| g.as_raw()).collect();
        thread_groups(groups)?;
        // SAFETY: both take plain numbers, change this thread only and return the former value.
        let (gid, uid) = unsafe { (libc::setfsgid(gid), libc::setfsuid(uid)) };
        let number = |id: libc::c_int| u32::try_from(id).unwrap_or(0);
        Ok(Self { uid: number(uid), gid: number(gid), groups: before, _thread: std::marker::PhantomData })
    }
}

impl Drop for FileRights {
    fn drop(&mut self) {
        // SAFETY: as above. Back to root first: only root may set the groups.
        unsafe {
            libc::setfsuid(self.uid);
            libc::setfsgid(self.gid);
        }
        let _ = thread_groups(&self.groups);
    }
}

/// What a new process is, set between fork and exec.
pub struct ChildSetup {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    /// Descriptor of `cgroup.procs`.
    pub cgroup: Option<RawFd>,
    /// The process gets standard input as its controlling terminal.
    pub terminal: bool,
}

/// Prepares the command. Only calls that are safe in a forked child of a threaded process: no allocation.
pub fn prepare(command: &mut Command, setup: ChildSetup) {
    let oom = c"/proc/self/oom_score_adj";
    let child = move || {
        // SAFETY: async-signal-safe calls on plain numbers and constants.
        unsafe {
            if let Some(cgroup) = setup.cgroup
                && libc::write(cgroup, c"0".as_ptr().cast(), 1) != 1
            {
                return Err(io::Error::last_os_error());
            }
            let file = libc::open(oom.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if file >= 0 {
                libc::write(file, c"0".as_ptr().cast(), 1);
                libc::close(file);
            }
            check(libc::setsid().min(0))?;
            if setup.terminal {
                check(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
            }
            for signal in 1..=64 {
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
            libc::umask(0o022);
            // Whatever descriptor was inherited or opened without the flag must not reach the program.
            libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
            check(libc::setgroups(setup.groups.len(), setup.groups.as_ptr()))?;
            check(libc::setgid(setup.gid))?;
            check(libc::setuid(setup.uid))
        }
    };
    // SAFETY: the closure keeps to the rules of `pre_exec`, see its own comment.
    unsafe { command.pre_exec(child) };
}

/// The next connection of a listening socket of any kind; not blocking.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = nix::sys::socket::SockFlag::SOCK_NONBLOCK | nix::sys::socket::SockFlag::SOCK_CLOEXEC;
    let fd = nix::sys::socket::accept4(listener.as_raw_fd(), flags)?;
    // SAFETY: the kernel has just made it, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Readiness of a descriptor that the result owns.
pub fn async_fd(fd: OwnedFd) -> io::Result<tokio::io::unix::AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is moved in, is never replaced, and is closed only after it was deregistered.
    Ok(unsafe { tokio::io::unix::AsyncFd::register(fd) }?)
}
