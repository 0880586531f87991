//! Protobuf over gRPC with one more bound than the size of a message: how many fields it has.
//!
//! An element of a list takes two bytes on the wire and some hundred in memory, so that four mebibytes of a guest's
//! answer would become more than half a gibibyte here. Nothing may be decoded before its fields were counted.

use std::marker::PhantomData;

use bytes::Buf as _;
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::ProstCodec;

/// Fields of one message, elements of its lists one by one. The longest list in good faith is a page of a folder.
pub const FIELDS_MAX: usize = 16 * 1024;

/// Whether a message may be decoded: at most [`FIELDS_MAX`] fields on its outermost level. What is no message at all
/// passes as far as it can be read: decoding it tells what is wrong.
pub fn is_bounded(mut message: &[u8]) -> bool {
    for _ in 0..FIELDS_MAX {
        if skip_field(&mut message).is_none() {
            return true;
        }
    }
    message.is_empty()
}

fn skip_field(message: &mut &[u8]) -> Option<()> {
    if message.is_empty() {
        return None;
    }
    let (_, wire) = decode_key(message).ok()?;
    let len = match wire {
        WireType::Varint => return decode_varint(message).ok().map(drop),
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        WireType::LengthDelimited => decode_varint(message).ok()?,
        // A group is its fields one by one, with a mark before and after them.
        WireType::StartGroup | WireType::EndGroup => 0,
    };
    let len = usize::try_from(len).ok().filter(|len| *len <= message.len())?;
    message.advance(len);
    Some(())
}

/// What the generated clients and servers use.
#[derive(Debug)]
pub struct BoundedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as Codec>::Encoder;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(PhantomData)
    }
}

#[derive(Debug)]
pub struct BoundedDecoder<U>(PhantomData<U>);

impl<U: Message + Default> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // In one piece as tonic has it; a message that is not would be counted in part, so it is copied.
        let counted = match buf.chunk() {
            whole if whole.len() == buf.remaining() => is_bounded(whole),
            _ => {
                let whole = buf.copy_to_bytes(buf.remaining());
                return decode(&whole).map(Some);
            }
        };
        if !counted {
            return Err(too_many());
        }
        U::decode(buf).map(Some).map_err(nonsense)
    }
}

/// A message as the codec takes it.
///
/// # Errors
/// `resource_exhausted` beyond [`FIELDS_MAX`], `internal` when the bytes are no such message.
pub fn decode<U: Message + Default>(bytes: &[u8]) -> Result<U, Status> {
    if !is_bounded(bytes) {
        return Err(too_many());
    }
    U::decode(bytes).map_err(nonsense)
}

fn too_many() -> Status {
    Status::resource_exhausted(format!("a message with more than {FIELDS_MAX} fields is not taken"))
}

fn nonsense(error: prost::DecodeError) -> Status {
    Status::internal(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::{FileStat, ListDirReply, ListProcessesReply, ProcessInfo};

    #[test]
    fn a_list_of_nothing_costs_no_memory() {
        let bytes = [0x0a, 0x00].repeat(2 << 20);
        assert!(size_of::<ProcessInfo>() * (2 << 20) > 400 << 20, "it would be worth refusing");
        let status = decode::<ListProcessesReply>(&bytes).expect_err("too many");
        assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    }

    #[test]
    fn an_unknown_field_counts_as_well_and_the_bound_itself_is_taken() {
        for field in [&[0x78, 0x01][..], &[0x7d, 0, 0, 0, 0], &[0x79, 0, 0, 0, 0, 0, 0, 0, 0], &[0x7b, 0x7c]] {
            let fields = if field == [0x7b, 0x7c] { FIELDS_MAX / 2 } else { FIELDS_MAX };
            assert!(is_bounded(&field.repeat(fields)), "{field:x?}");
            assert!(!is_bounded(&field.repeat(fields + 1)), "{field:x?}");
        }
    }

    #[test]
    fn what_a_guest_answers_in_good_faith_passes() {
        let stat = FileStat { path: "/a".repeat(50), size: 7, ..FileStat::default() };
        let page = ListDirReply { entries: vec![stat; 10_000], more: true };
        assert_eq!(decode::<ListDirReply>(&page.encode_to_vec()).expect("a page"), page);
    }

    #[test]
    fn damaged_messages_are_errors() {
        for bytes in [&[0x0a, 0x05, 0x00][..], &[0x0a], &[0xff; 30], &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f]] {
            assert_eq!(decode::<ListDirReply>(bytes).expect_err("damaged").code(), tonic::Code::Internal, "{bytes:x?}");
        }
    }
}
