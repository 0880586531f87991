//! A framed link over a raw byte channel that knows no connections, as a virtio serial port is one.
//!
//! ```text
//!  host                                        guest
//!  connect() ── Hello(session) ──────────────▶ Listener::accept() ── refresh ──┐
//!            ◀─────────────── HelloAck(session) ── Responder::ack() ◀──────────┘
//!  LinkStream ◀════════ Data(session) ════════▶ LinkStream          (gRPC runs in here)
//!            ── Close(session) ──────────────▶
//! ```
//!
//! The promise: a new host connection always works, also after the old one vanished without closing, and after the
//! guest was frozen in the middle of a frame and restored elsewhere. Hence
//!
//! * every frame carries the random number of its session, and frames of any other session are dropped;
//! * the guest looks for the next frame when a header is not one, and the host repeats its `Hello` behind enough zeros
//!   to fill up whatever frame the guest was left in;
//! * the host takes nothing for true before a `HelloAck` of its own session, wherever in the input that begins;
//! * a new `Hello` ends the older session at once, and a repeated one is answered again, never worked on twice.
//!
//! This module must never buffer without bound: each direction of a session holds at most [`QUEUE_MAX_BYTES`] and one
//! frame, then the sender waits.

mod connect;
pub mod frame;
mod listen;
mod pipe;
mod rpc;
mod stream;

pub use connect::{Carrier, REFUSAL_MAX_CHARS, connect};
pub use frame::{DATA_MAX_BYTES, HEADER_BYTES, HELLO_MAX_BYTES};
pub use listen::{Listener, Responder};
pub use pipe::QUEUE_MAX_BYTES;
pub use rpc::{guest_channel, incoming, server};
pub use stream::LinkStream;

/// Why there is no link.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The guest answered, and said that it must not be used.
    #[error("the guest refused the connection: {0}")]
    Refused(String),
    /// No answer in time: the guest is not up yet, is stuck, or is paused.
    #[error("the guest did not answer in time; it may still be booting, or hang")]
    Timeout,
    /// The other end of the byte channel is gone: the VM has ended, or another connection took the place.
    #[error("the guest's channel was closed")]
    Closed,
    #[error("the guest's channel failed")]
    Io(#[from] std::io::Error),
    /// The bytes make no sense. `what` says which.
    #[error("the guest's channel carries nonsense: {what}")]
    Protocol { what: &'static str },
}
