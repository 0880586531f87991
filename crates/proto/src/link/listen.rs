//! The guest's end: one channel, one session at a time, the newest wins.
//!
//! Two tasks own the channel, so that a peer that does not read never keeps a new `Hello` from being seen. While a live
//! session's queue is full, reading stops: that is the back-pressure. What frees it again is the consumer, the news that
//! the host's side of the channel was reopened, or, as a backstop, a stall that no live consumer has.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use super::LinkError;
use super::frame::{self, Decoder, Frame, Kind};
use super::stream::{LinkStream, Session};
use crate::guest;

/// So many seconds, counted one by one (the clock may jump when the guest is frozen), a full queue may stand still.
const STALL_TICKS: u32 = 60;
const REFUSAL_MAX_BYTES: usize = 4096;
const ACKS_QUEUED_MAX: usize = 4;

/// Accepts sessions from a channel. Dropping it ends the channel and every session on it.
pub struct Listener {
    shared: Arc<Shared>,
    tasks: [JoinHandle<()>; 2],
}

/// Answers one `Hello`. Dropped without an answer, the host's next repetition is taken as new.
pub struct Responder {
    shared: Arc<Shared>,
    id: u64,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    arrived: Notify,
}

#[derive(Default)]
struct State {
    /// Not accepted yet. Only the newest counts.
    waiting: Option<(guest::Hello, u64)>,
    /// Accepted or waiting, and not answered.
    pending: Option<u64>,
    answered: Option<(u64, Bytes)>,
    session: Option<Arc<Session>>,
    acks: VecDeque<Bytes>,
    writer: Option<Waker>,
    closed: bool,
}

impl State {
    fn wake_writer(&mut self) {
        if let Some(waker) = self.writer.take() {
            waker.wake();
        }
    }

    fn answer(&mut self, bytes: Bytes) {
        if self.acks.len() < ACKS_QUEUED_MAX {
            self.acks.push_back(bytes);
            self.wake_writer();
        }
    }

    fn drop_session(&mut self) {
        if let Some(session) = self.session.take() {
            session.kill();
        }
        self.wake_writer();
    }
}

impl Listener {
    /// Must be called within a runtime.
    pub fn new<I: AsyncRead + AsyncWrite + Send + 'static>(io: I) -> Self {
        Self::with_reopened(io, watch::channel(0).1)
    }

    /// `reopened` counts how often the host's side of the channel was seen closed. The count must grow before any byte
    /// of the next host connection is handed over.
    pub fn with_reopened<I>(io: I, reopened: watch::Receiver<u64>) -> Self
    where
        I: AsyncRead + AsyncWrite + Send + 'static,
    {
        let shared = Arc::new(Shared::default());
        let (reader, writer) = tokio::io::split(io);
        let input = Input { shared: Arc::clone(&shared), reader, decoder: Decoder::default(), reopened };
        let tasks = [tokio::spawn(input.run()), tokio::spawn(write_frames(Arc::clone(&shared), writer))];
        Self { shared, tasks }
    }

    /// The next session that the host wants. Everything of the one before is dead by now.
    ///
    /// # Errors
    /// [`LinkError::Closed`] when the channel itself has ended.
    pub async fn accept(&mut self) -> Result<(guest::Hello, Responder), LinkError> {
        loop {
            {
                let mut state = self.shared.lock();
                if let Some((hello, id)) = state.waiting.take() {
                    return Ok((hello, Responder { shared: Arc::clone(&self.shared), id }));
                }
                if state.closed {
                    return Err(LinkError::Closed);
                }
            }
            self.shared.arrived.notified().await;
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.shared.close();
    }
}

impl Responder {
    /// Opens the session. If the host has given up on it meanwhile, the stream is at its end already.
    pub fn ack(self, ack: guest::HelloAck) -> LinkStream {
        let session = Session::new(self.id);
        if !self.respond(ack, Some(Arc::clone(&session))) {
            session.kill();
        }
        LinkStream::new(session)
    }

    /// Tells the host that this run must not be used, and why.
    pub fn refuse(self, mut why: String) {
        let mut end = why.len().min(REFUSAL_MAX_BYTES);
        while !why.is_char_boundary(end) {
            end -= 1;
        }
        why.truncate(end);
        if why.is_empty() {
            why.push_str("no reason given");
        }
        let ack = guest::HelloAck { protocol: crate::GUEST_PROTOCOL, refresh: None, error: why };
        self.respond(ack, None);
    }

