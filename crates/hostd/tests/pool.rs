//! The pool against a real btrfs in a loop file.

use std::fs;
use std::path::Path;

use space_hostd::btrfs;
use space_hostd::pool::{Area, MIN_POOL_BYTES, Pool, PoolError, PoolSource};

/// A pool in a folder of its own, unmounted when the test ends, however it ends.
struct TestPool {
    pool: Pool,
    dir: tempfile::TempDir,
}

impl Drop for TestPool {
    fn drop(&mut self) {
        if let Err(error) = self.pool.unmount() {
            eprintln!("cannot unmount the pool of a test: {error}");
        }
    }
}

fn source(dir: &Path) -> PoolSource {
    PoolSource::LoopFile { image: dir.join("pool.img"), bytes: MIN_POOL_BYTES }
}

fn pool() -> Option<TestPool> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIP: a pool needs root");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let pool = Pool::open(&dir.path().join("pool"), source(dir.path())).unwrap();
    Some(TestPool { pool, dir })
}

#[test]
fn a_template_becomes_two_sandboxes_and_goes_away() {
    let Some(test) = pool() else { return };
    let pool = &test.pool;
    let made = pool.create(Area::Tmp, "new").unwrap();
    fs::write(made.join("memory.img"), b"one").unwrap();
    let template = pool.snapshot((Area::Tmp, "new"), (Area::Templates, "abc"), true).unwrap();
    pool.delete(Area::Tmp, "new").unwrap();
    assert!(fs::write(template.join("x"), b"").is_err(), "a template is read-only");

    for name in ["s1", "s2"] {
        let path = pool.snapshot((Area::Templates, "abc"), (Area::Sandboxes, name), false).unwrap();
        fs::write(path.join("memory.img"), name).unwrap();
    }
    assert_eq!(fs::read(pool.path(Area::Sandboxes, "s1").unwrap().join("memory.img")).unwrap(), b"s1");
    assert_eq!(fs::read(template.join("memory.img")).unwrap(), b"one");
    assert_eq!(pool.list(Area::Sandboxes).unwrap(), ["s1", "s2"]);

    let again = pool.snapshot((Area::Templates, "abc"), (Area::Sandboxes, "s1"), false);
    assert!(matches!(again, Err(PoolError::AlreadyExists(_))), "{again:?}");
    let missing = pool.snapshot((Area::Templates, "none"), (Area::Sandboxes, "s3"), false);
    assert!(matches!(missing, Err(PoolError::NotFound(_))), "{missing:?}");
    for name in ["s1", "s2"] {
        pool.delete(Area::Sandboxes, name).unwrap();
        pool.delete(Area::Sandboxes, name).unwrap();
    }
    pool.delete(Area::Templates, "abc").unwrap();
    assert!(pool.list(Area::Templates).unwrap().is_empty());
}

#[test]
fn opening_twice_keeps_everything_but_unfinished_work() {
    let Some(test) = pool() else { return };
    test.pool.create(Area::Tmp, "half").unwrap();
    fs::write(test.pool.root().join("tmp/stray"), b"").unwrap();
    test.pool.create(Area::Tmp, "done").unwrap();
    test.pool.rename((Area::Tmp, "done"), (Area::Sandboxes, "s")).unwrap();
    let again = Pool::open(test.pool.root(), source(test.dir.path())).unwrap();
    assert_eq!(fs::read_dir(again.root().join("tmp")).unwrap().count(), 0);
    assert_eq!(again.list(Area::Sandboxes).unwrap(), ["s"]);
    again.unmount().unwrap();
    again.unmount().unwrap();
    assert!(!again.is_mounted().unwrap());
    let after = Pool::open(test.pool.root(), source(test.dir.path())).unwrap();
    assert_eq!(after.list(Area::Sandboxes).unwrap(), ["s"]);
    let usage = after.usage().unwrap();
    assert!(usage.total <= MIN_POOL_BYTES && usage.free > 0 && usage.free < usage.total, "{usage:?}");
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    let Some(test) = pool() else { return };
    for name in ["", ".", "..", ".x", "a/b", "../templates", "a\0b", &"x".repeat(129), "ü"] {
        assert!(matches!(test.pool.create(Area::Sandboxes, name), Err(PoolError::BadName(_))), "{name:?}");
        assert!(matches!(test.pool.delete(Area::Sandboxes, name), Err(PoolError::BadName(_))), "{name:?}");
    }
    fs::create_dir(test.pool.root().join("sandboxes/plain")).unwrap();
    std::os::unix::fs::symlink("/", test.pool.root().join("sandboxes/link")).unwrap();
    for name in ["plain", "link"] {
        assert!(matches!(test.pool.delete(Area::Sandboxes, name), Err(PoolError::NotASubvolume(_))), "{name}");
    }
    assert!(!btrfs::is_subvolume(Path::new("/proc")).unwrap());
}

#[test]
fn a_folder_that_is_not_btrfs_and_a_tiny_pool_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    if btrfs::is_btrfs(dir.path()).unwrap() {
        eprintln!("SKIP: the temporary folder is on btrfs");
        return;
    }
    let existing = Pool::open(&dir.path().join("pool"), PoolSource::Existing);
    assert!(matches!(existing, Err(PoolError::NotBtrfs(_))), "{existing:?}");
    let tiny = PoolSource::LoopFile { image: dir.path().join("pool.img"), bytes: 1 << 20 };
    let tiny = Pool::open(&dir.path().join("pool"), tiny);
    assert!(matches!(tiny, Err(PoolError::TooSmall { .. })), "{tiny:?}");
}
