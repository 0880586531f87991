//! Subvolume operations as the kernel offers them, one ioctl each.
//!
//! Works on an open parent folder and a single name, never on a path with parts: what a caller names cannot lead elsewhere.
#![allow(unsafe_code, reason = "ioctls; each call is wrapped by a safe function of this module")]

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const MAGIC: u8 = 0x94;
const NAME_V1: usize = 4088;
const NAME_V2: usize = 4040;
/// `BTRFS_SUBVOL_RDONLY`, in the flags of a creation and of a subvolume.
const READ_ONLY: u64 = 1 << 1;
/// The inode number of the root folder of every subvolume.
const ROOT_INODE: u64 = 256;

#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; NAME_V1],
}

#[repr(C)]
struct VolArgsV2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; NAME_V2],
}

nix::ioctl_write_ptr!(snap_destroy, MAGIC, 15, VolArgs);
nix::ioctl_write_ptr!(snap_create_v2, MAGIC, 23, VolArgsV2);
nix::ioctl_write_ptr!(subvol_create_v2, MAGIC, 24, VolArgsV2);
nix::ioctl_read!(subvol_getflags, MAGIC, 25, u64);
nix::ioctl_write_ptr!(subvol_setflags, MAGIC, 26, u64);

fn fill<const N: usize>(name: &OsStr) -> io::Result<[u8; N]> {
    let bytes = name.as_bytes();
    let bad = bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') || bytes.contains(&0);
    if bad || bytes.len() >= N {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a single file name"));
    }
    let mut field = [0; N];
    field[..bytes.len()].copy_from_slice(bytes);
    Ok(field)
}

/// Makes an empty, writable subvolume `name` in `parent`.
pub fn create(parent: &File, name: &OsStr) -> io::Result<()> {
    let args = VolArgsV2 { fd: 0, transid: 0, flags: 0, unused: [0; 4], name: fill(name)? };
    // SAFETY: `args` has the layout of btrfs_ioctl_vol_args_v2 and outlives the call; the name ends with NUL.
    unsafe { subvol_create_v2(parent.as_raw_fd(), &args) }?;
    Ok(())
}

/// Makes `name` in `parent` a snapshot of the subvolume `source` is open on. Atomic: afterwards it is there or it is not.
pub fn snapshot(source: &File, parent: &File, name: &OsStr, read_only: bool) -> io::Result<()> {
    let flags = if read_only { READ_ONLY } else { 0 };
    let fd = i64::from(source.as_raw_fd());
    let args = VolArgsV2 { fd, transid: 0, flags, unused: [0; 4], name: fill(name)? };
    // SAFETY: as in `create`; `source` stays open during the call.
    unsafe { snap_create_v2(parent.as_raw_fd(), &args) }?;
    Ok(())
}

/// Deletes the subvolume `name` of `parent`, with all it holds. Its space comes back in the background.
pub fn destroy(parent: &File, name: &OsStr) -> io::Result<()> {
    let args = VolArgs { fd: 0, name: fill(name)? };
    // SAFETY: `args` has the layout of btrfs_ioctl_vol_args and outlives the call; the name ends with NUL.
    unsafe { snap_destroy(parent.as_raw_fd(), &args) }?;
    Ok(())
}

/// Whether the subvolume is read-only.
pub fn is_read_only(subvolume: &File) -> io::Result<bool> {
    let mut flags = 0;
    // SAFETY: the kernel writes one u64 into `flags`.
    unsafe { subvol_getflags(subvolume.as_raw_fd(), &mut flags) }?;
    Ok(flags & READ_ONLY != 0)
}

/// Makes the subvolume read-only or writable.
pub fn set_read_only(subvolume: &File, read_only: bool) -> io::Result<()> {
    let flags = if read_only { READ_ONLY } else { 0 };
    // SAFETY: the kernel reads one u64 from `flags`.
    unsafe { subvol_setflags(subvolume.as_raw_fd(), &flags) }?;
    Ok(())
}

/// Whether `path` lies on btrfs.
pub fn is_btrfs(path: &Path) -> io::Result<bool> {
    Ok(nix::sys::statfs::statfs(path)?.filesystem_type() == nix::sys::statfs::BTRFS_SUPER_MAGIC)
}

/// Whether `path` is the root folder of a subvolume. Symbolic links are not followed.
pub fn is_subvolume(path: &Path) -> io::Result<bool> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok(meta.is_dir() && meta.ino() == ROOT_INODE && is_btrfs(path)?)
}
