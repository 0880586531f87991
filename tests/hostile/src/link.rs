//! The link between host and guest: its frames, and both ends against a peer that says anything.

use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use space_proto::guest::{Hello, HelloAck, RefreshReply, RefreshRequest};
use space_proto::link::frame::{Decoder, Frame, Kind, encode, prefix};
use space_proto::link::{Carrier, HEADER_BYTES, HELLO_MAX_BYTES, LinkError, Listener, REFUSAL_MAX_CHARS};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::time::{Instant, timeout};

use crate::{Seed, choose, run, seed};

const SESSION: u64 = 0x5345_5353_494f_4e31;
/// Stands for the number of the session, which a guest learns and a fuzzer cannot guess.
const PLACE_OF_SESSION: &[u8; 8] = b"SESSION#";
const PIPE_BYTES: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(200);

fn frame(kind: Kind, session: u64, payload: &[u8]) -> Bytes {
    encode(kind, session, std::iter::once(payload))
}

fn decode(bytes: &[u8], step: usize) -> (Vec<Frame>, u64) {
    let mut decoder = Decoder::default();
    let mut found = Vec::new();
    for piece in bytes.chunks(step) {
        decoder.space().extend_from_slice(piece);
        while let Some(frame) = decoder.next_frame() {
            found.push(frame);
        }
    }
    (found, decoder.take_skipped())
}

fn hunt(bytes: &[u8], wanted: &[u8; 16], step: usize) -> Option<Frame> {
    let mut decoder = Decoder::default();
    bytes.chunks(step).find_map(|piece| {
        decoder.space().extend_from_slice(piece);
        decoder.hunt(wanted)
    })
}

/// The same frames wherever the stream is cut; each one stands in the input, within the bound of its kind; the hunt finds
/// its session behind anything.
pub fn frames(data: &[u8]) {
    let (step, data) = choose(data);
    let (found, skipped) = decode(data, data.len().max(1));
    let (cut, _) = decode(data, step + 1);
    assert_eq!(found.len(), cut.len(), "the cuts change what is found");
    let mut rest = data;
    let mut bytes = 0;
    for (frame_found, frame_cut) in found.iter().zip(&cut) {
        assert!(frame_found.payload.len() <= frame_found.kind.max_bytes());
        let own = frame(frame_found.kind, frame_found.session, &frame_found.payload);
        assert_eq!(own, frame(frame_cut.kind, frame_cut.session, &frame_cut.payload));
        let at = rest.windows(own.len()).position(|window| window == own).expect("a frame that was not sent");
        rest = &rest[at + own.len()..];
        bytes += own.len();
    }
    assert!(bytes as u64 + skipped <= data.len() as u64, "bytes were counted twice");

    let wanted = prefix(Kind::HelloAck, SESSION);
    if !data.windows(wanted.len()).any(|window| window == wanted) {
        let mut whole = data.to_vec();
        whole.extend_from_slice(&frame(Kind::HelloAck, SESSION, b"mine"));
        let found = hunt(&whole, &wanted, step + 1).expect("the answer was lost");
        assert_eq!(&found.payload[..], b"mine");
    } else {
        let (whole, cut) = (hunt(data, &wanted, data.len()), hunt(data, &wanted, step + 1));
        assert_eq!(whole.map(|frame| frame.payload), cut.map(|frame| frame.payload));
    }
}

/// Serves sessions as a guest does: the refresh is confirmed, then bytes are sent back, or left lying.
async fn serve(mut listener: Listener, echo: bool) {
    let mut held = Vec::new();
    while let Ok((hello, responder)) = listener.accept().await {
        if hello.run == u32::MAX {
            responder.refuse(hello.sandbox);
            continue;
        }
        let mut stream = responder.ack(HelloAck { protocol: hello.protocol, ..HelloAck::default() });
        let real = hello.sandbox == "real";
        if echo || real {
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                    if stream.write_all(&buffer[..count]).await.is_err() {
                        return;
                    }
                }
            });
        } else {
            held.clear();
            held.push(stream);
        }
    }
}

