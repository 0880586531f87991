//! One connection to QEMU's monitor: commands, answers and what the events say.
//!
//! QEMU may be in the hands of a guest that broke out into it: lines are bounded in length, unknown ones are dropped,
//! and every command has a time limit. One task owns the connection; dropping [`Qmp`] closes it, and the next may connect.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::{VmmError, within};

/// The longest line read: the console ring in base64 is the longest that comes in good faith.
pub const MAX_LINE: u64 = 256 << 10;
/// Commands under way at once.
const MAX_PENDING: usize = 64;
pub const ERROR_MAX_CHARS: usize = 1000;
pub const REASON_MAX_CHARS: usize = 64;

/// Where a migration (which is how QEMU saves and loads) stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Migration {
    None,
    Completed,
    Failed,
}

/// What the events have told so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub migration: Migration,
    /// Reason of the guest's shutdown, in QEMU's words: `guest-shutdown`, `guest-reset`, `guest-panic`, `host-qmp-quit`.
    pub shutdown: Option<String>,
    pub closed: bool,
}

struct Request {
    command: &'static str,
    arguments: Value,
    fd: Option<OwnedFd>,
    reply: oneshot::Sender<Result<Value, String>>,
}

/// An answer that is on its way.
pub(super) struct Pending {
    command: &'static str,
    answer: oneshot::Receiver<Result<Value, String>>,
    patience: Duration,
    /// Its turn among those under way, given back when nobody waits for the answer any more.
    _turn: OwnedSemaphorePermit,
}

pub(super) struct Qmp {
    requests: mpsc::Sender<Request>,
    turns: Arc<Semaphore>,
    pub patience: Duration,
    seen: watch::Sender<Seen>,
    task: JoinHandle<()>,
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Qmp {
    /// Takes the stream, whose peer need not have accepted it yet. QEMU greets; the greeting is not needed.
    /// `patience`: the time for each answer.
    pub fn new(stream: UnixStream, patience: Duration) -> Self {
        let (requests, receiver) = mpsc::channel(MAX_PENDING);
        let seen = watch::Sender::new(Seen { migration: Migration::None, shutdown: None, closed: false });
        let task = tokio::spawn(run(stream, receiver, seen.clone()));
        Qmp { requests, turns: Arc::new(Semaphore::new(MAX_PENDING)), patience, seen, task }
    }

    pub fn seen(&self) -> watch::Receiver<Seen> {
        self.seen.subscribe()
    }

    /// Forgets how the last migration ended, before a new one.
    pub fn reset_migration(&self) {
        self.seen.send_modify(|seen| seen.migration = Migration::None);
    }

    /// Sends a command without waiting for the answer: several may be on their way. When too many are, it waits for one of them,
    /// within the same time.
    pub async fn send(
        &self,
        command: &'static str,
        arguments: Value,
        fd: Option<OwnedFd>,
    ) -> Result<Pending, VmmError> {
        let (reply, answer) = oneshot::channel();
        let sent = async {
            // Both fail only when the connection's end is gone.
            let turn = self.turns.clone().acquire_owned().await.ok()?;
            self.requests.send(Request { command, arguments, fd, reply }).await.ok().map(|()| turn)
        };
        let turn = within(command, self.patience, sent).await?.ok_or(VmmError::Disconnected { command })?;
        Ok(Pending { command, answer, patience: self.patience, _turn: turn })
    }

    pub async fn call(&self, command: &'static str, arguments: Value) -> Result<Value, VmmError> {
        self.send(command, arguments, None).await?.answer().await
    }

    /// Waits until the migration under way has ended; true when it worked.
    pub async fn migrated(&self, command: &'static str) -> Result<bool, VmmError> {
        let mut seen = self.seen();
        let done = seen.wait_for(|seen| seen.migration != Migration::None || seen.closed);
        let end = within("the end of a migration", self.patience, done).await?;
        match end.map(|seen| seen.migration) {
            Ok(Migration::Completed) => Ok(true),
            Ok(Migration::Failed) => Ok(false),
            _ => Err(VmmError::Disconnected { command }),
        }
    }
}

impl Pending {
    pub async fn answer(self) -> Result<Value, VmmError> {
        let command = self.command;
        match within(command, self.patience, self.answer).await? {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(message)) => Err(VmmError::Refused { command, message }),
            Err(_) => Err(VmmError::Disconnected { command }),
        }
    }
}

/// Owns the connection until it closes or the [`Qmp`] is dropped.
async fn run(stream: UnixStream, mut requests: mpsc::Receiver<Request>, seen: watch::Sender<Seen>) {
    let (read, write) = stream.into_split();
    let mut reader = BufReader::new(read);
    let mut waiting = BTreeMap::new();
    let mut next_id: u64 = 0;
    let mut line = Vec::new();
    loop {
        tokio::select! {
            // Reading into `line` resumes where it was when the other branch came first.
            read = read_line(&mut reader, &mut line) => match read {
                Ok(true) => {
                    receive(&line, &mut waiting, &seen);
                    line.clear();
                }
                Ok(false) | Err(_) => break,
            },
            request = requests.recv() => {
                let Some(request) = request else { break };
                // Who gave up waiting for a silent QEMU leaves nothing behind.
                waiting.retain(|_, reply: &mut oneshot::Sender<_>| !reply.is_closed());
                next_id += 1;
                let message = message(request.command, request.arguments, next_id);
                waiting.insert(next_id, request.reply);
                if send_all(write.as_ref(), message.as_bytes(), request.fd.as_ref()).await.is_err() {
                    break;
                }
            }
        }
    }
    seen.send_modify(|seen| seen.closed = true);
}

