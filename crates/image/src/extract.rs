//! Applies tar streams to a root directory: one plain archive, or the layers of an image in order
//! with their whiteouts. Must never write outside the root and never exceed [`Limits`].
//!
//! Whiteouts act on lower layers only, in whatever order a layer lists them: what the layer itself
//! has written is remembered and kept.

use std::collections::HashSet;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags, fsetxattr, lsetxattr};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::digest::is_zero;
use crate::error::{ImageError, IoContext, Result, show};
use crate::progress::{self, Progress};
use crate::rootfs::{self, RootDir};
use crate::tarball::{Entry, Kind, TarReader};

const WHITEOUT: &[u8] = b".wh.";
const WHITEOUT_META: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const COPY_BYTES: usize = 64 << 10;
/// A file may claim to be this large; its holes cost nothing.
const MAX_FILE_BYTES: u64 = 1 << 40;

/// Bounds of one image, all its layers together.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Entries of all layers.
    pub entries: u64,
    /// Bytes of file content written, zeros not counted.
    pub data_bytes: u64,
    /// Bytes that come out of the decompressors, headers and zeros included.
    pub stream_bytes: u64,
    /// Bytes of all names together.
    pub name_bytes: u64,
}

impl Limits {
    /// What a disk of `disk_bytes` can reasonably come from: layers may overwrite each other once.
    pub fn for_disk(disk_bytes: u64) -> Self {
        Self {
            entries: 2_000_000,
            data_bytes: disk_bytes.saturating_mul(2),
            stream_bytes: disk_bytes.saturating_mul(2).saturating_add(8 << 30),
            name_bytes: 512 << 20,
        }
    }
}

/// Applies archives to one root, counting against one set of limits.
pub struct Extractor<'a> {
    root: RootDir,
    limits: Limits,
    entries: u64,
    data_bytes: u64,
    stream_bytes: u64,
    name_bytes: u64,
    progress: &'a dyn Progress,
}

/// State of the layer being applied.
#[derive(Default)]
struct Layer {
    whiteouts: bool,
    /// Hashes of the canonical names this layer wrote, and of all their parents.
    written: HashSet<[u8; 16]>,
    /// Set at the end: writing into a directory changes its time.
    dir_times: Vec<(Vec<u8>, (i64, u32))>,
    last_parent: Option<(Vec<u8>, Place)>,
}

#[derive(Clone)]
struct Place {
    fd: Rc<OwnedFd>,
    canonical: Rc<[u8]>,
}

impl<'a> Extractor<'a> {
    pub fn new(root: RootDir, limits: Limits, progress: &'a dyn Progress) -> Self {
        Self { root, limits, entries: 0, data_bytes: 0, stream_bytes: 0, name_bytes: 0, progress }
    }

    /// The root, for reading what the image has in it.
    pub fn root(&self) -> &RootDir {
        &self.root
    }

    /// Applies one uncompressed tar stream and reads it to its end. With `whiteouts` the names of
    /// the OCI layer format are obeyed, otherwise they are plain files.
    pub fn apply(&mut self, stream: impl Read, whiteouts: bool) -> Result<()> {
        let mut layer = Layer { whiteouts, ..Layer::default() };
        let left = self.limits.stream_bytes - self.stream_bytes;
        let counted = Counted { inner: stream, left };
        let mut tar = TarReader::new(counted);
        while let Some(entry) = tar.next_entry()? {
            progress::check(self.progress)?;
            self.count(&entry)?;
            self.entry(&mut tar, &entry, &mut layer)?;
        }
        let mut rest = tar.into_inner();
        std::io::copy(&mut rest, &mut std::io::sink()).ctx(|| "read the archive".into())?;
        self.stream_bytes = self.limits.stream_bytes - rest.left;
        self.set_dir_times(&layer)
    }

    fn count(&mut self, entry: &Entry) -> Result<()> {
        let over = |what, limit| Err(ImageError::LimitExceeded { what, limit });
        self.entries += 1;
        self.name_bytes += (entry.path.len() + entry.link.len()) as u64;
        if self.entries > self.limits.entries {
            return over("the number of files", self.limits.entries);
        }
        if self.name_bytes > self.limits.name_bytes {
            return over("the length of all names", self.limits.name_bytes);
        }
        if entry.size > MAX_FILE_BYTES {
            return over("the size of one file", MAX_FILE_BYTES);
        }
        Ok(())
    }

