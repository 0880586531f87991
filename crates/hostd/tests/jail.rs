//! The escape drill: this test program runs in a jail in place of a VMM, as one that a guest has taken over would, and tries
//! what must not work. What it managed it reports; the test outside asserts each attempt by name.
#![allow(unsafe_code, reason = "the attempts are system calls")]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::libc;
use serde::{Deserialize, Serialize};
use space_hostd::cgroup::{Cgroup, CgroupRoot, Limits, Weight};
use space_hostd::jail::{Contents, Jail, JailRoot};
use space_hostd::process::{self, Exit, FIRST_INHERITED, Output, Rights, Rlimits, SpawnSpec, spawn};
use space_hostd::seccomp::Profile;

const UID: u32 = 299_100;
const QUOTA: u64 = 1 << 20;
const TASKS: u32 = 24;

/// What the one inside is told of the host, so that it tries the right places.
#[derive(Serialize, Deserialize)]
struct Map {
    victim: PathBuf,
    socket: PathBuf,
    port: u16,
    pid: i32,
    secret: PathBuf,
}

fn ask(call: impl FnOnce() -> libc::c_long) -> io::Result<()> {
    if call() == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn open_socket(family: i32, kind: i32) -> io::Result<()> {
    // SAFETY: numbers only.
    ask(|| unsafe { libc::socket(family, kind, 0).into() })
}

fn system_call(number: libc::c_long, arguments: [libc::c_long; 4]) -> io::Result<()> {
    let [a, b, c, d] = arguments;
    // SAFETY: numbers and null pointers; what takes effect all the same is what the drill looks for.
    ask(|| unsafe { libc::syscall(number, a, b, c, d) })
}

fn read(path: impl AsRef<Path>) -> io::Result<()> {
    File::open(path)?.read(&mut [0; 16]).map(drop)
}

fn make(path: &str) -> io::Result<()> {
    File::create(path).map(drop)
}

fn outgrow(path: &str) -> io::Result<()> {
    // SAFETY: a plain change of a signal's handling.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let mut file = OpenOptions::new().append(true).open(path)?;
    (0..4 * QUOTA / 4096).try_for_each(|_| file.write_all(&[1; 4096]))
}

fn raise(limit: libc::__rlimit_resource_t) -> io::Result<()> {
    let all = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the structure outlives the call.
    ask(|| unsafe { libc::setrlimit(limit, &all).into() })
}

/// Success means that more tasks were made than the group may have.
fn multiply() -> io::Result<()> {
    let mut all = Vec::new();
    for _ in 0..2 * TASKS {
        all.push(
            std::thread::Builder::new().stack_size(64 << 10).spawn(|| std::thread::sleep(Duration::from_secs(5)))?,
        );
    }
    Ok(())
}

type Attempt<'a> = Box<dyn Fn() -> io::Result<()> + 'a>;

/// Everything that must fail, by name. The one inside runs it; the one outside takes the names from it.
fn attempts(map: &Map) -> Vec<(&'static str, Attempt<'_>)> {
    const NONE: libc::c_long = 0;
    let none = [NONE; 4];
    let user = libc::c_long::from(libc::CLONE_NEWUSER);
    vec![
        ("read another sandbox's memory", Box::new(move || read(&map.victim))),
        ("read it from the folder up", Box::new(move || read("/vm/../../victim/memory.img"))),
        ("read it through a link in the folder", Box::new(move || read("/vm/link"))),
        ("read the vault", Box::new(move || read(&map.secret))),
        ("read the record of its own run", Box::new(move || read("/vm/run.json"))),
        ("read the host's users", Box::new(move || read("/etc/passwd"))),
        ("read its own program", Box::new(move || read(std::env::args().next().unwrap_or_default()))),
        ("see processes", Box::new(move || read("/proc/1/status"))),
        ("see the system", Box::new(move || read("/sys/kernel/mm/ksm/run"))),
        ("open the host's memory", Box::new(move || read("/dev/mem"))),
        ("open KVM without need", Box::new(move || File::open("/dev/kvm").map(drop))),
        ("open a loop device", Box::new(move || read("/dev/loop0"))),
        ("connect to a socket of the node", Box::new(move || UnixStream::connect(&map.socket).map(drop))),
        ("connect to its own monitor", Box::new(move || UnixStream::connect("/vm/qmp.sock").map(drop))),
        ("connect to the API", Box::new(move || TcpStream::connect(("127.0.0.1", map.port)).map(drop))),
        ("make an internet socket", Box::new(move || open_socket(libc::AF_INET6, libc::SOCK_DGRAM))),
        ("make a packet socket", Box::new(move || open_socket(libc::AF_PACKET, libc::SOCK_RAW))),
        ("make a netlink socket", Box::new(move || open_socket(libc::AF_NETLINK, libc::SOCK_RAW))),
        ("make a vsock socket", Box::new(move || open_socket(libc::AF_VSOCK, libc::SOCK_STREAM))),
        ("signal the node", Box::new(move || system_call(libc::SYS_kill, [map.pid.into(), NONE, NONE, NONE]))),
        (
            "hold on to the node",
            Box::new(move || system_call(libc::SYS_pidfd_open, [map.pid.into(), NONE, NONE, NONE])),
        ),
        ("trace the node", Box::new(move || system_call(libc::SYS_ptrace, [16, map.pid.into(), NONE, NONE]))),
        ("trace at all", Box::new(move || system_call(libc::SYS_ptrace, none))),
        ("read a process", Box::new(move || system_call(libc::SYS_process_vm_readv, none))),
        ("mount", Box::new(move || system_call(libc::SYS_mount, none))),
        ("mount anew", Box::new(move || system_call(libc::SYS_fsopen, none))),
        ("unmount", Box::new(move || system_call(libc::SYS_umount2, none))),
        ("change the root", Box::new(move || system_call(libc::SYS_chroot, none))),
        ("make a user namespace", Box::new(move || system_call(libc::SYS_unshare, [user, NONE, NONE, NONE]))),
        ("clone into one", Box::new(move || system_call(libc::SYS_clone, [user | 17, NONE, NONE, NONE]))),
        ("join a namespace", Box::new(move || system_call(libc::SYS_setns, none))),
        ("become root", Box::new(move || system_call(libc::SYS_setuid, none))),
        ("become another's group", Box::new(move || system_call(libc::SYS_setgid, none))),
        ("make a device", Box::new(move || system_call(libc::SYS_mknodat, none))),
        ("load a program into the kernel", Box::new(move || system_call(libc::SYS_bpf, none))),
        ("watch the machine's counters", Box::new(move || system_call(libc::SYS_perf_event_open, none))),
        ("use io_uring", Box::new(move || system_call(libc::SYS_io_uring_setup, none))),
        ("handle page faults", Box::new(move || system_call(libc::SYS_userfaultfd, none))),
        ("reach keys", Box::new(move || system_call(libc::SYS_keyctl, none))),
        ("read the kernel's log", Box::new(move || system_call(libc::SYS_syslog, [3, NONE, NONE, NONE]))),
        ("set the clock", Box::new(move || system_call(libc::SYS_clock_settime, none))),
        ("set the host name", Box::new(move || system_call(libc::SYS_sethostname, none))),
        ("run a shell", Box::new(move || std::process::Command::new("/bin/sh").spawn().map(drop))),
        ("write to the root", Box::new(move || make("/new"))),
        ("write among the devices", Box::new(move || make("/dev/new"))),
        ("change a library", Box::new(move || fs::remove_dir_all("/lib"))),
        ("make a file in its folder", Box::new(move || make("/vm/new"))),
        ("replace a file of its folder", Box::new(move || fs::rename("/vm/memory.img", "/vm/run.json"))),
        ("make a file in a folder that was closed", Box::new(move || make("/vm/run/new"))),
        ("remove a file of it", Box::new(move || fs::remove_file("/vm/run/known"))),
        ("make a link in its folder", Box::new(move || symlink("/", "/vm/new"))),
        ("outgrow its files", Box::new(move || outgrow("/vm/memory.img"))),
        ("raise its file size", Box::new(move || raise(libc::RLIMIT_FSIZE))),
        ("raise its core size", Box::new(move || raise(libc::RLIMIT_CORE))),
        ("make more tasks than allowed", Box::new(multiply)),
    ]
}

/// Runs only inside: `drill` starts it there. Alone it has nothing to do.
#[test]
fn inside_the_jail() {
    let Ok(text) = fs::read("/vm/map.json") else { return };
    if Path::new("/vm/devour").exists() {
        let mut eaten = Vec::new();
        loop {
            eaten.push(vec![1u8; 1 << 20]);
        }
    }
    let map: Map = serde_json::from_slice(&text).unwrap();
    let mut report = String::from("\n");
    for (name, attempt) in attempts(&map) {
        report += &match attempt() {
            Ok(()) => format!("BROKEN {name}\n"),
            Err(error) => format!("held {name}: {error}\n"),
        };
    }
    // What it does need works: its own files, randomness, inherited descriptors, threads.
    let fine = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut [0; 8])).is_ok()
        && OpenOptions::new().write(true).open("/vm/disk.img").and_then(|mut file| file.write_all(b"x")).is_ok()
        && fs::read(format!("/dev/fd/{FIRST_INHERITED}")).is_err();
    let rest: Vec<_> = (FIRST_INHERITED + 1..400)
        .filter(|fd| {
            // SAFETY: a look at a number that may be a descriptor.
            unsafe { libc::fcntl(*fd, libc::F_GETFD) != -1 }
        })
        .collect();
    report += &format!("fine {fine}\ndescriptors {rest:?}\nuser {}\n", nix::unistd::getuid());
    report += &format!("pid {} host {:?}\n", std::process::id(), nix::unistd::gethostname().unwrap());
    let mut out = report.as_bytes();
    while let Ok(count) = nix::unistd::write(io::stderr(), out)
        && count > 0
    {
        out = &out[count..];
    }
}

