//! Sharing the bytes of files instead of copying them, as btrfs can.
#![allow(unsafe_code, reason = "one ioctl; wrapped by a safe function of this module")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::SeekFrom;

/// The layout of `struct file_clone_range`.
#[repr(C)]
struct CloneRange {
    fd: i64,
    from: u64,
    len: u64,
    to: u64,
}

nix::ioctl_write_ptr!(ficlonerange, 0x94, 13, CloneRange);

/// Makes all of `to` share the bytes of `from`.
pub fn clone_all(from: &File, to: &File) -> io::Result<()> {
    Ok(rustix::fs::ioctl_ficlone(to, from)?)
}

/// Makes `range` of `to` share the bytes of the same range of `from`.
pub fn clone_range(from: &File, to: &File, range: Range<u64>) -> io::Result<()> {
    let fd = i64::from(from.as_raw_fd());
    let args = CloneRange { fd, from: range.start, len: range.end - range.start, to: range.start };
    // SAFETY: `args` has the layout the kernel expects and outlives the call; it only reads it.
    unsafe { ficlonerange(to.as_raw_fd(), &args) }?;
    Ok(())
}

/// The parts of a file that hold data, in order; what lies between them are holes.
pub fn data_ranges(file: &File) -> impl Iterator<Item = io::Result<Range<u64>>> {
    let mut at = Some(0);
    std::iter::from_fn(move || {
        let found = next_data(file, at?);
        // The end, or an error: nothing comes after either.
        at = found.as_ref().ok().and_then(|range| range.as_ref().map(|range| range.end));
        found.transpose()
    })
}

fn next_data(file: &File, at: u64) -> io::Result<Option<Range<u64>>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok(Some(start..end))
}
