//! Between blocking readers and writers on a thread and the asynchronous body of a request: a short queue, so that neither
//! side runs ahead of the other.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures::Stream;
use tokio::sync::mpsc;

pub const CHUNK: usize = 256 * 1024;
const QUEUE: usize = 4;

pub type Piece = io::Result<Bytes>;

pub fn queue() -> (mpsc::Sender<Piece>, mpsc::Receiver<Piece>) {
    mpsc::channel(QUEUE)
}

/// The receiving end as a body.
pub fn stream(from: mpsc::Receiver<Piece>) -> impl Stream<Item = Piece> + Send + 'static {
    futures::stream::unfold(from, |mut from| async move { Some((from.recv().await?, from)) })
}

/// A reader as a body; `passed` counts its bytes.
pub fn stream_of(
    mut reader: impl Read + Send + 'static,
    passed: Arc<AtomicU64>,
) -> impl Stream<Item = Piece> + Send + 'static {
    let (to, from) = queue();
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        loop {
            let piece = match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    passed.fetch_add(n as u64, Ordering::Relaxed);
                    Ok(Bytes::copy_from_slice(&buffer[..n]))
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => Err(e),
            };
            let failed = piece.is_err();
            if to.blocking_send(piece).is_err() || failed {
                break;
            }
        }
    });
    stream(from)
}

/// Writes into a queue.
pub struct Sender {
    pub to: mpsc::Sender<Piece>,
    pub passed: Arc<AtomicU64>,
}

impl Write for Sender {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the server takes no more");
        self.to.blocking_send(Ok(Bytes::copy_from_slice(data))).map_err(gone)?;
        self.passed.fetch_add(data.len() as u64, Ordering::Relaxed);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads out of a queue.
pub struct Receiver {
    pub from: mpsc::Receiver<Piece>,
    pub rest: Bytes,
}

impl Read for Receiver {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.from.blocking_recv() {
                None => return Ok(0),
                Some(piece) => self.rest = piece?,
            }
        }
        let n = buffer.len().min(self.rest.len());
        buffer[..n].copy_from_slice(&self.rest.split_to(n));
        Ok(n)
    }
}
