//! The server in this process: control plane and node, which talk over a socket as they would over a network. Also what only one
//! server of a data folder may do: hold its lock, mount its pool.

pub mod lock;
pub mod log;
mod start;

pub use start::start;

use crate::failure::Failure;

/// Every sandbox costs a few descriptors here.
const OPEN_FILES: u64 = 65_536;

/// The server makes users, mounts and cgroups.
pub fn require_root(what: &str) -> Result<(), Failure> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::new(format!("{what} needs root: run `sudo {what}`")))
}

/// Raises the limit of open files as far as it goes.
pub fn raise_limits() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let wanted = OPEN_FILES.max(soft);
    if setrlimit(Resource::RLIMIT_NOFILE, wanted, hard.max(wanted)).is_err() {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, wanted.min(hard), hard);
    }
}
