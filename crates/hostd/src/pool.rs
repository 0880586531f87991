//! The pool: one btrfs file system whose subvolumes are the templates, sandboxes and checkpoints of a node.
//!
//! A half-made thing is never seen under its final name: what takes more than one step is made in `tmp/` and then
//! published by one snapshot or one rename. After a crash `tmp/` holds the garbage, and opening the pool sweeps it.
//! The pool never deletes anything that is not a direct child of one of its areas.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::libc;
use nix::mount::{MntFlags, umount2};
use serde::{Deserialize, Serialize};

use crate::btrfs;

const MKFS: &str = "/usr/sbin/mkfs.btrfs";
const MKFS_MERGED: &str = "/usr/bin/mkfs.btrfs";
const MOUNT: &str = "/usr/bin/mount";
/// The least size for which a pool makes sense; mkfs itself refuses below about 110 MB.
pub const MIN_POOL_BYTES: u64 = 256 << 20;
/// The longest name of a subvolume, in bytes.
pub const MAX_NAME_BYTES: usize = 128;
const MKFS_LABEL: &str = "space-pool";

/// Where the bytes of a pool are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolSource {
    /// A sparse file, made when it is missing, used through a loop device.
    LoopFile { image: PathBuf, bytes: u64 },
    /// A block device. Formatted only when it is blank; anything else on it is refused.
    Device(PathBuf),
    /// A folder on a btrfs that somebody else mounts.
    Existing,
}

/// One of the fixed folders of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Area {
    Templates,
    Sandboxes,
    Checkpoints,
    /// Unfinished work, swept when the pool is opened.
    Tmp,
}

impl Area {
    pub(crate) const ALL: [Area; 4] = [Area::Templates, Area::Sandboxes, Area::Checkpoints, Area::Tmp];

    fn folder(self) -> &'static str {
        match self {
            Area::Templates => "templates",
            Area::Sandboxes => "sandboxes",
            Area::Checkpoints => "checkpoints",
            Area::Tmp => "tmp",
        }
    }
}

/// What the pool can say when something does not work.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("{0:?} cannot name a subvolume: use 1 to 128 letters, digits, '.', '_' or '-', not starting with '.'")]
    BadName(String),
    #[error("the pool has no {0}")]
    NotFound(PathBuf),
    #[error("{0} is already there")]
    AlreadyExists(PathBuf),
    #[error("{0} is not a btrfs subvolume; the pool does not touch it")]
    NotASubvolume(PathBuf),
    #[error(
        "{0} is not on a btrfs file system: name a folder on btrfs, a blank block device, or let a pool file be made"
    )]
    NotBtrfs(PathBuf),
    #[error("{0} holds something already: wipe it yourself (wipefs) if it may be used for the pool")]
    NotBlank(PathBuf),
    #[error("a pool of {asked} bytes is too small: give it at least {least} bytes")]
    TooSmall { asked: u64, least: u64 },
    #[error("the pool is full ({0}): delete sandboxes or templates, or make the pool larger")]
    Full(PathBuf),
    #[error("the program {program} is missing: install the package {package}")]
    MissingProgram { program: &'static str, package: &'static str },
    #[error("{program} failed: {message}")]
    Program { program: &'static str, message: String },
    #[error("cannot {action} {path}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// Bytes of the pool's file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub total: u64,
    pub free: u64,
}

/// An open pool. Cheap to clone; dropping it leaves the pool mounted.
#[derive(Clone, Debug)]
pub struct Pool {
    root: PathBuf,
    source: PoolSource,
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PoolError {
    let path = path.to_owned();
    move |source| match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => PoolError::Full(path),
        Some(libc::ENOENT) => PoolError::NotFound(path),
        Some(libc::EEXIST | libc::ENOTEMPTY) => PoolError::AlreadyExists(path),
        _ => PoolError::Io { action, path, source },
    }
}

/// One plain name: it leads nowhere but to a direct child of the folder it is looked for in.
pub fn is_name(name: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(good)
}

