//! The node's side: the primitives as functions, carried out by the root process, or in this process where it is root itself
//! (tests, set-up).
//!
//! Calls block until they are answered. The connection may break at any instruction, since the root process may be ended and
//! started anew: a call that was not answered is made again, which every primitive allows.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::cgroup::{Limits, Weight};
use crate::pool::{Area, Pool, Usage};
use crate::process::{Exit, Order, ProcessIdentity, VmmProcess};
use crate::protocol::{self, Build, HostError, Reply, Request, Start};
use crate::service::Service;

/// For a root process that is just being started anew.
const PATIENCE: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_millis(50);
/// Connections that are kept for the next calls.
const IDLE_MAX: usize = 8;

#[derive(Debug)]
enum Way {
    Here(Box<Service>),
    Socket { path: PathBuf, idle: Mutex<Vec<OwnedFd>> },
}

/// The root process of a node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Host {
    pool: Pool,
    way: Arc<Way>,
}

/// A group of processes, by name.
#[derive(Clone, Debug)]
pub struct Group {
    host: Host,
    name: String,
}

impl Host {
    /// Does it all in this process.
    pub fn here(service: Service) -> Host {
        Host { pool: service.pool.clone(), way: Arc::new(Way::Here(Box::new(service))) }
    }

    /// Asks the root process that listens at `socket`. `pool`: the folder of its pool.
    pub fn at(socket: impl Into<PathBuf>, pool: &Path) -> Host {
        Host { pool: Pool::attach(pool), way: Arc::new(Way::Socket { path: socket.into(), idle: Mutex::default() }) }
    }

    fn call(&self, request: Request, fds: &[OwnedFd]) -> Result<(Reply, Vec<OwnedFd>), HostError> {
        match &*self.way {
            Way::Here(service) => {
                let copies: io::Result<Vec<_>> = fds.iter().map(OwnedFd::try_clone).collect();
                service.handle(request, copies.map_err(unavailable)?)
            }
            Way::Socket { path, idle } => ask(path, idle, &request, fds),
        }
    }

    fn done(&self, request: Request) -> Result<(), HostError> {
        match self.call(request, &[])?.0 {
            Reply::Done => Ok(()),
            other => Err(strange(&other)),
        }
    }

    fn names(&self, request: Request) -> Result<Vec<String>, HostError> {
        match self.call(request, &[])?.0 {
            Reply::Names(names) => Ok(names),
            other => Err(strange(&other)),
        }
    }

    fn process(&self, request: Request, fds: &[OwnedFd]) -> Result<VmmProcess, HostError> {
        let (reply, given) = self.call(request, fds)?;
        match (reply, given.into_iter().next()) {
            (Reply::Process(identity), Some(pidfd)) => Ok(VmmProcess::of_host(self.clone(), identity, pidfd)?),
            (other, _) => Err(strange(&other)),
        }
    }

    /// This process is the node from now on. Comes before anything else.
    pub fn begin(&self) -> Result<(), HostError> {
        self.done(Request::Begin)
    }

    /// The folder the pool is mounted at.
    pub fn root(&self) -> &Path {
        self.pool.root()
    }

    /// The path of a subvolume, whether it exists or not.
    pub fn path(&self, area: Area, name: &str) -> Result<PathBuf, HostError> {
        Ok(self.pool.path(area, name)?)
    }

    /// Makes an empty, writable subvolume and returns its path.
    pub fn create(&self, area: Area, name: &str) -> Result<PathBuf, HostError> {
        self.done(Request::Create { area, name: name.to_owned() })?;
        self.path(area, name)
    }

    /// Makes `to` a snapshot of `from` in one atomic step and returns its path.
    pub fn snapshot(&self, from: (Area, &str), to: (Area, &str), read_only: bool) -> Result<PathBuf, HostError> {
        let (source, target) = ((from.0, from.1.to_owned()), (to.0, to.1.to_owned()));
        self.done(Request::Snapshot { from: source, to: target, read_only })?;
        self.path(to.0, to.1)
    }

    /// Moves a writable subvolume in one atomic step and returns its new path; never replaces anything.
    pub fn rename(&self, from: (Area, &str), to: (Area, &str)) -> Result<PathBuf, HostError> {
        let (source, target) = ((from.0, from.1.to_owned()), (to.0, to.1.to_owned()));
        self.done(Request::Rename { from: source, to: target })?;
        self.path(to.0, to.1)
    }

    /// Deletes a subvolume with all it holds. It is no error when it is gone already.
    pub fn delete(&self, area: Area, name: &str) -> Result<(), HostError> {
        self.done(Request::Delete { area, name: name.to_owned() })
    }

    /// The names of the subvolumes of an area, sorted.
    pub fn list(&self, area: Area) -> Result<Vec<String>, HostError> {
        self.names(Request::List { area })
    }

    /// Total and free bytes of the pool.
    pub fn usage(&self) -> Result<Usage, HostError> {
        match self.call(Request::Usage, &[])?.0 {
            Reply::Usage(usage) => Ok(usage),
            other => Err(strange(&other)),
        }
    }