struct Drill {
    dir: tempfile::TempDir,
    cgroups: CgroupRoot,
    cgroup: Cgroup,
}

impl Drop for Drill {
    fn drop(&mut self) {
        drop(self.cgroup.kill());
        drop(self.cgroup.remove());
        self.cgroups.remove_if_empty();
    }
}

/// Where the kernel can; elsewhere the skip is printed.
fn own_core() -> bool {
    let possible = process::core_scheduling() == Some(true);
    if !possible {
        eprintln!("SKIP: this kernel has no core scheduling, or no threads that share a core");
    }
    possible
}

impl Drill {
    fn new(name: &str) -> Option<Drill> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIP: a jail needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let cgroups = CgroupRoot::new(&format!("test-{}-{name}", std::process::id())).unwrap();
        let limits = Limits { memory_bytes: 128 << 20, cpu_millis: 2000, pids: TASKS, weight: Weight::Normal };
        let cgroup = cgroups.create("one", limits).unwrap();
        let drill = Drill { dir, cgroups, cgroup };
        for (folder, owner) in [("own", UID), ("victim", UID + 1)] {
            let folder = drill.dir.path().join(folder);
            fs::create_dir(&folder).unwrap();
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o711)).unwrap();
            for file in ["memory.img", "disk.img"].map(|name| folder.join(name)) {
                fs::write(&file, b"secret").unwrap();
                // Even open to all it is out of reach.
                let mode = if owner == UID { 0o600 } else { 0o666 };
                fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
                std::os::unix::fs::chown(&file, Some(owner), Some(owner)).unwrap();
            }
        }
        Some(drill)
    }

    fn own(&self, name: &str) -> PathBuf {
        self.dir.path().join("own").join(name)
    }

    fn root(&self, program: &Path, kvm: bool) -> JailRoot {
        let contents = Contents { program: program.to_owned(), files: vec![], kvm };
        JailRoot::prepare(&self.dir.path().join("jails"), "drill", &contents).unwrap()
    }

    fn spec(&self, program: PathBuf, args: &[&str], out: Output, jail: bool) -> SpawnSpec {
        let root = self.root(&program, false);
        let own = self.dir.path().join("own");
        SpawnSpec {
            program,
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            cwd: own.clone(),
            uid: UID,
            gid: UID,
            cgroup: Some(self.cgroup.clone()),
            output: out,
            limits: Rlimits { open_files: Some(256), file_size_bytes: Some(QUOTA) },
            inherited: vec![File::open("/dev/zero").unwrap().into()],
            env: Vec::new(),
            rights: Rights::None,
            profile: jail.then_some(Profile::NoSockets),
            jail: jail.then_some(Jail { root, folder: own, boot: None, own_core: own_core() }),
        }
    }
}

