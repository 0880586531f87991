//! Reaps every child, ours and those that lost their parent, and hands the status of ours to who waits for it.
//!
//! Nobody else in this process may wait for a child: the one that does would steal a status.

use std::io;
use std::sync::Arc;

use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};

use crate::Daemon;

/// How a process of ours ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Code(i32),
    Signal(i32),
}

pub fn start(daemon: Arc<Daemon>) -> io::Result<()> {
    let mut children = signal(SignalKind::child())?;
    // These would end an ordinary PID 1 or be lost; the guest is ended by the host.
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        if daemon.mode == crate::Mode::Guest {
            let mut ignored = signal(kind)?;
            tokio::spawn(async move { while ignored.recv().await.is_some() {} });
        }
    }
    tokio::spawn(async move {
        while children.recv().await.is_some() {
            reap(&daemon);
        }
    });
    Ok(())
}

fn reap(daemon: &Daemon) {
    loop {
        match waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, code)) => daemon.table.ended(pid.as_raw(), Status::Code(code)),
            Ok(WaitStatus::Signaled(pid, signal, _)) => daemon.table.ended(pid.as_raw(), Status::Signal(signal as i32)),
            Ok(WaitStatus::StillAlive) | Err(nix::errno::Errno::ECHILD) => return,
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}
