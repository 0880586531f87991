//! The root folder of a jail: a copy of the program and of what it needs, made once and shared, read-only, by all VMMs of
//! its kind.
//!
//! Copies, not bind mounts of the host's folders: a jail then holds some fifty files instead of all of `/usr/lib`, a
//! namespace needs three mounts instead of fifty, and an upgrade of the host's packages cannot change the libraries under
//! a VMM that is about to start. The name of the folder holds a fingerprint of the sources, so that a changed program gets
//! a new folder; one that is in use is never changed.

use std::fs::{self, File, Permissions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde::{Deserialize, Serialize};

use super::{JailError, elf};

/// Raise it with any change of what a root holds.
const FORMAT: u32 = 1;

/// What a kind of jail holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contents {
    /// Absolute. Found in the jail under the same path.
    pub program: PathBuf,
    /// More files, under the same paths. Those that do not exist are left out: they differ between distributions.
    pub files: Vec<PathBuf>,
    /// Give it `/dev/kvm`.
    pub kvm: bool,
}

/// A root folder that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JailRoot {
    path: PathBuf,
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JailError + use<> {
    JailError::file(action, path)
}

/// All files of the jail, sorted.
fn closure(contents: &Contents) -> Result<Vec<PathBuf>, JailError> {
    let program = &contents.program;
    let mut files = vec![program.clone()];
    files.extend(elf::needs(program, program)?);
    for file in contents.files.iter().filter(|file| file.is_file()) {
        files.push(file.clone());
        if file.extension().is_some_and(|extension| extension == "so") {
            files.extend(elf::needs(file, program)?);
        }
    }
    files.sort();
    files.dedup();
    Ok(files)
}

fn fingerprint(contents: &Contents, files: &[PathBuf]) -> Result<u64, JailError> {
    let mut hasher = DefaultHasher::new();
    (FORMAT, contents.kvm).hash(&mut hasher);
    for file in files {
        let meta = fs::metadata(file).map_err(failed("inspect", file))?;
        (file, meta.dev(), meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// Makes `path`, and what is missing above it, open to all whatever the mask of this process is.
pub(crate) fn make_folder(path: &Path) -> Result<(), JailError> {
    if path.is_dir() {
        return Ok(());
    }
    path.parent().map_or(Ok(()), make_folder)?;
    fs::create_dir(path).map_err(failed("create", path))?;
    fs::set_permissions(path, Permissions::from_mode(0o755)).map_err(failed("open up", path))
}

pub(crate) fn make_device(path: &Path, (major, minor): (u64, u64)) -> Result<(), JailError> {
    // Each VMM has a user of its own, so the node is open to all; who reaches it is what the jail decides.
    let mode = Mode::from_bits_truncate(0o666);
    mknod(path, SFlag::S_IFCHR, mode, makedev(major, minor))
        .map_err(|errno| failed("make the device", path)(errno.into()))?;
    fs::set_permissions(path, Permissions::from_mode(0o666)).map_err(failed("open up", path))
}

impl JailRoot {
    /// Makes the root `name` in the folder `parent` unless it is there. The caller is the only one who does so.
    pub fn prepare(parent: &Path, name: &str, contents: &Contents) -> Result<JailRoot, JailError> {
        make_folder(parent)?;
        // Nobody passes from outside: there may be a device in it that only a VMM in its jail is to open.
        fs::set_permissions(parent, Permissions::from_mode(0o700)).map_err(failed("close up", parent))?;
        let files = closure(contents)?;
        let path = parent.join(format!("{name}-{:016x}", fingerprint(contents, &files)?));
        if path.is_dir() {
            return Ok(JailRoot { path });
        }
        let new = path.with_extension("new");
        match fs::remove_dir_all(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("remove", &new)(error)),
            _ => {}
        }
        // Others must reach it under their own user, and may see what is in it: it is all public.
        make_folder(&new)?;
        fill(&new, contents, &files)?;
        let folder = File::open(&new).map_err(failed("open", &new))?;
        rustix::fs::syncfs(&folder).map_err(|errno| failed("write", &new)(errno.into()))?;
        fs::rename(&new, &path).map_err(failed("put in place", &path))?;
        Ok(JailRoot { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn fill(new: &Path, contents: &Contents, files: &[PathBuf]) -> Result<(), JailError> {
    for folder in ["vm", "dev", "boot"] {
        make_folder(&new.join(folder))?;
    }
    for place in [super::KERNEL, super::INITRAMFS] {
        let path = new.join(place.trim_start_matches('/'));
        File::create(&path).map_err(failed("create", &path))?;
    }
    for file in files {
        let inside = new.join(file.strip_prefix("/").unwrap_or(file));
        make_folder(inside.parent().unwrap_or(new))?;
        fs::copy(file, &inside).map_err(failed("copy", file))?;
        // A program that its user may run and not read cannot be traced by that user, and dumps no core.
        let mode = if *file == contents.program { 0o511 } else { 0o555 };
        fs::set_permissions(&inside, Permissions::from_mode(mode)).map_err(failed("open up", &inside))?;
    }
    make_device(&new.join("dev/null"), (1, 3))?;
    make_device(&new.join("dev/urandom"), (1, 9))?;
    if contents.kvm {
        let meta = fs::metadata("/dev/kvm").map_err(failed("inspect", Path::new("/dev/kvm")))?;
        let (major, minor) = (nix::sys::stat::major(meta.rdev()), nix::sys::stat::minor(meta.rdev()));
        make_device(&new.join("dev/kvm"), (major, minor))?;
    }
    Ok(())
}
