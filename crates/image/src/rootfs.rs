//! A root directory full of hostile names. Every look-up below it is made so that a symbolic link
//! is resolved as a process chrooted there would see it; nothing outside can be read or written.
//! Must never hand out a path that someone else resolves again.
//!
//! The caller keeps the directory private (mode 0700 above it): it holds set-uid programs and
//! device nodes of the image.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;

use crate::error::{ImageError, IoContext, Result, show};

/// Longest path the kernel takes, less the final NUL.
pub const MAX_PATH_BYTES: usize = 4095;
/// Longest name of one file.
pub const MAX_NAME_BYTES: usize = 255;
/// Deepest nesting: walking and removing need one descriptor per level.
pub const MAX_DEPTH: usize = 256;
/// Same as the kernel's own.
const MAX_LINKS: usize = 40;

const DIR_PATH: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// An open root directory.
#[derive(Debug)]
pub struct RootDir {
    fd: OwnedFd,
}

/// A directory below the root: its descriptor and its name without any link in it.
#[derive(Debug)]
pub(crate) struct Dir {
    pub fd: OwnedFd,
    pub canonical: Vec<u8>,
}

/// Splits a name from an archive into components. A leading `/` means the root, as in every tool
/// that unpacks layers; `..` is refused.
pub(crate) fn components(name: &[u8]) -> Result<Vec<&[u8]>> {
    let unsafe_path = |why| ImageError::UnsafePath { path: show(name), why };
    if name.len() > MAX_PATH_BYTES {
        return Err(unsafe_path("longer than 4095 bytes"));
    }
    if name.contains(&0) {
        return Err(unsafe_path("contains a NUL byte"));
    }
    let mut out = Vec::new();
    for part in name.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(unsafe_path("contains `..`")),
            _ if part.len() > MAX_NAME_BYTES => {
                return Err(unsafe_path("a component is longer than 255 bytes"));
            }
            _ => out.push(part),
        }
    }
    if out.len() > MAX_DEPTH {
        return Err(unsafe_path("more than 256 levels deep"));
    }
    Ok(out)
}

pub(crate) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(dir.len() + 1 + name.len());
    out.extend_from_slice(dir);
    if !dir.is_empty() {
        out.push(b'/');
    }
    out.extend_from_slice(name);
    out
}

impl RootDir {
    /// Opens an existing directory; a link as the last component is followed (it is the caller's).
    pub fn open(path: &Path) -> Result<Self> {
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .ctx(|| format!("open the directory {}", path.display()))?;
        Ok(Self { fd })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Opens a directory by a name that has no link in it.
    pub(crate) fn open_canonical(&self, canonical: &[u8]) -> rustix::io::Result<OwnedFd> {
        let name: &[u8] = if canonical.is_empty() { b"." } else { canonical };
        rustix::fs::openat2(
            &self.fd,
            name,
            DIR_PATH | OFlags::DIRECTORY,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
        )
    }

    /// Walks to a directory, links resolved inside the root. With `create`, what is missing is
    /// made (root, 0755) and a file in the way is replaced, as a layer on top of it would.
    /// `None`: not there (only without `create`).
    pub(crate) fn walk(&self, parts: &[&[u8]], create: bool) -> Result<Option<Dir>> {
        let mut pending: VecDeque<Vec<u8>> = parts.iter().map(|p| p.to_vec()).collect();
        let mut at: Vec<Vec<u8>> = Vec::new();
        let mut fd = self.open_canonical(b"").ctx(|| "open the root".into())?;
        let mut links = 0;
        while let Some(part) = pending.pop_front() {
            if part == b".." {
                at.pop();
                fd = self.reopen(&at)?;
                continue;
            }
            let Some(child) = step(&fd, &part, create)? else {
                return Ok(None);
            };
            let Some(target) = link_target(&child, &part)? else {
                at.push(part);
                fd = child;
                check_place(&at)?;
                continue;
            };
            links += 1;
            if links > MAX_LINKS {
                return Err(ImageError::UnsafePath { path: show(&parts.join(&b'/')), why: "too many symbolic links" });
            }
            if target.starts_with(b"/") {
                at.clear();
                fd = self.reopen(&at)?;
            }
            for piece in target.rsplit(|b| *b == b'/') {
                if !piece.is_empty() && piece != b"." {
                    pending.push_front(piece.to_vec());
                }
            }
        }
        Ok(Some(Dir { fd, canonical: at.join(&b'/') }))
    }

    fn reopen(&self, at: &[Vec<u8>]) -> Result<OwnedFd> {
        let name = at.join(&b'/');
        self.open_canonical(&name).ctx(|| format!("open `{}` in the image", show(&name)))
    }

    /// Reads a regular file, links resolved inside the root. `None`: there is no such regular
    /// file. More than `max` bytes is an error.
    pub fn read_file(&self, name: &str, max: u64) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(name)? else {
            return Ok(None);
        };
        let mut data = Vec::new();
        file.take(max + 1).read_to_end(&mut data).ctx(|| format!("read `{name}` in the image"))?;
        if data.len() as u64 > max {
            return Err(ImageError::LimitExceeded { what: "the size of a metadata file", limit: max });
        }
        Ok(Some(data))
    }

