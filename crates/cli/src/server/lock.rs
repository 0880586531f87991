//! One server per data folder: a lock that the kernel takes back when its holder dies, with the holder's process id in it.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};

use crate::config::ServerConfig;
use crate::failure::Failure;

/// Held until it is dropped, here and in every process that was given a copy.
pub struct Lock(Flock<File>);

fn path(config: &ServerConfig) -> PathBuf {
    config.run_dir().join("server.lock")
}

/// Makes the folders a server needs. They hold keys and the memory of guests.
pub fn make_folders(config: &ServerConfig) -> Result<(), Failure> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    for folder in [config.data_dir.clone(), config.run_dir()] {
        let failed = |e: std::io::Error| Failure::new(format!("cannot make {}: {e}", folder.display()));
        // Others may pass through, so that the services under their own users reach their folders; they may not list.
        std::fs::DirBuilder::new().recursive(true).mode(0o711).create(&folder).map_err(failed)?;
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o711)).map_err(failed)?;
    }
    Ok(())
}

/// The process id in the lock file.
fn holder(config: &ServerConfig) -> Option<i32> {
    let mut text = String::new();
    File::open(path(config)).ok()?.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

impl Lock {
    /// For a child: as long as one lives, no other server may begin.
    pub fn share(&self) -> std::io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }

    /// Fails at once when another server holds it.
    pub fn take(config: &ServerConfig) -> Result<Self, Failure> {
        make_folders(config)?;
        let path = path(config);
        let failed = |e: std::io::Error| Failure::new(format!("cannot lock {}: {e}", path.display()));
        let mut options = OpenOptions::new();
        let file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(failed)?;
        let mut file = Some(file);
        // A look by `doctor` holds it for an instant, and the processes of a server that was killed until they notice.
        for _ in 0..50 {
            match Flock::lock(file.take().expect("put back below"), FlockArg::LockExclusiveNonblock) {
                Ok(mut lock) => {
                    lock.set_len(0).and_then(|()| lock.rewind()).map_err(failed)?;
                    writeln!(lock, "{}", std::process::id()).map_err(failed)?;
                    return Ok(Self(lock));
                }
                Err((back, nix::errno::Errno::EWOULDBLOCK)) => file = Some(back),
                Err((_, errno)) => return Err(failed(errno.into())),
            }
            std::thread::sleep(Duration::from_millis(40));
        }
        let pid = holder(config).map(|pid| format!(" (process {pid})")).unwrap_or_default();
        Err(Failure::new(format!(
            "a server already runs on {}{pid}: use it, stop it with `space down`, or choose another folder with --data-dir",
            config.data_dir.display()
        )))
    }
}

/// Whether a server runs on this folder.
pub fn is_held(config: &ServerConfig) -> bool {
    let Ok(file) = File::open(path(config)) else { return false };
    matches!(Flock::lock(file, FlockArg::LockSharedNonblock), Err((_, nix::errno::Errno::EWOULDBLOCK)))
}

/// The process id of the server that runs on this folder.
pub fn running(config: &ServerConfig) -> Option<i32> {
    if is_held(config) { holder(config) } else { None }
}