    fn entry<R: Read>(&mut self, tar: &mut TarReader<R>, entry: &Entry, layer: &mut Layer) -> Result<()> {
        let parts = rootfs::components(&entry.path)?;
        let Some((base, parents)) = parts.split_last() else {
            return self.root_entry(entry, layer);
        };
        if layer.whiteouts && base.starts_with(WHITEOUT) {
            return self.whiteout(base, parents, layer);
        }
        let place = self.parent(parents, layer)?;
        layer.mark(&rootfs::join(&place.canonical, base));
        let what = || format!("write `{}` of the image", show(&entry.path));
        if entry.kind == Kind::Dir {
            return self.dir(entry, &place, base, layer);
        }
        self.clear(&place, base, layer)?;
        match entry.kind {
            Kind::File => return self.file(tar, entry, &place, base),
            Kind::HardLink => return self.hard_link(entry, &place, base),
            Kind::Symlink => {
                if entry.link.is_empty() || entry.link.contains(&0) {
                    return Err(ImageError::UnsafePath {
                        path: show(&entry.path),
                        why: "a symbolic link without a usable target",
                    });
                }
                rustix::fs::symlinkat(&entry.link[..], &place.fd, *base).ctx(what)?;
            }
            Kind::Char => make_node(&place.fd, base, FileType::CharacterDevice, entry).ctx(what)?,
            Kind::Block => make_node(&place.fd, base, FileType::BlockDevice, entry).ctx(what)?,
            Kind::Fifo => make_node(&place.fd, base, FileType::Fifo, entry).ctx(what)?,
            Kind::Dir => {}
        }
        unopened_metadata(&place.fd, base, entry)
    }

    /// The root itself: its owner, mode, attributes and time.
    fn root_entry(&mut self, entry: &Entry, layer: &mut Layer) -> Result<()> {
        if entry.kind == Kind::Dir {
            let fd = self.root.fd();
            metadata(fd, entry)?;
            layer.dir_times.push((Vec::new(), entry.mtime));
        }
        Ok(())
    }

    fn parent(&self, parents: &[&[u8]], layer: &mut Layer) -> Result<Place> {
        let key = parents.join(&b'/');
        if let Some((last, place)) = &layer.last_parent
            && *last == key
        {
            return Ok(place.clone());
        }
        let dir = self.root.walk(parents, true)?.ok_or_else(|| ImageError::image("a directory vanished"))?;
        let place = Place { fd: Rc::new(dir.fd), canonical: dir.canonical.into() };
        layer.last_parent = Some((key, place.clone()));
        Ok(place)
    }

    /// Removes what has the name. Descriptors of directories may be stale after that.
    fn clear(&self, place: &Place, base: &[u8], layer: &mut Layer) -> Result<()> {
        let what = || format!("replace `{}` of the image", show(base));
        match rustix::fs::unlinkat(&place.fd, base, AtFlags::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            Ok(()) => {}
            Err(Errno::ISDIR | Errno::PERM) => {
                rootfs::remove_tree(&place.fd, base).ctx(what)?;
            }
            Err(e) => return Err(e).ctx(what),
        }
        layer.last_parent = None;
        Ok(())
    }

