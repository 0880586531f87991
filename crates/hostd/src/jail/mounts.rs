//! Detached mounts: made by the parent, put in place by the child in its own namespace. A path is looked up once, here; the
//! child handles descriptors only.
#![allow(unsafe_code, reason = "open_tree, mount_setattr and move_mount, which no library here offers")]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::libc;

/// Of one detached mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Programs and libraries: read-only, no devices, no set-uid.
    Root,
    /// The VMM's own files: no devices, no programs.
    Folder,
    /// A single file, or a folder of them, to be read: no devices, no programs.
    ReadOnly,
    /// Devices and nothing else.
    Devices,
    /// A system that is being put together: it has programs, and device nodes that cannot be opened.
    Work,
    /// A local source of a build.
    Source,
}

const OPEN_TREE_CLONE: libc::c_uint = 1;
const AT_EMPTY_PATH: libc::c_uint = libc::AT_EMPTY_PATH as libc::c_uint;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;

#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A detached clone of the one mount at `path`, which must not end in a symbolic link.
pub(crate) fn detached(path: &Path, kind: Kind) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    clone_tree(libc::AT_FDCWD, &path, libc::AT_SYMLINK_NOFOLLOW as libc::c_uint, kind)
}

/// A detached clone of the mount that a descriptor is open in, from that file or folder on.
pub(crate) fn detached_fd(fd: &OwnedFd, kind: Kind) -> io::Result<OwnedFd> {
    clone_tree(fd.as_raw_fd(), c"", AT_EMPTY_PATH, kind)
}

fn clone_tree(at: RawFd, path: &CStr, flags: libc::c_uint, kind: Kind) -> io::Result<OwnedFd> {
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint | flags;
    // SAFETY: the path ends with NUL and outlives the call.
    let fd = check(unsafe { libc::syscall(libc::SYS_open_tree, at, path.as_ptr(), flags) })?;
    // SAFETY: the kernel has just made this descriptor for us.
    let tree = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
    let (read_only, no_devices, no_programs) =
        (libc::MOUNT_ATTR_RDONLY, libc::MOUNT_ATTR_NODEV, libc::MOUNT_ATTR_NOEXEC);
    let no_suid = libc::MOUNT_ATTR_NOSUID;
    let (set, clear) = match kind {
        Kind::Root => (read_only | no_devices, no_programs),
        Kind::Folder => (no_devices | no_programs, 0),
        Kind::Work => (no_devices, no_programs),
        Kind::ReadOnly | Kind::Source => (read_only | no_devices | no_programs, 0),
        Kind::Devices => (read_only | no_programs, no_devices),
    };
    let attributes = MountAttr { set: set | no_suid, clear, propagation: libc::MS_PRIVATE, user_namespace: 0 };
    let size = size_of::<MountAttr>();
    // SAFETY: `attributes` has the layout of struct mount_attr and outlives the call; the path is empty.
    let set = unsafe {
        libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), AT_EMPTY_PATH, &attributes, size)
    };
    check(set)?;
    Ok(tree)
}

/// Puts a detached mount at `target`, relative to the folder `at`. Safe between fork and exec: one system call.
pub(crate) fn attach(tree: RawFd, at: RawFd, target: &CStr) -> io::Result<()> {
    // SAFETY: both paths end with NUL and outlive the call.
    let moved = unsafe {
        libc::syscall(libc::SYS_move_mount, tree, c"".as_ptr(), at, target.as_ptr(), MOVE_MOUNT_F_EMPTY_PATH)
    };
    check(moved).map(drop)
}
