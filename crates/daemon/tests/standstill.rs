//! Standing still for a snapshot: a clean disk, hooks before and after, and everything going on afterwards.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::*;
use space_proto::guest::*;

/// A small ext4 file system in a file, thawed and unmounted with the value: declared before its daemon, it goes after it.
struct Ext4 {
    image: PathBuf,
    mount: PathBuf,
    _dir: tempfile::TempDir,
}

fn command(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

impl Ext4 {
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let (image, mount) = (dir.path().join("disk.img"), dir.path().join("mnt"));
        std::fs::create_dir(&mount).unwrap();
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let made = command("mkfs.ext4", &["-q", image.to_str().unwrap()])
            && command("mount", &["-o", "loop", image.to_str().unwrap(), mount.to_str().unwrap()]);
        if !made {
            eprintln!("SKIP: no ext4 file system can be mounted here (needs root, mkfs.ext4 and loop devices)");
            return None;
        }
        Some(Self { image, mount, _dir: dir })
    }

    /// What a snapshot of this instant would hold, checked as after a cold start that may repair nothing.
    fn is_clean(&self) -> bool {
        let copy = self.image.with_extension("copy");
        std::fs::copy(&self.image, &copy).unwrap();
        command("e2fsck", &["-fn", copy.to_str().unwrap()])
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        let mount = self.mount.to_str().unwrap();
        command("fsfreeze", &["-u", mount]);
        for _ in 0..100 {
            if command("umount", &[mount]) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn thaw() -> RefreshRequest {
    RefreshRequest { thaw: true, ..Default::default() }
}

fn size(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |meta| meta.len())
}

#[tokio::test]
async fn a_frozen_disk_is_clean_and_goes_on_after_the_thaw() {
    let Some(disk) = Ext4::new() else { return };
    let daemon = Daemon::start_with(&["--disk", disk.mount.to_str().unwrap()]);
    let mut client = daemon.client().await;
    let file = disk.mount.join("growing");
    let script = format!("while :; do echo line >> {0}; mkdir -p {0}.d; rmdir {0}.d; done", file.display());
    let id = reserve(&mut client, sh(&script)).await;
    client.start(ProcessRef { process_id: id }).await.unwrap();
    eventually("the program writes", || size(&file) > 1000).await;

    let freeze = QuiesceRequest { freeze_disk: true, ..Default::default() };
    for _ in 0..2 {
        let reply = client.quiesce(freeze).await.unwrap().into_inner();
        assert!(reply.disk_frozen, "asked twice, it is the same");
    }
    let before = size(&file);
    assert!(disk.is_clean(), "the frozen file system needs a repair");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(size(&file), before, "something was written to a frozen disk");

    for _ in 0..2 {
        client.refresh(thaw()).await.unwrap();
    }
    eventually("the program writes on", || size(&file) > before).await;
    assert!(client.quiesce(freeze).await.unwrap().into_inner().disk_frozen, "it can stand still again");
    assert!(disk.is_clean());
    client.refresh(thaw()).await.unwrap();
}

#[tokio::test]
async fn a_disk_somebody_else_thawed_is_no_fault() {
    let Some(disk) = Ext4::new() else { return };
    let daemon = Daemon::start_with(&["--disk", disk.mount.to_str().unwrap()]);
    let mut client = daemon.client().await;
    client.quiesce(QuiesceRequest { freeze_disk: true, ..Default::default() }).await.unwrap();
    // Root of the guest may do that.
    assert!(command("fsfreeze", &["-u", disk.mount.to_str().unwrap()]));
    client.refresh(thaw()).await.unwrap();
    std::fs::write(disk.mount.join("file"), "text").unwrap();
}

struct Hooks(tempfile::TempDir);

impl Hooks {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn add(&self, when: &str, name: &str, mode: u32, script: &str) {
        let folder = self.0.path().join(when);
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join(name);
        std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }

    fn daemon(&self) -> Daemon {
        Daemon::start_with(&["--hooks", self.0.path().to_str().unwrap()])
    }
}

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIP: hooks must belong to root, and this test does not run as root");
    }
    root
}

