//! The users of a server's processes: numbers, not names.
//!
//! They need no entry in `/etc/passwd`, so nothing is installed and nothing left behind; they are derived from the data folder, so that
//! two servers on one machine have different ones, and stay the same over restarts, as files belong to them.

use std::path::Path;

use space_core::limits::SANDBOXES_PER_NODE_MAX;

/// Above the users of all VMMs of all data folders, and far above what distributions give out.
const SERVICES: u32 = 5_000_000;

pub struct Users {
    /// Names the cgroups, too.
    pub owner: String,
    pub node: u32,
    pub control: u32,
    /// First user of VMMs, and how many.
    pub vmms: (u32, u32),
}

pub fn of(data_dir: &Path) -> Users {
    let owner = space_node::owner(data_dir);
    let first = space_node::first_uid(&owner);
    let count = u32::try_from(SANDBOXES_PER_NODE_MAX).unwrap_or(1000);
    // One pair for each range of VMMs.
    let pair = SERVICES + (first - space_hostd::uids::DEFAULT_BASE) / count * 2;
    Users { owner, node: pair, control: pair + 1, vmms: (first, count) }
}
