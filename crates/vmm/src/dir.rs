//! The folder of one VM: fixed names, so that a snapshot of the folder is the VM.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::libc;

use crate::VmmError;

pub const DISK: &str = "disk.img";
pub const MEMORY: &str = "memory.img";
pub const DEVICE_STATE: &str = "device.state";
pub const CONSOLE_LOG: &str = "console.log";
pub(crate) const QMP_SOCKET: &str = "qmp.sock";
pub(crate) const AGENT_SOCKET: &str = "agent.sock";
/// What a VMM makes itself: a folder of its user.
pub(crate) const RUN: &str = "run";

/// A VM's folder. Only the VMM's own user and root may look into the files of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmDir {
    path: PathBuf,
}

impl VmDir {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        VmDir { path: path.into() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file of the folder, such as [`DISK`].
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn error(&self, action: &'static str, name: &str) -> impl FnOnce(io::Error) -> VmmError {
        let path = self.file(name);
        move |source| VmmError::File { action, path, source }
    }

    /// Opens a file of the folder; never through a symbolic link.
    pub(crate) fn open(&self, name: &str, options: &mut OpenOptions) -> Result<File, VmmError> {
        options.mode(0o600).custom_flags(libc::O_NOFOLLOW).open(self.file(name)).map_err(self.error("open", name))
    }

    /// Makes new, empty guest memory of the given size.
    pub(crate) fn create_memory(&self, bytes: u64) -> Result<(), VmmError> {
        let file = self.open(MEMORY, OpenOptions::new().write(true).create(true).truncate(true))?;
        file.set_len(bytes).map_err(self.error("size", MEMORY))
    }

    /// Runs `act` with a path to `name` that is short enough for a socket address, whatever the folder's own length.
    fn with_short_path<T>(&self, name: &str, act: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
        let dir = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(&self.path)?;
        act(&PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd())))
    }

    /// A listening socket for the VMM to inherit. One left from an earlier run is replaced.
    pub(crate) fn listen(&self, name: &str) -> Result<OwnedFd, VmmError> {
        match std::fs::remove_file(self.file(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(self.error("remove", name)(error)),
            _ => {}
        }
        let listener =
            self.with_short_path(name, |path| UnixListener::bind(path)).map_err(self.error("listen on", name))?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(self.file(name), mode).map_err(self.error("close up", name))?;
        Ok(listener.into())
    }

    /// Connects to a socket that the VMM made in a folder of its own: to that socket and to nothing it may point to.
    pub(crate) async fn connect_owned(&self, name: &str) -> Result<tokio::net::UnixStream, VmmError> {
        let flags = libc::O_PATH | libc::O_NOFOLLOW;
        let socket = OpenOptions::new().read(true).custom_flags(flags).open(self.file(name));
        let socket = socket.map_err(self.error("find", name))?;
        // The kernel goes to the very file that is open; something else than a socket refuses.
        let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
        tokio::net::UnixStream::connect(path).await.map_err(self.error("connect to", name))
    }

    /// Removes what a VMM and its console left, so that a snapshot of the folder is the VM and nothing else. Only when no
    /// VMM runs in it.
    pub fn remove_traces(&self) -> Result<(), VmmError> {
        for name in [CONSOLE_LOG, QMP_SOCKET, AGENT_SOCKET] {
            match std::fs::remove_file(self.file(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(self.error("remove", name)(error)),
                _ => {}
            }
        }
        self.remove_folder(RUN)
    }

    /// From now on only we may make or remove files in that folder; the VMM still reaches those it knows.
    pub(crate) fn close_folder(&self, name: &str) -> Result<(), VmmError> {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o710);
        std::fs::set_permissions(self.file(name), mode).map_err(self.error("close", name))
    }

    pub(crate) fn remove_folder(&self, name: &str) -> Result<(), VmmError> {
        match std::fs::remove_dir_all(self.file(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.error("remove", name)(error)),
            _ => Ok(()),
        }
    }

    /// Connects to a socket of the folder. Does not wait: the backlog of a listening socket takes the connection.
    pub(crate) fn connect(&self, name: &str) -> Result<tokio::net::UnixStream, VmmError> {
        let stream = self.with_short_path(name, |path| UnixStream::connect(path));
        let stream = stream.and_then(|stream| stream.set_nonblocking(true).map(|()| stream));
        stream.and_then(tokio::net::UnixStream::from_std).map_err(self.error("connect to", name))
    }
}