/// Whatever came over the channel before, a new host connection works, and its bytes arrive whole.
pub fn listen(data: &[u8]) {
    let (choice, data) = choose(data);
    run(async {
        let (mut host, guest) = tokio::io::duplex(PIPE_BYTES);
        let server = tokio::spawn(serve(Listener::new(guest), choice % 2 == 0));
        for piece in data.chunks(choice * 16 + 1) {
            // A full channel is one that a host has to give up, as its death would.
            if timeout(PATIENCE, host.write_all(piece)).await.map_or(true, |written| written.is_err()) {
                break;
            }
        }
        let hello = Hello { protocol: 1, sandbox: "real".to_owned(), run: 1, refresh: None };
        let (mut stream, ack) = space_proto::link::connect(host, Carrier::Channel, hello, Instant::now() + PATIENCE)
            .await
            .expect("a new connection works");
        assert_eq!(ack.protocol, 1);
        stream.write_all(b"all of it").await.expect("the session lives");
        let mut back = [0; 9];
        timeout(PATIENCE, stream.read_exact(&mut back)).await.expect("an echo in time").expect("an echo");
        assert_eq!(&back, b"all of it");
        server.abort();
    });
}

async fn next_hello(guest: &mut DuplexStream) -> Option<Frame> {
    let mut decoder = Decoder::default();
    loop {
        while let Some(found) = decoder.next_frame() {
            if found.kind == Kind::Hello {
                return Some(found);
            }
        }
        if guest.read_buf(decoder.space()).await.ok()? == 0 {
            return None;
        }
    }
}

fn with_session(data: &[u8], session: u64) -> Vec<u8> {
    let mut out = data.to_vec();
    let mut at = 0;
    while let Some(found) = out[at..].windows(8).position(|window| window == PLACE_OF_SESSION) {
        at += found;
        out[at..at + 8].copy_from_slice(&session.to_le_bytes());
        at += 8;
    }
    out
}

/// A host that talks to a guest gone bad gets the answer of its own session or a typed error in time, reads no byte that was
/// not sent to it, and an end.
pub fn connect(data: &[u8]) {
    let (choice, data) = choose(data);
    // Two parts: what comes before the answer of the daemon, and what comes after it.
    let (before, after) = data.split_at(data.len() * choice / 255);
    let carrier = if choice % 2 == 0 { Carrier::Connection } else { Carrier::Channel };
    run(async {
        let (host, mut guest) = tokio::io::duplex(PIPE_BYTES);
        let (before, after) = (before.to_vec(), after.to_vec());
        let daemon = tokio::spawn(async move {
            let hello = next_hello(&mut guest).await.expect("a hello");
            let (mut reader, mut writer) = tokio::io::split(guest);
            let read = tokio::spawn(async move {
                let mut sink = [0; 4096];
                while let Ok(1..) = reader.read(&mut sink).await {}
            });
            let ack = HelloAck { protocol: 7, ..HelloAck::default() }.encode_to_vec();
            for part in [
                with_session(&before, hello.session),
                frame(Kind::HelloAck, hello.session, &ack).to_vec(),
                with_session(&after, hello.session),
            ] {
                if writer.write_all(&part).await.is_err() {
                    return;
                }
            }
            let _ = writer.shutdown().await;
            let _ = read.await;
        });
        let untouched = !data.windows(8).any(|window| window == PLACE_OF_SESSION);
        let sent = data.len();
        let hello = Hello { protocol: 1, ..Hello::default() };
        match space_proto::link::connect(host, carrier, hello, Instant::now() + PATIENCE).await {
            Ok((mut stream, ack)) => {
                assert!(!untouched || ack.protocol == 7, "an answer that was not the session's was believed");
                let mut got = Vec::new();
                let end = timeout(PATIENCE, stream.read_to_end(&mut got)).await.expect("an end in time");
                assert!(end.is_ok() && got.len() <= sent, "{} bytes out of {sent}", got.len());
                assert!(!untouched || got.is_empty(), "bytes of another session were taken");
            }
            Err(LinkError::Refused(words)) => {
                assert!(!untouched, "the answer was lost");
                assert!(words.chars().count() <= REFUSAL_MAX_CHARS && !words.contains(char::is_control), "{words:?}");
            }
            // Who knows the session can make half a frame of the answer, and close.
            Err(LinkError::Protocol { .. } | LinkError::Closed) => assert!(!untouched, "the answer was lost"),
            Err(error) => panic!("{error}"),
        }
        daemon.abort();
    });
}

