//! The files of a save, and how they replace the ones before: both or neither.
//!
//! ```text
//! Firecracker writes      this side makes                       the moment        then
//! device.state.new  ───────────────────────────────▶ save.commit appears ─▶ device.state
//! memory.diff ──ranges──▶ memory.img.new ◀─clone── memory.img          ─▶ memory.img
//! ```
//! Until `save.commit` is there the old pair counts, afterwards the new one: whoever comes next goes on from there, after
//! a crash too. `memory.img` itself is never written: a running VMM maps it.
//!
//! What Firecracker writes to lies in `run/`, made by us and open to it by name only; once it has written, it is closed to
//! everybody else and moved.
//!
//! `memory.diff` stays until its content is in `memory.img`, and Firecracker adds to it: a page it reported as changed is
//! not reported again. What must not be taken for all changes, after an attempt whose end is not known, is marked by
//! `memory.stale`: the next save is a full one.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt};

use rustix::fs::{FallocateFlags, fallocate};

use crate::dir::{DEVICE_STATE, MEMORY};
use crate::{SaveKind, VmDir, VmmError, reflink};

pub(super) const NEW_STATE: &str = "run/device.state.new";
pub(super) const NEW_MEMORY: &str = "run/memory.img.new";
pub(super) const DIFF: &str = "run/memory.diff";
const COMMIT: &str = "save.commit";
const STALE: &str = "memory.stale";
/// Zeros of at least this length become a hole.
const HOLE_BYTES: usize = 64 << 10;
const SCAN_BYTES: usize = 1 << 20;

fn remove(dir: &VmDir, name: &str) -> Result<(), VmmError> {
    match std::fs::remove_file(dir.file(name)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(dir.error("remove", name)(error)),
        _ => Ok(()),
    }
}

/// Puts a file in the place of another, unless that was done before.
fn put_in_place(dir: &VmDir, from: &str, to: &str) -> Result<(), VmmError> {
    match std::fs::rename(dir.file(from), dir.file(to)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(dir.error("put in place", to)(error)),
        _ => Ok(()),
    }
}

/// Marks that the next save must write everything.
pub(super) fn mark_stale(dir: &VmDir) -> Result<(), VmmError> {
    dir.open(STALE, OpenOptions::new().write(true).create(true)).map(drop)
}

/// Finishes a save that was decided, forgets one that was not. The VM may be alive.
pub(super) fn recover(dir: &VmDir) -> Result<(), VmmError> {
    if dir.file(COMMIT).exists() {
        return finish(dir);
    }
    remove(dir, NEW_STATE)?;
    remove(dir, NEW_MEMORY)
}

/// What [`recover`] does, and what only a VM that is gone had use for.
pub(super) fn recover_ended(dir: &VmDir) -> Result<(), VmmError> {
    recover(dir)?;
    remove(dir, DIFF)?;
    remove(dir, STALE)
}

/// What Firecracker is to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Full,
    Diff,
}

/// Makes the files that Firecracker opens, and says which kind of save is possible.
pub(super) fn prepare(dir: &VmDir, wanted: SaveKind) -> Result<Kind, VmmError> {
    recover(dir)?;
    let kind = match wanted {
        SaveKind::Changed if !dir.file(STALE).exists() => Kind::Diff,
        _ => Kind::Full,
    };
    let memory = match kind {
        Kind::Diff => DIFF,
        Kind::Full => {
            mark_stale(dir)?;
            NEW_MEMORY
        }
    };
    for name in [NEW_STATE, memory] {
        let file = dir.open(name, OpenOptions::new().write(true).create(true).truncate(false))?;
        // Only the VMM gets into the folder it is in.
        set_mode(dir, &file, name, 0o666)?;
    }
    Ok(kind)
}

fn set_mode(dir: &VmDir, file: &File, name: &str, mode: u32) -> Result<(), VmmError> {
    file.set_permissions(Permissions::from_mode(mode)).map_err(dir.error("change the rights of", name))
}

