//! The frames of the link and the decoder that finds them again. No I/O.
//!
//! A frame: magic `SPL1`, kind (1 byte), three zeros, session (8, little endian), length (4, little endian), payload.

use bytes::{Buf, BufMut, Bytes, BytesMut};

pub const HEADER_BYTES: usize = 20;
/// Payload of one Data frame. A larger write becomes several.
pub const DATA_MAX_BYTES: usize = 64 * 1024;
/// Payload of a Hello: two environments of the largest size that the API takes, and some room.
pub const HELLO_MAX_BYTES: usize = 512 * 1024;
const MAGIC: [u8; 4] = *b"SPL1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Hello = 1,
    HelloAck = 2,
    Data = 3,
    Close = 4,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::HelloAck,
            3 => Self::Data,
            4 => Self::Close,
            _ => return None,
        })
    }

    /// The longest payload.
    pub fn max_bytes(self) -> usize {
        match self {
            Self::Hello => HELLO_MAX_BYTES,
            Self::HelloAck | Self::Data => DATA_MAX_BYTES,
            Self::Close => 0,
        }
    }
}

#[derive(Debug)]
pub struct Frame {
    pub kind: Kind,
    pub session: u64,
    pub payload: Bytes,
}

/// The first 16 bytes of a frame of this kind and session: what the host hunts for.
pub fn prefix(kind: Kind, session: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[..4].copy_from_slice(&MAGIC);
    out[4] = kind as u8;
    out[8..].copy_from_slice(&session.to_le_bytes());
    out
}

/// A whole frame whose payload is the parts, one after the other.
///
/// # Panics
/// When the payload is larger than the kind allows: the callers bound it.
pub fn encode<'a>(kind: Kind, session: u64, parts: impl Iterator<Item = &'a [u8]> + Clone) -> Bytes {
    let len: usize = parts.clone().map(<[u8]>::len).sum();
    assert!(len <= kind.max_bytes(), "a frame of {len} bytes is larger than its kind allows");
    let mut out = BytesMut::with_capacity(HEADER_BYTES + len);
    out.put_slice(&prefix(kind, session));
    out.put_u32_le(len as u32);
    for part in parts {
        out.put_slice(part);
    }
    out.freeze()
}

struct Header {
    kind: Kind,
    session: u64,
    len: usize,
}

fn header(bytes: &[u8]) -> Option<Header> {
    if bytes[..4] != MAGIC || bytes[5..8] != [0; 3] {
        return None;
    }
    let kind = Kind::from_byte(bytes[4])?;
    let session = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
    let len = u32::from_le_bytes(bytes[16..20].try_into().expect("four bytes")) as usize;
    (len <= kind.max_bytes()).then_some(Header { kind, session, len })
}

/// Finds frames in a byte stream. Holds at most one frame and what one read brought.
#[derive(Default)]
pub struct Decoder {
    buffer: BytesMut,
    skipped: u64,
}

impl Decoder {
    /// Where the next read goes. Always has room.
    pub fn space(&mut self) -> &mut BytesMut {
        let wanted = self.missing().clamp(DATA_MAX_BYTES / 4, DATA_MAX_BYTES + HEADER_BYTES);
        if self.buffer.capacity() - self.buffer.len() < wanted {
            self.buffer.reserve(DATA_MAX_BYTES + HEADER_BYTES);
        }
        &mut self.buffer
    }

    fn missing(&self) -> usize {
        match self.buffer.get(..HEADER_BYTES).and_then(header) {
            Some(found) => (HEADER_BYTES + found.len).saturating_sub(self.buffer.len()),
            None => 0,
        }
    }

    /// Bytes that were no part of a frame, since the last call.
    pub fn take_skipped(&mut self) -> u64 {
        std::mem::take(&mut self.skipped)
    }

    /// The next whole frame; `None`: more bytes are needed.
    pub fn next_frame(&mut self) -> Option<Frame> {
        loop {
            if self.buffer.len() < HEADER_BYTES {
                return None;
            }
            let Some(Header { kind, session, len }) = header(&self.buffer) else {
                let skip = 1 + magic_begins(&self.buffer[1..]);
                self.skipped += skip as u64;
                self.buffer.advance(skip);
                continue;
            };
            if self.buffer.len() < HEADER_BYTES + len {
                return None;
            }
            self.buffer.advance(HEADER_BYTES);
            return Some(Frame { kind, session, payload: self.buffer.split_to(len).freeze() });
        }
    }

