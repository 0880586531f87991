//! The host's end: one connection to the channel is one session.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::{Instant, sleep, timeout_at};

use super::LinkError;
use super::frame::{self, DATA_MAX_BYTES, Decoder, HEADER_BYTES, HELLO_MAX_BYTES, Kind};
use super::stream::{LinkStream, Session};
use crate::guest;

const FIRST_RESEND: Duration = Duration::from_millis(150);
const RESEND: Duration = Duration::from_millis(300);
/// What a dropped stream may still take to write its last frames.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Of what a guest says when it refuses.
pub const REFUSAL_MAX_CHARS: usize = 1000;

/// What carries the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// Bytes of earlier sessions may be under way in it, and bytes may have been lost: the hello is repeated.
    Channel,
    /// A connection made for this session: what is written arrives, or the connection ends. The hello is sent once, since
    /// repetitions cost a slow guest more than they help.
    Connection,
}

/// Opens a session over a fresh connection to the channel. Blocks until the guest has answered, at most until
/// `deadline`. The guest works on one `hello` once, however often it has to be repeated here.
///
/// # Errors
/// [`LinkError::Refused`] when the guest says that the run must not be used; the others as they are named.
pub async fn connect<I>(
    io: I,
    carrier: Carrier,
    hello: guest::Hello,
    deadline: Instant,
) -> Result<(LinkStream, guest::HelloAck), LinkError>
where
    I: AsyncRead + AsyncWrite + Send + 'static,
{
    let payload = hello.encode_to_vec();
    if payload.len() > HELLO_MAX_BYTES {
        return Err(LinkError::Protocol { what: "the hello is larger than 512 KiB; make the environment smaller" });
    }
    let id = getrandom::u64().map_err(|e| io::Error::other(e.to_string()))?;
    let hello = frame::encode(Kind::Hello, id, std::iter::once(&payload[..]));
    let (reader, writer) = tokio::io::split(io);
    let mut sender = Sender { writer, pending: hello.clone() };
    let mut receiver = Receiver { reader, decoder: Decoder::default() };
    let ack = tokio::select! {
        ack = timeout_at(deadline, receiver.ack(id)) => ack.map_err(|_| LinkError::Timeout)??,
        error = sender.repeat(&hello, carrier) => return Err(error.into()),
    };
    if !ack.error.is_empty() {
        let words = ack.error.chars().map(|c| if c.is_control() { ' ' } else { c });
        return Err(LinkError::Refused(words.take(REFUSAL_MAX_CHARS).collect()));
    }
    let session = Session::new(id);
    tokio::spawn(drive(Arc::clone(&session), receiver, sender));
    Ok((LinkStream::new(session), ack))
}

/// Lives as long as the channel and the stream do.
async fn drive<I: AsyncRead + AsyncWrite>(session: Arc<Session>, receiver: Receiver<I>, sender: Sender<I>) {
    let released = async {
        session.released.notified().await;
        sleep(CLOSE_GRACE).await;
    };
    tokio::select! {
        result = receiver.run(&session) => {
            if let Err(error) = result {
                tracing::debug!(%error, "the guest's channel ended");
            }
        }
        result = sender.run(&session) => {
            if let Err(error) = result {
                tracing::debug!(%error, "the guest's channel takes no more");
            }
        }
        () = released => {}
    }
    session.end();
}

struct Receiver<I> {
    reader: ReadHalf<I>,
    decoder: Decoder,
}

impl<I: AsyncRead> Receiver<I> {
    async fn fill(&mut self) -> io::Result<bool> {
        Ok(self.reader.read_buf(self.decoder.space()).await? > 0)
    }

    async fn ack(&mut self, id: u64) -> Result<guest::HelloAck, LinkError> {
        let wanted = frame::prefix(Kind::HelloAck, id);
        loop {
            if let Some(found) = self.decoder.hunt(&wanted) {
                return guest::HelloAck::decode(found.payload)
                    .map_err(|_| LinkError::Protocol { what: "the answer to the hello" });
            }
            if !self.fill().await? {
                return Err(LinkError::Closed);
            }
        }
    }

    async fn run(mut self, session: &Session) -> io::Result<()> {
        loop {
            while let Some(found) = self.decoder.next_frame() {
                match found.kind {
                    _ if found.session != session.id => {}
                    Kind::Data => {
                        let ready = poll_fn(|cx| session.input.poll_ready(cx)).await;
                        if ready.and_then(|()| session.input.push(found.payload)).is_err() {
                            // The stream was dropped; its last frames are being written.
                            return std::future::pending().await;
                        }
                    }
                    Kind::Close => return Ok(()),
                    Kind::Hello | Kind::HelloAck => {}
                }
            }
            if self.decoder.take_skipped() > 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "bytes of the session are missing"));
            }
            if !self.fill().await? {
                return Ok(());
            }
        }
    }
}

struct Sender<I> {
    writer: WriteHalf<I>,
    /// What is left of the bytes that were begun: a frame once begun must be finished.
    pending: Bytes,
}

impl<I: AsyncWrite> Sender<I> {
    async fn finish(&mut self) -> io::Result<()> {
        while self.pending.has_remaining() {
            let len = self.writer.write(&self.pending).await?;
            if len == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.pending.advance(len);
        }
        self.writer.flush().await
    }

    /// Sends the hello again and again. Returns only when the channel fails.
    async fn repeat(&mut self, hello: &Bytes, carrier: Carrier) -> io::Error {
        let mut wait = FIRST_RESEND;
        let mut padding = DATA_MAX_BYTES + HEADER_BYTES;
        loop {
            if let Err(error) = self.finish().await {
                return error;
            }
            if carrier == Carrier::Connection {
                return std::future::pending().await;
            }
            sleep(wait).await;
            let mut bytes = BytesMut::zeroed(padding);
            bytes.extend_from_slice(hello);
            self.pending = bytes.freeze();
            wait = RESEND;
            // A guest that is stuck in a hello of an earlier host needs more to get out of it.
            padding = HELLO_MAX_BYTES + HEADER_BYTES;
        }
    }

    async fn run(mut self, session: &Session) -> io::Result<()> {
        loop {
            self.finish().await?;
            match poll_fn(|cx| session.output.poll_pop(cx)).await {
                Some(bytes) => self.pending = bytes,
                None => return self.writer.shutdown().await,
            }
        }
    }
}