/// Turns what Firecracker has written into the sandbox's memory and state.
pub(super) fn commit(dir: &VmDir, kind: Kind) -> Result<(), VmmError> {
    let size = std::fs::metadata(dir.file(MEMORY)).map_err(dir.error("inspect", MEMORY))?.len();
    match kind {
        Kind::Diff => merge(dir, size)?,
        Kind::Full => {
            let file = dir.open(NEW_MEMORY, OpenOptions::new().read(true).write(true))?;
            check_size(dir, &file, NEW_MEMORY, size)?;
            set_mode(dir, &file, NEW_MEMORY, 0o600)?;
            dig_holes(&file, size).and_then(|()| file.sync_all()).map_err(dir.error("dig holes in", NEW_MEMORY))?;
        }
    }
    let state = dir.open(NEW_STATE, OpenOptions::new().read(true))?;
    set_mode(dir, &state, NEW_STATE, 0o600)?;
    dir.open(COMMIT, OpenOptions::new().write(true).create(true))?;
    finish(dir)
}

/// After the decision; every step may have been done before.
fn finish(dir: &VmDir) -> Result<(), VmmError> {
    put_in_place(dir, NEW_MEMORY, MEMORY)?;
    put_in_place(dir, NEW_STATE, DEVICE_STATE)?;
    remove(dir, DIFF)?;
    remove(dir, STALE)?;
    remove(dir, COMMIT)
}

fn check_size(dir: &VmDir, file: &File, name: &str, size: u64) -> Result<(), VmmError> {
    let found = file.metadata().map_err(dir.error("inspect", name))?.len();
    if found == size {
        return Ok(());
    }
    let message = format!("{name} has {found} bytes, and the memory {size}");
    Err(VmmError::Refused { command: "the snapshot", message })
}

/// `memory.img.new`: the memory so far, with the changed ranges laid over it. No byte is copied.
///
/// Nothing is synced while the VM stands: cloning waits until the bytes it shares are on disk, what it writes itself is metadata,
/// which btrfs commits in order, and the snapshot that follows a save commits all of it.
fn merge(dir: &VmDir, size: u64) -> Result<(), VmmError> {
    let diff = dir.open(DIFF, OpenOptions::new().read(true))?;
    check_size(dir, &diff, DIFF, size)?;
    let base = dir.open(MEMORY, OpenOptions::new().read(true))?;
    let new = dir.open(NEW_MEMORY, OpenOptions::new().write(true).create(true).truncate(true))?;
    let merged = || {
        reflink::clone_all(&base, &new)?;
        for range in reflink::data_ranges(&diff) {
            reflink::clone_range(&diff, &new, range?)?;
        }
        Ok(())
    };
    merged().map_err(dir.error("merge changes into", NEW_MEMORY))
}

/// Gives back the space of long runs of zeros: most of a fresh guest's memory.
fn dig_holes(file: &File, size: u64) -> io::Result<()> {
    let mut buffer = vec![0u8; SCAN_BYTES];
    let mut at = 0;
    while at < size {
        let len = usize::try_from(size - at).unwrap_or(SCAN_BYTES).min(SCAN_BYTES);
        file.read_exact_at(&mut buffer[..len], at)?;
        let mut begun: Option<usize> = None;
        for (index, block) in buffer[..len].chunks(HOLE_BYTES).enumerate() {
            let zero = block.iter().all(|byte| *byte == 0);
            match (zero, begun) {
                (true, None) => begun = Some(index * HOLE_BYTES),
                (false, Some(start)) => {
                    dig(file, at + start as u64, (index * HOLE_BYTES - start) as u64)?;
                    begun = None;
                }
                _ => {}
            }
        }
        if let Some(start) = begun {
            dig(file, at + start as u64, (len - start) as u64)?;
        }
        at += len as u64;
    }
    Ok(())
}

