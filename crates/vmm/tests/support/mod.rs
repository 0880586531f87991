//! What the drivers' tests share: a pool, a kernel, a tiny guest, the scenarios, and counting what is left at the end.
#![allow(dead_code, reason = "each driver's tests use their part of it")]

pub mod scenarios;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use space_hostd::cgroup::{CgroupRoot, Limits, Weight};
use space_hostd::host::Host;
use space_hostd::pool::{Area, Pool, PoolSource};
use space_hostd::service::{Config, Service};
use space_hostd::uids::Slot;
use space_vmm::firecracker::{self, FirecrackerConfig};
use space_vmm::guest_kernel::{self, GuestKernel, Module};
use space_vmm::qemu::QemuConfig;
use space_vmm::{AfterRestore, Driver, DriverConfig, ExitReason, Jail, SaveKind, Vm, VmDir, VmSpec, initramfs};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

pub const MEMORY_MIB: u32 = 192;
/// A hypervisor that emulates the guest's kernel takes many seconds for a few hundred page faults.
const ANSWER_PATIENCE: Duration = Duration::from_secs(120);
/// Of the driver that is used for VMMs that do not answer.
pub const SHORT_PATIENCE: Duration = Duration::from_secs(2);
const DISK_BYTES: u64 = 64 << 20;
/// Users of one test's VMMs.
const SLOTS: u32 = 16;
/// Tests of one process that run at the same time have users of their own.
const BENCHES: u32 = 8;
static BENCH: AtomicU32 = AtomicU32::new(0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Qemu,
    Firecracker,
}

impl Kind {
    /// The ways a guest can end itself, and what is then known.
    pub fn ends(self) -> Vec<(&'static str, ExitReason)> {
        match self {
            Kind::Qemu => vec![
                ("poweroff", ExitReason::GuestShutdown),
                ("reboot", ExitReason::GuestReset),
                ("panic", ExitReason::GuestReset),
            ],
            // Powering off needs ACPI, which not every guest kernel has.
            Kind::Firecracker => vec![("reboot", ExitReason::GuestEnded), ("panic", ExitReason::GuestEnded)],
        }
    }

    /// A boot of some kernels under some hypervisors takes most of a minute.
    fn boot_patience(self) -> Duration {
        Duration::from_secs(if self == Kind::Qemu { 25 } else { 150 })
    }
}

/// A driver with a kernel it can boot.
struct Machine {
    config: DriverConfig,
    image: PathBuf,
    modules: Vec<Module>,
    cmdline: String,
}

/// Everything a test makes, removed when it ends, however it ends.
pub struct Bench {
    pub kind: Kind,
    pub pool: Pool,
    pub driver: Arc<dyn Driver>,
    /// The same, with `SHORT_PATIENCE`.
    pub impatient: Arc<dyn Driver>,
    pub cgroups: CgroupRoot,
    cmdline: String,
    _dir: tempfile::TempDir,
    slot: AtomicU32,
}

/// The program that the tests drive: named, or in one of the usual places.
pub fn firecracker_program() -> Option<PathBuf> {
    std::env::var_os("SPACE_FIRECRACKER").map(PathBuf::from).or_else(firecracker::find_program)
}

fn firecracker() -> Result<Machine, &'static str> {
    let program = firecracker_program().ok_or("no firecracker: set SPACE_FIRECRACKER")?;
    if !Path::new("/dev/kvm").exists() {
        return Err("no /dev/kvm");
    }
    let image = std::env::var_os("SPACE_FIRECRACKER_KERNEL");
    let image = image.ok_or("no guest kernel: set SPACE_FIRECRACKER_KERNEL to one that this host's KVM can run")?;
    Ok(Machine {
        config: DriverConfig::Firecracker(FirecrackerConfig::new(program)),
        image: image.into(),
        modules: Vec::new(),
        cmdline: std::env::var("SPACE_FIRECRACKER_KERNEL_ARGS").unwrap_or_default(),
    })
}

fn qemu(dir: &Path) -> Result<Machine, &'static str> {
    if !Path::new(space_vmm::qemu::DEFAULT_PROGRAM).exists() {
        return Err("qemu-system-x86 is not installed");
    }
    let kernel = kernel(dir)
        .ok_or("no guest kernel: set SPACE_TEST_KERNEL (a prepared folder) or SPACE_TEST_KERNEL_DEB (a package)")?;
    let config = DriverConfig::Qemu(QemuConfig::default());
    Ok(Machine { config, image: kernel.image, modules: kernel.modules, cmdline: String::new() })
}

