//! gRPC over a link: the same HTTP/2 settings on both ends.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::sync::mpsc;
use tonic::codegen::tokio_stream::Stream;
use tonic::transport::{Channel, Endpoint, Server, Uri};

use super::stream::LinkStream;

const STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;
const FRAME_MAX_BYTES: u32 = 64 * 1024 - 64;
const STREAMS_MAX: u32 = 1024;

/// A client channel over this one session. When the session ends every call fails, and the channel must be thrown away:
/// it never connects again. No keep-alive: an emulated or paused guest may be silent for long.
pub fn guest_channel(stream: LinkStream) -> Channel {
    let stream = Arc::new(Mutex::new(Some(stream)));
    let connector = tower::service_fn(move |_: Uri| {
        let taken = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        std::future::ready(match taken {
            Some(stream) => Ok(TokioIo::new(stream)),
            None => Err(io::Error::new(io::ErrorKind::NotConnected, "the connection to the guest has ended")),
        })
    });
    Endpoint::from_static("http://guest.invalid")
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .connect_with_connector_lazy(connector)
}

/// A server for [`incoming`] sessions. Each is served on its own; none waits for another.
pub fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_MAX_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
}

/// Accepted sessions, as `Server::serve_with_incoming` takes them. Ends when the sender is dropped.
pub fn incoming(sessions: mpsc::Receiver<LinkStream>) -> impl Stream<Item = io::Result<LinkStream>> {
    Incoming(sessions)
}

struct Incoming(mpsc::Receiver<LinkStream>);

impl Stream for Incoming {
    type Item = io::Result<LinkStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|stream| stream.map(Ok))
    }
}
