//! The two wire interfaces of SPACE: node ↔ guest (`guest`) and control plane ↔ node (`node`), the bounds of their
//! messages (`codec`), and the link that carries the first of them over a virtio channel (`link`).
//!
//! Nothing here decides anything: types, framing and bounds only.

pub mod codec;
pub mod link;

// Generated code; its style is not ours to lint.
#[allow(clippy::all, clippy::pedantic)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/space.rs"));
}

pub use generated::space::guest::v1 as guest;
pub use generated::space::node::v1 as node;

/// Number of the guest protocol this build speaks. It grows with every addition that a host must know of.
pub const GUEST_PROTOCOL: u32 = 1;

/// Metadata keys that name the run in calls passed through to a guest.
pub const META_SANDBOX: &str = "space-sandbox";
pub const META_RUN: &str = "space-run";
pub const META_GENERATION: &str = "space-generation";
