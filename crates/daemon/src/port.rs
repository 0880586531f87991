//! The guest's end of the virtio serial port, as a byte stream that never ends.
//!
//! The kernel's port has no usable readiness: while the host is not connected it reports a hang-up for ever and reads give
//! zero bytes at once. So two threads do blocking reads and writes, and the reader waits for the edge that the host's
//! next connection makes. Only one open file is allowed per port; both threads share it.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use rustix::event::epoll;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, watch};

const NAME: &str = "space.agent";
const CHUNK_BYTES: usize = 64 * 1024;
/// Chunks on their way in each direction.
const CHUNKS: usize = 4;
/// A missed edge costs this much and no more.
const EDGE_MAX_MS: i64 = 1000;

/// Finds the port by its name. `None`: it is not there, or not yet.
pub fn find() -> Option<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == NAME {
            return Some(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    None
}

pub struct Port {
    input: mpsc::Receiver<Bytes>,
    rest: Bytes,
    output: Outlet,
}

/// A bounded sender that can be polled for room.
struct Outlet {
    sender: mpsc::Sender<Bytes>,
    waiting: Option<Reservation>,
}

type Reservation = Pin<Box<dyn Future<Output = Option<mpsc::OwnedPermit<Bytes>>> + Send>>;

impl Outlet {
    fn poll_send(&mut self, cx: &mut Context<'_>, bytes: impl FnOnce() -> Bytes) -> Poll<io::Result<()>> {
        let sender = &self.sender;
        let reserve = || -> Reservation {
            let sender = sender.clone();
            Box::pin(async move { sender.reserve_owned().await.ok() })
        };
        let place = ready!(self.waiting.get_or_insert_with(reserve).as_mut().poll(cx));
        self.waiting = None;
        place.ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?.send(bytes());
        Poll::Ready(Ok(()))
    }
}

/// Opens the port. The receiver counts how often the host was seen to be gone.
pub fn open(path: &Path) -> io::Result<(Port, watch::Receiver<u64>)> {
    let file = Arc::new(File::options().read(true).write(true).open(path)?);
    let (in_sender, input) = mpsc::channel(CHUNKS);
    let (output, out_receiver) = mpsc::channel(CHUNKS);
    let (gone, gone_receiver) = watch::channel(0u64);
    let reader = file.clone();
    std::thread::Builder::new().name("port-in".into()).stack_size(64 * 1024).spawn(move || {
        if let Err(error) = read_loop(&reader, &in_sender, &gone) {
            crate::log::say(&format!("the port cannot be read: {error}"));
        }
    })?;
    std::thread::Builder::new().name("port-out".into()).stack_size(64 * 1024).spawn(move || {
        if let Err(error) = write_loop(&file, out_receiver) {
            crate::log::say(&format!("the port cannot be written: {error}"));
        }
    })?;
    Ok((Port { input, rest: Bytes::new(), output: Outlet { sender: output, waiting: None } }, gone_receiver))
}

fn read_loop(mut file: &File, input: &mpsc::Sender<Bytes>, gone: &watch::Sender<u64>) -> io::Result<()> {
    let edges = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&edges, file.as_fd(), epoll::EventData::new_u64(0), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
    let mut buffer = vec![0u8; CHUNK_BYTES];
    let mut connected = true;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => {
                if connected {
                    connected = false;
                    gone.send_modify(|count| *count += 1);
                }
                let mut events = Vec::with_capacity(1);
                let limit = rustix::event::Timespec { tv_sec: EDGE_MAX_MS / 1000, tv_nsec: 0 };
                match epoll::wait(&edges, rustix::buffer::spare_capacity(&mut events), Some(&limit)) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            Ok(len) => {
                connected = true;
                if input.blocking_send(Bytes::copy_from_slice(&buffer[..len])).is_err() {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn write_loop(mut file: &File, mut output: mpsc::Receiver<Bytes>) -> io::Result<()> {
    while let Some(mut bytes) = output.blocking_recv() {
        while bytes.has_remaining() {
            match file.write(&bytes) {
                Ok(len) => bytes.advance(len),
                // The host left in the middle: the rest waits for the next one, which finds its way through it.
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(nix::libc::EPIPE | nix::libc::EAGAIN | nix::libc::EINTR)
                    ) =>
                {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

impl AsyncRead for Port {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.rest.is_empty() {
            match ready!(self.input.poll_recv(cx)) {
                Some(bytes) => self.rest = bytes,
                None => return Poll::Ready(Ok(())),
            }
        }
        let len = self.rest.len().min(out.remaining());
        out.put_slice(&self.rest[..len]);
        self.rest.advance(len);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Port {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let len = buf.len().min(CHUNK_BYTES);
        ready!(self.output.poll_send(cx, || Bytes::copy_from_slice(&buf[..len])))?;
        Poll::Ready(Ok(len))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
