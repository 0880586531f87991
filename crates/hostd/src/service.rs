//! The primitives behind the requests: what the root process does, and what it checks before.
//!
//! It keeps nothing that a restart would lose: what runs is read from the kernel, what is on disk from the pool. Every
//! request may be repeated. It must never act on a process, group or subvolume outside of its own range, whoever asks.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use nix::libc;
use serde::{Deserialize, Serialize};

use crate::cgroup::{Cgroup, CgroupRoot};
use crate::jail::{Contents, Jail, JailRoot};
use crate::pool::{Area, Pool};
use crate::process::{self, Exit, Output, ProcessIdentity, Rights, Rlimits, SpawnSpec};
use crate::protocol::{HostError, Reply, Request, Start};
use crate::seccomp::Profile;

/// Ends of VMMs that are remembered for a node that has not asked yet.
const ENDED_MAX: usize = 4096;

/// A VMM that may be started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Program {
    pub contents: Contents,
    pub profile: Profile,
    /// The guest's kernel and first file system, for a boot.
    pub boot: Option<(PathBuf, PathBuf)>,
}

/// What the root process is started with. Nothing of it comes from the node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    /// Names the cgroups of this data folder.
    pub owner: String,
    /// Mounted, and swept.
    pub pool: PathBuf,
    /// Where the root folders of jails are made.
    pub jails: PathBuf,
    /// Where builds work: on the host's disk, not in the pool.
    pub builds: PathBuf,
    /// The program of a build, and the arguments that make it one.
    pub builder: Option<(PathBuf, Vec<String>)>,
    /// Of builds: where proxies are.
    pub build_env: Vec<String>,
    /// User and group of the node: who may ask, and who owns the folders.
    pub node: (u32, u32),
    /// First user id of VMMs, and how many there are.
    pub uids: (u32, u32),
    pub vmms: BTreeMap<String, Program>,
    /// No two VMMs on the threads of one core.
    pub core_scheduling: bool,
    /// See [`crate::points`].
    pub drill: Option<PathBuf>,
}

/// The root process's state.
#[derive(Debug)]
pub struct Service {
    pub(crate) config: Config,
    pub(crate) pool: Pool,
    groups: CgroupRoot,
    /// The process that is the node, held while a request of its is carried out.
    node: RwLock<Option<i32>>,
    roots: Mutex<HashMap<String, JailRoot>>,
    /// Of each user the last process that has it.
    users: Mutex<HashMap<u32, OwnedFd>>,
    pub(crate) children: Mutex<HashMap<u32, Child>>,
}

#[derive(Debug)]
pub(crate) struct Child {
    identity: ProcessIdentity,
    end: End,
}

