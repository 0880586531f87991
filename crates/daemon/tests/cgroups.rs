//! Control groups: ending a whole tree, standing still for a snapshot, and what is left of them.

mod common;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::*;
use space_proto::guest::*;

/// A group for one daemon, gone with the value.
struct Group(PathBuf);

impl Group {
    fn new() -> Option<Self> {
        let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
        let root = roots.iter().map(Path::new).find(|root| root.join("cgroup.procs").exists())?;
        let path = root.join(format!("space-daemon-test-{}-{}", std::process::id(), new_id()));
        std::fs::create_dir(&path).ok().map(|()| Self(path))
    }

    fn members(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.0.join("space")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("space/cgroup.freeze"), "0");
        let _ = std::fs::write(self.0.join("cgroup.kill"), "1");
        for _ in 0..200 {
            for path in self.members().iter().chain([&self.0.join("space"), &self.0]) {
                let _ = std::fs::remove_dir(path);
            }
            if !self.0.exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The group goes last: it is declared first.
fn start() -> Option<(Group, Daemon)> {
    let Some(group) = Group::new() else {
        eprintln!("SKIP: no control group of version 2 can be made here");
        return None;
    };
    let daemon = Daemon::start_with(&["--cgroup", group.0.to_str().unwrap()]);
    Some((group, daemon))
}

#[tokio::test]
async fn a_timeout_ends_also_what_left_the_process_group() {
    let Some((_group, daemon)) = start() else { return };
    let mut client = daemon.client().await;
    let script = "setsid sh -c 'echo $$; exec sleep 1000' & wait";
    let seen = run(&mut client, ProcessSpec { timeout_ms: 1000, ..sh(script) }).await;
    assert_eq!(seen.reason(), ExitReason::Timeout);
    let child: u32 = seen.text().trim().parse().unwrap();
    eventually("the child ended too", || !is_alive(child)).await;
}

#[tokio::test]
async fn groups_of_processes_that_ended_are_removed() {
    let Some((group, daemon)) = start() else { return };
    let mut client = daemon.client().await;
    for _ in 0..20 {
        assert_eq!(run(&mut client, sh("exit 1")).await.code(), 1);
    }
    eventually("the groups go", || group.members().is_empty()).await;
}

#[tokio::test]
async fn killing_the_tree_reaches_what_lives_on_in_the_background() {
    let Some((_group, daemon)) = start() else { return };
    let mut client = daemon.client().await;
    let id = reserve(&mut client, sh("setsid sleep 1000 >/dev/null 2>&1 & echo $!; exit 0")).await;
    let seen = Attached::to(&mut client, &id, 0).await.finish().await;
    let child: u32 = seen.text().trim().parse().unwrap();
    assert!(is_alive(child));
    client.signal(SignalRequest { process_id: id, signal: 9, kill_tree: true }).await.unwrap();
    eventually("the child ended", || !is_alive(child)).await;
}

#[tokio::test]
async fn programs_stand_still_and_go_on_and_a_start_waits_for_that() {
    let Some((_group, daemon)) = start() else { return };
    let mut client = daemon.client().await;
    let ticking = reserve(&mut client, sh("while :; do echo tick; sleep 0.01; done")).await;
    Attached::to(&mut client, &ticking, 0).await.until("tick").await;
    client.quiesce(QuiesceRequest { freeze: true, ..Default::default() }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = info(&mut client, &ticking, Duration::ZERO).await.output_end;
    // The daemon must answer all the while, or nobody could ever thaw the programs.
    let id = reserve(&mut client, sh("echo started")).await;
    let mut other = client.clone();
    let starting = tokio::spawn(async move { Attached::to(&mut other, &id, 0).await.finish().await.text() });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(info(&mut client, &ticking, Duration::ZERO).await.output_end, before, "they did not stand still");
    assert!(!starting.is_finished());
    client.refresh(RefreshRequest { thaw: true, ..Default::default() }).await.unwrap();
    assert_eq!(starting.await.unwrap(), "started\n");
    Attached::to(&mut client, &ticking, before).await.until("tick").await;
}
