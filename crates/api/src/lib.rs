//! The HTTP interface of SPACE: its types, from which OpenAPI is generated, the frames of the attach WebSocket, and the
//! Rust client. The server's and the client's idea of a message are the same type.

pub mod client;
pub mod frame;
pub mod problem;
#[cfg(feature = "server")]
pub mod serve;
pub mod types;

pub use problem::Problem;
pub use types::*;
