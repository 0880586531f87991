//! Files for the host, with the rights of a user of the guest. Where a path leads is the guest's own business: the kernel
//! decides, as that user. What must hold here: a file appears whole or not at all, nothing but a regular file is read, and
//! no call blocks for ever.
//!
//! Each operation runs on a blocking thread that takes the user's file rights and gives them back.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use nix::libc;
use space_proto::guest::{
    FileChunk, FileKind, FileStat, ListDirReply, ListDirRequest, MakeDirRequest, PathRequest, ReadFileRequest,
    RemoveFileRequest, RenameFileRequest, WriteFileOpen,
};
use tokio::sync::mpsc;
use tonic::Status;

use crate::sys::FileRights;
use crate::users::User;

/// Transfers of files at the same time; more wait in line.
pub const TRANSFERS_MAX: usize = 24;
const PATH_MAX_BYTES: usize = 4095;
const COMPONENT_MAX_BYTES: usize = 255;
const LIST_MAX: usize = 1000;
const CHUNK_BYTES: usize = 64 * 1024;

/// Does the work as the user, away from the runtime's thread.
pub async fn as_user<T: Send + 'static>(
    user: User,
    work: impl FnOnce(&User) -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    let task = tokio::task::spawn_blocking(move || {
        let _rights = FileRights::of(user.uid, user.gid, &user.groups)
            .map_err(|error| Status::internal(format!("cannot act as {}: {error}", user.name)))?;
        work(&user)
    });
    task.await.map_err(|_| Status::internal("the work was interrupted"))?
}

/// The path a user means: relative ones start at home.
pub fn path(text: &str, user: &User) -> Result<PathBuf, Status> {
    if text.is_empty() || text.len() > PATH_MAX_BYTES || text.contains('\0') {
        return Err(Status::invalid_argument("a path has 1 to 4095 bytes and no NUL"));
    }
    if text.split('/').any(|part| part.len() > COMPONENT_MAX_BYTES) {
        return Err(Status::invalid_argument("a part of a path has at most 255 bytes"));
    }
    Ok(Path::new(&user.home).join(text))
}

pub fn status(what: &str, path: &Path, error: &io::Error) -> Status {
    let name = path.display();
    match error.raw_os_error() {
        Some(libc::ENOENT) => Status::not_found(format!("{what} {name}: there is no such file or folder")),
        Some(libc::EACCES | libc::EPERM) => Status::permission_denied(format!("{what} {name}: permission denied")),
        Some(libc::EROFS) => Status::permission_denied(format!("{what} {name}: the file system is read-only")),
        Some(libc::EEXIST) => Status::already_exists(format!("{what} {name}: it is there already")),
        Some(libc::ENOTEMPTY) => Status::failed_precondition(format!("{what} {name}: the folder is not empty")),
        Some(libc::EISDIR) => Status::failed_precondition(format!("{what} {name}: it is a folder")),
        Some(libc::ENOTDIR) => {
            Status::failed_precondition(format!("{what} {name}: a part of the path is not a folder"))
        }
        Some(libc::ELOOP) => Status::failed_precondition(format!("{what} {name}: too many symbolic links")),
        Some(libc::ENAMETOOLONG) => Status::invalid_argument(format!("{what}: the path is too long")),
        Some(libc::ENOSPC | libc::EDQUOT) => {
            let free = free_bytes(path.parent().unwrap_or(path)) >> 20;
            Status::resource_exhausted(format!("{what} {name}: the disk is full; {free} MiB are free"))
        }
        Some(libc::EFBIG) => Status::resource_exhausted(format!("{what} {name}: the file is too large")),
        _ => Status::internal(format!("{what} {name}: {error}")),
    }
}

fn free_bytes(path: &Path) -> u64 {
    nix::sys::statvfs::statvfs(path).map_or(0, |fs| fs.blocks_available() * fs.fragment_size())
}

fn stat_of(path: &Path, meta: &fs::Metadata) -> FileStat {
    let kind = meta.file_type();
    let kind = if kind.is_file() {
        FileKind::File
    } else if kind.is_dir() {
        FileKind::Directory
    } else if kind.is_symlink() {
        FileKind::Symlink
    } else {
        FileKind::Other
    };
    let target = if kind == FileKind::Symlink { fs::read_link(path).ok() } else { None };
    FileStat {
        path: path.to_string_lossy().into_owned(),
        kind: kind.into(),
        size: meta.len(),
        mode: meta.permissions().mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
        modified_unix_ns: meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec()),
        target: target.map(|t| t.to_string_lossy().into_owned()).unwrap_or_default(),
    }
}