    fn dir(&self, entry: &Entry, place: &Place, base: &[u8], layer: &mut Layer) -> Result<()> {
        let what = || format!("make the directory `{}` of the image", show(&entry.path));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&place.fd, base, flags, Mode::empty());
        let fd = match open() {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                self.clear(place, base, layer)?;
                rustix::fs::mkdirat(&place.fd, base, Mode::from_raw_mode(0o700)).ctx(what)?;
                open().ctx(what)?
            }
            Err(e) => return Err(e).ctx(what),
        };
        metadata(&fd, entry)?;
        layer.dir_times.push((rootfs::join(&place.canonical, base), entry.mtime));
        Ok(())
    }

    fn file<R: Read>(&mut self, tar: &mut TarReader<R>, entry: &Entry, place: &Place, base: &[u8]) -> Result<()> {
        let what = || format!("write `{}` of the image", show(&entry.path));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&place.fd, base, flags, Mode::from_raw_mode(0o600)).ctx(what)?;
        let mut file = std::fs::File::from(fd);
        let mut buf = vec![0u8; COPY_BYTES];
        for (offset, len) in &entry.ranges {
            file.seek(SeekFrom::Start(*offset)).ctx(what)?;
            let mut left = *len;
            while left > 0 {
                let want = COPY_BYTES.min(usize::try_from(left).unwrap_or(COPY_BYTES));
                let n = tar.read(&mut buf[..want])?;
                if n == 0 {
                    return Err(ImageError::archive("a file is shorter than it says"));
                }
                left -= n as u64;
                self.write_piece(&mut file, &buf[..n]).ctx(what)?;
                if self.data_bytes > self.limits.data_bytes {
                    return Err(ImageError::LimitExceeded {
                        what: "the content of all files",
                        limit: self.limits.data_bytes,
                    });
                }
                progress::check(self.progress)?;
            }
        }
        file.set_len(entry.size).ctx(what)?;
        metadata(&file, entry)?;
        rustix::fs::futimens(&file, &times(entry.mtime)).ctx(what)
    }

    /// Zeros become holes: images are full of them and the disk is sparse.
    fn write_piece(&mut self, file: &mut std::fs::File, data: &[u8]) -> std::io::Result<()> {
        if data.len() >= 4096 && is_zero(data) {
            let len = i64::try_from(data.len()).unwrap_or(0);
            return file.seek(SeekFrom::Current(len)).map(|_| ());
        }
        self.data_bytes += data.len() as u64;
        file.write_all(data)
    }

    fn hard_link(&self, entry: &Entry, place: &Place, base: &[u8]) -> Result<()> {
        let refuse = |why| ImageError::UnsafePath { path: show(&entry.link), why };
        let parts = rootfs::components(&entry.link)?;
        let Some((target, parents)) = parts.split_last() else {
            return Err(refuse("a hard link to the root directory"));
        };
        let dir = self.root.walk(parents, false)?.ok_or_else(|| refuse("the target of a hard link does not exist"))?;
        match rustix::fs::linkat(&dir.fd, *target, &place.fd, base, AtFlags::empty()) {
            Ok(()) => Ok(()),
            Err(Errno::NOENT) => Err(refuse("the target of a hard link does not exist")),
            Err(Errno::PERM) => Err(refuse("a hard link to a directory")),
            Err(e) => Err(e).ctx(|| format!("link `{}` of the image", show(&entry.path))),
        }
    }

    fn whiteout(&self, base: &[u8], parents: &[&[u8]], layer: &mut Layer) -> Result<()> {
        if base != OPAQUE && base.starts_with(WHITEOUT_META) {
            return Ok(()); // Bookkeeping of a union file system, no content.
        }
        let name = &base[WHITEOUT.len()..];
        if matches!(name, b"" | b"." | b"..") {
            return Err(ImageError::UnsafePath { path: show(base), why: "a whiteout of no file" });
        }
        let Some(dir) = self.root.walk(parents, false)? else {
            return Ok(());
        };
        layer.last_parent = None;
        if base == OPAQUE {
            return purge_children(&dir.fd, &dir.canonical, layer);
        }
        purge(&dir.fd, &dir.canonical, name, layer)
    }

    fn set_dir_times(&self, layer: &Layer) -> Result<()> {
        for (canonical, mtime) in &layer.dir_times {
            let fd = match self.root.open_canonical(canonical) {
                Ok(fd) => fd,
                // Replaced later in the same layer.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(e) => return Err(e).ctx(|| format!("open `{}`", show(canonical))),
            };
            let what = || format!("set the time of `{}`", show(canonical));
            let fd = rootfs::reopen_readable(&fd, OFlags::DIRECTORY).ctx(what)?;
            rustix::fs::futimens(&fd, &times(*mtime)).ctx(what)?;
        }
        Ok(())
    }
}

impl Layer {
    /// Remembers a name and its parents as this layer's own.
    fn mark(&mut self, canonical: &[u8]) {
        let mut name = canonical;
        while self.written.insert(hash(name)) {
            match name.iter().rposition(|b| *b == b'/') {
                Some(slash) => name = &name[..slash],
                None => break,
            }
        }
    }

    fn wrote(&self, canonical: &[u8]) -> bool {
        self.written.contains(&hash(canonical))
    }
}

fn hash(name: &[u8]) -> [u8; 16] {
    let mut out = [0u8; 16];
    out.copy_from_slice(&Sha256::digest(name)[..16]);
    out
}