fn hello() -> Vec<u8> {
    let refresh =
        RefreshRequest { realtime_ns: 1, entropy: vec![7; 64].into(), thaw: true, ..RefreshRequest::default() };
    Hello { protocol: 1, sandbox: "sbx-0".to_owned(), run: 2, refresh: Some(refresh) }.encode_to_vec()
}

fn session_frames(session: u64) -> Vec<u8> {
    let ack = HelloAck { protocol: 1, refresh: Some(RefreshReply::default()), error: String::new() }.encode_to_vec();
    [
        frame(Kind::Hello, session, &hello()),
        frame(Kind::HelloAck, session, &ack),
        frame(Kind::Data, session, b"some bytes"),
        frame(Kind::Data, session, b""),
        frame(Kind::Close, session, b""),
    ]
    .concat()
}

pub fn frame_seeds() -> Vec<Seed> {
    let all = session_frames(SESSION);
    let mut cut = vec![3];
    cut.extend_from_slice(&frame(Kind::Data, 1, &[1; 300])[..HEADER_BYTES + 20]);
    cut.extend_from_slice(&frame(Kind::Hello, 2, &hello()));
    let mut too_long = vec![0];
    too_long.extend_from_slice(&prefix(Kind::Hello, 1));
    too_long.extend_from_slice(&(HELLO_MAX_BYTES as u32 + 1).to_le_bytes());
    too_long.extend_from_slice(&all);
    let refused = Hello { run: u32::MAX, sandbox: "why".to_owned(), ..Hello::default() }.encode_to_vec();
    vec![
        seed("session", [&[1][..], &all].concat()),
        seed("cut", cut),
        seed("too_long", too_long),
        seed("refused", [&[2][..], &frame(Kind::Hello, 3, &refused)].concat()),
        seed("no_message", [&[0][..], &frame(Kind::Hello, 4, b"\xff\xff")].concat()),
        seed("padding", [&[200][..], &[0; 500], b"SPSPLSPL1", &all].concat()),
    ]
}

pub fn answer_seeds() -> Vec<Seed> {
    let place = u64::from_le_bytes(*PLACE_OF_SESSION);
    let refusal = HelloAck { error: "no".to_owned(), ..HelloAck::default() }.encode_to_vec();
    let long = HelloAck { error: "no\u{1b}[2J".repeat(2000), ..HelloAck::default() }.encode_to_vec();
    vec![
        seed("refusal_long", [&[255][..], &frame(Kind::HelloAck, place, &long)].concat()),
        seed("other_session", [&[128][..], &session_frames(1)].concat()),
        seed("own_session", [&[0][..], &session_frames(place)].concat()),
        seed("early", [&[255][..], &session_frames(place)].concat()),
        seed("refusal", [&[255][..], &frame(Kind::HelloAck, place, &refusal)].concat()),
        seed("no_message", [&[255][..], &frame(Kind::HelloAck, place, b"\xff")].concat()),
        seed("torn", [&[0][..], &frame(Kind::Data, place, b"a"), b"torn", &frame(Kind::Data, place, b"b")].concat()),
    ]
}