pub fn stat(request: &PathRequest, user: &User) -> Result<FileStat, Status> {
    let path = path(&request.path, user)?;
    let meta = if request.follow { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
    Ok(stat_of(&path, &meta.map_err(|e| status("look at", &path, &e))?))
}

pub fn list(request: &ListDirRequest, user: &User) -> Result<ListDirReply, Status> {
    let path = path(&request.path, user)?;
    let entries = fs::read_dir(&path).map_err(|e| status("list", &path, &e))?;
    let limit = match usize::try_from(request.limit).unwrap_or(LIST_MAX) {
        0 => LIST_MAX,
        limit => limit.min(LIST_MAX),
    };
    // Keeps only what may be answered, whatever the folder holds.
    let after = OsStr::from_bytes(request.after.as_bytes());
    let mut names = std::collections::BTreeSet::new();
    let mut more = false;
    for entry in entries {
        let name = entry.map_err(|e| status("list", &path, &e))?.file_name();
        if request.after.is_empty() || name.as_os_str() > after {
            names.insert(name);
        }
        if names.len() > limit {
            names.pop_last();
            more = true;
        }
    }
    let look = |name| {
        let path = path.join(name);
        fs::symlink_metadata(&path).ok().map(|meta| stat_of(&path, &meta))
    };
    Ok(ListDirReply { entries: names.into_iter().filter_map(look).collect(), more })
}

pub fn make_dir(request: &MakeDirRequest, user: &User) -> Result<FileStat, Status> {
    let path = path(&request.path, user)?;
    let made = if request.parents { fs::create_dir_all(&path) } else { fs::create_dir(&path) };
    made.map_err(|e| status("make", &path, &e))?;
    if request.mode != 0 {
        let mode = fs::Permissions::from_mode(request.mode & 0o7777);
        fs::set_permissions(&path, mode).map_err(|e| status("make", &path, &e))?;
    }
    let meta = fs::metadata(&path).map_err(|e| status("make", &path, &e))?;
    Ok(stat_of(&path, &meta))
}

pub fn remove(request: &RemoveFileRequest, user: &User) -> Result<(), Status> {
    let path = path(&request.path, user)?;
    let meta = fs::symlink_metadata(&path).map_err(|e| status("remove", &path, &e))?;
    let removed = match (meta.is_dir(), request.recursive) {
        (false, _) => fs::remove_file(&path),
        (true, false) => fs::remove_dir(&path),
        (true, true) => fs::remove_dir_all(&path),
    };
    removed.map_err(|e| status("remove", &path, &e))
}

pub fn rename(request: &RenameFileRequest, user: &User) -> Result<FileStat, Status> {
    let (from, to) = (path(&request.from, user)?, path(&request.to, user)?);
    fs::rename(&from, &to).map_err(|e| status("rename", &from, &e))?;
    let meta = fs::symlink_metadata(&to).map_err(|e| status("rename", &to, &e))?;
    Ok(stat_of(&to, &meta))
}

/// Opens a regular file; a FIFO or a device never blocks and is refused.
fn open_regular(path: &Path) -> Result<(File, fs::Metadata), Status> {
    let open = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = open.map_err(|e| status("read", path, &e))?;
    let meta = file.metadata().map_err(|e| status("read", path, &e))?;
    if meta.is_file() {
        return Ok((file, meta));
    }
    let what = if meta.is_dir() { "a folder" } else { "not a regular file" };
    Err(Status::failed_precondition(format!("read {}: it is {what}", path.display())))
}

pub type Chunks = mpsc::Sender<Result<FileChunk, Status>>;

/// Sends the stat, then the range. A receiver that goes away ends it.
pub fn read(request: &ReadFileRequest, user: &User, chunks: &Chunks) -> Result<(), Status> {
    let path = path(&request.path, user)?;
    let (mut file, meta) = open_regular(&path)?;
    if request.offset > meta.len() || (request.offset == meta.len() && request.offset > 0) {
        return Err(Status::out_of_range(format!("the file has {} bytes", meta.len())));
    }
    let stat = FileChunk { stat: Some(stat_of(&path, &meta)), data: Bytes::new() };
    if chunks.blocking_send(Ok(stat)).is_err() {
        return Ok(());
    }
    file.seek(SeekFrom::Start(request.offset)).map_err(|e| status("read", &path, &e))?;
    let mut left = if request.length == 0 { u64::MAX } else { request.length };
    while left > 0 {
        let mut data = vec![0u8; CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES))];
        let len = file.read(&mut data).map_err(|e| status("read", &path, &e))?;
        if len == 0 {
            break;
        }
        data.truncate(len);
        left -= len as u64;
        if chunks.blocking_send(Ok(FileChunk { stat: None, data: data.into() })).is_err() {
            break;
        }
    }
    Ok(())
}

