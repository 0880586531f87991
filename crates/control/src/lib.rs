//! The control plane: the HTTP API, what users want (desired state), and the work that makes it so.
//!
//! Rule: it is stateless. Everything that must outlive an instruction is in the store; any copy may die at any point and
//! another one, or the same one after a restart, finishes the work from what is written there. So a mutation writes its
//! intent and its operation in one transaction *before* anything is done, every step may be done again, and every change
//! of state is a guarded update that says when it has lost a race.
//!
//! It must never: touch a VM, a file of the pool or a guest other than through the node's interface; log a key, a token
//! or a secret; decide by itself whether a move between states is legal (`space_core::state` does).
//!
//! ```text
//! http ──▶ store (intent + operation) ──▶ work (one driver per sandbox) ──▶ node
//!   │                                        ▲
//!   └── guest calls ──▶ node                 └── reconcile: timer and signals, re-reads the world
//! ```

mod app;
mod clock;
mod error;
mod files;
mod http;
mod node;
mod points;
mod secrets;
mod serve;
mod store;
mod validate;
mod waiters;
mod work;

pub use error::ControlError;
pub use http::ROUTES;
pub use http::openapi::document as openapi;
pub use node::NodeEndpoint;
pub use points::Points;
pub use secrets::{AdminKey, bootstrap_admin_key, token_verifier};
pub use serve::{ControlConfig, Ready, serve};
pub use store::Store;
