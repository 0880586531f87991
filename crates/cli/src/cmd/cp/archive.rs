//! Folders as tar streams. Packing keeps files, folders and links and passes over sockets, pipes and devices with a note.
//! Unpacking trusts nothing: a name that leaves the destination ends it, links are made last and never followed, only the
//! permission bits are taken over.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyhow::Context as _;
use bytes::Bytes;
use futures::Stream;
use tokio::sync::{mpsc, oneshot};

use super::pipe::{self, Piece};
use crate::failure::Failure;
use crate::output::note;

const DEPTH_MAX: usize = 256;
/// Links are kept until the end; more are not a folder somebody works in.
const LINKS_MAX: usize = 1_000_000;

type Outcome<T> = oneshot::Receiver<Result<T, Failure>>;

/// The folder as a tar stream, and how reading it went.
pub fn pack(root: PathBuf, passed: Arc<AtomicU64>) -> (impl Stream<Item = Piece> + Send + 'static, Outcome<()>) {
    let (to, from) = pipe::queue();
    let (tell, outcome) = oneshot::channel();
    std::thread::spawn(move || {
        let sender = pipe::Sender { to: to.clone(), passed };
        let mut tar = tar::Builder::new(BufWriter::with_capacity(pipe::CHUNK, sender));
        let result = add_folder(&mut tar, &root, Path::new(""), 0).and_then(|()| {
            let mut out = tar.into_inner()?;
            Ok(out.flush()?)
        });
        let result = match result {
            // The server ended the request; its answer says why.
            Err(e) if e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) => Ok(()),
            Err(e) => {
                let _ = to.blocking_send(Err(io::Error::other("reading the folder failed")));
                Err(Failure::from(e))
            }
            Ok(()) => Ok(()),
        };
        let _ = tell.send(result);
    });
    (pipe::stream(from), outcome)
}

fn header(meta: &fs::Metadata) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(meta.permissions().mode() & 0o777);
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header
}

fn add_folder<W: Write>(tar: &mut tar::Builder<W>, root: &Path, inside: &Path, depth: usize) -> anyhow::Result<()> {
    let folder = root.join(inside);
    if depth > DEPTH_MAX {
        anyhow::bail!("{} lies more than {DEPTH_MAX} folders deep", folder.display());
    }
    let failed = || format!("cannot read {}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(failed)? {
        names.push(entry.with_context(failed)?.file_name());
    }
    names.sort();
    for name in names {
        let inside = inside.join(name);
        let path = root.join(&inside);
        let failed = || format!("cannot read {}", path.display());
        let meta = fs::symlink_metadata(&path).with_context(failed)?;
        let mut header = header(&meta);
        if meta.is_dir() {
            header.set_entry_type(tar::EntryType::Directory);
            tar.append_data(&mut header, &inside, io::empty())?;
            add_folder(tar, root, &inside, depth + 1)?;
        } else if meta.is_symlink() {
            header.set_entry_type(tar::EntryType::Symlink);
            tar.append_link(&mut header, &inside, fs::read_link(&path).with_context(failed)?)?;
        } else if meta.is_file() {
            let mut options = fs::OpenOptions::new();
            let file = options.read(true).custom_flags(nix::libc::O_NOFOLLOW).open(&path).with_context(failed)?;
            header.set_size(meta.len());
            // Exactly the promised size, also when the file shrinks or grows meanwhile.
            let data = file.take(meta.len()).chain(io::repeat(0)).take(meta.len());
            tar.append_data(&mut header, &inside, data)?;
        } else {
            note(format!("space: {} is no file, folder or link and is left out", path.display()));
        }
    }
    Ok(())
}

/// A queue for the pieces of a tar stream, and the number of bytes of files it held.
pub fn unpack(root: PathBuf) -> (mpsc::Sender<Piece>, Outcome<u64>) {
    let (to, from) = pipe::queue();
    let (tell, outcome) = oneshot::channel();
    std::thread::spawn(move || {
        let reader = pipe::Receiver { from, rest: Bytes::new() };
        let _ = tell.send(unpack_from(reader, &root).map_err(Failure::from));
    });
    (to, outcome)
}