    /// Opens a regular file for reading. Never opens a device or a FIFO: that could block or act.
    pub fn open_file(&self, name: &str) -> Result<Option<File>> {
        let what = || format!("open `{}` in the image", show(name.as_bytes()));
        let found = rustix::fs::openat2(
            &self.fd,
            name,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        );
        let probe = match found {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            Err(e) => return Err(e).ctx(what),
        };
        let stat = rustix::fs::fstat(&probe).ctx(what)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        let fd = reopen_readable(&probe, OFlags::empty()).ctx(what)?;
        Ok(Some(File::from(fd)))
    }

    /// Writes a whole file with these permissions and owner, replacing what has the name. Parents
    /// are made. The last component is never followed.
    pub fn write_file(&self, name: &str, data: &[u8], mode: u32, owner: (u32, u32)) -> Result<()> {
        let what = || format!("write `{name}` into the root file system");
        let parts = components(name.as_bytes())?;
        let Some((base, parents)) = parts.split_last() else {
            return Err(ImageError::image("a file needs a name"));
        };
        let Some(dir) = self.walk(parents, true)? else {
            return Err(ImageError::image(what()));
        };
        remove_tree(&dir.fd, base).ctx(what)?;
        let fd = rustix::fs::openat(
            &dir.fd,
            *base,
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o600),
        )
        .ctx(what)?;
        let mut file = File::from(fd);
        file.write_all(data).ctx(what)?;
        set_owner_mode(&file, owner, mode).ctx(what)
    }

    /// Makes a directory (and its parents) with these permissions and owner.
    pub fn make_dir(&self, name: &str, mode: u32, owner: (u32, u32)) -> Result<()> {
        let what = || format!("make the directory `{name}` in the root file system");
        let parts = components(name.as_bytes())?;
        let Some(dir) = self.walk(&parts, true)? else {
            return Err(ImageError::image(what()));
        };
        let fd = reopen_readable(&dir.fd, OFlags::DIRECTORY).ctx(what)?;
        set_owner_mode(&fd, owner, mode).ctx(what)
    }

    /// Removes a file or a whole directory; not being there is fine.
    pub fn remove(&self, name: &str) -> Result<()> {
        let parts = components(name.as_bytes())?;
        let Some((base, parents)) = parts.split_last() else {
            return Ok(());
        };
        match self.walk(parents, false)? {
            Some(dir) => remove_tree(&dir.fd, base).ctx(|| format!("remove `{name}` in the image")),
            None => Ok(()),
        }
    }
}

/// One component further, never through a link. Returns the directory or the link itself.
fn step(fd: &OwnedFd, part: &[u8], create: bool) -> Result<Option<OwnedFd>> {
    let what = || format!("open `{}` in the image", show(part));
    for _ in 0..2 {
        match rustix::fs::openat(fd, part, DIR_PATH, Mode::empty()) {
            Ok(child) => {
                let stat = rustix::fs::fstat(&child).ctx(what)?;
                match FileType::from_raw_mode(stat.st_mode) {
                    FileType::Directory | FileType::Symlink => return Ok(Some(child)),
                    _ if !create => return Ok(None),
                    _ => rustix::fs::unlinkat(fd, part, AtFlags::empty()).ctx(what)?,
                }
            }
            Err(Errno::NOENT) if !create => return Ok(None),
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e).ctx(what),
        }
        rustix::fs::mkdirat(fd, part, Mode::from_raw_mode(0o755)).ctx(what)?;
        // The umask of the server must not show in an image.
        rustix::fs::chmodat(fd, part, Mode::from_raw_mode(0o755), AtFlags::empty()).ctx(what)?;
    }
    Err(ImageError::image(format!("`{}` cannot be made a directory", show(part))))
}

fn link_target(fd: &OwnedFd, part: &[u8]) -> Result<Option<Vec<u8>>> {
    let what = || format!("read the link `{}` in the image", show(part));
    let stat = rustix::fs::fstat(fd).ctx(what)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        return Ok(None);
    }
    let target = rustix::fs::readlinkat(fd, "", Vec::new()).ctx(what)?;
    Ok(Some(target.into_bytes()))
}

fn check_place(at: &[Vec<u8>]) -> Result<()> {
    let bytes: usize = at.iter().map(|p| p.len() + 1).sum();
    if at.len() > MAX_DEPTH || bytes > MAX_PATH_BYTES {
        return Err(ImageError::UnsafePath {
            path: show(&at.join(&b'/')),
            why: "too deep or too long once its links are resolved",
        });
    }
    Ok(())
}

/// Turns an `O_PATH` descriptor, whose type the caller has checked, into a readable one.
pub(crate) fn reopen_readable(fd: &OwnedFd, extra: OFlags) -> rustix::io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    rustix::fs::open(
        format!("/proc/self/fd/{}", fd.as_raw_fd()),
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | extra,
        Mode::empty(),
    )
}

/// Owner first: changing it drops the set-uid bits.
pub(crate) fn set_owner_mode(fd: impl AsFd, (uid, gid): (u32, u32), mode: u32) -> rustix::io::Result<()> {
    rustix::fs::fchown(&fd, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode & 0o7777))
}

/// Names in a directory, without `.` and `..`.
pub(crate) fn list(dir: impl AsFd) -> rustix::io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// Removes a file, a link (itself) or a directory with everything in it. Absent is fine. Depth is
/// bounded by [`MAX_DEPTH`], which holds for all that was made here.
pub(crate) fn remove_tree(parent: impl AsFd, name: &[u8]) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(e) => return Err(e),
    }
    let dir = rustix::fs::openat(
        &parent,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    for child in list(&dir)? {
        remove_tree(&dir, &child)?;
    }
    rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR)
}
