//! The ext4 file itself: size, sparseness, features, errors.

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::*;
use space_image::{DEFAULT_DISK_BYTES, DiskOptions, ImageError, NoProgress, digest, disk};
use uuid::Uuid;

fn options(bytes: u64) -> DiskOptions {
    DiskOptions::new(bytes, Uuid::from_u128(0xabc), Uuid::from_u128(0xdef))
}

fn make(root: &Path, out: &Path, bytes: u64) -> space_image::Result<()> {
    disk::make(root, out, &options(bytes), &NoProgress)
}

fn dumpe2fs(disk: &Path) -> String {
    let out = std::process::Command::new("/usr/sbin/dumpe2fs").arg(disk).output().unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn default_disk_is_sparse_complete_and_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    std::fs::write(root.join("file"), "content").unwrap();
    let out = dir.path().join("disk.img");
    make(&root, &out, DEFAULT_DISK_BYTES).unwrap();
    let meta = std::fs::metadata(&out).unwrap();
    assert_eq!(meta.len(), 2 << 30);
    assert!(meta.blocks() * 512 < 16 << 20, "{} KiB used", meta.blocks() / 2);
    check_disk(&out);
    let info = dumpe2fs(&out);
    for part in [
        "00000000-0000-0000-0000-000000000abc",
        "00000000-0000-0000-0000-000000000def",
        "metadata_csum",
        "64bit",
        "has_journal",
        "Reserved block count:     0",
    ] {
        assert!(info.contains(part), "{part} not in {info}");
    }
    // Nothing is left for a kernel thread of the guest to initialise.
    let groups = info.lines().filter(|l| l.starts_with("Group ") && l.contains(": (Blocks")).count();
    let zeroed = info.matches("ITABLE_ZEROED").count();
    assert_eq!(groups, 16);
    assert_eq!(zeroed, groups, "{info}");
    assert!(!dir.path().join("disk.img.part").exists());
}

#[test]
fn equal_input_gives_equal_digests() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    for i in 0..50 {
        std::fs::write(root.join(format!("f{i}")), vec![i; 5000]).unwrap();
    }
    let digest_of = |name: &str| {
        let out = dir.path().join(name);
        make(&root, &out, 64 << 20).unwrap();
        digest::file_sha256_sparse(&out, &NoProgress).unwrap()
    };
    // Times are in whole seconds on the disk; let one pass.
    let one = digest_of("a.img");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(one, digest_of("b.img"));
}

#[test]
fn too_small_and_impossible_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let out = dir.path().join("disk.img");
    std::fs::write(root.join("large"), vec![1u8; 100 << 20]).unwrap();
    let Err(ImageError::DoesNotFit { needed_bytes, given_bytes }) = make(&root, &out, 100 << 20) else {
        panic!("must not fit");
    };
    assert_eq!(given_bytes, 100 << 20);
    assert!(!out.exists());
    // What the error asks for is enough, and not much more than needed.
    make(&root, &out, needed_bytes).unwrap();
    check_disk(&out);
    assert!(needed_bytes < 130 << 20, "{needed_bytes}");
    for bad in [0, 1 << 20, u64::MAX] {
        assert!(matches!(make(&root, &out, bad), Err(ImageError::BadDiskSize { .. })));
    }
}

#[test]
fn many_small_files_get_inodes() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    for d in 0..30 {
        std::fs::create_dir(root.join(format!("{d}"))).unwrap();
        for f in 0..300 {
            std::fs::write(root.join(format!("{d}/{f}")), "").unwrap();
        }
    }
    let out = dir.path().join("disk.img");
    make(&root, &out, 64 << 20).unwrap(); // The default ratio would give 4096.
    check_disk(&out);
    assert!(debugfs(&out, "stat /29/299").contains("Type: regular"));
}

#[test]
fn a_sparse_file_of_the_source_stays_sparse() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let f = std::fs::File::create(root.join("lastlog")).unwrap();
    f.set_len(10 << 30).unwrap();
    let out = dir.path().join("disk.img");
    make(&root, &out, 64 << 20).unwrap();
    check_disk(&out);
    assert!(debugfs(&out, "stat /lastlog").contains("Size: 10737418240"));
}

#[test]
fn a_killed_build_does_not_stop_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let out = dir.path().join("disk.img");
    std::fs::write(dir.path().join("disk.img.part"), "half").unwrap();
    std::fs::write(&out, "an older disk").unwrap();
    make(&root, &out, 64 << 20).unwrap();
    check_disk(&out);
    assert_eq!(std::fs::metadata(&out).unwrap().blocks() * 512 / (16 << 20), 0);
}
