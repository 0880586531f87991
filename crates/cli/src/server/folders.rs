//! Folders and sockets of a server, each owned by the process that uses it. Also brings what an earlier version left to root to its
//! place.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, lchown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen as listen_on, socket as new_socket,
};

use super::users::Users;
use crate::config::ServerConfig;
use crate::failure::Failure;

/// What the control plane kept in the data folder itself, before it had a user and a folder of its own.
const MOVED: [&str; 5] = ["token.seed", "admin.key", "control.db-wal", "control.db-shm", "control.db"];

fn failed(action: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let text = format!("cannot {action} {}", path.display());
    move |e| Failure::new(format!("{text}: {e}"))
}

pub fn prepare(config: &ServerConfig, users: &Users) -> Result<(), Failure> {
    check_way(&config.data_dir)?;
    let control = config.control_dir();
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&control).map_err(failed("create", &control))?;
    for name in MOVED {
        let (old, new) = (config.data_dir.join(name), control.join(name));
        // The database itself comes last: what is still beside it belongs to it.
        if old.symlink_metadata().is_ok() && new.symlink_metadata().is_err() {
            fs::rename(&old, &new).map_err(failed("move", &old))?;
        }
    }
    give(&control, users.control)
}

/// The services have users of their own, and must be able to pass.
fn check_way(data_dir: &Path) -> Result<(), Failure> {
    let real = data_dir.canonicalize().map_err(failed("find", data_dir))?;
    for folder in real.ancestors().skip(1) {
        let meta = fs::metadata(folder).map_err(failed("inspect", folder))?;
        if meta.mode() & 0o001 == 0 {
            return Err(Failure::new(format!(
                "{} is closed to other users, and the server's processes have users of their own: choose another --data-dir, or \
                 `chmod o+x {}`",
                folder.display(),
                folder.display()
            )));
        }
    }
    Ok(())
}

/// A folder and the files in it become a user's.
pub fn give(folder: &Path, user: u32) -> Result<(), Failure> {
    for entry in fs::read_dir(folder).map_err(failed("list", folder))?.flatten() {
        lchown(entry.path(), Some(user), Some(user)).map_err(failed("give", &entry.path()))?;
    }
    lchown(folder, Some(user), Some(user)).map_err(failed("give", folder))
}

pub fn socket(config: &ServerConfig, name: &str) -> PathBuf {
    config.run_dir().join(name)
}

fn make_way(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Only this user may connect.
fn close_to_others(path: &Path, user: u32) -> Result<(), Failure> {
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed("close up", path))?;
    lchown(path, Some(user), Some(user)).map_err(failed("give", path))
}

/// A socket for streams, to which `user` may connect.
pub fn listen(path: &Path, user: u32) -> Result<OwnedFd, Failure> {
    make_way(path)?;
    let listener = UnixListener::bind(path).map_err(failed("listen on", path))?;
    close_to_others(path, user)?;
    Ok(listener.into())
}

/// A socket that keeps packet borders, to which `user` may connect.
pub fn listen_packets(path: &Path, user: u32) -> Result<OwnedFd, Failure> {
    make_way(path)?;
    let listening = || -> nix::Result<OwnedFd> {
        let door = new_socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        bind(door.as_raw_fd(), &UnixAddr::new(path)?)?;
        listen_on(&door, Backlog::MAXCONN)?;
        Ok(door)
    };
    let door = listening().map_err(|errno| failed("listen on", path)(errno.into()))?;
    close_to_others(path, user)?;
    Ok(door)
}