/// A descriptor is held only as long as there is an end to wait for.
#[derive(Debug)]
enum End {
    Awaited(OwnedFd),
    Known(Exit),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HostError {
    let path = path.to_owned();
    move |error| HostError::Failed(format!("cannot {action} {}: {error}", path.display()))
}

/// The process of a group that has this user.
fn running(uid: u32, group: &Cgroup) -> Option<(ProcessIdentity, OwnedFd)> {
    let pid = group.pids().ok()?.into_iter().find(|pid| process::user(*pid) == Some(uid))?;
    let identity = process::identity(pid).ok()?;
    Some((identity, process::find(identity).ok()?))
}

/// Opens a file or folder itself, never what a link leads to, and never a device's or pipe's other end.
fn open_plain(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

impl Service {
    /// Looks at what runs, and gives the node what an earlier version left to root.
    pub fn open(config: Config) -> Result<Service, HostError> {
        let pool = Pool::attach(&config.pool);
        let groups = CgroupRoot::new(&config.owner)?;
        let service = Service {
            groups,
            pool,
            node: RwLock::default(),
            roots: Mutex::default(),
            users: Mutex::default(),
            children: Mutex::default(),
            config,
        };
        service.find_users();
        service.give_folders()?;
        Ok(service)
    }

    /// The control groups of this data folder.
    pub fn groups(&self) -> &CgroupRoot {
        &self.groups
    }

    fn is_vmm_user(&self, uid: u32) -> bool {
        let (base, count) = self.config.uids;
        (base..base.saturating_add(count)).contains(&uid)
    }

    /// VMMs of an earlier root process still have their users.
    fn find_users(&self) {
        let mut users = lock(&self.users);
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            if let Some(uid) = process::user(pid).filter(|uid| self.is_vmm_user(*uid))
                && let Ok(pidfd) = process::open_pidfd(pid)
            {
                users.insert(uid, pidfd);
            }
        }
    }

    /// Areas and the folders in them belong to the node, so that it can keep its records there.
    fn give_folders(&self) -> Result<(), HostError> {
        let (uid, gid) = self.config.node;
        for area in Area::ALL {
            let path = self.pool.area(area);
            std::os::unix::fs::chown(&path, Some(uid), Some(gid)).map_err(failed("give", &path))?;
            for name in self.pool.list(area)? {
                let folder = self.pool.path(area, &name)?;
                let owner = std::fs::symlink_metadata(&folder).map_err(failed("inspect", &folder))?.uid();
                if owner != uid {
                    self.give_old_folder(area, &name, &folder)?;
                }
            }
        }
        Ok(())
    }

    /// The folder itself last: after a crash all of it is done again.
    fn give_old_folder(&self, area: Area, name: &str, folder: &Path) -> Result<(), HostError> {
        let (uid, gid) = self.config.node;
        let read_only = area == Area::Templates || area == Area::Checkpoints;
        if read_only {
            self.pool.set_read_only(area, name, false)?;
        }
        for entry in std::fs::read_dir(folder).map_err(failed("list", folder))?.flatten() {
            let path = entry.path();
            let meta = entry.metadata().map_err(failed("inspect", &path))?;
            // A VMM's file stays its own; the node gets at it by its group.
            let owner = if self.is_vmm_user(meta.uid()) { meta.uid() } else { uid };
            std::os::unix::fs::lchown(&path, Some(owner), Some(gid)).map_err(failed("give", &path))?;
            if meta.is_file() {
                let mode = Permissions::from_mode(0o660);
                open_plain(&path).and_then(|file| file.set_permissions(mode)).map_err(failed("give", &path))?;
            }
        }
        self.give_folder(folder)?;
        if read_only {
            self.pool.set_read_only(area, name, true)?;
        }
        Ok(())
    }

    /// The VMM may pass through it, not look around.
    fn give_folder(&self, folder: &Path) -> Result<(), HostError> {
        let (uid, gid) = self.config.node;
        let open = open_plain(folder).map_err(failed("open", folder))?;
        open.set_permissions(Permissions::from_mode(0o711)).map_err(failed("open up", folder))?;
        fchown(&open, Some(uid), Some(gid)).map_err(failed("give", folder))
    }

    /// One request of a process that has the node's user. A node may have died with a request on its way: the next one must not
    /// look at what there is before that is done, nor find more of it later.
    pub fn handle_for(
        &self,
        caller: i32,
        request: Request,
        fds: Vec<OwnedFd>,
    ) -> Result<(Reply, Vec<OwnedFd>), HostError> {
        if matches!(request, Request::Begin) {
            *self.node.write().unwrap_or_else(PoisonError::into_inner) = Some(caller);
            return Ok((Reply::Done, Vec::new()));
        }
        let node = self.node.read().unwrap_or_else(PoisonError::into_inner);
        if node.is_some_and(|node| node != caller) {
            return Err(HostError::Refused("another process is the node now".to_owned()));
        }
        self.handle(request, fds)
    }

    /// One request. The descriptors that came with it are used or closed; those of the answer are the caller's.
    pub fn handle(&self, request: Request, fds: Vec<OwnedFd>) -> Result<(Reply, Vec<OwnedFd>), HostError> {
        let names = |pair: &(Area, String)| (pair.0, pair.1.clone());
        let mut given = Vec::new();
        let reply = match request {
            // In this process there is no other.
            Request::Begin => Reply::Done,
            Request::Create { area, name } => {
                let folder = self.pool.create(area, &name)?;
                self.give_folder(&folder)?;
                Reply::Done
            }
            Request::Snapshot { from, to, read_only } => {
                let (from, to) = (names(&from), names(&to));
                self.pool.snapshot((from.0, &from.1), (to.0, &to.1), read_only)?;
                Reply::Done
            }
            Request::Rename { from, to } => {
                self.pool.rename((from.0, &from.1), (to.0, &to.1))?;
                Reply::Done
            }
            Request::Delete { area, name } => {
                self.pool.delete(area, &name)?;
                Reply::Done
            }
            Request::List { area } => Reply::Names(self.pool.list(area)?),
            Request::Usage => Reply::Usage(self.pool.usage()?),
            Request::CreateGroup { name, limits } => {
                self.groups.create(&name, limits)?;
                Reply::Done
            }
            Request::EndGroup { name } => {
                let group = self.groups.open(&name)?;
                if group.exists() {
                    group.kill()?;
                    group.remove()?;
                }
                Reply::Done
            }
            Request::ListGroups => Reply::Names(self.groups.list()?),
            Request::WeighGroup { name, weight } => {
                self.groups.open(&name)?.set_weight(weight)?;
                Reply::Done
            }
            Request::MemoryOfGroup { name } => Reply::Bytes(self.groups.open(&name)?.memory_used()?),
            Request::Start(start) => {
                let (identity, pidfd) = self.start(start, fds)?;
                given.push(pidfd);
                Reply::Process(identity)
            }
            Request::Open { identity } => {
                given.push(self.vmm(identity)?);
                Reply::Process(identity)
            }
            Request::Order { identity, order } => {
                match self.vmm(identity) {
                    Ok(pidfd) => process::order(&pidfd, identity.pid, order)?,
                    Err(HostError::Gone { .. }) => {}
                    Err(error) => return Err(error),
                }
                Reply::Done
            }
            Request::Exit { identity } => Reply::Exit(self.exit(identity)),
            Request::Build(build) => {
                let (identity, pidfd) = self.build(&build, fds)?;
                given.push(pidfd);
                Reply::Process(identity)
            }
            Request::EndBuild { name } => {
                self.end_build(name.as_deref())?;
                Reply::Done
            }
        };
        Ok((reply, given))
    }

    /// A pidfd of a living process that has one of our users.
    fn vmm(&self, identity: ProcessIdentity) -> Result<OwnedFd, HostError> {
        let gone = HostError::Gone { pid: identity.pid };
        let pidfd = process::find(identity)?;
        // A zombie of ours has its user still; what is not a VMM is none of the caller's business.
        let ours = process::user(identity.pid).is_some_and(|uid| self.is_vmm_user(uid))
            || lock(&self.children).get(&identity.pid).is_some_and(|child| child.identity == identity);
        if ours { Ok(pidfd) } else { Err(gone) }
    }

    fn start(&self, start: Start, fds: Vec<OwnedFd>) -> Result<(ProcessIdentity, OwnedFd), HostError> {
        start.check()?;
        let program = self.config.vmms.get(&start.driver);
        let program = program.ok_or_else(|| HostError::Refused(format!("there is no driver {:?}", start.driver)))?;
        let (base, count) = self.config.uids;
        if start.slot.0 >= count {
            return Err(HostError::Refused(format!("there is no slot {}", start.slot.0)));
        }
        let uid = base + start.slot.0;
        let folder = self.pool.subvolume(start.area, &start.name)?;
        let group = self.groups.open(&start.group)?;
        let mut fds = fds.into_iter();
        let output = fds.next().map_or(Output::Null, Output::Fd);
        // Held until the new process is in it: two starts never get the same user.
        let mut users = lock(&self.users);
        if users.get(&uid).is_some_and(|pidfd| !process::has_ended(pidfd)) {
            // Asked for again, because the root process ended before it could answer: it is there.
            return running(uid, &group).ok_or_else(|| HostError::Refused(format!("slot {} is in use", start.slot.0)));
        }
        for name in &start.given {
            self.hand_over(&folder.join(name), uid)?;
        }
        let spec = SpawnSpec {
            program: program.contents.program.clone(),
            args: start.args,
            cwd: folder.clone(),
            uid,
            gid: uid,
            cgroup: Some(group),
            output,
            limits: Rlimits { open_files: Some(start.open_files), file_size_bytes: Some(start.file_size_bytes) },
            inherited: fds.collect(),
            env: Vec::new(),
            rights: Rights::None,
            profile: Some(program.profile),
            jail: Some(Jail {
                root: self.root(&start.driver, program)?,
                folder,
                boot: program.boot.clone().filter(|_| start.boot),
                own_core: self.config.core_scheduling,
            }),
        };
        let (identity, pidfd) = process::start(spec)?;
        users.insert(uid, pidfd.try_clone().map_err(failed("keep", Path::new("a pidfd")))?);
        self.keep(identity, &pidfd)?;
        Ok((identity, pidfd))
    }

    /// Remembers a child, so that it is reaped and its end can be asked for.
    pub(crate) fn keep(&self, identity: ProcessIdentity, pidfd: &OwnedFd) -> Result<(), HostError> {
        let pidfd = pidfd.try_clone().map_err(failed("keep", Path::new("a pidfd")))?;
        let mut children = lock(&self.children);
        if children.len() >= ENDED_MAX {
            children.retain(|_, child| matches!(child.end, End::Awaited(_)));
        }
        children.insert(identity.pid, Child { identity, end: End::Awaited(pidfd) });
        Ok(())
    }

    fn root(&self, driver: &str, program: &Program) -> Result<JailRoot, HostError> {
        let mut roots = lock(&self.roots);
        if let Some(root) = roots.get(driver) {
            return Ok(root.clone());
        }
        let root = JailRoot::prepare(&self.config.jails, driver, &program.contents)?;
        roots.insert(driver.to_owned(), root.clone());
        Ok(root)
    }

    /// A file, or the files of a folder, become the VMM's. Opened once and changed through that, so that nothing can be put in
    /// its place on the way.
    ///
    /// The folder itself stays the node's: with what a VMM makes in a folder of its own it could fill the pool, so the node
    /// closes it once that is made.
    fn hand_over(&self, path: &Path, uid: u32) -> Result<(), HostError> {
        let file = open_plain(path).map_err(failed("open", path))?;
        let meta = file.metadata().map_err(failed("inspect", path))?;
        let known = |owner: u32| owner == 0 || owner == self.config.node.0 || self.is_vmm_user(owner);
        if !known(meta.uid()) || (meta.is_file() && meta.nlink() > 1) {
            return Err(HostError::Refused(format!("{} is not a file of a sandbox", path.display())));
        }
        if meta.is_dir() {
            for entry in std::fs::read_dir(path).map_err(failed("list", path))?.flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_file() || kind.is_fifo()) {
                    self.hand_over(&entry.path(), uid)?;
                }
            }
        }
        let (node, group) = self.config.node;
        let (owner, mode) = if meta.is_dir() { ((node, uid), 0o770) } else { ((uid, group), 0o660) };
        fchown(&file, Some(owner.0), Some(owner.1)).map_err(failed("give", path))?;
        file.set_permissions(Permissions::from_mode(mode)).map_err(failed("open up", path))
    }

    fn exit(&self, identity: ProcessIdentity) -> Exit {
        self.reap();
        let children = lock(&self.children);
        let child = children.get(&identity.pid).filter(|child| child.identity == identity);
        match child.map(|child| &child.end) {
            Some(End::Known(exit)) => *exit,
            _ => Exit::Unknown,
        }
    }

    /// Collects children that have ended.
    pub fn reap(&self) {
        for child in lock(&self.children).values_mut() {
            if let End::Awaited(pidfd) = &child.end
                && process::has_ended(pidfd)
            {
                child.end = End::Known(process::reap(pidfd));
            }
        }
        lock(&self.users).retain(|_, pidfd| !process::has_ended(pidfd));
    }
}
