//! Makes the ext4 disk of a guest out of a root directory, without mounting anything: `mke2fs -d`.
//! The disk is sparse and complete: no background initialisation is left for the guest.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

use crate::digest::dig_holes;
use crate::error::{ImageError, IoContext, Result};
use crate::progress::{self, Progress};
use crate::tool::Tool;

/// Size of a disk when nothing else is asked for: 2 GiB, sparse.
pub const DEFAULT_DISK_BYTES: u64 = 2 << 30;
/// A smaller file system has no room for its own structures and a journal.
pub const MIN_DISK_BYTES: u64 = 64 << 20;
/// Largest disk that is built.
pub const MAX_DISK_BYTES: u64 = 1 << 40;
const BLOCK_BYTES: u64 = 4096;
const INODE_BYTES: u64 = 256;
const BYTES_PER_INODE: u64 = 16384;
/// Sizes are rounded up to this.
const ALIGN_BYTES: u64 = 1 << 20;
/// Files a guest can still make on a disk that was given an inode table for its content.
const SPARE_INODES: u64 = 8192;
const MAX_FILES: u64 = 4_000_000;
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,\
                        flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,\
                        metadata_csum";

/// How the file system is made. The ids come from the caller, so that equal input gives equal
/// options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskOptions {
    /// Bytes; rounded up to whole MiB.
    pub bytes: u64,
    pub uuid: Uuid,
    /// Seed of the directory hashes.
    pub hash_seed: Uuid,
    /// Seconds since 1970 that stand for "now" in the file system.
    pub timestamp: u64,
}

impl DiskOptions {
    pub fn new(bytes: u64, uuid: Uuid, hash_seed: Uuid) -> Self {
        Self { bytes, uuid, hash_seed, timestamp: 1_700_000_000 }
    }

    /// The size after rounding, or why there can be none.
    pub fn rounded_bytes(&self) -> Result<u64> {
        let bad = |why| ImageError::BadDiskSize { given_bytes: self.bytes, why };
        if self.bytes < MIN_DISK_BYTES {
            return Err(bad("the smallest disk has 64 MiB"));
        }
        if self.bytes > MAX_DISK_BYTES {
            return Err(bad("the largest disk has 1 TiB"));
        }
        Ok(self.bytes.next_multiple_of(ALIGN_BYTES))
    }
}

/// What a root directory holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Content {
    /// Blocks of files, directories and long links; holes not counted.
    pub bytes: u64,
    /// Files of every kind; hard links counted once.
    pub inodes: u64,
}

/// Adds up a directory. Does not follow links.
pub fn measure(root: &Path, progress: &dyn Progress) -> Result<Content> {
    let mut total = Content::default();
    let mut linked = HashSet::new();
    let mut dirs: Vec<PathBuf> = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        progress::check(progress)?;
        let what = || format!("read the directory {}", dir.display());
        let mut name_bytes = 0;
        for entry in std::fs::read_dir(&dir).ctx(what)? {
            let entry = entry.ctx(what)?;
            name_bytes += entry.file_name().len() as u64 + 12;
            let meta = entry.metadata().ctx(what)?;
            if meta.is_dir() {
                dirs.push(entry.path());
                continue;
            }
            if meta.nlink() > 1 && !linked.insert((meta.dev(), meta.ino())) {
                continue;
            }
            total.inodes += 1;
            if meta.is_file() {
                let used = meta.len().min(meta.blocks() * 512);
                total.bytes += used.next_multiple_of(BLOCK_BYTES);
            } else if meta.is_symlink() && meta.len() >= 60 {
                total.bytes += BLOCK_BYTES;
            }
        }
        total.inodes += 1;
        total.bytes += name_bytes.next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES);
        if total.inodes > MAX_FILES {
            return Err(ImageError::LimitExceeded { what: "the number of files", limit: MAX_FILES });
        }
    }
    Ok(total)
}

fn journal_bytes(disk: u64) -> u64 {
    match disk {
        0..0x1000_0000 => 4 << 20,
        0x1000_0000..0x4000_0000 => 16 << 20,
        _ => 32 << 20,
    }
}

fn inode_count(disk: u64, content: Content) -> u64 {
    (disk / BYTES_PER_INODE).max(content.inodes + SPARE_INODES)
}

