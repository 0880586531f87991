//! Folders as tar streams, in constant memory. What comes out of an archive stays below its target: entries that are
//! absolute, climb, or would pass through a link of the same archive are refused.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Buf as _, Bytes};
use space_proto::guest::{FileChunk, PathRequest, WriteArchiveReply, WriteFileOpen};
use tokio::sync::mpsc;
use tonic::Status;

use crate::files::{self, Chunks, Piece};
use crate::users::User;

const CHUNK_BYTES: usize = 64 * 1024;
const ENTRIES_MAX: u64 = 2_000_000;
/// Folders whose rights and times are put right at the end.
const FOLDERS_MAX: usize = 100_000;

/// Collects small writes of the tar library into chunks.
struct Outlet<'a> {
    chunks: &'a Chunks,
    pending: Vec<u8>,
}

impl Outlet<'_> {
    fn send(&mut self) -> io::Result<()> {
        let data = Bytes::from(std::mem::take(&mut self.pending));
        let sent = self.chunks.blocking_send(Ok(FileChunk { stat: None, data }));
        sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }
}

impl Write for Outlet<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.pending.extend_from_slice(data);
        if self.pending.len() >= CHUNK_BYTES {
            self.send()?;
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.pending.is_empty() { Ok(()) } else { self.send() }
    }
}

/// A folder's content with names relative to it, or one file under its own name.
pub fn read(request: &PathRequest, user: &User, chunks: &Chunks) -> Result<(), Status> {
    let path = files::path(&request.path, user)?;
    let stat = files::stat(&PathRequest { follow: true, ..request.clone() }, user)?;
    if chunks.blocking_send(Ok(FileChunk { stat: Some(stat), data: Bytes::new() })).is_err() {
        return Ok(());
    }
    let failed = |error: &io::Error| files::status("pack", &path, error);
    let mut builder = tar::Builder::new(Outlet { chunks, pending: Vec::new() });
    builder.follow_symlinks(false);
    builder.sparse(false);
    if path.is_dir() {
        pack(&mut builder, &path, Path::new("")).map_err(|e| failed(&e))?;
    } else {
        let name = path.file_name().unwrap_or_default();
        builder.append_path_with_name(&path, name).map_err(|e| failed(&e))?;
    }
    let mut outlet = builder.into_inner().map_err(|e| failed(&e))?;
    outlet.flush().map_err(|e| failed(&e))
}

/// Everything that has a meaning elsewhere: sockets and devices have none.
fn pack<W: Write>(builder: &mut tar::Builder<W>, folder: &Path, name: &Path) -> io::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<io::Result<_>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), name.join(entry.file_name()));
        let kind = entry.file_type()?;
        if kind.is_dir() {
            builder.append_dir(&name, &path)?;
            pack(builder, &path, &name)?;
        } else if kind.is_file() || kind.is_symlink() {
            match builder.append_path_with_name(&path, &name) {
                // It went away while we walked.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
    }
    Ok(())
}

/// The pieces of an upload as a stream of bytes; an upload that breaks off is an error, not an end.
struct Inlet<'a> {
    pieces: &'a mut mpsc::Receiver<Piece>,
    rest: Bytes,
    ended: bool,
    total: u64,
}

impl Read for Inlet<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Piece::Data(data)) => self.rest = data,
                Some(Piece::End) => self.ended = true,
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the upload broke off")),
            }
        }
        let len = self.rest.len().min(out.len());
        out[..len].copy_from_slice(&self.rest[..len]);
        self.rest.advance(len);
        self.total += len as u64;
        Ok(len)
    }
}

