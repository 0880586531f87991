//! A command's output: one sequence of both streams in the order they were read, of which the newest part is kept.
//!
//! An offset counts the bytes of the sequence. While readers are attached, the pump waits for the slowest of them; one that
//! takes nothing for [`STALL`] is no longer waited for. With no reader the oldest bytes go. All logs together hold at most
//! [`Budget`]; beyond it each keeps little.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use space_proto::guest::{Exit, Stream};
use tokio::sync::Notify;

/// Of one command.
pub const LOG_MAX_BYTES: usize = 1 << 20;
const LOG_MAX_BYTES_OVER_BUDGET: usize = 64 * 1024;
const CHUNK_MAX_BYTES: usize = 32 * 1024;
/// What a chunk costs beside its bytes: a program may write single bytes to both streams in turn.
const CHUNK_COST_BYTES: usize = 64;
const STALL: Duration = Duration::from_secs(10);

/// Bytes that all logs of the daemon hold.
pub struct Budget {
    used: AtomicUsize,
    max: usize,
}

impl Budget {
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), max })
    }

    fn log_max(&self) -> usize {
        if self.used.load(Ordering::Relaxed) > self.max { LOG_MAX_BYTES_OVER_BUDGET } else { LOG_MAX_BYTES }
    }
}

struct Chunk {
    stream: Stream,
    offset: u64,
    data: Vec<u8>,
}

struct Reader {
    position: u64,
    moved: Instant,
}

#[derive(Default)]
struct State {
    chunks: VecDeque<Chunk>,
    start: u64,
    end: u64,
    /// Of all chunks, their own cost included.
    held: usize,
    exit: Option<Exit>,
    readers: HashMap<u64, Reader>,
    /// Pumps that wait for a reader; their pipes may hold more.
    waiting: usize,
    pumps: usize,
}

pub struct Log {
    state: Mutex<State>,
    budget: Arc<Budget>,
    grown: Notify,
    room: Notify,
    next_reader: AtomicU64,
}

/// What a reader finds.
pub enum Found {
    Data {
        stream: Stream,
        offset: u64,
        data: Bytes,
    },
    /// Bytes before this offset are gone.
    Dropped(u64),
    /// Nothing yet.
    Nothing,
    /// All has been read, and this was the end.
    End(Exit),
}

/// An attached reader; detached when dropped.
pub struct Attachment {
    log: Arc<Log>,
    id: u64,
}

