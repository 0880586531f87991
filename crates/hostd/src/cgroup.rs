//! One cgroup per VMM, limited in memory, CPU and number of tasks.
//!
//! Version 2 where it has controllers; otherwise the version 1 hierarchies of the three controllers, a folder of the same
//! name in each. The groups lie under the root of what this process can see, not under its own group: a service that is
//! started anew from elsewhere must find its VMMs' groups where they were.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::libc;
use serde::{Deserialize, Serialize};

use crate::pool::is_name;

/// The controllers a group needs.
pub const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// Length of the CPU period in microseconds; short, so that a throttled VMM does not stall for long.
const CPU_PERIOD_US: u64 = 20_000;
const REMOVE_PATIENCE: Duration = Duration::from_secs(5);

/// Upper bounds of a group, and its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub memory_bytes: u64,
    /// Thousandths of one CPU.
    pub cpu_millis: u32,
    pub pids: u32,
    pub weight: Weight,
}

/// How much of a CPU a group gets while others of the same owner want it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Weight {
    Normal,
    /// Gives way to every normal group; still gets what they leave.
    Background,
}

impl Weight {
    /// The value for `cpu.shares` of version 1.
    fn shares(self) -> u32 {
        match self {
            Weight::Normal => 1024,
            Weight::Background => 32,
        }
    }

    /// The value for `cpu.weight` of version 2.
    fn weight(self) -> u32 {
        match self {
            Weight::Normal => 100,
            Weight::Background => 3,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("the cgroup name {0:?} is not made of 1 to 128 letters, digits, '.', '_', '-' parts")]
    BadName(String),
    #[error("the host offers no {0} controller, in cgroup version 2 or 1: mount cgroup2 at /sys/fs/cgroup")]
    NoController(&'static str),
    #[error("the cgroup {0} still has processes that do not end")]
    Busy(PathBuf),
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Io { action, path, source }
}

/// Where the groups of this host are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hierarchy {
    /// The mount point of version 2.
    V2(PathBuf),
    /// A mount point per controller, in the order of [`CONTROLLERS`].
    V1([PathBuf; 3]),
}

impl Hierarchy {
    /// Finds out what is mounted. Version 2 wins when all controllers are there.
    pub fn detect() -> Result<Hierarchy, CgroupError> {
        let path = Path::new("/proc/self/mountinfo");
        Self::from_mountinfo(&fs::read_to_string(path).map_err(io_error("read", path))?)
    }

    fn from_mountinfo(text: &str) -> Result<Hierarchy, CgroupError> {
        let mut v1: [Option<PathBuf>; 3] = [None, None, None];
        for line in text.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let Some(mount) = left.split(' ').nth(4).map(PathBuf::from) else { continue };
            let mut right = right.split(' ');
            match right.next() {
                Some("cgroup2") => {
                    let offered = fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default();
                    if CONTROLLERS.iter().all(|name| offered.split_whitespace().any(|word| word == *name)) {
                        return Ok(Hierarchy::V2(mount));
                    }
                }
                Some("cgroup") => {
                    let options = right.nth(1).unwrap_or_default();
                    for (slot, name) in v1.iter_mut().zip(CONTROLLERS) {
                        if options.split(',').any(|option| option == name) {
                            *slot = Some(mount.clone());
                        }
                    }
                }
                _ => {}
            }
        }
        let [memory, cpu, pids] = v1;
        let need = |found: Option<PathBuf>, name| found.ok_or(CgroupError::NoController(name));
        Ok(Hierarchy::V1([need(memory, "memory")?, need(cpu, "cpu")?, need(pids, "pids")?]))
    }

    /// 1 or 2.
    pub fn version(&self) -> u8 {
        match self {
            Hierarchy::V2(_) => 2,
            Hierarchy::V1(_) => 1,
        }
    }

    fn mounts(&self) -> &[PathBuf] {
        match self {
            Hierarchy::V2(mount) => std::slice::from_ref(mount),
            Hierarchy::V1(mounts) => mounts,
        }
    }
}

/// The group under which all groups of one owner (one data folder) lie.
#[derive(Clone, Debug)]
pub struct CgroupRoot {
    hierarchy: Hierarchy,
    name: String,
}

/// One VMM's group.
#[derive(Clone, Debug)]
pub struct Cgroup {
    dirs: Vec<PathBuf>,
    v2: bool,
}

