//! The Firecracker driver with real VMs: the scenarios of all drivers and those of its own, from one guest that is booted
//! once, since that may take most of a minute.

mod support;

use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use space_vmm::firecracker;
use space_vmm::{AfterRestore, SaveKind, Vm, VmDir, VmStatus, VmmError};
use support::{Agent, Bench, Kind, scenarios};

macro_rules! each {
    ($bench:expr, $($scenario:path)*) => {$(
        let begun = Instant::now();
        eprintln!("-- {}", stringify!($scenario));
        $scenario($bench).await;
        eprintln!("-- {:?}", begun.elapsed());
    )*};
}

#[tokio::test(flavor = "multi_thread")]
async fn firecracker_does_what_every_driver_must() {
    let Some(bench) = Bench::new(Kind::Firecracker, "firecracker") else { return };
    bench.template().await;
    each!(&bench,
        scenarios::two_sandboxes_continue_one_memory_each_for_itself
        scenarios::a_vm_outlives_its_driver_and_is_adopted
        scenarios::a_silent_vmm_costs_a_bounded_wait_and_is_ended
        scenarios::each_end_of_a_guest_has_its_reason
        scenarios::a_flooding_guest_stays_bounded_and_a_lost_connection_is_replaced
        scenarios::what_a_restore_costs
        a_save_of_what_changed_is_the_memory_of_the_vm
        a_state_that_does_not_fit_is_refused
        a_renamed_vm_goes_on
        it_is_kept_in_its_jail
    );
}

/// The memory of the guest as it is in the VMM: its mapping of the VM's file, through the kernel.
fn memory_of(pid: u32) -> Vec<u8> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = maps.lines().find(|line| line.contains("/memory.img")).expect("the memory is mapped from its file");
    let (range, _) = line.split_once(' ').unwrap();
    let (start, end) = range.split_once('-').unwrap();
    let number = |text| u64::from_str_radix(text, 16).unwrap();
    let mut bytes = vec![0; usize::try_from(number(end) - number(start)).unwrap()];
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    memory.read_exact_at(&mut bytes, number(start)).unwrap();
    bytes
}

/// The file must be the memory, page for page.
fn assert_saved(vm: &dyn Vm, dir: &VmDir, what: &str) {
    let (mut file, memory) = (Vec::new(), memory_of(vm.identity().pid));
    std::fs::File::open(dir.file("memory.img")).unwrap().read_to_end(&mut file).unwrap();
    assert_eq!(file.len(), memory.len());
    let different = file.chunks(4096).zip(memory.chunks(4096)).filter(|(file, memory)| file != memory).count();
    assert_eq!(different, 0, "{what}: pages that are not saved as they are");
    for left in ["run/memory.diff", "run/memory.img.new", "run/device.state.new", "save.commit", "memory.stale"] {
        assert!(!dir.file(left).exists(), "{what} left {left}");
    }
}

fn inode(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().ino()
}

async fn a_save_of_what_changed_is_the_memory_of_the_vm(bench: &Bench) {
    let (vm, dir) = bench.restore("a", AfterRestore::Run).await;
    let before = Agent::connect(&*vm).await.counter().await;
    for round in 0..3 {
        let mapped = inode(&dir.file("memory.img"));
        let mut agent = Agent::connect(&*vm).await;
        agent.ask("touch 1").await;
        let begun = Instant::now();
        vm.save(SaveKind::Changed).await.unwrap();
        eprintln!("diff save: {:?}", begun.elapsed());
        assert_saved(&*vm, &dir, &format!("round {round}"));
        assert_ne!(inode(&dir.file("memory.img")), mapped, "a file that a VMM maps is never written");
        vm.resume().await.unwrap();
    }
    // Somebody died after Firecracker had written and before anything was merged: the changes are not lost.
    let api = Request(dir.file("run/api.sock"));
    assert!(api.send("PATCH", "/vm", r#"{"state":"Paused"}"#).contains("204"), "a pause by hand");
    for name in ["run/memory.diff", "run/device.state.new"] {
        let file = std::fs::File::create(dir.file(name)).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(0o666)).unwrap();
    }
    let body = r#"{"snapshot_type":"Diff","snapshot_path":"run/device.state.new","mem_file_path":"run/memory.diff"}"#;
    assert!(api.send("PUT", "/snapshot/create", body).contains("204"), "a diff by hand");
    // One more, after Firecracker's pause: whoever adopts the VM can reach its guest all the same.
    let identity = vm.identity();
    drop(vm);
    let vm = bench.driver.adopt(&dir, identity).await.unwrap();
    assert_eq!(vm.status().await.unwrap(), VmStatus::Paused);
    vm.resume().await.unwrap();
    Agent::connect(&*vm).await.ask("touch 1").await;
    vm.save(SaveKind::Changed).await.unwrap();
    assert_saved(&*vm, &dir, "after a death");
    vm.resume().await.unwrap();
    Agent::connect(&*vm).await.counter().await;
    let begun = Instant::now();
    vm.save(SaveKind::Full).await.unwrap();
    eprintln!("full save: {:?}", begun.elapsed());
    assert_saved(&*vm, &dir, "full");
    vm.resume().await.unwrap();
    Agent::connect(&*vm).await.counter().await;
    vm.save(SaveKind::Changed).await.unwrap();
    assert_saved(&*vm, &dir, "changed after full");
    scenarios::end(&*vm).await;

    // And the guest goes on from there.
    let again = bench.driver.restore(&bench.spec("b"), &dir, AfterRestore::Run).await.unwrap();
    assert!(Agent::connect(&*again).await.counter().await > before);
    scenarios::end(&*again).await;
    bench.assert_nothing_left();
}

/// Firecracker's interface without the driver.
struct Request(std::path::PathBuf);

impl Request {
    fn send(&self, method: &str, path: &str, body: &str) -> String {
        use std::io::Write;
        let mut stream = std::os::unix::net::UnixStream::connect(&self.0).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n");
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = [0; 256];
        let length = stream.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..length]).into_owned()
    }
}

