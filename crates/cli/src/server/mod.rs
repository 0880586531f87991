//! The server: the processes of a node and a control plane on one machine. Also what only one server of a data folder may do: hold
//! its lock, mount its pool.

mod child;
mod folders;
pub mod lock;
pub mod log;
pub mod role;
mod start;
mod users;

pub use start::start;

use crate::failure::Failure;

/// The server makes users, mounts and cgroups.
pub fn require_root(what: &str) -> Result<(), Failure> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::new(format!("{what} needs root: run `sudo {what}`")))
}