/// The way of a new process into its group. Moving a whole process stops the forks and exits of the host until an RCU grace
/// period has passed (7 ms at the median here, 14 at the 90th percentile); neither of these does.
pub(crate) enum Entry {
    /// Version 2: the kernel makes it in the group, whose folder this is.
    Born(File),
    /// Version 1: while it has one thread, it writes "0" (myself) to these `tasks` files.
    Joins(Vec<File>),
}

fn check_name(name: &str) -> Result<(), CgroupError> {
    if is_name(name) { Ok(()) } else { Err(CgroupError::BadName(name.chars().take(256).collect())) }
}

fn write(dir: &Path, file: &str, value: impl ToString) -> Result<(), CgroupError> {
    let path = dir.join(file);
    fs::write(&path, value.to_string()).map_err(io_error("write", &path))
}

/// For what a kernel built without accounting of swap lacks.
fn write_if_there(dir: &Path, file: &str, value: impl ToString) -> Result<(), CgroupError> {
    match write(dir, file, value) {
        Err(CgroupError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Memory, and the same for memory and swap together, which must never be the smaller one on the way.
fn limit_memory_v1(dir: &Path, bytes: u64) -> Result<(), CgroupError> {
    const BOTH: &str = "memory.memsw.limit_in_bytes";
    if write(dir, "memory.limit_in_bytes", bytes).is_err() {
        // A group that is left of an earlier attempt may have a smaller limit of both.
        write_if_there(dir, BOTH, bytes)?;
        write(dir, "memory.limit_in_bytes", bytes)?;
    }
    write_if_there(dir, BOTH, bytes)
}

fn make_dir(path: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(io_error("create", path)(error)),
        _ => Ok(()),
    }
}

impl CgroupRoot {
    /// The root `space/<owner>`, made when the first group is.
    pub fn new(owner: &str) -> Result<CgroupRoot, CgroupError> {
        Self::in_hierarchy(Hierarchy::detect()?, owner)
    }

    fn in_hierarchy(hierarchy: Hierarchy, owner: &str) -> Result<CgroupRoot, CgroupError> {
        check_name(owner)?;
        Ok(CgroupRoot { hierarchy, name: owner.to_owned() })
    }

    pub fn hierarchy(&self) -> &Hierarchy {
        &self.hierarchy
    }

    fn dirs(&self) -> impl Iterator<Item = PathBuf> {
        self.hierarchy.mounts().iter().map(|mount| mount.join("space").join(&self.name))
    }

    /// Makes a group, or takes the one that is left of an earlier attempt, and sets its limits.
    pub fn create(&self, name: &str, limits: Limits) -> Result<Cgroup, CgroupError> {
        let cgroup = self.open(name)?;
        for mount in self.hierarchy.mounts() {
            let (top, owner) = (mount.join("space"), mount.join("space").join(&self.name));
            let parents = [mount.clone(), top, owner];
            for parent in &parents {
                make_dir(parent)?;
                if cgroup.v2 {
                    enable_controllers(parent)?;
                }
            }
        }
        for dir in &cgroup.dirs {
            make_dir(dir)?;
        }
        let quota = u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000;
        match cgroup.dirs.as_slice() {
            [memory, cpu, pids] => {
                limit_memory_v1(memory, limits.memory_bytes)?;
                write(cpu, "cpu.cfs_period_us", CPU_PERIOD_US)?;
                write(cpu, "cpu.cfs_quota_us", quota.max(1000))?;
                write(pids, "pids.max", limits.pids)?;
            }
            dirs => {
                let dir = &dirs[0];
                write(dir, "memory.max", limits.memory_bytes)?;
                write_if_there(dir, "memory.swap.max", 0)?;
                write(dir, "cpu.max", format!("{} {CPU_PERIOD_US}", quota.max(1000)))?;
                write(dir, "pids.max", limits.pids)?;
            }
        }
        cgroup.set_weight(limits.weight)?;
        Ok(cgroup)
    }

    /// The group of that name, whether it exists or not: for adoption and for removal.
    pub fn open(&self, name: &str) -> Result<Cgroup, CgroupError> {
        check_name(name)?;
        Ok(Cgroup { dirs: self.dirs().map(|dir| dir.join(name)).collect(), v2: self.hierarchy.version() == 2 })
    }

    /// The names of the groups there are, sorted.
    pub fn list(&self) -> Result<Vec<String>, CgroupError> {
        let mut names = Vec::new();
        for dir in self.dirs() {
            let entries = match fs::read_dir(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(io_error("list", &dir))?,
            };
            let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            names.extend(folders.filter_map(|entry| entry.file_name().into_string().ok()));
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Removes the root itself when no group is left in it.
    pub fn remove_if_empty(&self) {
        for dir in self.dirs() {
            // Not empty, or gone: both are fine.
            drop(fs::remove_dir(&dir));
            drop(dir.parent().map(fs::remove_dir));
        }
    }
}

/// Lets the children of a version 2 group have our controllers.
///
/// The kernel refuses that (EBUSY) for a group that holds processes, unless it is the real root. Inside a container the
/// visible root does: its processes are then moved to a leaf next to ours first.
fn enable_controllers(dir: &Path) -> Result<(), CgroupError> {
    let enabled = fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
    let missing: Vec<&str> =
        CONTROLLERS.into_iter().filter(|name| !enabled.split_whitespace().any(|word| word == *name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let request = missing.iter().map(|name| format!("+{name}")).collect::<Vec<_>>().join(" ");
    match write(dir, "cgroup.subtree_control", &request) {
        Err(CgroupError::Io { source, .. }) if source.raw_os_error() == Some(libc::EBUSY) => {
            let leaf = dir.join("space-host");
            make_dir(&leaf)?;
            let path = dir.join("cgroup.procs");
            for pid in fs::read_to_string(&path).map_err(io_error("read", &path))?.lines() {
                // One that ended meanwhile, or that may not be moved, shows in the second attempt below.
                drop(fs::write(leaf.join("cgroup.procs"), pid));
            }
            write(dir, "cgroup.subtree_control", &request)
        }
        other => other,
    }
}

impl Cgroup {
    /// How a process that is about to be made gets into the group.
    pub(crate) fn entry(&self) -> io::Result<Entry> {
        if self.v2 {
            return File::open(&self.dirs[0]).map(Entry::Born);
        }
        let open = |dir: &PathBuf| OpenOptions::new().write(true).open(dir.join("tasks"));
        self.dirs.iter().map(open).collect::<io::Result<_>>().map(Entry::Joins)
    }

    pub fn set_weight(&self, weight: Weight) -> Result<(), CgroupError> {
        match self.dirs.as_slice() {
            [_, cpu, _] => write(cpu, "cpu.shares", weight.shares()),
            dirs => write(&dirs[0], "cpu.weight", weight.weight()),
        }
    }

    /// Bytes that are charged to the group now, page cache included.
    pub fn memory_used(&self) -> Result<u64, CgroupError> {
        let path = self.dirs[0].join(if self.v2 { "memory.current" } else { "memory.usage_in_bytes" });
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        let number = text.trim().parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
        number.map_err(io_error("read", &path))
    }

    /// Whether the group is there, in any hierarchy.
    pub fn exists(&self) -> bool {
        self.dirs.iter().any(|dir| dir.exists())
    }

    /// The processes in the group.
    pub fn pids(&self) -> Result<Vec<u32>, CgroupError> {
        let mut pids = Vec::new();
        for dir in &self.dirs {
            let path = dir.join("cgroup.procs");
            match fs::read_to_string(&path) {
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {}
                other => pids.extend(
                    other.map_err(io_error("read", &path))?.lines().filter_map(|line| line.parse::<u32>().ok()),
                ),
            }
        }
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Sends SIGKILL to every process in the group, again until none is left, for at most five seconds.
    pub fn kill(&self) -> Result<(), CgroupError> {
        let until = Instant::now() + REMOVE_PATIENCE;
        loop {
            let pids = self.pids()?;
            if pids.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(CgroupError::Busy(self.dirs[0].clone()));
            }
            if !(self.v2 && write(&self.dirs[0], "cgroup.kill", 1).is_ok()) {
                for pid in pids.into_iter().filter_map(|pid| i32::try_from(pid).ok()).filter(|pid| *pid > 0) {
                    // Ended meanwhile: the next round sees it.
                    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Removes the group; no error when it is gone. Its processes must have ended, or be ending.
    pub fn remove(&self) -> Result<(), CgroupError> {
        let until = Instant::now() + REMOVE_PATIENCE;
        for dir in &self.dirs {
            loop {
                match fs::remove_dir(dir) {
                    Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < until => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                        return Err(CgroupError::Busy(dir.clone()));
                    }
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(io_error("remove", dir)(error));
                    }
                    _ => break,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Output, Rights, Rlimits, SpawnSpec, spawn};

    /// A version 2 hierarchy of our own, which needs no controllers to hold processes.
    struct Mounted(tempfile::TempDir);

    impl Drop for Mounted {
        fn drop(&mut self) {
            let group = self.0.path().join("space-test-born");
            let until = Instant::now() + REMOVE_PATIENCE;
            while group.exists() && fs::remove_dir(&group).is_err() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
        }
    }

    #[tokio::test]
    async fn in_version_2_a_process_is_born_in_its_group() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIP: mounting a cgroup hierarchy needs root");
            return;
        }
        let mounted = Mounted(tempfile::tempdir().unwrap());
        let flags = nix::mount::MsFlags::empty();
        if let Err(errno) = nix::mount::mount(Some("none"), mounted.0.path(), Some("cgroup2"), flags, None::<&str>) {
            eprintln!("SKIP: this kernel mounts no cgroup2: {errno}");
            return;
        }
        let group = Cgroup { dirs: vec![mounted.0.path().join("space-test-born")], v2: true };
        fs::create_dir_all(&group.dirs[0]).unwrap();
        let said = mounted.0.path().with_extension("said");
        let spec = SpawnSpec {
            program: "/bin/cat".into(),
            args: vec!["/proc/self/cgroup".to_owned()],
            cwd: "/".into(),
            uid: 0,
            gid: 0,
            cgroup: Some(group),
            output: Output::File(said.clone()),
            limits: Rlimits { open_files: None, file_size_bytes: Some(1 << 20) },
            inherited: Vec::new(),
            env: Vec::new(),
            rights: Rights::None,
            profile: None,
            jail: None,
        };
        let process = spawn(spec).unwrap();
        assert_eq!(process.wait().await, crate::process::Exit::Code(0));
        let text = fs::read_to_string(&said).unwrap();
        fs::remove_file(&said).unwrap();
        assert!(text.lines().any(|line| line.starts_with("0::/") && line.ends_with("space-test-born")), "{text}");
    }

    #[test]
    fn version_1_needs_all_three_controllers() {
        let line =
            |name: &str| format!("30 25 0:2{} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n", name.len());
        let all: String = CONTROLLERS.iter().map(|name| line(name)).collect();
        let found = Hierarchy::from_mountinfo(&all).unwrap();
        assert_eq!(found, Hierarchy::V1(CONTROLLERS.map(|name| Path::new("/sys/fs/cgroup").join(name))));
        let some = line("memory") + &line("cpu");
        assert!(matches!(Hierarchy::from_mountinfo(&some), Err(CgroupError::NoController("pids"))));
    }

    #[test]
    fn version_2_writes_its_own_files() {
        let dir = tempfile::tempdir().unwrap();
        let mount = dir.path().to_owned();
        fs::write(mount.join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
        let info = format!("31 25 0:29 / {} rw - cgroup2 cgroup2 rw\n", mount.display());
        let hierarchy = Hierarchy::from_mountinfo(&info).unwrap();
        assert_eq!(hierarchy, Hierarchy::V2(mount.clone()));
        let root = CgroupRoot::in_hierarchy(hierarchy, "owner").unwrap();
        root.create("one", Limits { memory_bytes: 1 << 30, cpu_millis: 1500, pids: 64, weight: Weight::Background })
            .unwrap();
        let read = |file: &str| fs::read_to_string(mount.join("space/owner/one").join(file)).unwrap();
        assert_eq!(
            (read("cpu.max"), read("memory.max"), read("pids.max")),
            ("30000 20000".into(), "1073741824".into(), "64".into())
        );
        assert_eq!(read("cpu.weight"), "3");
        root.open("one").unwrap().set_weight(Weight::Normal).unwrap();
        assert_eq!(read("cpu.weight"), "100");
        fs::write(mount.join("space/owner/one/memory.current"), "4096\n").unwrap();
        assert_eq!(root.open("one").unwrap().memory_used().unwrap(), 4096);
        assert_eq!(fs::read_to_string(mount.join("space/owner/cgroup.subtree_control")).unwrap(), "+memory +cpu +pids");
        assert_eq!(root.list().unwrap(), ["one"]);
        assert!(matches!(root.open("../x"), Err(CgroupError::BadName(_))));
    }
}
