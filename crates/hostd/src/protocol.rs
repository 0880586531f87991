//! What the node may ask of the root process: one message per primitive, ids and numbers in it, never a path.
//!
//! A message is one packet on a Unix socket that keeps packet borders, as JSON, with at most [`FDS_MAX`] descriptors. The
//! answer to a packet is one packet. A packet that is too long, torn, or not understood ends the connection.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cgroup::{CgroupError, Limits, Weight};
use crate::pool::{Area, PoolError, Usage, is_name};
use crate::process::{Exit, Order, ProcessError, ProcessIdentity};
use crate::uids::Slot;

/// The longest packet: a list of a thousand names fits three times.
pub const MESSAGE_MAX_BYTES: usize = 160 << 10;
pub const FDS_MAX: usize = 8;
const ARGS_MAX: usize = 128;
const GIVEN_MAX: usize = 8;

/// A VMM to be started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    /// One of the drivers the root process was started with, which says what program that is.
    pub driver: String,
    /// As they are: in its jail a VMM reaches its own files only, whatever it is told.
    pub args: Vec<String>,
    pub area: Area,
    /// The subvolume that becomes the VMM's folder.
    pub name: String,
    /// Its user, which no living VMM may have.
    pub slot: Slot,
    pub group: String,
    /// Show it the guest's kernel and first file system.
    pub boot: bool,
    /// Files of the subvolume that become the VMM's own; the node keeps its way to them by group. Of a folder only the files
    /// become its own: the folder stays the node's, and the VMM may make files in it until the node takes that back.
    pub given: Vec<String>,
    pub open_files: u64,
    pub file_size_bytes: u64,
}

impl Start {
    /// Whether it is one at all: what it names lies in the subvolume itself.
    ///
    /// # Errors
    /// `Refused`; neither what exists nor what is in use was looked at.
    pub fn check(&self) -> Result<(), HostError> {
        let fine = is_name(&self.driver)
            && self.args.len() <= ARGS_MAX
            && self.args.iter().all(|arg| !arg.contains('\0'))
            && self.given.len() <= GIVEN_MAX
            && self.given.iter().all(|name| is_name(name))
            && matches!(self.area, Area::Sandboxes | Area::Tmp);
        if fine { Ok(()) } else { Err(HostError::Refused("this is no way to start a VMM".to_owned())) }
    }
}

/// A root file system to be built: the builder reads what from the descriptor that comes with it, and writes there how it
/// goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Build {
    /// The subvolume in `tmp` that the disk goes to, and the name of the work folder.
    pub name: String,
    /// Whether it may use the host's network, for packages or a registry.
    pub network: bool,
    /// Whether it installs packages, and therefore mounts.
    pub packages: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The caller is the node from now on: what an earlier one asked for is finished before the answer, and what it still may
    /// ask for is refused.
    Begin,
    Create {
        area: Area,
        name: String,
    },
    Snapshot {
        from: (Area, String),
        to: (Area, String),
        read_only: bool,
    },
    Rename {
        from: (Area, String),
        to: (Area, String),
    },
    Delete {
        area: Area,
        name: String,
    },
    List {
        area: Area,
    },
    Usage,
    CreateGroup {
        name: String,
        limits: Limits,
    },
    /// Kills what is in it and removes it.
    EndGroup {
        name: String,
    },
    ListGroups,
    WeighGroup {
        name: String,
        weight: Weight,
    },
    MemoryOfGroup {
        name: String,
    },
    /// Descriptors: standard error, then what the VMM inherits. Answer: a pidfd.
    Start(Start),
    /// A VMM that an earlier service started. Answer: a pidfd.
    Open {
        identity: ProcessIdentity,
    },
    /// Ends a VMM, stops it or lets it go on.
    Order {
        identity: ProcessIdentity,
        order: Order,
    },
    /// How a VMM whose pidfd says that it ended did so.
    Exit {
        identity: ProcessIdentity,
    },
    /// Descriptor: the builder's side of a stream, and a local source if there is one. Answer: a pidfd.
    Build(Build),
    /// Removes the work folder of a build, or of all.
    EndBuild {
        name: Option<String>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Names(Vec<String>),
    Usage(Usage),
    Bytes(u64),
    Process(ProcessIdentity),
    Exit(Exit),
}

/// Why the root process did not do a thing.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum HostError {
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    AlreadyExists(String),
    #[error("{0}")]
    Full(String),
    #[error("process {pid} is gone")]
    Gone { pid: u32 },
    /// The request was outside of what the caller may ask for.
    #[error("the root process refused: {0}")]
    Refused(String),
    #[error("the root process (space-hostd) cannot be reached: {0}")]
    Unavailable(String),
    #[error("{0}")]
    Failed(String),
}

/// An error with its causes in one line.
fn text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let next = cause.to_string();
        if !text.contains(&next) {
            text += ": ";
            text += &next;
        }
        source = cause.source();
    }
    text
}

impl From<PoolError> for HostError {
    fn from(error: PoolError) -> Self {
        let said = text(&error);
        match error {
            PoolError::NotFound(_) => Self::NotFound(said),
            PoolError::AlreadyExists(_) => Self::AlreadyExists(said),
            PoolError::Full(_) => Self::Full(said),
            PoolError::BadName(_) | PoolError::NotASubvolume(_) => Self::Refused(said),
            _ => Self::Failed(said),
        }
    }
}

impl From<CgroupError> for HostError {
    fn from(error: CgroupError) -> Self {
        let said = text(&error);
        if matches!(error, CgroupError::BadName(_)) { Self::Refused(said) } else { Self::Failed(said) }
    }
}

impl From<ProcessError> for HostError {
    fn from(error: ProcessError) -> Self {
        match error {
            ProcessError::Gone { pid } => Self::Gone { pid },
            other => Self::Failed(text(&other)),
        }
    }
}

impl From<crate::jail::JailError> for HostError {
    fn from(error: crate::jail::JailError) -> Self {
        Self::Failed(text(&error))
    }
}

/// Sends one packet.
///
/// # Errors
/// `InvalidInput` when it would be too long; what the socket says.
pub fn send(socket: &OwnedFd, message: &impl Serialize, fds: &[OwnedFd]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MESSAGE_MAX_BYTES || fds.len() > FDS_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too long"));
    }
    let numbers: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights = if fds.is_empty() { &rights[..0] } else { &rights[..] };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Takes one packet; `None`: the other side has closed. Descriptors of a packet that is refused are closed.
///
/// # Errors
/// `InvalidData` when the packet is too long, has too many descriptors or is no such message; what the socket says.
pub fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MESSAGE_MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    // Owns what is in it, also when there was more than it has room for.
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    // The buffer is rounded up, so that a few more may have fitted in.
    if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || fds.len() > FDS_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
    }
    if message.bytes == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes[..message.bytes])?, fds)))
}