fn check_name(name: &str) -> Result<(), PoolError> {
    if is_name(name) { Ok(()) } else { Err(PoolError::BadName(name.chars().take(2 * MAX_NAME_BYTES).collect())) }
}

fn open_dir(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC).open(path)
}

fn run(program: &'static str, package: &'static str, args: &[&OsStr]) -> Result<(), PoolError> {
    if !Path::new(program).exists() {
        return Err(PoolError::MissingProgram { program, package });
    }
    let output = Command::new(program)
        .args(args)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(io_error("run", Path::new(program)))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let message = text.lines().filter(|line| !line.trim().is_empty()).take(4).collect::<Vec<_>>().join("; ");
    Err(PoolError::Program { program, message })
}

impl Pool {
    /// Makes the pool if it is missing, mounts it at `root` if it is not mounted, makes its folders and sweeps `tmp/`.
    ///
    /// Idempotent, and safe to repeat after a crash at any point. Only one process at a time may hold a pool open:
    /// the sweep would take away another one's unfinished work.
    pub fn open(root: &Path, source: PoolSource) -> Result<Pool, PoolError> {
        let pool = Pool { root: root.to_owned(), source };
        pool.ensure_mounted()?;
        for area in Area::ALL {
            let path = pool.root.join(area.folder());
            DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(io_error("create", &path))?;
        }
        for name in pool.list_everything(Area::Tmp)? {
            let path = pool.root.join(Area::Tmp.folder()).join(&name);
            if let Err(error) = pool.sweep(&path) {
                tracing::warn!(path = %path.display(), %error, "cannot sweep unfinished work out of the pool");
            }
        }
        Ok(pool)
    }

    /// A pool that somebody else has opened, as it is: nothing is mounted, made or swept.
    pub fn attach(root: &Path) -> Pool {
        Pool { root: root.to_owned(), source: PoolSource::Existing }
    }

    pub(crate) fn area(&self, area: Area) -> PathBuf {
        self.root.join(area.folder())
    }

    /// The path of a subvolume that is there.
    pub(crate) fn subvolume(&self, area: Area, name: &str) -> Result<PathBuf, PoolError> {
        let path = self.path(area, name)?;
        self.require_subvolume(&path)?;
        Ok(path)
    }

    /// Which subvolume has this path.
    pub(crate) fn locate(&self, path: &Path) -> Result<(Area, String), PoolError> {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        check_name(name)?;
        let area = Area::ALL.into_iter().find(|area| path.parent() == Some(&self.area(*area)));
        area.map(|area| (area, name.to_owned())).ok_or_else(|| PoolError::NotFound(path.to_owned()))
    }

    /// The folder the pool is mounted at.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether the pool's file system is mounted at its folder.
    pub fn is_mounted(&self) -> Result<bool, PoolError> {
        if self.source == PoolSource::Existing {
            return btrfs::is_btrfs(&self.root).map_err(io_error("inspect", &self.root));
        }
        Ok(self.root.is_dir() && btrfs::is_subvolume(&self.root).map_err(io_error("inspect", &self.root))?)
    }