impl Log {
    pub fn new(budget: Arc<Budget>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            budget,
            grown: Notify::new(),
            room: Notify::new(),
            next_reader: AtomicU64::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn range(&self) -> (u64, u64) {
        let state = self.lock();
        (state.start, state.end)
    }

    pub fn attached(&self) -> usize {
        self.lock().readers.len()
    }

    /// Appends what a pump has read, after waiting for readers that are not too slow.
    pub async fn append(&self, stream: Stream, data: &[u8]) {
        self.lock().waiting += 1;
        let max = self.budget.log_max();
        loop {
            // Asked for before the look, so that a move in between is not missed.
            let room = self.room.notified();
            let must_wait = {
                let state = self.lock();
                let slowest = state.slowest().filter(|slowest| *slowest < state.end);
                let cost = |slowest| state.cost_from(slowest) + data.len() + 2 * CHUNK_COST_BYTES;
                slowest.is_some_and(|slowest| cost(slowest) > self.budget.log_max())
            };
            if !must_wait {
                break;
            }
            let _ = tokio::time::timeout(Duration::from_millis(500), room).await;
        }
        let mut state = self.lock();
        state.waiting -= 1;
        let before = state.held;
        state.push(stream, data);
        let needed = state.slowest();
        state.trim(max, needed);
        self.budget.used.fetch_add(state.held, Ordering::Relaxed);
        self.budget.used.fetch_sub(before, Ordering::Relaxed);
        drop(state);
        self.grown.notify_waiters();
    }

    pub fn pump_begins(&self) {
        self.lock().pumps += 1;
    }

    pub fn pump_ends(&self) {
        self.lock().pumps -= 1;
        self.grown.notify_waiters();
    }

    /// After the main process has ended: until the pipes are closed, or nothing came for `quiet`, or `limit` has passed.
    /// Time in which a pump waits for a reader does not count: what it holds is output that must not be lost.
    pub async fn drained(&self, quiet: Duration, limit: Duration) {
        let step = Duration::from_millis(10);
        let (mut silent, mut total) = (Duration::ZERO, Duration::ZERO);
        let mut end = self.range().1;
        loop {
            let grown = self.grown.notified();
            let (pumps, waiting, now) = {
                let state = self.lock();
                (state.pumps, state.waiting, state.end)
            };
            if pumps == 0 || silent >= quiet || total >= limit {
                return;
            }
            let begun = Instant::now();
            let _ = tokio::time::timeout(step, grown).await;
            if waiting > 0 {
                continue;
            }
            let passed = begun.elapsed().min(step * 2);
            total += passed;
            silent = if now == end { silent + passed } else { Duration::ZERO };
            end = now;
        }
    }

    /// The exit comes after all output so far.
    pub fn finish(&self, exit: Exit) {
        self.lock().exit = Some(exit);
        self.grown.notify_waiters();
    }

    pub fn exit(&self) -> Option<Exit> {
        self.lock().exit.clone()
    }

    pub async fn finished(&self) -> Exit {
        loop {
            let grown = self.grown.notified();
            if let Some(exit) = self.exit() {
                return exit;
            }
            grown.await;
        }
    }

    /// Gives the memory back; what was there is gone.
    pub fn clear(&self) {
        let mut state = self.lock();
        let before = state.held;
        state.trim(0, None);
        self.budget.used.fetch_sub(before - state.held, Ordering::Relaxed);
    }

    pub fn attach(self: &Arc<Self>, offset: u64) -> Attachment {
        let id = self.next_reader.fetch_add(1, Ordering::Relaxed);
        self.lock().readers.insert(id, Reader { position: offset, moved: Instant::now() });
        Attachment { log: self.clone(), id }
    }
}

impl State {
    fn push(&mut self, stream: Stream, mut data: &[u8]) {
        // Whoever had read everything falls behind only now, however long it was quiet.
        let (now, end) = (Instant::now(), self.end);
        self.readers.values_mut().filter(|reader| reader.position >= end).for_each(|reader| reader.moved = now);
        // Small writes share a chunk: a million of them must not cost a million allocations.
        if let Some(last) = self.chunks.back_mut().filter(|last| last.stream == stream) {
            let len = data.len().min(CHUNK_MAX_BYTES.saturating_sub(last.data.len()));
            last.data.extend_from_slice(&data[..len]);
            data = &data[len..];
            self.end += len as u64;
            self.held += len;
        }
        while !data.is_empty() {
            let len = data.len().min(CHUNK_MAX_BYTES);
            self.chunks.push_back(Chunk { stream, offset: self.end, data: data[..len].to_vec() });
            data = &data[len..];
            self.end += len as u64;
            self.held += len + CHUNK_COST_BYTES;
        }
    }

    /// The chunk with the byte at this position, which is held.
    fn index(&self, position: u64) -> usize {
        self.chunks.partition_point(|chunk| chunk.offset <= position).saturating_sub(1)
    }

    /// What is held from this position on costs so much.
    fn cost_from(&self, position: u64) -> usize {
        let chunks = self.chunks.len() - self.index(position);
        usize::try_from(self.end - position.min(self.end)).unwrap_or(usize::MAX) + chunks * CHUNK_COST_BYTES
    }

    /// Where the slowest reader is that is still waited for.
    fn slowest(&self) -> Option<u64> {
        let waited_for = self.readers.values().filter(|r| r.moved.elapsed() < STALL);
        waited_for.map(|r| r.position.max(self.start)).min()
    }

    /// Drops whole chunks from the front until they cost at most `max` bytes, but none that is still needed from an offset
    /// on: a reader may stand in the middle of a chunk.
    fn trim(&mut self, max: usize, needed: Option<u64>) {
        while self.held > max {
            let Some(chunk) = self.chunks.front() else { break };
            let next = chunk.offset + chunk.data.len() as u64;
            if needed.is_some_and(|needed| next > needed) {
                break;
            }
            self.held -= chunk.data.len() + CHUNK_COST_BYTES;
            self.start = next;
            self.chunks.pop_front();
        }
    }