pub fn write(
    open: &WriteFileOpen,
    user: &User,
    pieces: &mut mpsc::Receiver<Piece>,
) -> Result<WriteArchiveReply, Status> {
    let target = files::path(&open.path, user)?;
    fs::create_dir_all(&target).map_err(|e| files::status("make", &target, &e))?;
    let mut inlet = Inlet { pieces, rest: Bytes::new(), ended: false, total: 0 };
    let mut archive = tar::Archive::new(&mut inlet);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_preserve_ownerships(false);
    archive.set_unpack_xattrs(false);
    let mut entries = 0;
    let mut folders = Vec::new();
    let inside = fs::canonicalize(&target).map_err(|e| files::status("unpack into", &target, &e))?;
    let damaged = |error: &io::Error| Status::invalid_argument(format!("the archive is damaged or broke off: {error}"));
    for entry in archive.entries().map_err(|e| damaged(&e))? {
        let mut entry = entry.map_err(|e| damaged(&e))?;
        let kind = entry.header().entry_type();
        let plain = kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link() || kind.is_contiguous();
        if !plain {
            return Err(Status::invalid_argument(format!(
                "the archive holds an entry of kind {kind:?}; only files, folders and links are taken"
            )));
        }
        let name = entry.path().map_err(|e| damaged(&e))?.display().to_string();
        entries += 1;
        if entries > ENTRIES_MAX {
            return Err(Status::resource_exhausted("the archive has too many entries"));
        }
        if kind.is_dir() {
            let path = entry.path().map_err(|e| damaged(&e))?.into_owned();
            make_folder(&inside, &path, entry.header(), &mut folders)?;
            continue;
        }
        let unpacked = entry.unpack_in(&target).map_err(|e| match e.raw_os_error() {
            Some(_) => files::status("unpack", &target, &e),
            None => unpack_error(&name, &e),
        })?;
        if !unpacked {
            return Err(Status::invalid_argument(format!(
                "the archive entry {name:?} leaves the folder it is unpacked in"
            )));
        }
    }
    finish_folders(&folders)?;
    // What follows the last entry is padding; reading it tells a whole upload from a broken one.
    io::copy(&mut inlet, &mut io::sink()).map_err(|e| damaged(&e))?;
    Ok(WriteArchiveReply { entries, bytes: inlet.total })
}

/// A folder of the archive, and what it is to be once everything is in it.
type Folder = (PathBuf, u32, SystemTime);

/// Makes the folder with rights that let its content come in; its own rights and time come last.
fn make_folder(target: &Path, name: &Path, header: &tar::Header, folders: &mut Vec<Folder>) -> Result<(), Status> {
    let outside = || {
        let name = name.display();
        Status::invalid_argument(format!("the archive entry {name:?} leaves the folder it is unpacked in"))
    };
    if !name.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err(outside());
    }
    let path = target.join(name);
    if !stays_inside(target, &path) {
        return Err(outside());
    }
    match fs::symlink_metadata(&path) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(Status::failed_precondition(format!("{} is there and is no folder", path.display()))),
        Err(_) => fs::create_dir_all(&path).map_err(|e| files::status("make", &path, &e))?,
    }
    if folders.len() < FOLDERS_MAX && path.components().count() > target.components().count() {
        let since = Duration::from_secs(header.mtime().unwrap_or(0));
        let mtime = UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH);
        folders.push((path, header.mode().unwrap_or(0o755) & 0o7777, mtime));
    }
    Ok(())
}

/// Whether the place of the path, as far as it is there already, lies below the target: a link of the same archive may
/// lead elsewhere.
fn stays_inside(target: &Path, path: &Path) -> bool {
    let there = path.ancestors().skip(1).find(|part| fs::symlink_metadata(part).is_ok());
    path == target || there.is_some_and(|part| fs::canonicalize(part).is_ok_and(|real| real.starts_with(target)))
}

/// The innermost first, or a folder that loses its rights would keep its own from getting theirs.
fn finish_folders(folders: &[Folder]) -> Result<(), Status> {
    for (path, mode, mtime) in folders.iter().rev() {
        // One that was replaced by a link meanwhile is none.
        if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
            let opened = fs::File::open(path);
            let rights = fs::Permissions::from_mode(*mode);
            fs::set_permissions(path, rights).map_err(|e| files::status("set the rights of", path, &e))?;
            // A time that cannot be set spoils nothing.
            let _ = opened.and_then(|folder| folder.set_modified(*mtime));
        }
    }
    Ok(())
}

/// The library wraps the cause; a full disk must not read as a damaged archive.
fn unpack_error(name: &str, error: &io::Error) -> Status {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(code) = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return files::status("unpack", Path::new(name), &io::Error::from_raw_os_error(code));
        }
        source = cause.source();
    }
    if error.kind() == io::ErrorKind::StorageFull {
        return Status::resource_exhausted(format!("unpack {name}: the disk is full"));
    }
    Status::invalid_argument(format!("unpack {name}: {error}"))
}
