//! The root process: takes connections, checks who is there, answers one request after the other on each.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nix::sys::socket::{SockFlag, accept4, getsockopt, setsockopt, sockopt};

use crate::points;
use crate::protocol::{self, HostError, MESSAGE_MAX_BYTES, Reply, Request};
use crate::service::Service;

/// Connections at the same time; a node keeps eight and opens more for a moment when much happens at once.
const CONNECTIONS_MAX: usize = 96;
const REAP_EVERY: Duration = Duration::from_secs(1);

/// Serves until the process ends. `listener`: a listening Unix socket that keeps packet borders.
pub fn serve(service: Service, listener: &OwnedFd) -> io::Result<()> {
    let service = Arc::new(service);
    let reaped = service.clone();
    std::thread::Builder::new().name("reaper".into()).spawn(move || {
        loop {
            reaped.reap();
            std::thread::sleep(REAP_EVERY);
        }
    })?;
    let count = Arc::new(AtomicUsize::new(0));
    loop {
        let socket = match accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            Ok(fd) => own(fd),
            Err(nix::errno::Errno::EINTR | nix::errno::Errno::ECONNABORTED) => continue,
            Err(nix::errno::Errno::EMFILE | nix::errno::Errno::ENFILE) => {
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
            Err(errno) => return Err(errno.into()),
        };
        let Some(caller) = caller(&service, &socket).filter(|_| count.load(Ordering::Acquire) < CONNECTIONS_MAX) else {
            continue;
        };
        count.fetch_add(1, Ordering::AcqRel);
        let (service, counted) = (service.clone(), count.clone());
        let answering = std::thread::Builder::new().name("answer".into()).spawn(move || {
            // The other side sees its connection end, and makes a new one.
            let _ = answer(&service, caller, &socket);
            counted.fetch_sub(1, Ordering::AcqRel);
        });
        if answering.is_err() {
            count.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The process at the other end, if it has the node's user; the socket file's own rights say the same.
fn caller(service: &Service, socket: &OwnedFd) -> Option<i32> {
    let peer = getsockopt(socket, sockopt::PeerCredentials).ok()?;
    (peer.uid() == service.config.node.0).then(|| peer.pid())
}

fn answer(service: &Service, caller: i32, socket: &OwnedFd) -> io::Result<()> {
    setsockopt(socket, sockopt::SndBuf, &(2 * MESSAGE_MAX_BYTES))?;
    while let Some((request, fds)) = protocol::receive::<Request>(socket)? {
        let point = point_of(&request);
        if point.is_some() {
            points::reach("host.before");
        }
        let (answer, given): (Result<Reply, HostError>, _) = match service.handle_for(caller, request, fds) {
            Ok((reply, given)) => (Ok(reply), given),
            Err(error) => (Err(error), Vec::new()),
        };
        point.into_iter().for_each(points::reach);
        protocol::send(socket, &answer, &given)?;
    }
    Ok(())
}

/// Where a drill can end us between what a request does and its answer.
fn point_of(request: &Request) -> Option<&'static str> {
    Some(match request {
        Request::Snapshot { .. } => "host.snapshot",
        Request::Rename { .. } => "host.rename",
        Request::Delete { .. } => "host.delete",
        Request::CreateGroup { .. } => "host.group",
        Request::EndGroup { .. } => "host.group_end",
        Request::Start(_) => "host.start",
        Request::Order { .. } => "host.order",
        Request::Build(_) => "host.build",
        _ => return None,
    })
}

#[allow(unsafe_code, reason = "a descriptor that the kernel has just made for us")]
fn own(fd: i32) -> OwnedFd {
    // SAFETY: accept made it and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