    fn find(&self, position: u64) -> Option<(Stream, Bytes)> {
        let chunk = self.chunks.get(self.index(position))?;
        let from = usize::try_from(position.checked_sub(chunk.offset)?).ok()?;
        let data = chunk.data.get(from..).filter(|data| !data.is_empty())?;
        Some((chunk.stream, Bytes::copy_from_slice(data)))
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Attachment {
    /// The next thing at the reader's position, which moves past it.
    pub fn next(&self) -> Found {
        let mut state = self.log.lock();
        let (start, end) = (state.start, state.end);
        let Some(reader) = state.readers.get_mut(&self.id) else { return Found::Nothing };
        reader.moved = Instant::now();
        if reader.position < start {
            reader.position = start;
            return Found::Dropped(start);
        }
        let position = reader.position.min(end);
        if position == end {
            return state.exit.clone().map_or(Found::Nothing, Found::End);
        }
        let Some((stream, data)) = state.find(position) else { return Found::Nothing };
        if let Some(reader) = state.readers.get_mut(&self.id) {
            reader.position = position + data.len() as u64;
        }
        drop(state);
        self.log.room.notify_waiters();
        Found::Data { stream, offset: position, data }
    }

    /// Waits until there may be more.
    pub async fn next_or_wait(&self) -> Found {
        loop {
            let grown = self.log.grown.notified();
            match self.next() {
                Found::Nothing => grown.await,
                found => return found,
            }
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.log.lock().readers.remove(&self.id);
        self.log.room.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> Arc<Log> {
        Log::new(Budget::new(64 << 20))
    }

    async fn all(reader: &Attachment) -> (Vec<u8>, u64) {
        let (mut out, mut dropped) = (Vec::new(), 0);
        loop {
            match reader.next_or_wait().await {
                Found::Data { data, .. } => out.extend_from_slice(&data),
                Found::Dropped(until) => dropped = until,
                Found::End(_) => return (out, dropped),
                Found::Nothing => {}
            }
        }
    }

    #[tokio::test]
    async fn a_reader_sees_everything_in_order_from_any_offset() {
        let log = log();
        log.append(Stream::Stdout, b"one").await;
        log.append(Stream::Stderr, b"two").await;
        log.append(Stream::Stdout, b"three").await;
        log.finish(Exit::default());
        assert_eq!(all(&log.attach(0)).await, (b"onetwothree".to_vec(), 0));
        assert_eq!(all(&log.attach(4)).await, (b"wothree".to_vec(), 0));
        assert_eq!(all(&log.attach(99)).await, (vec![], 0));
    }

    #[tokio::test]
    async fn without_a_reader_the_oldest_go_and_that_is_said() {
        let log = log();
        let block = vec![7u8; CHUNK_MAX_BYTES];
        for _ in 0..100 {
            log.append(Stream::Stdout, &block).await;
        }
        log.finish(Exit::default());
        let (start, end) = log.range();
        assert!(end == 100 * CHUNK_MAX_BYTES as u64 && end - start <= LOG_MAX_BYTES as u64);
        let (out, dropped) = all(&log.attach(0)).await;
        assert_eq!((dropped, out.len() as u64), (start, end - start));
    }

    #[tokio::test]
    async fn the_pump_waits_for_a_reader_and_loses_nothing() {
        let log = log();
        let reader = log.attach(0);
        let writer = log.clone();
        let pump = tokio::spawn(async move {
            for n in 0..200u8 {
                writer.append(Stream::Stdout, &vec![n; CHUNK_MAX_BYTES]).await;
            }
            writer.finish(Exit::default());
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!pump.is_finished(), "the pump must wait");
        let (out, dropped) = all(&reader).await;
        assert_eq!((out.len(), dropped), (200 * CHUNK_MAX_BYTES, 0));
    }

    #[tokio::test]
    async fn small_writes_share_memory() {
        let log = log();
        for _ in 0..100_000 {
            log.append(Stream::Stdout, b"x").await;
        }
        assert!(log.lock().chunks.len() < 10);
    }
}