/// Smallest disk, about, that takes the content.
fn needed(disk: u64, content: Content) -> u64 {
    let structures = inode_count(disk, content) * INODE_BYTES
        + journal_bytes(disk)
        + disk / 256 // Descriptors and bitmaps, and the room kept for growing.
        + (4 << 20);
    content.bytes + content.bytes / 128 + structures
}

/// Writes the ext4 file system with the content of `root` to `output`, which appears whole or not
/// at all. `output` must be on a file system that can hold sparse files.
pub fn make(root: &Path, output: &Path, options: &DiskOptions, progress: &dyn Progress) -> Result<()> {
    let bytes = options.rounded_bytes()?;
    // The program runs in another directory.
    let absolute = |p: &Path| std::path::absolute(p).ctx(|| format!("find {}", p.display()));
    let (root, output) = (&absolute(root)?, &absolute(output)?);
    let content = measure(root, progress)?;
    let needed_bytes = needed(bytes, content).next_multiple_of(ALIGN_BYTES);
    if needed_bytes > bytes {
        return Err(ImageError::DoesNotFit { needed_bytes, given_bytes: bytes });
    }
    progress.step(&format!("writing the disk: {} files, {} MiB", content.inodes, content.bytes >> 20));
    let part = PartFile::create(output, bytes)?;
    let result = mke2fs(root, &part.path, options, bytes, content).run(progress, &|_| ());
    match result {
        Ok(_) => {}
        // The estimate was too low: say the same as it would have.
        Err(ImageError::ToolFailed { stderr, .. }) if is_full(&stderr) => {
            return Err(ImageError::DoesNotFit {
                needed_bytes: needed_bytes.max(bytes + bytes / 4),
                given_bytes: bytes,
            });
        }
        Err(e) => return Err(e),
    }
    // The journal is written as zeros; each template would keep them for ever. Only a saving:
    // a file system that cannot do it makes no difference to the disk.
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&part.path);
    let _ = file.and_then(|f| dig_holes(&f, progress));
    progress::check(progress)?;
    part.keep(output)
}

fn is_full(stderr: &str) -> bool {
    let text = stderr.to_ascii_lowercase();
    text.contains("could not allocate block") || text.contains("could not allocate inode")
}

fn mke2fs(root: &Path, disk: &Path, options: &DiskOptions, bytes: u64, content: Content) -> Tool {
    let time = options.timestamp.to_string();
    Tool::new("/usr/sbin/mke2fs", "e2fsprogs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"])
        .arg("-I")
        .arg(INODE_BYTES.to_string())
        .arg("-N")
        .arg(inode_count(bytes, content).to_string())
        .arg("-J")
        .arg(format!("size={}", journal_bytes(bytes) >> 20))
        .arg("-O")
        .arg(FEATURES)
        .arg("-E")
        .arg(format!("lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0,hash_seed={}", options.hash_seed))
        .arg("-U")
        .arg(options.uuid.to_string())
        .arg("-d")
        .arg(root)
        .arg(disk)
        .arg((bytes / BLOCK_BYTES).to_string())
        // The host's own defaults must not show in a guest's disk.
        .env("MKE2FS_CONFIG", "/dev/null")
        .env("E2FSPROGS_FAKE_TIME", &time)
        .env("SOURCE_DATE_EPOCH", &time)
        .timeout(Duration::from_secs(1800))
}

/// The disk while it is not complete: removed unless kept.
struct PartFile {
    path: PathBuf,
    kept: bool,
}

impl PartFile {
    fn create(output: &Path, bytes: u64) -> Result<Self> {
        let mut name = output.as_os_str().to_owned();
        name.push(".part");
        let path = PathBuf::from(name);
        // What a killed build left behind.
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(e).ctx(|| format!("remove {}", path.display()));
            }
            _ => {}
        }
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)
            .ctx(|| format!("create {}", path.display()))?;
        let part = Self { path, kept: false };
        file.set_len(bytes).ctx(|| format!("size {}", part.path.display()))?;
        Ok(part)
    }

    fn keep(mut self, output: &Path) -> Result<()> {
        let what = || format!("put {} in its place", output.display());
        std::fs::File::open(&self.path).and_then(|f| f.sync_all()).ctx(what)?;
        std::fs::rename(&self.path, output).ctx(what)?;
        self.kept = true;
        if let Some(dir) = output.parent().filter(|d| !d.as_os_str().is_empty()) {
            std::fs::File::open(dir).and_then(|d| d.sync_all()).ctx(what)?;
        }
        Ok(())
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.kept {
            // Nothing more can be done about a failure; the next build removes it first.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