/// The path below the root that a name of the archive means, or why it is refused.
fn inside(name: &Path) -> anyhow::Result<PathBuf> {
    let mut path = PathBuf::new();
    for part in name.components() {
        match part {
            Component::Normal(part) => path.push(part),
            Component::CurDir => {}
            _ => anyhow::bail!("the sandbox sent the name {:?}, which leaves the folder; nothing more is copied", name),
        }
    }
    if path.components().count() > DEPTH_MAX {
        anyhow::bail!("the sandbox sent a name more than {DEPTH_MAX} folders deep");
    }
    Ok(path)
}

/// Makes the folders above `path`; a link where a folder must be ends the copy.
fn make_parents(root: &Path, path: &Path) -> anyhow::Result<()> {
    let mut at = root.to_owned();
    for part in path.parent().into_iter().flat_map(Path::components) {
        at.push(part);
        match fs::symlink_metadata(&at) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => anyhow::bail!("{} is in the way: it is not a folder", at.display()),
            Err(_) => fs::create_dir(&at).with_context(|| format!("cannot make {}", at.display()))?,
        }
    }
    Ok(())
}

fn unpack_from(reader: impl Read, root: &Path) -> anyhow::Result<u64> {
    fs::create_dir_all(root).with_context(|| format!("cannot make {}", root.display()))?;
    let mut archive = tar::Archive::new(reader);
    let mut links = Vec::new();
    // Set at the end: a folder without write permission could not be filled.
    let mut folder_modes = BTreeMap::new();
    let mut bytes = 0;
    for entry in archive.entries()? {
        let mut entry = entry.context("the sandbox's archive is damaged")?;
        let name = inside(&entry.path()?)?;
        let target = root.join(&name);
        let mode = entry.header().mode().unwrap_or(0o644) & 0o777;
        let kind = entry.header().entry_type();
        if name.as_os_str().is_empty() && !kind.is_dir() {
            anyhow::bail!("the sandbox sent a file without a name");
        }
        make_parents(root, &name)?;
        match kind {
            tar::EntryType::Directory => {
                make_folder(&target)?;
                folder_modes.insert(target, mode);
            }
            tar::EntryType::Regular | tar::EntryType::Continuous => bytes += write_file(&mut entry, &target, mode)?,
            tar::EntryType::Symlink | tar::EntryType::Link if links.len() < LINKS_MAX => {
                let Some(to) = entry.link_name()? else { continue };
                links.push((kind, name, to.into_owned()));
            }
            tar::EntryType::Symlink | tar::EntryType::Link => {
                anyhow::bail!("the sandbox sent more than a million links")
            }
            _ => note(format!("space: {:?} is no file, folder or link and is left out", name)),
        }
    }
    for (kind, name, to) in links {
        make_link(root, kind, &name, &to)?;
    }
    for (folder, mode) in folder_modes.into_iter().rev() {
        let _ = fs::set_permissions(&folder, fs::Permissions::from_mode(mode | 0o700));
    }
    Ok(bytes)
}

fn make_folder(target: &Path) -> anyhow::Result<()> {
    match fs::symlink_metadata(target) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => anyhow::bail!("{} is in the way: it is not a folder", target.display()),
        Err(_) => {
            let made = fs::DirBuilder::new().mode(0o700).create(target);
            made.with_context(|| format!("cannot make {}", target.display()))
        }
    }
}

fn write_file(entry: &mut impl Read, target: &Path, mode: u32) -> anyhow::Result<u64> {
    let failed = || format!("cannot write {}", target.display());
    if fs::symlink_metadata(target).is_ok_and(|meta| !meta.is_dir()) {
        fs::remove_file(target).with_context(failed)?;
    }
    // New, so that nothing that lies there is written through.
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(target).with_context(failed)?;
    let bytes = io::copy(entry, &mut file).with_context(failed)?;
    file.set_permissions(fs::Permissions::from_mode(mode)).with_context(failed)?;
    Ok(bytes)
}

