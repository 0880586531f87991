//! What the driver's tests share: a pool, a kernel, a tiny guest, and counting what is left at the end.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use space_hostd::cgroup::{CgroupRoot, Limits, Weight};
use space_hostd::host::Host;
use space_hostd::pool::{Area, Pool, PoolSource};
use space_hostd::service::{Config, Service};
use space_hostd::uids::Slot;
use space_vmm::guest_kernel::{self, GuestKernel};
use space_vmm::qemu::{self, Qemu, QemuConfig};
use space_vmm::{AfterRestore, Driver, Jail, SaveKind, Vm, VmDir, VmSpec, initramfs};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

pub const MEMORY_MIB: u32 = 192;
const DISK_BYTES: u64 = 64 << 20;
/// Users of one test's VMMs.
const SLOTS: u32 = 16;

/// Everything a test makes, removed when it ends, however it ends.
pub struct Bench {
    pub pool: Pool,
    pub driver: Qemu,
    pub cgroups: CgroupRoot,
    _dir: tempfile::TempDir,
    slot: AtomicU32,
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
    pub fn new(name: &str) -> Option<Bench> {
        let skip = |why: &str| {
            eprintln!("SKIP: {why}");
            None
        };
        if !nix::unistd::geteuid().is_root() {
            return skip("a real VM in a pool needs root");
        }
        if !Path::new(space_vmm::qemu::DEFAULT_PROGRAM).exists() {
            return skip("qemu-system-x86 is not installed");
        }
        let dir = tempfile::tempdir().unwrap();
        let Some(kernel) = kernel(dir.path()) else {
            return skip(
                "no guest kernel: set SPACE_TEST_KERNEL (a prepared folder) or SPACE_TEST_KERNEL_DEB (a package)",
            );
        };
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/init.c");
        let init = dir.path().join("init");
        let built = Command::new("gcc").args(["-O2", "-static", "-pthread", "-o"]).arg(&init).arg(source).status();
        if !built.is_ok_and(|status| status.success()) {
            return skip("the test guest needs gcc and a static libc");
        }
        initramfs::build(&kernel.modules, &init, &dir.path().join("initramfs.img")).unwrap();
        let image = PoolSource::LoopFile { image: dir.path().join("pool.img"), bytes: 2 << 30 };
        let pool = Pool::open(&dir.path().join("pool"), image).unwrap();
        let owner = format!("test-{}-{name}", std::process::id());
        let cgroups = CgroupRoot::new(&owner).unwrap();
        let config = QemuConfig::default();
        let program = config.host_program(kernel.image.clone(), dir.path().join("initramfs.img"));
        let service = Service::open(Config {
            owner,
            pool: pool.root().to_owned(),
            jails: dir.path().join("jails"),
            builds: dir.path().join("builds"),
            builder: None,
            build_env: Vec::new(),
            node: (0, 0),
            uids: (290_000 + std::process::id() % 500 * SLOTS, SLOTS),
            vmms: [(qemu::NAME.to_owned(), program)].into(),
        });
        let driver = Qemu::new(config, Host::here(service.unwrap()));
        Some(Bench { pool, driver, cgroups, _dir: dir, slot: AtomicU32::new(0) })
    }

    /// A specification with a user and a cgroup of its own.
    pub fn spec(&self, name: &str) -> VmSpec {
        let slot = Slot(self.slot.fetch_add(1, Ordering::Relaxed));
        let limits = Limits { memory_bytes: 512 << 20, cpu_millis: 2000, pids: 64, weight: Weight::Normal };
        self.cgroups.create(name, limits).unwrap();
        VmSpec { memory_mib: MEMORY_MIB, vcpus: 1, cmdline: String::new(), jail: Jail { slot, group: name.to_owned() } }
    }

    /// Boots a guest, saves it once it answers and makes a template of it.
    pub async fn template(&self) {
        let path = self.pool.create(Area::Tmp, "boot").unwrap();
        std::fs::File::create(path.join("disk.img")).unwrap().set_len(DISK_BYTES).unwrap();
        let dir = VmDir::new(path);
        let vm = self.driver.boot(&self.spec("boot"), &dir).await.unwrap();
        let mut agent = Agent::connect(&*vm).await;
        if tokio::time::timeout(Duration::from_secs(25), agent.ask("ping")).await.is_err() {
            vm.drain_console().await.unwrap();
            panic!("the guest is not up: {}", std::fs::read_to_string(dir.file("console.log")).unwrap_or_default());
        }
        vm.sync_ahead().await.unwrap();
        vm.save(SaveKind::Full).await.unwrap();
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

/// The guest's end of the channel, line by line.
pub struct Agent(BufReader<UnixStream>);

impl Agent {
    pub async fn connect(vm: &dyn Vm) -> Agent {
        Agent(BufReader::new(vm.agent().await.unwrap()))
    }

    pub async fn line(&mut self) -> String {
        let mut line = String::new();
        let read = tokio::time::timeout(Duration::from_secs(30), self.0.read_line(&mut line)).await;
        assert!(read.expect("the guest answers within 30 s").unwrap() > 0, "the channel closed");
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