#[tokio::test]
async fn the_escape_drill() {
    // As QEMU and as Firecracker are kept. With Unix sockets allowed, it is the mount and network namespaces that keep the
    // drill from those of others.
    let with_kvm = Path::new("/dev/kvm").exists();
    if !with_kvm {
        eprintln!("SKIP: no /dev/kvm to open in a jail");
    }
    for (name, profile, kvm) in [("drill", Profile::NoSockets, false), ("drill-unix", Profile::UnixSockets, with_kvm)] {
        if let Some(drill) = Drill::new(name) {
            run_drill(&drill, profile, kvm).await;
        }
    }
}

async fn run_drill(drill: &Drill, profile: Profile, kvm: bool) {
    let path = |name: &str| drill.dir.path().join(name);
    fs::write(path("secret"), b"secret").unwrap();
    fs::set_permissions(path("secret"), fs::Permissions::from_mode(0o666)).unwrap();
    fs::write(drill.own("run.json"), b"secret").unwrap();
    fs::set_permissions(drill.own("run.json"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink(path("victim/memory.img"), drill.own("link")).unwrap();
    // What a VMM has made and the node has closed since.
    fs::create_dir(drill.own("run")).unwrap();
    fs::write(drill.own("run/known"), b"").unwrap();
    fs::set_permissions(drill.own("run/known"), fs::Permissions::from_mode(0o666)).unwrap();
    std::os::unix::fs::chown(drill.own("run"), None, Some(UID)).unwrap();
    fs::set_permissions(drill.own("run"), fs::Permissions::from_mode(0o710)).unwrap();
    let _monitor = UnixListener::bind(drill.own("qmp.sock")).unwrap();
    let _node = UnixListener::bind(path("node.sock")).unwrap();
    fs::set_permissions(path("node.sock"), fs::Permissions::from_mode(0o777)).unwrap();
    let api = TcpListener::bind("127.0.0.1:0").unwrap();
    let map = Map {
        victim: path("victim/memory.img"),
        socket: path("node.sock"),
        port: api.local_addr().unwrap().port(),
        pid: std::process::id().try_into().unwrap(),
        secret: path("secret"),
    };
    fs::write(drill.own("map.json"), serde_json::to_vec(&map).unwrap()).unwrap();

    let own = std::env::current_exe().unwrap();
    let args = ["--exact", "inside_the_jail", "--nocapture", "--test-threads", "1"];
    let mut spec = drill.spec(own.clone(), &args, Output::File(path("out")), true);
    spec.profile = Some(profile);
    if let Some(jail) = &mut spec.jail {
        jail.root = drill.root(&own, kvm);
    }
    let process = spawn(spec).unwrap();
    let exit = process.wait().await;
    let out = fs::read_to_string(path("out")).unwrap();
    assert_eq!(exit, Exit::Code(0), "{out}");
    let held: BTreeMap<&str, &str> =
        out.lines().filter_map(|line| line.strip_prefix("held ")?.split_once(": ")).collect();
    for (name, _) in attempts(&map) {
        let may = kvm && name == "open KVM without need";
        assert_eq!(held.contains_key(name), !may, "it could {name}, or could not open KVM:\n{out}");
    }
    // The devices of a jail are for those in it.
    assert_eq!(fs::metadata(path("jails")).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(out.contains("fine true\ndescriptors []\n"), "{out}");
    assert!(out.contains(&format!("user {UID}\npid 1 host \"vm\"\n")), "{out}");
    assert!(fs::metadata(drill.own("memory.img")).unwrap().len() <= QUOTA);
    assert_eq!(fs::read(path("victim/memory.img")).unwrap(), b"secret");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(drill.dir.path().to_str().unwrap()), "a mount of the jail is seen on the host: {mounts}");
}

#[tokio::test]
async fn memory_has_an_end_with_swap() {
    let Some(drill) = Drill::new("devour") else { return };
    fs::write(drill.own("map.json"), b"{}").unwrap();
    fs::write(drill.own("devour"), b"").unwrap();
    let own = std::env::current_exe().unwrap();
    let args = ["--exact", "inside_the_jail", "--test-threads", "1"];
    let process = spawn(drill.spec(own, &args, Output::Null, true)).unwrap();
    assert_eq!(process.wait().await, Exit::Signal(libc::SIGKILL));
}

/// What `/proc` says of a jailed process, from outside.
#[tokio::test]
async fn the_kernel_agrees() {
    let Some(drill) = Drill::new("kernel") else { return };
    let process = spawn(drill.spec("/usr/bin/sleep".into(), &["1000"], Output::Null, true)).unwrap();
    let pid = process.identity().pid;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
    assert_eq!(field("Uid:"), format!("{UID}\t{UID}\t{UID}\t{UID}"));
    assert_eq!(field("Groups:"), "");
    for caps in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(field(caps), "0000000000000000", "{caps} {status}");
    }
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1", "2"), "{status}");
    for kind in ["mnt", "pid", "ipc", "uts", "net"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(of("self"), of(&pid.to_string()), "{kind}");
    }
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
    let places: Vec<_> = mounts.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    assert_eq!(places, ["/dev", "/vm", "/"], "{mounts}");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    assert!(limits.lines().any(|line| line.starts_with("Max core file size        0 ")), "{limits}");
    // Not dumpable: its entries belong to root, not to its user.
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&fs::metadata(format!("/proc/{pid}/environ")).unwrap()), 0);
    process.kill().unwrap();
    assert_eq!(process.wait().await, Exit::Signal(9));
}

/// Prints what the jail adds to a start; the bound is one that only a fault exceeds.
#[tokio::test]
async fn what_a_jail_costs() {
    let Some(drill) = Drill::new("cost") else { return };
    let mut medians = Vec::new();
    for jail in [false, true] {
        let mut times = Vec::new();
        for _ in 0..25 {
            let spec = drill.spec("/usr/bin/true".into(), &[], Output::Null, jail);
            let begun = Instant::now();
            let process = spawn(spec).unwrap();
            times.push(begun.elapsed());
            process.wait().await;
        }
        times.sort();
        eprintln!("jail {jail}: median {:?}, p90 {:?}", times[12], times[22]);
        medians.push(times[12]);
    }
    assert!(medians[1] < medians[0] + Duration::from_millis(100), "{medians:?}");
}