    /// Formats (when blank) and mounts (when not mounted) the pool.
    pub fn ensure_mounted(&self) -> Result<(), PoolError> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.root).map_err(io_error("create", &self.root))?;
        if self.is_mounted()? {
            return Ok(());
        }
        let (what, options) = match &self.source {
            PoolSource::Existing => return Err(PoolError::NotBtrfs(self.root.clone())),
            PoolSource::LoopFile { image, bytes } => {
                ensure_image(image, *bytes)?;
                (image, "loop,noatime,nosuid,nodev,noexec")
            }
            PoolSource::Device(device) => {
                ensure_device(device)?;
                (device, "noatime,nosuid,nodev,noexec")
            }
        };
        let args = ["-t", "btrfs", "-o", options].map(OsStr::new);
        let target = [what.as_os_str(), self.root.as_os_str()];
        run(MOUNT, "mount", &[&args[..], &target[..]].concat())
    }

    /// Unmounts the pool; a loop device made for it goes with it. An existing btrfs stays as it is.
    pub fn unmount(&self) -> Result<(), PoolError> {
        if self.source == PoolSource::Existing || !self.is_mounted()? {
            return Ok(());
        }
        umount2(&self.root, MntFlags::empty()).map_err(|errno| io_error("unmount", &self.root)(errno.into()))
    }

    /// Total and free bytes.
    pub fn usage(&self) -> Result<Usage, PoolError> {
        let stat =
            nix::sys::statvfs::statvfs(&self.root).map_err(|errno| io_error("inspect", &self.root)(errno.into()))?;
        let unit = stat.fragment_size();
        Ok(Usage { total: stat.blocks() * unit, free: stat.blocks_available() * unit })
    }

    /// The path of a subvolume, whether it exists or not.
    pub fn path(&self, area: Area, name: &str) -> Result<PathBuf, PoolError> {
        check_name(name)?;
        Ok(self.root.join(area.folder()).join(name))
    }

    fn parent(&self, area: Area) -> Result<File, PoolError> {
        let path = self.root.join(area.folder());
        open_dir(&path).map_err(io_error("open", &path))
    }

    /// Makes an empty, writable subvolume and returns its path.
    pub fn create(&self, area: Area, name: &str) -> Result<PathBuf, PoolError> {
        let path = self.path(area, name)?;
        btrfs::create(&self.parent(area)?, OsStr::new(name)).map_err(io_error("create", &path))?;
        Ok(path)
    }

    /// Makes `to` a snapshot of `from` in one atomic step and returns its path.
    pub fn snapshot(&self, from: (Area, &str), to: (Area, &str), read_only: bool) -> Result<PathBuf, PoolError> {
        let (source, target) = (self.path(from.0, from.1)?, self.path(to.0, to.1)?);
        self.require_subvolume(&source)?;
        if target.symlink_metadata().is_ok() {
            return Err(PoolError::AlreadyExists(target));
        }
        let dir = open_dir(&source).map_err(io_error("open", &source))?;
        btrfs::snapshot(&dir, &self.parent(to.0)?, OsStr::new(to.1), read_only)
            .map_err(io_error("snapshot", &target))?;
        Ok(target)
    }

    /// Moves a writable subvolume to its final place in one atomic step; never replaces anything.
    ///
    /// The kernel refuses to move a read-only one: publish that as a read-only [`Pool::snapshot`].
    pub fn rename(&self, from: (Area, &str), to: (Area, &str)) -> Result<PathBuf, PoolError> {
        let (source, target) = (self.path(from.0, from.1)?, self.path(to.0, to.1)?);
        self.require_subvolume(&source)?;
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(rustix::fs::CWD, &source, rustix::fs::CWD, &target, flags)
            .map_err(|errno| io_error("rename", &target)(errno.into()))?;
        Ok(target)
    }

    /// Makes a subvolume read-only or writable.
    pub fn set_read_only(&self, area: Area, name: &str, read_only: bool) -> Result<(), PoolError> {
        let path = self.path(area, name)?;
        self.require_subvolume(&path)?;
        let dir = open_dir(&path).map_err(io_error("open", &path))?;
        btrfs::set_read_only(&dir, read_only).map_err(io_error("change", &path))
    }

    /// Deletes a subvolume with all it holds. It is no error when it is gone already.
    pub fn delete(&self, area: Area, name: &str) -> Result<(), PoolError> {
        let path = self.path(area, name)?;
        match self.require_subvolume(&path) {
            Err(PoolError::NotFound(_)) => return Ok(()),
            other => other?,
        }
        match btrfs::destroy(&self.parent(area)?, OsStr::new(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(io_error("delete", &path)),
        }
    }

    /// The names of the subvolumes of an area, sorted. Anything else that lies there is left out.
    pub fn list(&self, area: Area) -> Result<Vec<String>, PoolError> {
        let mut names = self.list_everything(area)?;
        names.retain(|name| self.path(area, name).is_ok_and(|path| btrfs::is_subvolume(&path).unwrap_or(false)));
        Ok(names)
    }

    fn list_everything(&self, area: Area) -> Result<Vec<String>, PoolError> {
        let path = self.root.join(area.folder());
        let entries = std::fs::read_dir(&path).map_err(io_error("list", &path))?;
        let mut names: Vec<String> =
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        Ok(names)
    }

    fn require_subvolume(&self, path: &Path) -> Result<(), PoolError> {
        match btrfs::is_subvolume(path) {
            Ok(true) => Ok(()),
            Ok(false) => Err(PoolError::NotASubvolume(path.to_owned())),
            Err(error) => Err(io_error("inspect", path)(error)),
        }
    }

    /// Removes one entry of `tmp/`, whatever it is.
    fn sweep(&self, path: &Path) -> Result<(), PoolError> {
        let name = path.file_name().unwrap_or_default();
        let removed = if btrfs::is_subvolume(path).map_err(io_error("inspect", path))? {
            btrfs::destroy(&self.parent(Area::Tmp)?, name)
        } else if path.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
            std::fs::remove_dir_all(path)
        } else {
            std::fs::remove_file(path)
        };
        removed.map_err(io_error("remove", path))
    }
}