#[tokio::test]
async fn each_hook_runs_at_its_time_in_order_and_only_when_asked() {
    if !is_root() {
        return;
    }
    let hooks = Hooks::new();
    let daemon = hooks.daemon();
    let log = daemon.path("log");
    for when in ["before-checkpoint", "after-restore", "after-fork"] {
        for name in ["10-first", "20-second"] {
            hooks.add(when, name, 0o755, &format!("echo $SPACE_HOOK {name} >> {log}"));
        }
    }
    let mut client = daemon.client().await;
    client.quiesce(QuiesceRequest::default()).await.unwrap();
    client.refresh(thaw()).await.unwrap();
    assert!(!exists(&log), "a hook ran that nobody asked for");

    let reply = client.quiesce(QuiesceRequest { hooks: true, ..Default::default() }).await.unwrap().into_inner();
    assert_eq!(reply.hook_failures, Vec::<String>::new());
    let after = |hook: Hook| RefreshRequest { hook: hook.into(), ..thaw() };
    client.refresh(after(Hook::AfterRestore)).await.unwrap();
    client.refresh(after(Hook::AfterFork)).await.unwrap();
    let seen = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<_> = seen.lines().collect();
    let expected = ["before-checkpoint 10-first", "before-checkpoint 20-second", "after-restore 10-first"];
    assert_eq!(lines[..3], expected);
    assert_eq!(lines[3..], ["after-restore 20-second", "after-fork 10-first", "after-fork 20-second"]);
    let listed = client.list_processes(ListProcessesRequest {}).await.unwrap().into_inner();
    assert!(listed.processes.is_empty(), "hooks are no commands of tenants");
}

#[tokio::test]
async fn a_broken_hook_is_reported_and_stops_nothing() {
    if !is_root() {
        return;
    }
    let hooks = Hooks::new();
    let daemon = hooks.daemon();
    let log = daemon.path("log");
    hooks.add("after-restore", "1-fails", 0o755, "exit 3");
    hooks.add("after-restore", "2-anybodys", 0o777, &format!("echo anybodys >> {log}"));
    hooks.add("after-restore", "3-no-program", 0o644, "exit 0");
    hooks.add("after-restore", "4-noisy", 0o755, "head -c 20000000 /dev/zero");
    hooks.add("after-restore", "5-works", 0o755, &format!("echo works >> {log}"));
    hooks.add("after-restore", "6-hangs", 0o755, "sleep 1000");
    hooks.add("after-restore", "7-late", 0o755, &format!("echo late >> {log}"));
    let mut client = daemon.client().await;
    let request = RefreshRequest { hook: Hook::AfterRestore.into(), hooks_ms: 10_000, ..thaw() };
    let reply = client.refresh(request).await.unwrap().into_inner();
    let named = |start: &str| reply.hook_failures.iter().any(|text| text.starts_with(start));
    assert!(named("1-fails: exit code 3"), "{:?}", reply.hook_failures);
    assert!(named("2-anybodys: not run"));
    assert!(named("3-no-program: not run"));
    assert!(named("6-hangs: took longer"));
    assert!(named("7-late: not run: the time for hooks was up"));
    assert_eq!(reply.hook_failures.len(), 5);
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "works\n");
}

#[tokio::test]
async fn there_is_a_limit_to_hooks() {
    if !is_root() {
        return;
    }
    let hooks = Hooks::new();
    let daemon = hooks.daemon();
    let log = daemon.path("log");
    for number in 10..30 {
        hooks.add("after-fork", &number.to_string(), 0o755, &format!("echo {number} >> {log}"));
    }
    let mut client = daemon.client().await;
    let request = RefreshRequest { hook: Hook::AfterFork.into(), hooks_ms: 60_000, ..thaw() };
    let reply = client.refresh(request).await.unwrap().into_inner();
    assert_eq!(reply.hook_failures, ["20 hooks, 16 may be: those behind them are not run"]);
    assert_eq!(std::fs::read_to_string(&log).unwrap().lines().count(), 16);
}
