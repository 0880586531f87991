//! A queue of byte chunks between two tasks, bounded in bytes. No I/O.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

/// Held per direction of a session before the sender waits; one chunk may go beyond it.
pub const QUEUE_MAX_BYTES: usize = 512 * 1024;

#[derive(Default)]
pub(super) struct Pipe(Mutex<State>);

#[derive(Default)]
struct State {
    queue: VecDeque<Bytes>,
    bytes: usize,
    closed: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl State {
    fn wake(waker: &mut Option<Waker>) {
        if let Some(waker) = waker.take() {
            waker.wake();
        }
    }
}

/// The other side has closed the pipe.
#[derive(Debug)]
pub(super) struct Closed;

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ready when a push would be taken.
    pub fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<Result<(), Closed>> {
        let mut state = self.lock();
        if state.closed {
            return Poll::Ready(Err(Closed));
        }
        if state.bytes < QUEUE_MAX_BYTES {
            return Poll::Ready(Ok(()));
        }
        state.writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Takes it whatever the bound: call after `poll_ready`, or for something tiny.
    pub fn push(&self, chunk: Bytes) -> Result<(), Closed> {
        let mut state = self.lock();
        if state.closed {
            return Err(Closed);
        }
        state.bytes += chunk.len();
        state.queue.push_back(chunk);
        State::wake(&mut state.reader);
        Ok(())
    }

    /// The next chunk; `None`: closed, and everything was taken.
    pub fn poll_pop(&self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let mut state = self.lock();
        match state.queue.pop_front() {
            Some(chunk) => {
                state.bytes -= chunk.len();
                State::wake(&mut state.writer);
                Poll::Ready(Some(chunk))
            }
            None if state.closed => Poll::Ready(None),
            None => {
                state.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// No more comes in; what is queued can still be taken, unless it is to be discarded.
    pub fn close(&self, discard: bool) {
        let mut state = self.lock();
        state.closed = true;
        if discard {
            state.queue.clear();
            state.bytes = 0;
        }
        State::wake(&mut state.reader);
        State::wake(&mut state.writer);
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }
}