/// Removes one name, except what the layer itself wrote.
fn purge(parent: &OwnedFd, dir: &[u8], name: &[u8], layer: &Layer) -> Result<()> {
    let canonical = rootfs::join(dir, name);
    let what = || format!("remove `{}` of a lower layer", show(&canonical));
    if !layer.wrote(&canonical) {
        return rootfs::remove_tree(parent, name).ctx(what);
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        Ok(fd) => purge_children(&fd, &canonical, layer),
        Err(Errno::NOTDIR | Errno::NOENT | Errno::LOOP) => Ok(()),
        Err(e) => Err(e).ctx(what),
    }
}

fn purge_children(dir: &OwnedFd, canonical: &[u8], layer: &Layer) -> Result<()> {
    let what = || format!("list `{}` of a lower layer", show(canonical));
    let readable = rootfs::reopen_readable(dir, OFlags::DIRECTORY).ctx(what)?;
    for name in rootfs::list(&readable).ctx(what)? {
        purge(dir, canonical, &name, layer)?;
    }
    Ok(())
}

fn make_node(dir: &OwnedFd, base: &[u8], file_type: FileType, entry: &Entry) -> rustix::io::Result<()> {
    let device = if file_type == FileType::Fifo { 0 } else { rustix::fs::makedev(entry.device.0, entry.device.1) };
    let mode = Mode::from_raw_mode(entry.mode & 0o777);
    rustix::fs::mknodat(dir, base, file_type, mode, device)
}

fn times((seconds, nanos): (i64, u32)) -> Timestamps {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
    Timestamps { last_access: time, last_modification: time }
}

/// Attributes that mean something on a guest's disk. The others belong to the machine that made
/// the layer (labels of its security module, its union file system).
fn keeps_xattr(name: &[u8]) -> bool {
    name.starts_with(b"user.")
        || name == b"security.capability"
        || name == b"system.posix_acl_access"
        || name == b"system.posix_acl_default"
}

/// Owner, then mode (a new owner clears set-uid), then attributes (a new owner clears
/// capabilities).
fn metadata(fd: impl AsFd, entry: &Entry) -> Result<()> {
    let what = || format!("set owner and mode of `{}`", show(&entry.path));
    rootfs::set_owner_mode(&fd, (entry.uid, entry.gid), entry.mode).ctx(what)?;
    for (name, value) in entry.xattrs.iter().filter(|(n, _)| keeps_xattr(n)) {
        fsetxattr(&fd, &name[..], value, XattrFlags::empty()).ctx(|| xattr_context(name, &entry.path))?;
    }
    Ok(())
}

/// The same for what must not be opened: links, devices, FIFOs. Only this process writes here,
/// so `base` is what was just made.
fn unopened_metadata(dir: &OwnedFd, base: &[u8], entry: &Entry) -> Result<()> {
    let what = || format!("set owner and mode of `{}`", show(&entry.path));
    let owner = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
    let nofollow = AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::chownat(dir, base, Some(owner.0), Some(owner.1), nofollow).ctx(what)?;
    if entry.kind != Kind::Symlink {
        let mode = Mode::from_raw_mode(entry.mode);
        rustix::fs::chmodat(dir, base, mode, AtFlags::empty()).ctx(what)?;
    }
    let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
    path.extend_from_slice(base);
    for (name, value) in entry.xattrs.iter().filter(|(n, _)| keeps_xattr(n)) {
        // The kernel keeps `user.` attributes on files and directories only.
        if !name.starts_with(b"user.") {
            lsetxattr(&path[..], &name[..], value, XattrFlags::empty()).ctx(|| xattr_context(name, &entry.path))?;
        }
    }
    rustix::fs::utimensat(dir, base, &times(entry.mtime), nofollow).ctx(what)
}

fn xattr_context(name: &[u8], path: &[u8]) -> String {
    format!(
        "set the attribute `{}` of `{}`; the work directory must be on a file system with \
         extended attributes",
        show(name),
        show(path)
    )
}

/// Ends a stream that is longer than it may be.
struct Counted<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.left = self
            .left
            .checked_sub(n as u64)
            .ok_or_else(|| std::io::Error::other("the archive unpacks to more than it may"))?;
        Ok(n)
    }
}