/// QEMU reads its monitor one byte per wake-up: short messages are faster.
fn message(command: &str, arguments: Value, id: u64) -> String {
    let mut message = json!({"execute": command, "id": id});
    if !arguments.is_null() {
        message["arguments"] = arguments;
    }
    message.to_string() + "\n"
}

async fn read_line(reader: &mut (impl AsyncBufReadExt + Unpin), line: &mut Vec<u8>) -> io::Result<bool> {
    let room = MAX_LINE.saturating_sub(line.len() as u64);
    reader.take(room).read_until(b'\n', line).await?;
    Ok(line.ends_with(b"\n"))
}

async fn send_all(stream: &UnixStream, bytes: &[u8], fd: Option<&OwnedFd>) -> io::Result<()> {
    let fds = fd.map(|fd| [fd.as_raw_fd()]);
    let mut sent = 0;
    while sent < bytes.len() {
        sent += stream
            .async_io(Interest::WRITABLE, || {
                let rights = fds.as_ref().filter(|_| sent == 0).map(|fds| ControlMessage::ScmRights(fds));
                let parts = [IoSlice::new(&bytes[sent..])];
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                Ok(sendmsg::<()>(stream.as_raw_fd(), &parts, rights.as_slice(), flags, None)?)
            })
            .await?;
    }
    Ok(())
}

type Waiting = BTreeMap<u64, oneshot::Sender<Result<Value, String>>>;

fn receive(line: &[u8], waiting: &mut Waiting, seen: &watch::Sender<Seen>) {
    match Line::parse(line) {
        Some(Line::Answer { id, result }) => {
            if let Some(reply) = waiting.remove(&id) {
                // Nobody may wait any more: a caller that was cancelled.
                let _ = reply.send(result);
            }
        }
        Some(Line::Migration(now)) => seen.send_modify(|seen| seen.migration = now),
        Some(Line::Shutdown(reason)) => seen.send_modify(|seen| seen.shutdown = Some(reason)),
        None => {}
    }
}

/// What a line of QEMU's says, as far as it matters here.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// To the command of this number; the error in QEMU's words, at most [`ERROR_MAX_CHARS`].
    Answer { id: u64, result: Result<Value, String> },
    /// The migration under way has ended.
    Migration(Migration),
    /// The guest has shut down; the reason in QEMU's words, at most [`REASON_MAX_CHARS`].
    Shutdown(String),
}

impl Line {
    /// `None`: something else, or nonsense.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let mut message: Value = serde_json::from_slice(line).ok()?;
        if let Some(id) = message["id"].as_u64() {
            let result = match message["error"]["desc"].as_str() {
                Some(text) => Err(text.chars().take(ERROR_MAX_CHARS).collect()),
                None => Ok(message["return"].take()),
            };
            return Some(Self::Answer { id, result });
        }
        match message["event"].as_str()? {
            "MIGRATION" => match message["data"]["status"].as_str()? {
                "completed" => Some(Self::Migration(Migration::Completed)),
                "failed" | "cancelled" => Some(Self::Migration(Migration::Failed)),
                _ => None,
            },
            "SHUTDOWN" => {
                let reason = message["data"]["reason"].as_str().unwrap_or("unknown");
                Some(Self::Shutdown(reason.chars().take(REASON_MAX_CHARS).collect()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_told_apart_and_bounded() {
        let parse = |text: &str| Line::parse(text.as_bytes());
        assert_eq!(parse(r#"{"return":{"a":1},"id":7}"#), Some(Line::Answer { id: 7, result: Ok(json!({"a": 1})) }));
        let long = "ü".repeat(5000);
        let Some(Line::Answer { id: 1, result: Err(text) }) =
            parse(&json!({"id": 1, "error": {"desc": long}}).to_string())
        else {
            panic!("an error is an answer");
        };
        assert_eq!(text.chars().count(), ERROR_MAX_CHARS);
        let event = json!({"event": "SHUTDOWN", "data": {"reason": long}});
        let Some(Line::Shutdown(text)) = parse(&event.to_string()) else { panic!("a shutdown") };
        assert_eq!(text.chars().count(), REASON_MAX_CHARS);
        let event = |status: &str| json!({"event": "MIGRATION", "data": {"status": status}}).to_string();
        assert_eq!(parse(&event("failed")), Some(Line::Migration(Migration::Failed)));
        for nothing in ["", "7", "[]", "null", "{}", r#"["id"]"#, r#"{"id":"x"}"#, &event("active"), "{\"id\":1"] {
            assert_eq!(parse(nothing), None, "{nothing}");
        }
    }

    #[tokio::test]
    async fn a_line_without_end_ends_the_connection() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let qmp = Qmp::new(ours, Duration::from_secs(10));
        let flood = tokio::spawn(async move {
            use tokio::io::AsyncWriteExt as _;
            let mut theirs = theirs;
            let mut sent = 0u64;
            while theirs.write_all(&[b'x'; 4096]).await.is_ok() {
                sent += 4096;
            }
            sent
        });
        qmp.seen().wait_for(|seen| seen.closed).await.expect("still there");
        drop(qmp);
        let sent = flood.await.expect("no panic");
        assert!(sent < MAX_LINE + (1 << 20), "{sent} bytes were taken");
    }
}
