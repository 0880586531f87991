//! What all parts of SPACE agree on: ids, states and their transitions, limits, tokens.
//!
//! Pure values: no I/O, no clock, no lock. Whoever needs the time passes it in.

pub mod admission;
pub mod id;
pub mod limits;
pub mod name;
pub mod size;
pub mod state;
pub mod token;

pub use id::{CheckpointId, CommandId, Generation, KeyId, OperationId, RunNumber, RunRef, SandboxId};
pub use state::SandboxState;
