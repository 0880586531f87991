//! The link over a byte channel that outlives its host connections, as a virtio serial port does.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use proptest::prelude::*;
use space_proto::guest::{Hello, HelloAck};
use space_proto::link::{
    Carrier, DATA_MAX_BYTES, HEADER_BYTES, LinkError, LinkStream, Listener, QUEUE_MAX_BYTES, connect,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// The host's side of the channel. Connections come and go; the bytes in it stay.
#[derive(Clone)]
struct Port(Arc<Mutex<DuplexStream>>);

/// One host connection to the port. Once cut it does nothing any more, and closes nothing.
struct Connection(Port, Arc<AtomicBool>);

impl Port {
    fn new(buffer: usize) -> (Self, DuplexStream) {
        let (host, guest) = tokio::io::duplex(buffer);
        (Self(Arc::new(Mutex::new(host))), guest)
    }

    fn open(&self) -> (Connection, Arc<AtomicBool>) {
        let cut = Arc::new(AtomicBool::new(false));
        (Connection(self.clone(), Arc::clone(&cut)), cut)
    }

    async fn write_raw(&self, bytes: &[u8]) {
        self.open().0.write_all(bytes).await.unwrap();
    }

    async fn connect(&self) -> (LinkStream, HelloAck, Arc<AtomicBool>) {
        let (io, cut) = self.open();
        let (stream, ack) = connect(io, Carrier::Channel, hello(), in_seconds(200)).await.unwrap();
        (stream, ack, cut)
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.1.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        Pin::new(&mut *self.0.0.lock().unwrap()).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.1.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        Pin::new(&mut *self.0.0.lock().unwrap()).poll_write(cx, buf)
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn hello() -> Hello {
    Hello { protocol: 1, sandbox: "sb".into(), run: 1, refresh: None }
}

fn in_seconds(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

/// A guest that sends every session's bytes back.
fn echo_guest(io: DuplexStream) -> Arc<AtomicUsize> {
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&accepted);
    tokio::spawn(async move {
        let mut listener = Listener::new(io);
        while let Ok((_, responder)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            let stream = responder.ack(HelloAck { protocol: 1, ..Default::default() });
            let (mut reader, mut writer) = tokio::io::split(stream);
            tokio::spawn(async move { tokio::io::copy(&mut reader, &mut writer).await });
        }
    });
    accepted
}

async fn must_echo(stream: &mut LinkStream, text: &[u8]) {
    stream.write_all(text).await.unwrap();
    let mut back = vec![0; text.len()];
    tokio::time::timeout(Duration::from_secs(20), stream.read_exact(&mut back)).await.expect("no echo").unwrap();
    assert_eq!(back, text);
}

fn raw_frame(kind: u8, session: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::from(*b"SPL1");
    out.extend_from_slice(&[kind, 0, 0, 0]);
    out.extend_from_slice(&session.to_le_bytes());
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(payload);
    out
}

fn noise(len: usize, mut seed: u64) -> Vec<u8> {
    (0..len)
        .map(|_| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        })
        .collect()
}

#[tokio::test]
async fn a_large_transfer_arrives_whole_in_both_directions_at_once() {
    let (port, guest) = Port::new(10_007);
    echo_guest(guest);
    let (stream, _, _cut) = port.connect().await;
    let data = noise(32 * 1024 * 1024 + 3, 1);
    let (mut reader, mut writer) = tokio::io::split(stream);
    let sent = data.clone();
    let sending = tokio::spawn(async move { writer.write_all(&sent).await });
    let mut back = vec![0; data.len()];
    reader.read_exact(&mut back).await.unwrap();
    sending.await.unwrap().unwrap();
    assert!(back == data, "bytes were changed on the way");
}

#[tokio::test(start_paused = true)]
async fn a_host_that_vanished_without_closing_is_replaced() {
    let (port, guest) = Port::new(4096);
    let accepted = echo_guest(guest);
    let mut dead = Vec::new();
    for round in 0..30 {
        let (mut stream, ack, cut) = port.connect().await;
        assert_eq!(ack.protocol, 1);
        must_echo(&mut stream, format!("round {round}").as_bytes()).await;
        // Leave it in the middle of talking.
        stream.write_all(&noise(round * 700, round as u64)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(round as u64)).await;
        cut.store(true, Ordering::SeqCst);
        dead.push(stream);
    }
    assert_eq!(accepted.load(Ordering::SeqCst), 30);
}

#[tokio::test(start_paused = true)]
async fn a_cut_at_any_byte_of_a_frame_does_not_matter() {
    let mut bytes = raw_frame(1, 4242, b"\x08\x01");
    bytes.extend(raw_frame(3, 4242, &[b'S'; 90]));
    bytes.extend(raw_frame(4, 4242, b""));
    let (port, guest) = Port::new(1 << 20);
    echo_guest(guest);
    for cut_at in 0..=bytes.len() {
        port.write_raw(&bytes[..cut_at]).await;
        let (mut stream, _, _cut) = port.connect().await;
        must_echo(&mut stream, b"still there").await;
    }
    // The largest frame there can be, cut near both ends and in the middle.
    let big = raw_frame(3, 1, &vec![7; DATA_MAX_BYTES]);
    for cut_at in [HEADER_BYTES, HEADER_BYTES + 1, DATA_MAX_BYTES / 2, big.len() - 1] {
        port.write_raw(&big[..cut_at]).await;
        let (mut stream, _, _cut) = port.connect().await;
        must_echo(&mut stream, b"still there").await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_guest_works_on_a_hello_once() {
    let (port, guest) = Port::new(4096);
    let mut listener = Listener::new(guest);
    let accepting = tokio::spawn(async move {
        let mut accepted = 0;
        let mut stream = None;
        while let Ok(next) = tokio::time::timeout(Duration::from_secs(5), listener.accept()).await {
            let (_, responder) = next.unwrap();
            tokio::time::sleep(Duration::from_secs(2)).await;
            accepted += 1;
            stream = Some(responder.ack(HelloAck::default()));
        }
        (accepted, stream)
    });
    let (_stream, _, _cut) = port.connect().await;
    assert_eq!(accepting.await.unwrap().0, 1);
}

#[tokio::test(start_paused = true)]
async fn a_new_hello_ends_the_older_session() {
    let (port, guest) = Port::new(4096);
    let mut listener = Listener::new(guest);
    let (streams, mut accepted) = mpsc::channel(4);
    tokio::spawn(async move {
        while let Ok((_, responder)) = listener.accept().await {
            streams.send(responder.ack(HelloAck::default())).await.unwrap();
        }
    });
    let (_first, _, cut) = port.connect().await;
    let mut old = accepted.recv().await.unwrap();
    cut.store(true, Ordering::SeqCst);
    let (_second, _, _cut) = port.connect().await;
    assert_eq!(old.read(&mut [0; 10]).await.unwrap(), 0);
    assert_eq!(old.write(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

/// A guest whose first session is never read, and a host that filled it up.
async fn stalled(port: &Port, guest: DuplexStream, reopened: watch::Receiver<u64>) {
    let mut listener = Listener::with_reopened(guest, reopened);
    tokio::spawn(async move {
        let (_, responder) = listener.accept().await.unwrap();
        let _never_read = responder.ack(HelloAck::default());
        let (_, responder) = listener.accept().await.unwrap();
        let (mut reader, mut writer) = tokio::io::split(responder.ack(HelloAck::default()));
        tokio::io::copy(&mut reader, &mut writer).await.unwrap();
    });
    let (mut stream, _, cut) = port.connect().await;
    let mut sent = 0;
    let data = vec![1; 50_000];
    while let Ok(done) = tokio::time::timeout(Duration::from_secs(2), stream.write_all(&data)).await {
        done.unwrap();
        sent += data.len();
        assert!(sent < 3 * QUEUE_MAX_BYTES, "nothing holds the sender back");
    }
    cut.store(true, Ordering::SeqCst);
}

#[tokio::test(start_paused = true)]
async fn a_stalled_session_is_abandoned_when_the_host_reopens_the_channel() {
    let (port, guest) = Port::new(4096);
    let (reopened, signal) = watch::channel(0);
    stalled(&port, guest, signal).await;
    reopened.send_modify(|n| *n += 1);
    let start = Instant::now();
    let (mut stream, _, _cut) = port.connect().await;
    must_echo(&mut stream, b"free again").await;
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn a_stalled_session_is_abandoned_also_when_the_reopening_was_missed() {
    let (port, guest) = Port::new(4096);
    stalled(&port, guest, watch::channel(0).1).await;
    let (mut stream, _, _cut) = port.connect().await;
    must_echo(&mut stream, b"free again").await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_slows_the_writer_and_loses_nothing() {
    let (port, guest) = Port::new(4096);
    echo_guest(guest);
    let (stream, _, _cut) = port.connect().await;
    let (mut reader, mut writer) = tokio::io::split(stream);
    let data = noise(3 * 1024 * 1024, 5);
    let sent = data.clone();
    tokio::spawn(async move { writer.write_all(&sent).await });
    let mut back = Vec::new();
    let mut buffer = vec![0; 100_000];
    while back.len() < data.len() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let len = reader.read(&mut buffer).await.unwrap();
        back.extend_from_slice(&buffer[..len]);
    }
    assert!(back == data);
}

#[tokio::test(start_paused = true)]
async fn a_closed_stream_ends_the_other_side_after_its_bytes() {
    let (port, guest) = Port::new(4096);
    let mut listener = Listener::new(guest);
    let accepting = tokio::spawn(async move {
        let (_, responder) = listener.accept().await.unwrap();
        (responder.ack(HelloAck::default()), listener)
    });
    let (mut stream, _, _cut) = port.connect().await;
    stream.write_all(b"the last words").await.unwrap();
    drop(stream);
    let (mut guest, _listener) = accepting.await.unwrap();
    let mut text = String::new();
    guest.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "the last words");
}

#[tokio::test(start_paused = true)]
async fn refused_late_and_closed_are_told_apart() {
    let (port, guest) = Port::new(4096);
    let mut listener = Listener::new(guest);
    let late = connect(port.open().0, Carrier::Channel, hello(), in_seconds(1)).await.unwrap_err();
    assert!(matches!(late, LinkError::Timeout), "{late}");
    let refusing = tokio::spawn(async move {
        // The first one is the hello of the host that gave up; it is answered into the void.
        for _ in 0..2 {
            if let Ok(Ok((_, responder))) = tokio::time::timeout(Duration::from_secs(1), listener.accept()).await {
                responder.refuse("the clock could not be set".into());
            }
        }
        listener
    });
    let refused = connect(port.open().0, Carrier::Channel, hello(), in_seconds(9)).await.unwrap_err();
    assert!(matches!(&refused, LinkError::Refused(why) if why.contains("clock")), "{refused}");
    drop(refusing.await.unwrap());
    let (host, guest) = tokio::io::duplex(64);
    drop(guest);
    assert!(matches!(
        connect(host, Carrier::Channel, hello(), in_seconds(9)).await.unwrap_err(),
        LinkError::Io(_) | LinkError::Closed
    ));
}

#[tokio::test(start_paused = true)]
async fn an_environment_of_the_largest_size_passes() {
    let (port, guest) = Port::new(4096);
    let mut listener = Listener::new(guest);
    let accepting = tokio::spawn(async move {
        let (hello, responder) = listener.accept().await.unwrap();
        let stream = responder.ack(HelloAck::default());
        (hello, stream, listener)
    });
    let refresh = space_proto::guest::RefreshRequest {
        env: [("BIG".to_string(), "x".repeat(256 * 1024))].into(),
        ..Default::default()
    };
    let sent = Hello { refresh: Some(refresh), ..hello() };
    let _open = connect(port.open().0, Carrier::Channel, sent.clone(), in_seconds(9)).await.unwrap();
    assert_eq!(accepting.await.unwrap().0, sent);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn garbage_between_connections_does_not_matter(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 1..5)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let (port, guest) = Port::new(1 << 20);
            echo_guest(guest);
            for piece in &pieces {
                port.write_raw(piece).await;
                let (mut stream, _, cut) = port.connect().await;
                must_echo(&mut stream, b"hello").await;
                cut.store(true, Ordering::SeqCst);
            }
        });
    }
}
