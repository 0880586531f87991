//! The guest's end of the channel where the machine has no serial port but a vsock device, as Firecracker's have.
//!
//! Here the channel knows connections: each is one session, and a new one ends the one before. A snapshot ends all of
//! them and leaves the listening socket, so a restored guest needs to do nothing. Only the host is let in: programs of
//! the guest could reach the port too.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, getpeername, listen, socket};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

use crate::{log, sys};

/// Known to the host's driver.
const PORT: u32 = 5252;
/// `VIRTIO_ID_VSOCK`, as sysfs writes it.
const DEVICE: &str = "0x0013";
/// Connections that the host gave up on lie here until they are looked at.
const WAITING_MAX: i32 = 16;
/// After a failure that would repeat itself at once, such as no free descriptor.
const PAUSE: Duration = Duration::from_millis(50);

/// Whether the machine has such a device.
pub fn is_there() -> bool {
    let devices = fs::read_dir("/sys/bus/virtio/devices").into_iter().flatten().flatten();
    let mut ids = devices.map(|entry| fs::read_to_string(entry.path().join("device")).unwrap_or_default());
    ids.any(|id| id.trim() == DEVICE)
}

/// The listening socket.
pub struct Door(AsyncFd<OwnedFd>);

impl Door {
    /// Must be called within a runtime.
    pub fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd = socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
        bind(fd.as_raw_fd(), &VsockAddr::new(nix::libc::VMADDR_CID_ANY, PORT))?;
        listen(&fd, Backlog::new(WAITING_MAX)?)?;
        Ok(Self(sys::async_fd(fd)?))
    }

    /// The next connection of the host. A failure of one never ends the listening.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|door| sys::accept(door.get_ref().as_fd())) {
                Err(_not_ready) => {}
                Ok(Ok(fd)) => {
                    if let Some(stream) = self.admit(fd) {
                        return Ok(stream);
                    }
                }
                Ok(Err(error)) => {
                    log::say(&format!("a connection of the host was lost: {error}"));
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    fn admit(&self, fd: OwnedFd) -> Option<UnixStream> {
        let peer = getpeername::<VsockAddr>(fd.as_raw_fd()).ok()?;
        if peer.cid() != nix::libc::VMADDR_CID_HOST {
            return None;
        }
        // Any connected stream socket serves: only reads, writes and shutdowns are made of it.
        UnixStream::from_std(fd.into()).ok()
    }
}