    /// Makes a group, or takes the one that is left of an earlier attempt, and sets its limits.
    pub fn create_group(&self, name: &str, limits: Limits) -> Result<Group, HostError> {
        self.done(Request::CreateGroup { name: name.to_owned(), limits })?;
        Ok(self.group(name))
    }

    /// The group of that name, whether it exists or not.
    pub fn group(&self, name: &str) -> Group {
        Group { host: self.clone(), name: name.to_owned() }
    }

    /// The names of the groups there are, sorted.
    pub fn groups(&self) -> Result<Vec<String>, HostError> {
        self.names(Request::ListGroups)
    }

    /// Starts a VMM whose folder is at `folder`, a subvolume of the pool. `fds`: standard error, then what it inherits.
    /// Must be called on a tokio runtime.
    pub fn start(&self, folder: &Path, mut start: Start, fds: &[OwnedFd]) -> Result<VmmProcess, HostError> {
        (start.area, start.name) = self.pool.locate(folder)?;
        self.process(Request::Start(start), fds)
    }

    /// Takes hold of a VMM started earlier. `Gone` when it ended or the pid is another's now. Must be called on a tokio
    /// runtime.
    pub fn open(&self, identity: ProcessIdentity) -> Result<VmmProcess, HostError> {
        self.process(Request::Open { identity }, &[])
    }

    /// Ends a VMM, stops it or lets it go on. No error when it has ended already.
    pub fn order(&self, identity: ProcessIdentity, order: Order) -> Result<(), HostError> {
        self.done(Request::Order { identity, order })
    }

    /// How a process that has ended did so; `Unknown` when nobody can tell.
    pub fn exit(&self, identity: ProcessIdentity) -> Exit {
        match self.call(Request::Exit { identity }, &[]) {
            Ok((Reply::Exit(exit), _)) => exit,
            _ => Exit::Unknown,
        }
    }

    /// Starts the builder of a root file system. `fds`: its side of a stream, and a local source if there is one.
    pub fn build(&self, build: Build, fds: &[OwnedFd]) -> Result<VmmProcess, HostError> {
        self.process(Request::Build(build), fds)
    }

    /// Removes the work folder of a build, or of all.
    pub fn end_build(&self, name: Option<&str>) -> Result<(), HostError> {
        self.done(Request::EndBuild { name: name.map(str::to_owned) })
    }
}

impl Group {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Kills what is in it and removes it; no error when it is gone.
    pub fn end(&self) -> Result<(), HostError> {
        self.host.done(Request::EndGroup { name: self.name.clone() })
    }

    pub fn set_weight(&self, weight: Weight) -> Result<(), HostError> {
        self.host.done(Request::WeighGroup { name: self.name.clone(), weight })
    }

    /// Bytes that are charged to the group now, page cache included.
    pub fn memory_used(&self) -> Result<u64, HostError> {
        match self.host.call(Request::MemoryOfGroup { name: self.name.clone() }, &[])?.0 {
            Reply::Bytes(bytes) => Ok(bytes),
            other => Err(strange(&other)),
        }
    }
}

fn strange(reply: &Reply) -> HostError {
    HostError::Unavailable(format!("it answered something else: {reply:?}"))
}

fn unavailable(error: impl std::fmt::Display) -> HostError {
    HostError::Unavailable(error.to_string())
}

fn dial(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

type Answer = Result<Reply, HostError>;

fn exchange(socket: &OwnedFd, request: &Request, fds: &[OwnedFd]) -> io::Result<(Answer, Vec<OwnedFd>)> {
    protocol::send(socket, request, fds)?;
    protocol::receive(socket)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Asks until there is an answer, or patience ends. The first connection may be a kept one that broke meanwhile.
///
/// When a packet was sent and its answer lost, the request may have been carried out: then "it is there already" is what was
/// asked for.
fn ask(
    path: &Path,
    idle: &Mutex<Vec<OwnedFd>>,
    request: &Request,
    fds: &[OwnedFd],
) -> Result<(Reply, Vec<OwnedFd>), HostError> {
    let idle = || idle.lock().unwrap_or_else(PoisonError::into_inner);
    let until = Instant::now() + PATIENCE;
    let mut again = false;
    loop {
        let kept = idle().pop();
        let mut sent = false;
        let asked = kept.map_or_else(|| dial(path), Ok).and_then(|socket| {
            sent = true;
            let answer = exchange(&socket, request, fds)?;
            Ok((socket, answer))
        });
        match asked {
            Ok((socket, (answer, given))) => {
                let mut idle = idle();
                if idle.len() < IDLE_MAX {
                    idle.push(socket);
                }
                return match answer {
                    Err(error) if again && is_done(request, &error) => Ok((Reply::Done, given)),
                    answer => answer.map(|reply| (reply, given)),
                };
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(unavailable(error)),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(unavailable(error)),
            Err(error) if Instant::now() > until => return Err(unavailable(error)),
            Err(_) => {
                again |= sent;
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Whether the refusal of a request that was made twice says that the first one was carried out.
fn is_done(request: &Request, error: &HostError) -> bool {
    match request {
        Request::Create { .. } | Request::Snapshot { .. } => matches!(error, HostError::AlreadyExists(_)),
        // The source went with the first.
        Request::Rename { .. } => matches!(error, HostError::NotFound(_)),
        _ => false,
    }
}
