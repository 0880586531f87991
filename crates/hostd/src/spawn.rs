//! The few lines that run in the child between fork and exec, and the watch on its pidfd.
//!
//! Only system calls that are safe after a fork in a process with threads: no allocation, no locks, no formatting.
#![allow(unsafe_code, reason = "pre_exec, the raw system calls allowed in it, and the registration of a descriptor")]

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use nix::libc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// What the child does to itself before it becomes the program. All descriptors are open in the parent.
pub(crate) struct ChildSetup {
    pub cwd: RawFd,
    pub uid: libc::uid_t,
    pub gid: libc::gid_t,
    /// `cgroup.procs` files to write "0" (myself) to.
    pub cgroups: Vec<RawFd>,
    /// Descriptors that stay open in the program under the same numbers.
    pub inherited: Vec<RawFd>,
    pub limits: Vec<(libc::__rlimit_resource_t, u64)>,
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl ChildSetup {
    fn apply(&self) -> io::Result<()> {
        // SAFETY: plain system calls on values made before the fork; every pointer is to live memory of this process.
        unsafe {
            check(libc::setsid())?;
            for procs in &self.cgroups {
                if libc::write(*procs, c"0".as_ptr().cast(), 1) != 1 {
                    return Err(io::Error::last_os_error());
                }
            }
            for (resource, value) in &self.limits {
                let limit = libc::rlimit { rlim_cur: *value, rlim_max: *value };
                check(libc::setrlimit(*resource, &limit))?;
            }
            check(libc::fchdir(self.cwd))?;
            for fd in &self.inherited {
                check(libc::fcntl(*fd, libc::F_SETFD, 0))?;
            }
            if libc::geteuid() == 0 {
                check(libc::setgroups(0, std::ptr::null()))?;
            }
            check(libc::setresgid(self.gid, self.gid, self.gid))?;
            check(libc::setresuid(self.uid, self.uid, self.uid))?;
            check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
            let mut set: libc::sigset_t = std::mem::zeroed();
            check(libc::sigemptyset(&mut set))?;
            check(libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut()))?;
        }
        Ok(())
    }
}

/// Makes `command` run `setup` in its child.
pub(crate) fn prepare(command: &mut Command, setup: ChildSetup) {
    // SAFETY: `apply` makes only async-signal-safe calls and touches only memory allocated before the fork.
    unsafe { command.pre_exec(move || setup.apply()) };
}

/// Registers a descriptor with the runtime, to wait until it is readable.
pub(crate) fn watch_fd(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the `Arc` holds the descriptor open and the same for as long as it is registered.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}