/// A folder laid out by `guest_kernel::extract`, or a package to extract it from.
fn kernel(dir: &Path) -> Option<GuestKernel> {
    if let Some(deb) = std::env::var_os("SPACE_TEST_KERNEL_DEB") {
        return Some(guest_kernel::extract(Path::new(&deb), &dir.join("kernel")).unwrap());
    }
    let folders = [
        std::env::var_os("SPACE_TEST_KERNEL").map(PathBuf::from),
        Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guest-kernel")),
        Some(PathBuf::from("/var/lib/space/kernel")),
    ];
    folders.into_iter().flatten().find_map(|folder| guest_kernel::open(&folder).ok())
}

impl Bench {
    /// `None`, with a word on the terminal, where the test cannot run.
    pub fn new(kind: Kind, name: &str) -> Option<Bench> {
        let skip = |why: &str| {
            eprintln!("skipped: {why}");
            None
        };
        if !nix::unistd::geteuid().is_root() {
            return skip("a real VM in a pool needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        let machine = match kind {
            Kind::Qemu => qemu(dir.path()),
            Kind::Firecracker => firecracker(),
        };
        let machine = match machine {
            Ok(machine) => machine,
            Err(why) => return skip(why),
        };
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/init.c");
        let init = dir.path().join("init");
        let built = Command::new("gcc").args(["-O2", "-static", "-pthread", "-o"]).arg(&init).arg(source).status();
        if !built.is_ok_and(|status| status.success()) {
            return skip("the test guest needs gcc and a static libc");
        }
        initramfs::build(&machine.modules, &init, &dir.path().join("initramfs.img")).unwrap();
        let image = PoolSource::LoopFile { image: dir.path().join("pool.img"), bytes: 4 << 30 };
        let pool = Pool::open(&dir.path().join("pool"), image).unwrap();
        let owner = format!("test-{}-{name}", std::process::id());
        let cgroups = CgroupRoot::new(&owner).unwrap();
        let first = dir.path().join("initramfs.img");
        let service = Service::open(Config {
            drill: None,
            core_scheduling: false,
            owner,
            pool: pool.root().to_owned(),
            jails: dir.path().join("jails"),
            builds: dir.path().join("builds"),
            builder: None,
            build_env: Vec::new(),
            node: (0, 0),
            uids: (
                290_000
                    + (std::process::id() % 500 * BENCHES + BENCH.fetch_add(1, Ordering::Relaxed) % BENCHES) * SLOTS,
                SLOTS,
            ),
            vmms: [(machine.config.name().to_owned(), machine.config.host_program(machine.image, first))].into(),
        });
        let host = Host::here(service.unwrap());
        let mut config = machine.config.clone();
        match &mut config {
            DriverConfig::Qemu(config) => config.patience = SHORT_PATIENCE,
            DriverConfig::Firecracker(config) => config.patience = SHORT_PATIENCE,
        }
        let (driver, impatient) = (machine.config.driver(host.clone()), config.driver(host));
        Some(Bench {
            kind,
            pool,
            driver,
            impatient,
            cgroups,
            cmdline: machine.cmdline,
            _dir: dir,
            slot: AtomicU32::new(0),
        })
    }

    /// A specification with a user and a cgroup of its own.
    pub fn spec(&self, name: &str) -> VmSpec {
        let slot = Slot(self.slot.fetch_add(1, Ordering::Relaxed) % SLOTS);
        let limits = Limits { memory_bytes: 512 << 20, cpu_millis: 2000, pids: 64, weight: Weight::Normal };
        self.cgroups.create(name, limits).unwrap();
        let jail = Jail { slot, group: name.to_owned() };
        VmSpec { memory_mib: MEMORY_MIB, vcpus: 1, cmdline: self.cmdline.clone(), jail }
    }

    /// Boots a guest, saves it once it answers and makes a template of it.
    pub async fn template(&self) {
        let path = self.pool.create(Area::Tmp, "boot").unwrap();
        std::fs::File::create(path.join("disk.img")).unwrap().set_len(DISK_BYTES).unwrap();
        let dir = VmDir::new(path);
        let vm = self.driver.boot(&self.spec("boot"), &dir).await.unwrap();
        let begun = Instant::now();
        let up = async { Agent::connect(&*vm).await.ask("ping").await };
        if tokio::time::timeout(self.kind.boot_patience(), up).await.is_err() {
            vm.drain_console().await.unwrap();
            panic!("the guest is not up: {}", std::fs::read_to_string(dir.file("console.log")).unwrap_or_default());
        }
        eprintln!("boot: {:?}", begun.elapsed());
        vm.sync_ahead().await.unwrap();
        let begun = Instant::now();
        vm.save(SaveKind::Full).await.unwrap();
        eprintln!("full save: {:?}", begun.elapsed());
        self.pool.snapshot((Area::Tmp, "boot"), (Area::Templates, "t"), true).unwrap();
        vm.kill().await.unwrap();
        vm.wait().await;
        self.cgroups.open("boot").unwrap().remove().unwrap();
        self.pool.delete(Area::Tmp, "boot").unwrap();
    }

    pub fn sandbox(&self, name: &str) -> VmDir {
        VmDir::new(self.pool.snapshot((Area::Templates, "t"), (Area::Sandboxes, name), false).unwrap())
    }

    pub async fn restore(&self, name: &str, then: AfterRestore) -> (Box<dyn Vm>, VmDir) {
        let dir = self.sandbox(name);
        let vm = self.driver.restore(&self.spec(name), &dir, then).await.unwrap();
        (vm, dir)
    }

    /// Checks that nothing runs any more, then takes everything away.
    pub fn assert_nothing_left(&self) {
        for name in self.cgroups.list().unwrap() {
            let cgroup = self.cgroups.open(&name).unwrap();
            assert!(cgroup.pids().unwrap().is_empty(), "a process is left in the cgroup {name}");
            cgroup.remove().unwrap();
        }
        self.cgroups.remove_if_empty();
        for name in self.pool.list(Area::Sandboxes).unwrap() {
            self.pool.delete(Area::Sandboxes, &name).unwrap();
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for name in self.cgroups.list().unwrap_or_default() {
            if let Ok(cgroup) = self.cgroups.open(&name) {
                drop(cgroup.kill());
                drop(cgroup.remove());
            }
        }
        self.cgroups.remove_if_empty();
        if let Err(error) = self.pool.unmount() {
            eprintln!("cannot unmount the pool of a test: {error}");
        }
    }
}

/// A process that gets no time, in a control group of version 2 of its own; it can still be killed. A stop by signal would not
/// do: that is how some drivers pause.
pub struct Frozen(PathBuf);

impl Frozen {
    pub fn new(pid: u32) -> Option<Frozen> {
        let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
        let root = roots.iter().map(Path::new).find(|root| root.join("cgroup.procs").exists());
        let frozen = root.map(|root| Frozen(root.join(format!("space-vmm-test-{pid}"))));
        let made = frozen.filter(|frozen| std::fs::create_dir(&frozen.0).is_ok());
        let Some(frozen) = made else {
            eprintln!("skipped: no control group of version 2 can be made here");
            return None;
        };
        std::fs::write(frozen.0.join("cgroup.procs"), pid.to_string()).unwrap();
        std::fs::write(frozen.0.join("cgroup.freeze"), "1").unwrap();
        let begun = Instant::now();
        while !std::fs::read_to_string(frozen.0.join("cgroup.events")).unwrap().contains("frozen 1") {
            assert!(begun.elapsed() < Duration::from_secs(10), "the process did not stand still");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(frozen)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        drop(std::fs::write(self.0.join("cgroup.freeze"), "0"));
        drop(std::fs::write(self.0.join("cgroup.kill"), "1"));
        for _ in 0..200 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The guest's end of the channel, line by line.
pub struct Agent(BufReader<UnixStream>);

impl Agent {
    pub async fn connect(vm: &dyn Vm) -> Agent {
        Agent(BufReader::new(vm.agent().await.unwrap()))
    }

    pub async fn line(&mut self) -> String {
        let mut line = String::new();
        let read = tokio::time::timeout(ANSWER_PATIENCE, self.0.read_line(&mut line)).await;
        assert!(read.expect("the guest answers in time").unwrap() > 0, "the channel closed");
        line.trim_end().to_owned()
    }

    pub async fn ask(&mut self, command: &str) -> String {
        self.send(command).await;
        loop {
            // What an earlier connection did not fetch may come first.
            let line = self.line().await;
            if line != "ready" {
                return line;
            }
        }
    }

    pub async fn send(&mut self, command: &str) {
        self.0.get_mut().write_all(format!("{command}\n").as_bytes()).await.unwrap();
    }

    pub async fn counter(&mut self) -> u64 {
        let answer = self.ask("ping").await;
        answer
            .strip_prefix("pong ")
            .and_then(|text| text.parse().ok())
            .unwrap_or_else(|| panic!("not a pong: {answer}"))
    }
}