/// A file on its way in, under a name of its own. Gone when dropped, unless it was finished.
struct Upload {
    temp: PathBuf,
    file: File,
    done: bool,
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.temp);
        }
    }
}

fn temp_name(path: &Path) -> Result<PathBuf, Status> {
    let folder = path.parent().filter(|_| path.file_name().is_some());
    let folder = folder.ok_or_else(|| Status::failed_precondition(format!("{}: it is a folder", path.display())))?;
    let mut random = [0u8; 8];
    let source = File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut random));
    source.map_err(|e| status("write", path, &e))?;
    Ok(folder.join(format!(".space-upload-{:016x}", u64::from_ne_bytes(random))))
}

/// What a write's messages become: data, the good end, or nothing more (the sender broke off).
pub enum Piece {
    Data(Bytes),
    End,
}

/// Writes what comes; the file takes its place when the end does.
pub fn write(open: &WriteFileOpen, user: &User, pieces: &mut mpsc::Receiver<Piece>) -> Result<FileStat, Status> {
    let wanted = path(&open.path, user)?;
    // Through a link to a file, to the file itself, as any program would.
    let target = fs::canonicalize(&wanted).unwrap_or(wanted);
    let failed = |error: &io::Error| status("write", &target, error);
    let folder = target.parent().unwrap_or(Path::new("/"));
    if open.parents {
        fs::create_dir_all(folder).map_err(|e| status("make", folder, &e))?;
    }
    let old = fs::metadata(&target).ok();
    match &old {
        Some(meta) if meta.is_dir() => return Err(failed(&io::Error::from_raw_os_error(libc::EISDIR))),
        Some(meta) if !meta.is_file() => {
            return Err(Status::failed_precondition(format!("write {}: not a regular file", target.display())));
        }
        // Replacing needs the folder's rights only; a file the user may not write stays as it is.
        Some(_) => drop(OpenOptions::new().write(true).open(&target).map_err(|e| failed(&e))?),
        None => {}
    }
    let free = free_bytes(folder);
    if open.size_hint > free && folder.is_dir() {
        return Err(Status::resource_exhausted(format!(
            "write {}: {} bytes do not fit; {free} are free on the sandbox's disk",
            target.display(),
            open.size_hint
        )));
    }
    let temp = temp_name(&target)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temp).map_err(|e| failed(&e))?;
    let mut upload = Upload { temp, file, done: false };
    let mut ended = false;
    while let Some(piece) = pieces.blocking_recv() {
        match piece {
            Piece::Data(data) => upload.file.write_all(&data).map_err(|e| failed(&e))?,
            Piece::End => {
                ended = true;
                break;
            }
        }
    }
    if !ended {
        return Err(Status::aborted("the upload ended before its end; nothing was written"));
    }
    let mode = match (open.mode, &old) {
        (0, Some(meta)) => meta.permissions().mode() & 0o7777,
        (0, None) => 0o644,
        (mode, _) => mode & 0o7777,
    };
    upload.file.set_permissions(fs::Permissions::from_mode(mode)).map_err(|e| failed(&e))?;
    upload.file.sync_all().map_err(|e| failed(&e))?;
    fs::rename(&upload.temp, &target).map_err(|e| failed(&e))?;
    upload.done = true;
    let meta = fs::metadata(&target).map_err(|e| failed(&e))?;
    Ok(stat_of(&target, &meta))
}