    /// Drops input up to a frame that begins with `wanted` and returns it whole, whatever else the bytes before it
    /// look like: they may be the rest of a frame of a session long gone.
    pub fn hunt(&mut self, wanted: &[u8; 16]) -> Option<Frame> {
        loop {
            let at = magic_begins(&self.buffer);
            self.buffer.advance(at);
            if self.buffer.len() < HEADER_BYTES {
                return None;
            }
            if self.buffer[..16] == *wanted && header(&self.buffer).is_some() {
                return self.next_frame();
            }
            self.buffer.advance(1);
        }
    }
}

/// Where the magic begins, or could begin if more bytes came; the length if nowhere.
fn magic_begins(bytes: &[u8]) -> usize {
    let mut at = 0;
    // The padding is long and all zeros; under emulation a byte at a time would be felt.
    while let Some(block) = bytes.get(at..at + 16) {
        if u128::from_ne_bytes(block.try_into().expect("sixteen bytes")) != 0 {
            match block.iter().position(|b| *b == MAGIC[0]) {
                Some(i) if could_be_magic(&bytes[at + i..]) => return at + i,
                Some(i) => at += i + 1,
                None => at += 16,
            }
        } else {
            at += 16;
        }
    }
    (at..bytes.len()).find(|i| could_be_magic(&bytes[*i..])).unwrap_or(bytes.len())
}

fn could_be_magic(bytes: &[u8]) -> bool {
    let len = bytes.len().min(MAGIC.len());
    bytes[..len] == MAGIC[..len]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(kind: Kind, session: u64, payload: &[u8]) -> Bytes {
        encode(kind, session, std::iter::once(payload))
    }

    fn decode_all(decoder: &mut Decoder, bytes: &[u8], step: usize) -> Vec<Frame> {
        let mut out = Vec::new();
        for piece in bytes.chunks(step) {
            decoder.space().extend_from_slice(piece);
            while let Some(found) = decoder.next_frame() {
                out.push(found);
            }
        }
        out
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..20), step in 1usize..500) {
            let bytes: Vec<u8> = payloads.iter().flat_map(|p| frame(Kind::Data, 9, p)).collect();
            let found = decode_all(&mut Decoder::default(), &bytes, step);
            prop_assert_eq!(found.len(), payloads.len());
            for (found, payload) in found.iter().zip(&payloads) {
                prop_assert_eq!(&found.payload[..], &payload[..]);
            }
        }

        #[test]
        fn a_frame_behind_garbage_and_padding_is_found(garbage in prop::collection::vec(any::<u8>(), 0..4000), step in 1usize..5000) {
            let mut bytes = garbage;
            bytes.resize(bytes.len() + HELLO_MAX_BYTES + HEADER_BYTES, 0);
            bytes.extend_from_slice(&frame(Kind::Hello, 77, b"hello"));
            let found = decode_all(&mut Decoder::default(), &bytes, step);
            let last = found.last().expect("the hello was lost");
            prop_assert_eq!((last.kind, last.session, &last.payload[..]), (Kind::Hello, 77, &b"hello"[..]));
        }

        #[test]
        fn the_hunt_finds_its_session_in_anything(garbage in prop::collection::vec(any::<u8>(), 0..4000), step in 1usize..500) {
            let mut bytes = garbage;
            // A header that promises more than will come must not swallow what follows it.
            bytes.extend_from_slice(&frame(Kind::Data, 5, &[1; 1000])[..HEADER_BYTES]);
            bytes.extend_from_slice(&frame(Kind::HelloAck, 6, b"old"));
            bytes.extend_from_slice(&frame(Kind::HelloAck, 7, b"mine"));
            let mut decoder = Decoder::default();
            let mut found = None;
            for piece in bytes.chunks(step) {
                decoder.space().extend_from_slice(piece);
                found = found.or_else(|| decoder.hunt(&prefix(Kind::HelloAck, 7)));
            }
            prop_assert_eq!(&found.expect("not found").payload[..], b"mine");
        }
    }

    #[test]
    fn a_length_beyond_the_bound_is_no_frame() {
        let mut bad = BytesMut::from(&frame(Kind::Data, 1, b"")[..]);
        bad[16..20].copy_from_slice(&(DATA_MAX_BYTES as u32 + 1).to_le_bytes());
        bad.extend_from_slice(&frame(Kind::Data, 1, b"good"));
        let found = decode_all(&mut Decoder::default(), &bad, 7);
        assert_eq!(found.len(), 1);
        assert_eq!(&found[0].payload[..], b"good");
    }

    #[test]
    fn the_decoder_never_hoards() {
        let mut decoder = Decoder::default();
        for _ in 0..200 {
            decoder.space().extend_from_slice(&[b'S'; 40_000]);
            assert!(decoder.next_frame().is_none());
            assert!(decoder.buffer.len() < HEADER_BYTES);
        }
    }
}