    fn respond(&self, ack: guest::HelloAck, session: Option<Arc<Session>>) -> bool {
        let payload = ack.encode_to_vec();
        let bytes = frame::encode(Kind::HelloAck, self.id, std::iter::once(&payload[..]));
        let mut state = self.shared.lock();
        if state.pending != Some(self.id) || state.closed {
            return false;
        }
        state.pending = None;
        state.answered = Some((self.id, bytes.clone()));
        state.session = session;
        state.answer(bytes);
        true
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.pending == Some(self.id) {
            state.pending = None;
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        if let Some(session) = state.session.take() {
            session.end();
        }
        state.wake_writer();
        drop(state);
        self.arrived.notify_one();
    }

    fn hello(&self, id: u64, payload: Bytes) {
        let mut state = self.lock();
        if state.pending == Some(id) {
            return;
        }
        if let Some((answered, bytes)) = &state.answered
            && *answered == id
        {
            let bytes = bytes.clone();
            return state.answer(bytes);
        }
        let Ok(hello) = guest::Hello::decode(payload) else { return };
        state.drop_session();
        state.acks.clear();
        state.answered = None;
        state.pending = Some(id);
        state.waiting = Some((hello, id));
        drop(state);
        self.arrived.notify_one();
    }

    fn session(&self, id: u64) -> Option<Arc<Session>> {
        self.lock().session.as_ref().filter(|session| session.id == id).cloned()
    }

    /// The next bytes to write; `None`: the channel has ended.
    fn poll_output(&self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut state = self.lock();
        if let Some(bytes) = state.acks.pop_front() {
            return Poll::Ready(Some(bytes));
        }
        if state.closed {
            return Poll::Ready(None);
        }
        if let Some(session) = &state.session
            && let Poll::Ready(Some(bytes)) = session.output.poll_pop(cx)
        {
            return Poll::Ready(Some(bytes));
        }
        state.writer = Some(cx.waker().clone());
        Poll::Pending
    }
}

async fn write_frames<I: AsyncWrite>(shared: Arc<Shared>, mut writer: WriteHalf<I>) {
    while let Some(bytes) = poll_fn(|cx| shared.poll_output(cx)).await {
        let written = async {
            writer.write_all(&bytes).await?;
            writer.flush().await
        };
        if written.await.is_err() {
            break;
        }
    }
    shared.close();
}

struct Input<I> {
    shared: Arc<Shared>,
    reader: ReadHalf<I>,
    decoder: Decoder,
    reopened: watch::Receiver<u64>,
}

impl<I: AsyncRead> Input<I> {
    async fn run(mut self) {
        while let Ok(true) = self.fill().await {
            while let Some(found) = self.decoder.next_frame() {
                self.take(found).await;
            }
        }
        self.shared.close();
    }

    async fn fill(&mut self) -> io::Result<bool> {
        Ok(self.reader.read_buf(self.decoder.space()).await? > 0)
    }

    async fn take(&mut self, found: Frame) {
        match found.kind {
            Kind::Hello => {
                self.reopened.mark_unchanged();
                self.shared.hello(found.session, found.payload);
            }
            Kind::Data => {
                if let Some(session) = self.shared.session(found.session) {
                    self.deliver(&session, found.payload).await;
                }
            }
            Kind::Close => {
                if let Some(session) = self.shared.session(found.session) {
                    session.end();
                }
            }
            Kind::HelloAck => {}
        }
    }

    async fn deliver(&mut self, session: &Session, payload: Bytes) {
        if session.input.is_closed() {
            return;
        }
        let ready = poll_fn(|cx| session.input.poll_ready(cx));
        let abandoned = async {
            // The sender of the count may be gone, or never was: then only the backstop is left.
            if self.reopened.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let stalled = async {
            for _ in 0..STALL_TICKS {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        tokio::select! {
            biased;
            ready = ready => {
                // A session that ended meanwhile takes nothing; that is no fault.
                let _ = ready.and_then(|()| session.input.push(payload));
            }
            () = abandoned => session.kill(),
            () = stalled => session.kill(),
        }
    }
}