async fn a_state_that_does_not_fit_is_refused(bench: &Bench) {
    let driver = &bench.driver;
    let dir = bench.sandbox("broken");
    let good = std::fs::read(dir.file("device.state")).unwrap();
    let mut flipped = good.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0xff;
    for bytes in [&b""[..], &b"nonsense"[..], &good[..good.len() - 9], &flipped] {
        std::fs::write(dir.file("device.state"), bytes).unwrap();
        let error = driver.restore(&bench.spec("broken"), &dir, AfterRestore::Run).await.err().unwrap();
        assert!(matches!(error, VmmError::BadState { ref message } if !message.is_empty()), "{error:?}");
    }
    std::fs::write(dir.file("device.state"), &good).unwrap();
    let mut spec = bench.spec("broken");
    spec.memory_mib += 1;
    let error = driver.restore(&spec, &dir, AfterRestore::Run).await.err().unwrap();
    assert!(matches!(error, VmmError::BadState { ref message } if message.contains("memory")), "{error:?}");
    // Nothing of it has harmed the files: the right state still starts.
    let vm = driver.restore(&bench.spec("broken"), &dir, AfterRestore::StayPaused).await.unwrap();
    assert_eq!(vm.status().await.unwrap(), VmStatus::Paused);
    scenarios::end(&*vm).await;
    bench.assert_nothing_left();
}

async fn a_renamed_vm_goes_on(bench: &Bench) {
    use space_hostd::pool::Area;
    let (vm, _) = bench.restore("parked", AfterRestore::Run).await;
    let mut agent = Agent::connect(&*vm).await;
    let before = agent.counter().await;
    vm.pause().await.unwrap();
    assert_eq!(vm.status().await.unwrap(), VmStatus::Paused);
    let path = bench.pool.rename((Area::Sandboxes, "parked"), (Area::Sandboxes, "taken")).unwrap();
    vm.moved(&VmDir::new(&path));
    vm.resume().await.unwrap();
    assert!(agent.counter().await > before, "a connection outlives a pause");
    drop(agent);
    assert!(Agent::connect(&*vm).await.counter().await > before);
    // A paused one is saved and stays paused.
    vm.pause().await.unwrap();
    vm.save(SaveKind::Changed).await.unwrap();
    assert_saved(&*vm, &VmDir::new(&path), "renamed");
    assert_eq!(vm.status().await.unwrap(), VmStatus::Paused);
    scenarios::end(&*vm).await;
    bench.assert_nothing_left();
}

/// What `/proc` and the file system say of a Firecracker that runs.
async fn it_is_kept_in_its_jail(bench: &Bench) {
    let (vm, dir) = bench.restore("jailed", AfterRestore::Run).await;
    let pid = vm.identity().pid;
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap();
    let status = read("status");
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
    assert_eq!((field("CapEff:"), field("CapBnd:")), ("0000000000000000", "0000000000000000"));
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1", "2"));
    for kind in ["mnt", "pid", "ipc", "uts", "net"] {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(of("self"), of(&pid.to_string()), "{kind}");
    }
    let mounts = read("mountinfo");
    let places: Vec<_> = mounts.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    assert_eq!(places, ["/dev", "/vm", "/"], "{mounts}");
    let devices: BTreeSet<_> =
        std::fs::read_dir(format!("/proc/{pid}/root/dev")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(devices, ["kvm", "null", "urandom"].map(Into::into).into());

    // Of its folder it owns what it was given, and it can make nothing new: in no folder that it may write to.
    let user: u32 = field("Uid:").split_whitespace().next().unwrap().parse().unwrap();
    for folder in ["", "run"] {
        let meta = std::fs::metadata(dir.file(folder)).unwrap();
        assert_ne!(meta.uid(), user, "{folder:?}");
        assert_eq!(meta.mode() & 0o022, 0, "{folder:?}");
    }
    scenarios::end(&*vm).await;
    bench.assert_nothing_left();
}

/// A program that only says which version it is: what must not be used is refused before it is started.
#[tokio::test]
async fn a_version_that_is_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (version, expected) in [("v1.16.0", "vsock"), ("v1.15.1", "1.16"), ("v2.0.0", "1.16")] {
        let program = dir.path().join(version);
        std::fs::write(&program, format!("#!/bin/sh\necho Firecracker {version}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = firecracker::check(&program).await.err().unwrap();
        assert!(matches!(error, VmmError::UnfitVersion { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(&version[1..]) && text.contains(expected), "{text}");
    }
    let missing = firecracker::check(Path::new("/nowhere/firecracker")).await;
    assert!(matches!(missing, Err(VmmError::MissingProgram(_))), "{missing:?}");
}