fn dig(file: &File, at: u64, len: u64) -> io::Result<()> {
    Ok(fallocate(file.as_fd(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn folder() -> (tempfile::TempDir, VmDir) {
        let dir = tempfile::tempdir().unwrap();
        let vm = VmDir::new(dir.path());
        std::fs::create_dir(vm.file(crate::dir::RUN)).unwrap();
        for (name, text) in [(MEMORY, "old memory"), (DEVICE_STATE, "old state")] {
            std::fs::write(vm.file(name), text).unwrap();
        }
        (dir, vm)
    }

    fn pair(dir: &VmDir) -> [String; 2] {
        [MEMORY, DEVICE_STATE].map(|name| std::fs::read_to_string(dir.file(name)).unwrap())
    }

    #[test]
    fn a_save_that_dies_leaves_the_old_pair_or_the_new_one() {
        // Everything that can be there after a death, in the order of the steps of a save.
        let (new, old) = (["new memory", "new state"], ["old memory", "old state"]);
        for (steps, expected) in [(0, old), (1, old), (2, old), (3, new), (4, new), (5, new), (6, new), (7, new)] {
            let (_guard, dir) = folder();
            let step = |number: usize, act: &dyn Fn()| {
                if steps >= number {
                    act();
                }
            };
            std::fs::write(dir.file(DIFF), "").unwrap();
            step(1, &|| std::fs::write(dir.file(NEW_STATE), "new state").unwrap());
            step(2, &|| std::fs::write(dir.file(NEW_MEMORY), "new memory").unwrap());
            step(3, &|| std::fs::write(dir.file(COMMIT), "").unwrap());
            step(4, &|| put_in_place(&dir, NEW_MEMORY, MEMORY).unwrap());
            step(5, &|| put_in_place(&dir, NEW_STATE, DEVICE_STATE).unwrap());
            step(6, &|| remove(&dir, DIFF).unwrap());
            step(7, &|| remove(&dir, COMMIT).unwrap());
            recover(&dir).unwrap();
            recover(&dir).unwrap();
            assert_eq!(pair(&dir), expected, "after {steps} steps");
            assert!(!dir.file(COMMIT).exists() && !dir.file(NEW_STATE).exists() && !dir.file(NEW_MEMORY).exists());
            // Until the decision the changes that were reported once are kept for the next attempt.
            assert_eq!(dir.file(DIFF).exists(), steps < 3, "after {steps} steps");
        }
    }

    #[test]
    fn after_a_full_save_that_did_not_end_the_next_one_is_full() {
        let (_guard, dir) = folder();
        assert_eq!(prepare(&dir, SaveKind::Changed).unwrap(), Kind::Diff);
        assert_eq!(prepare(&dir, SaveKind::Full).unwrap(), Kind::Full);
        assert_eq!(prepare(&dir, SaveKind::Changed).unwrap(), Kind::Full);
        std::fs::write(dir.file(NEW_MEMORY), "new memory").unwrap();
        std::fs::write(dir.file(NEW_STATE), "new state").unwrap();
        commit(&dir, Kind::Full).unwrap();
        assert_eq!(pair(&dir), ["new memory", "new state"]);
        assert_eq!(prepare(&dir, SaveKind::Changed).unwrap(), Kind::Diff);
    }

    #[test]
    fn zeros_become_holes_and_nothing_else_changes() {
        let mut bytes = vec![0u8; 3 * SCAN_BYTES + 70_000];
        for at in [0, 5000, SCAN_BYTES + HOLE_BYTES, 3 * SCAN_BYTES + 69_999] {
            bytes[at] = 1;
        }
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let before = file.metadata().unwrap().blocks();
        dig_holes(&file, bytes.len() as u64).unwrap();
        let mut after = vec![9u8; bytes.len()];
        file.read_exact_at(&mut after, 0).unwrap();
        assert!(bytes == after);
        assert!(file.metadata().unwrap().blocks() < before / 4);
    }
}