fn mkfs(target: &Path) -> Result<(), PoolError> {
    let program = if Path::new(MKFS).exists() { MKFS } else { MKFS_MERGED };
    run(
        program,
        "btrfs-progs",
        &["-q", "-L", MKFS_LABEL].map(OsStr::new).into_iter().chain([target.as_os_str()]).collect::<Vec<_>>(),
    )
}

/// Makes the pool file under a passing name and renames it into place when it is a whole file system.
fn ensure_image(image: &Path, bytes: u64) -> Result<(), PoolError> {
    if image.exists() {
        return Ok(());
    }
    if bytes < MIN_POOL_BYTES {
        return Err(PoolError::TooSmall { asked: bytes, least: MIN_POOL_BYTES });
    }
    let parent = image.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(io_error("create", parent))?;
    let unfinished = image.with_extension("img.new");
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&unfinished)
        .map_err(io_error("create", &unfinished))?;
    file.set_len(bytes).map_err(io_error("size", &unfinished))?;
    mkfs(&unfinished)?;
    file.sync_all().map_err(io_error("write", &unfinished))?;
    std::fs::rename(&unfinished, image).map_err(io_error("rename", &unfinished))?;
    open_dir(parent).and_then(|dir| dir.sync_all()).map_err(io_error("write", parent))
}

/// Formats a block device that holds nothing at all; mkfs itself refuses one that holds a known file system.
fn ensure_device(device: &Path) -> Result<(), PoolError> {
    let meta = std::fs::metadata(device).map_err(io_error("inspect", device))?;
    if !meta.file_type().is_block_device() {
        return Err(PoolError::Io {
            action: "use",
            path: device.to_owned(),
            source: io::Error::other("not a block device"),
        });
    }
    if has_btrfs_label(device)? {
        return Ok(());
    }
    mkfs(device).map_err(|error| match error {
        PoolError::Program { message, .. } if message.contains("force") || message.contains("exist") => {
            PoolError::NotBlank(device.to_owned())
        }
        other => other,
    })
}

/// Whether the device holds a btrfs made for a pool. One with another label is somebody else's.
fn has_btrfs_label(device: &Path) -> Result<bool, PoolError> {
    use std::os::unix::fs::FileExt;
    const SUPER: u64 = 0x1_0000;
    let file = File::open(device).map_err(io_error("open", device))?;
    let mut block = [0; 0x400];
    match file.read_exact_at(&mut block, SUPER) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        other => other.map_err(io_error("read", device))?,
    }
    let label = &block[0x12b..0x12b + MKFS_LABEL.len() + 1];
    match (&block[0x40..0x48] == b"_BHRfS_M", label.strip_prefix(MKFS_LABEL.as_bytes()) == Some(b"\0")) {
        (true, true) => Ok(true),
        (true, false) => Err(PoolError::NotBlank(device.to_owned())),
        (false, _) => Ok(false),
    }
}
