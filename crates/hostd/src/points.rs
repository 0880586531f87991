//! Named points between two steps of the work where a drill can end a process, as `kill -9` would just there.
//!
//! A drill names a file; whoever reaches the point that is written in it removes the file and is gone. Without a drill a
//! point costs one load. Nothing here may be reached from a request: only who starts the server can ask for a drill.

use std::path::PathBuf;
use std::sync::OnceLock;

/// Every point of the node and of the root process, in the order of a sandbox's life. The control plane has its own list.
pub const ALL: &[&str] = &[
    "warm.restored",
    "warm.quiet",
    "warm.parked",
    "claim.recorded",
    "claim.moved",
    "claim.resumed",
    "claim.refreshed",
    "run.recorded",
    "run.started",
    "run.named",
    "run.refreshed",
    "run.confirmed",
    "delete.killed",
    "delete.removed",
    "build.created",
    "build.disk",
    "build.frozen",
    "build.published",
    "host.before",
    "host.snapshot",
    "host.rename",
    "host.delete",
    "host.group",
    "host.group_end",
    "host.start",
    "host.order",
    "host.build",
];

/// Those of a sandbox's later life, which a create and a delete do not come to.
pub const LATER: &[&str] = &[
    "pause.quiet",
    "pause.noted",
    "pause.paused",
    "resume.refreshed",
    "checkpoint.quiet",
    "checkpoint.saved",
    "checkpoint.facts",
    "checkpoint.taken",
    "checkpoint.resumed",
    "checkpoint.deleted",
    "unpack.recorded",
    "stop.quiet",
    "stop.noted",
    "stop.killed",
];

const POINT_MAX_BYTES: u64 = 64;

static DRILL: OnceLock<PathBuf> = OnceLock::new();

/// Obeys the file from now on. The first call counts.
pub fn obey(file: PathBuf) {
    let _ = DRILL.set(file);
}

/// Ends this process when the drill names this point.
pub fn reach(point: &str) {
    if let Some(file) = DRILL.get()
        && named(file).is_some_and(|wanted| wanted == point)
        // Whoever removes it is the one: each name ends one process.
        && std::fs::remove_file(file).is_ok()
    {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
    }
}

fn named(file: &std::path::Path) -> Option<String> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(file).ok()?.take(POINT_MAX_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_points_have_one_name() {
        let mut names = [ALL, LATER].concat();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ALL.len() + LATER.len());
    }
}