fn make_link(root: &Path, kind: tar::EntryType, name: &Path, to: &Path) -> anyhow::Result<()> {
    let target = root.join(name);
    let failed = || format!("cannot make the link {}", target.display());
    // Links made before may stand where a folder was.
    make_parents(root, name)?;
    if fs::symlink_metadata(&target).is_ok_and(|meta| !meta.is_dir()) {
        fs::remove_file(&target).with_context(failed)?;
    }
    if kind == tar::EntryType::Symlink {
        return std::os::unix::fs::symlink(to, &target).with_context(failed);
    }
    let to = inside(to)?;
    make_parents(root, &to)?;
    let source = root.join(to);
    if !fs::symlink_metadata(&source).with_context(failed)?.is_file() {
        anyhow::bail!("the sandbox sent a hard link to something that is no file: {}", target.display());
    }
    fs::hard_link(&source, &target).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tar_of(entries: &[(tar::EntryType, &str, &str)]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (kind, name, content) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o6755);
            // Past the checks of the library, as a hostile guest would.
            header.as_gnu_mut().expect("gnu").name[..name.len()].copy_from_slice(name.as_bytes());
            let data = if kind.is_file() { content.as_bytes() } else { b"" };
            if !kind.is_file() {
                header.as_gnu_mut().expect("gnu").linkname[..content.len()].copy_from_slice(content.as_bytes());
            }
            header.set_size(data.len() as u64);
            header.set_cksum();
            tar.append(&header, data).expect("in memory");
        }
        tar.into_inner().expect("in memory")
    }

    use tar::EntryType::{Directory, Fifo, Link, Regular, Symlink};

    #[test]
    fn hostile_archives_stay_inside() {
        let corpus: &[&[(tar::EntryType, &str, &str)]] = &[
            &[(Regular, "../evil", "x")],
            &[(Regular, "/evil", "x")],
            &[(Regular, "a/../../evil", "x")],
            &[(Symlink, "out", "../"), (Regular, "out/evil", "x"), (Regular, "out/evil", "y")],
            &[(Symlink, "out", "../evil"), (Regular, "out", "x")],
            &[(Link, "hard", "../outside")],
            &[(Symlink, "l", "../outside"), (Link, "hard", "l")],
            &[(Regular, "", "x")],
        ];
        for (at, entries) in corpus.iter().enumerate() {
            let dir = tempfile::tempdir().expect("a folder");
            fs::write(dir.path().join("outside"), "secret").expect("written");
            let root = dir.path().join("root");
            let _ = unpack_from(tar_of(entries).as_slice(), &root);
            assert!(!dir.path().join("evil").exists(), "case {at}");
            assert_eq!(fs::read_to_string(dir.path().join("outside")).expect("still there"), "secret", "case {at}");
            assert_eq!(fs::metadata(dir.path().join("outside")).expect("there").nlink(), 1, "case {at}");
        }
    }

    #[test]
    fn what_is_kept() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path().join("root");
        let entries = [
            (Directory, "./d", ""),
            (Regular, "d/f", "hi"),
            (Symlink, "d/l", "f"),
            (Link, "h", "d/f"),
            (Fifo, "p", ""),
        ];
        assert_eq!(unpack_from(tar_of(&entries).as_slice(), &root).expect("a good archive"), 2);
        assert_eq!(fs::read_to_string(root.join("d/l")).expect("a link"), "hi");
        assert_eq!(fs::metadata(root.join("d/f")).expect("a file").mode() & 0o7777, 0o755, "no set-uid");
        assert_eq!(fs::metadata(root.join("h")).expect("a file").nlink(), 2);
        assert!(!root.join("p").exists());
    }

    #[test]
    fn packing_and_unpacking_give_the_same() {
        let dir = tempfile::tempdir().expect("a folder");
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("a").join("x".repeat(200))).expect("made");
        let bytes: Vec<u8> = (0..=255u8).cycle().take(1_000_000).collect();
        fs::write(from.join("a").join("x".repeat(200)).join("bytes"), &bytes).expect("written");
        std::os::unix::fs::symlink("nowhere", from.join("broken")).expect("linked");
        let (to, mut pieces) = pipe::queue();
        let sender = pipe::Sender { to, passed: Arc::default() };
        let root = from.clone();
        let packer = std::thread::spawn(move || {
            let mut tar = tar::Builder::new(sender);
            add_folder(&mut tar, &root, Path::new(""), 0).and_then(|()| Ok(tar.finish()?))
        });
        let mut stream = Vec::new();
        while let Some(piece) = pieces.blocking_recv() {
            stream.extend_from_slice(&piece.expect("no error"));
        }
        packer.join().expect("no panic").expect("packed");
        let back = dir.path().join("back");
        unpack_from(stream.as_slice(), &back).expect("unpacked");
        assert_eq!(fs::read(back.join("a").join("x".repeat(200)).join("bytes")).expect("there"), bytes);
        assert_eq!(fs::read_link(back.join("broken")).expect("a link"), Path::new("nowhere"));
    }
}
