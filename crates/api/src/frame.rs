//! Frames of the attach WebSocket: one binary message is one frame; its first byte says what it is.
//!
//! | byte | frame | who | rest |
//! |---|---|---|---|
//! | 1 | stdout | server | offset u64 BE, bytes |
//! | 2 | stderr | server | offset u64 BE, bytes |
//! | 3 | stdin | client | bytes |
//! | 4 | close stdin | client | |
//! | 5 | resize | client | columns u16 BE, rows u16 BE |
//! | 6 | signal | client | number u8 |
//! | 7 | exit | server, last | JSON `Exit` |
//! | 8 | dropped | server | offset u64 BE: bytes before it are gone |
//! | 9 | started | server, first | JSON `Process` |
//! | 10 | error | server, last | JSON `Problem` |
//!
//! Offsets count the bytes of both streams together. Keep-alive is WebSocket ping and pong.

use bytes::{BufMut, Bytes, BytesMut};

use crate::{Exit, Problem, Process, TerminalSize};

/// Input in one frame; more is refused.
pub const STDIN_MAX_BYTES: usize = 256 * 1024;

#[derive(Clone, Debug)]
pub enum Frame {
    Stdout { offset: u64, data: Bytes },
    Stderr { offset: u64, data: Bytes },
    Stdin(Bytes),
    CloseStdin,
    Resize(TerminalSize),
    Signal(u8),
    Exit(Exit),
    Dropped { until: u64 },
    Started(Box<Process>),
    Error(Problem),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a frame: {0}")]
pub struct BadFrame(&'static str);

fn json<T: serde::Serialize>(kind: u8, value: &T) -> Bytes {
    let mut out = vec![kind];
    serde_json::to_writer(&mut out, value).expect("frames are plain data");
    out.into()
}

fn offset(rest: &mut Bytes) -> Result<u64, BadFrame> {
    if rest.len() < 8 {
        return Err(BadFrame("offset cut short"));
    }
    let head = rest.split_to(8);
    Ok(u64::from_be_bytes(head.as_ref().try_into().expect("eight bytes")))
}

fn parse<T: serde::de::DeserializeOwned>(rest: &[u8]) -> Result<T, BadFrame> {
    serde_json::from_slice(rest).map_err(|_| BadFrame("malformed JSON"))
}

impl Frame {
    pub fn encode(&self) -> Bytes {
        let output = |kind: u8, offset: u64, data: &Bytes| {
            let mut out = BytesMut::with_capacity(9 + data.len());
            out.put_u8(kind);
            out.put_u64(offset);
            out.put_slice(data);
            out.freeze()
        };
        match self {
            Self::Stdout { offset, data } => output(1, *offset, data),
            Self::Stderr { offset, data } => output(2, *offset, data),
            Self::Stdin(data) => {
                let mut out = BytesMut::with_capacity(1 + data.len());
                out.put_u8(3);
                out.put_slice(data);
                out.freeze()
            }
            Self::CloseStdin => Bytes::from_static(&[4]),
            Self::Resize(size) => {
                let mut out = BytesMut::with_capacity(5);
                out.put_u8(5);
                out.put_u16(size.cols);
                out.put_u16(size.rows);
                out.freeze()
            }
            Self::Signal(number) => Bytes::copy_from_slice(&[6, *number]),
            Self::Exit(exit) => json(7, exit),
            Self::Dropped { until } => output(8, *until, &Bytes::new()),
            Self::Started(process) => json(9, process),
            Self::Error(problem) => json(10, problem),
        }
    }

    pub fn decode(mut message: Bytes) -> Result<Self, BadFrame> {
        if message.is_empty() {
            return Err(BadFrame("empty"));
        }
        let kind = message.split_to(1)[0];
        let mut rest = message;
        Ok(match kind {
            1 => Self::Stdout { offset: offset(&mut rest)?, data: rest },
            2 => Self::Stderr { offset: offset(&mut rest)?, data: rest },
            3 if rest.len() <= STDIN_MAX_BYTES => Self::Stdin(rest),
            3 => return Err(BadFrame("more than 256 KiB of input in one frame")),
            4 if rest.is_empty() => Self::CloseStdin,
            5 if rest.len() == 4 => Self::Resize(TerminalSize {
                cols: u16::from_be_bytes([rest[0], rest[1]]),
                rows: u16::from_be_bytes([rest[2], rest[3]]),
            }),
            6 if rest.len() == 1 => Self::Signal(rest[0]),
            7 => Self::Exit(parse(&rest)?),
            8 if rest.len() == 8 => Self::Dropped { until: offset(&mut rest)? },
            9 => Self::Started(Box::new(parse(&rest)?)),
            10 => Self::Error(parse(&rest)?),
            4..=6 | 8 => return Err(BadFrame("wrong length")),
            _ => return Err(BadFrame("unknown kind")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip() {
        let data = Bytes::from_static(b"\xff\x00hi");
        let frames = [
            Frame::Stdout { offset: 7, data: data.clone() },
            Frame::Stderr { offset: u64::MAX, data: Bytes::new() },
            Frame::Stdin(data),
            Frame::CloseStdin,
            Frame::Resize(TerminalSize { cols: 80, rows: 24 }),
            Frame::Signal(15),
            Frame::Exit(Exit { reason: "exited".into(), code: 7, signal: None, message: None }),
            Frame::Dropped { until: 3 },
            Frame::Error(Problem::new(crate::problem::Code::Gone, "gone")),
        ];
        for frame in frames {
            let bytes = frame.encode();
            let again = Frame::decode(bytes.clone()).expect("own frame").encode();
            assert_eq!(bytes, again);
        }
    }

    #[test]
    fn garbage_is_refused_without_panic() {
        for kind in 0..=255u8 {
            for len in 0..12 {
                let mut message = vec![kind];
                message.extend(std::iter::repeat_n(0xa5, len));
                let _ = Frame::decode(message.into());
            }
        }
        assert!(Frame::decode(Bytes::new()).is_err());
        assert!(Frame::decode(Bytes::from(vec![3u8; STDIN_MAX_BYTES + 2])).is_err());
    }
}
