//! One session seen as a byte stream. It knows queues only; the tasks that own the channel move the frames.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tonic::transport::server::Connected;

use super::frame::{self, DATA_MAX_BYTES, Kind};
use super::pipe::Pipe;

pub(super) struct Session {
    pub id: u64,
    /// Payloads from the peer.
    pub input: Pipe,
    /// Whole frames to the peer.
    pub output: Pipe,
    /// Nobody holds the stream any more.
    pub released: Notify,
}

impl Session {
    pub fn new(id: u64) -> Arc<Self> {
        Arc::new(Self { id, input: Pipe::default(), output: Pipe::default(), released: Notify::new() })
    }

    /// Ends both directions at once: reads give the end, writes a broken pipe.
    pub fn kill(&self) {
        self.input.close(true);
        self.output.close(true);
    }

    /// The peer or the channel is gone: what has arrived can still be read.
    pub fn end(&self) {
        self.input.close(false);
        self.output.close(true);
    }

    fn close(&self) {
        let _ = self.output.push(frame::encode(Kind::Close, self.id, std::iter::empty()));
        self.output.close(false);
    }
}

/// A session's bytes, in order and whole. Ends with the session; dropping it closes the session.
pub struct LinkStream {
    session: Arc<Session>,
    rest: Bytes,
}

impl LinkStream {
    pub(super) fn new(session: Arc<Session>) -> Self {
        Self { session, rest: Bytes::new() }
    }
}

impl std::fmt::Debug for LinkStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkStream").field("session", &format_args!("{:016x}", self.session.id)).finish()
    }
}

impl AsyncRead for LinkStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.rest.is_empty() {
            match ready!(self.session.input.poll_pop(cx)) {
                Some(chunk) => self.rest = chunk,
                None => return Poll::Ready(Ok(())),
            }
        }
        let len = self.rest.len().min(out.remaining());
        out.put_slice(&self.rest[..len]);
        self.rest.advance(len);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for LinkStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let broken = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the session with the other side has ended");
        ready!(self.session.output.poll_ready(cx)).map_err(broken)?;
        let mut left = DATA_MAX_BYTES;
        let parts: Vec<&[u8]> = bufs
            .iter()
            .map(|buf| {
                let part = &buf[..buf.len().min(left)];
                left -= part.len();
                part
            })
            .filter(|part| !part.is_empty())
            .collect();
        let len = DATA_MAX_BYTES - left;
        if len > 0 {
            let data = frame::encode(Kind::Data, self.session.id, parts.iter().copied());
            self.session.output.push(data).map_err(broken)?;
        }
        Poll::Ready(Ok(len))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.session.close();
        Poll::Ready(Ok(()))
    }
}

impl Drop for LinkStream {
    fn drop(&mut self) {
        self.session.close();
        self.session.input.close(true);
        self.session.released.notify_one();
    }
}

impl Connected for LinkStream {
    type ConnectInfo = ();
    fn connect_info(&self) -> Self::ConnectInfo {}
}
