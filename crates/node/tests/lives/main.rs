//! Long lives of sandboxes on a real node with real VMs: pause, checkpoint, rollback, fork, stop, and a node that dies in
//! the midst of it.

mod bench;

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bench::{Bench, from_checkpoint, run};
use space_core::{CheckpointId, SandboxId};
use space_hostd::pool::Area;
use space_proto::node::start_run_request::Source;
use space_proto::node::{
    CheckpointRef, DiskSource, ListCheckpointsRequest, Rolling, RunRef, RunState, StartRunRequest,
};
use tonic::Code;

/// Holds a buffer of random bytes in its memory and writes its hash on demand; counts beside that.
const HOLDER: &str = "cat > /root/holder.py <<'X'
import hashlib, os, signal, time
data = bytearray(os.urandom(8 << 20))
def tell(*_):
    open('/root/sum.new', 'w').write(hashlib.sha256(data).hexdigest())
    os.rename('/root/sum.new', '/root/sum')
signal.signal(signal.SIGUSR1, tell)
tell()
open('/root/pid', 'w').write(str(os.getpid()))
while True: time.sleep(0.05)
X
rm -f /root/pid; setsid python3 /root/holder.py > /dev/null 2>&1 < /dev/null &
i=0; while [ ! -s /root/pid ] && [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); done; cat /root/sum";
const TELL: &str = "rm -f /root/sum; kill -USR1 $(cat /root/pid); i=0; \
    while [ ! -s /root/sum ] && [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); done; cat /root/sum";
const TREE: &str = "cd /srv && find . -type f -exec sha256sum {} + | sort | sha256sum";

#[tokio::test]
async fn the_nodes_process() {
    bench::be_the_node().await;
}

async fn started() -> Option<(Bench, SandboxId, RunRef)> {
    let mut bench = Bench::new().await?;
    let id = bench.sandbox().await;
    let first = run(&id, 1, 1);
    Some((bench, id, first))
}

fn clock_error(guest_ms: &str) -> i128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    now as i128 - guest_ms.parse::<i128>().unwrap()
}

/// The file system of a checkpoint's disk, as it would be found by a boot.
fn fsck(bench: &Bench, checkpoint: &str) {
    let disk = bench.folder(Area::Checkpoints, checkpoint).join("disk.img");
    let copy = tempfile::NamedTempFile::new().unwrap();
    std::fs::copy(disk, copy.path()).unwrap();
    // What a mount does first: the journal is played.
    let replay = Command::new("/usr/sbin/e2fsck").args(["-p", "-E", "journal_only"]).arg(copy.path()).output().unwrap();
    assert!(replay.status.code().is_some_and(|code| code <= 1), "{replay:?}");
    let out = Command::new("/usr/sbin/e2fsck").arg("-fn").arg(copy.path()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
}

#[tokio::test]
async fn a_paused_run_loses_nothing_and_says_so() {
    let Some((mut bench, id, first)) = started().await else { return };
    let sum = bench.sh(&first, HOLDER).await.unwrap();
    for round in 0..3 {
        let paused = bench.client.pause_run(first.clone()).await.unwrap().into_inner();
        assert_eq!(paused.state(), RunState::Paused);
        assert!(paused.reason.starts_with("requested: "), "{paused:?}");
        let refused = bench.sh(&first, "true").await.unwrap_err();
        assert_eq!((refused.code(), refused.message().starts_with("paused: ")), (Code::FailedPrecondition, true));
        tokio::time::sleep(Duration::from_secs(1)).await;
        if round == 1 {
            // A node that dies leaves it paused, and its successor knows.
            bench.kill();
            bench.start().await;
            assert_eq!(bench.state(&id).await, Some(RunState::Paused));
            tokio::time::sleep(Duration::from_secs(3)).await;
        }
        assert_eq!(bench.client.pause_run(first.clone()).await.unwrap().into_inner().state(), RunState::Paused);
        let begun = Instant::now();
        let running = bench.client.resume_run(first.clone()).await.unwrap().into_inner();
        eprintln!("resumed in {:?}", begun.elapsed());
        assert_eq!((running.state(), running.reason.as_str()), (RunState::Running, ""));
        // The answer takes time too: never early, and late by no more than that.
        let asked = Instant::now();
        let error = clock_error(&bench.sh(&first, "date +%s%3N").await.unwrap());
        assert!(error > -100 && error < 100 + asked.elapsed().as_millis() as i128, "{error} ms");
        assert_eq!(bench.sh(&first, TELL).await.unwrap(), sum);
    }
    bench.client.delete_run(first).await.unwrap();
    assert!(bench.everything().is_empty(), "{:?}", bench.everything());
}

#[tokio::test]
async fn a_checkpoint_gives_back_files_and_memory() {
    let Some((mut bench, id, first)) = started().await else { return };
    let sum = bench.sh(&first, HOLDER).await.unwrap();
    bench.sh(&first, "for i in $(seq 40); do head -c 20000 /dev/urandom > /srv/f$i; done").await.unwrap();
    let tree = bench.sh(&first, TREE).await.unwrap();
    let machine = bench.sh(&first, "cat /etc/machine-id").await.unwrap();
    let cp = CheckpointId::new().to_string();
    let begun = Instant::now();
    let info = bench.checkpoint(first.clone(), &cp, false).await.unwrap();
    eprintln!("checkpoint: {:?}, the guest stood still for {} µs", begun.elapsed(), info.paused_us);
    assert!(info.quiesced && info.paused_us > 0 && info.disk_bytes > 0 && !info.rolling, "{info:?}");
    let again = bench.checkpoint(first.clone(), &cp, false).await.unwrap();
    assert_eq!(again.created_unix_ms, info.created_unix_ms);
    fsck(&bench, &format!("{id}.{cp}"));
    // The run went on; what it does now is not in the checkpoint.
    bench.sh(&first, "rm /srv/f1; echo new > /srv/f2; kill $(cat /root/pid)").await.unwrap();
    let back = from_checkpoint(&id, &cp);
    let early = bench.begin(run(&id, 2, 2), back.clone(), false).await.unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition, "{early:?}");
    bench.client.end_run(run(&id, 1, 2)).await.unwrap();
    assert_eq!(bench.state(&id).await, Some(RunState::Gone));
    let begun = Instant::now();
    bench.begin(run(&id, 2, 2), back, false).await.unwrap();
    eprintln!("rolled back in {:?}", begun.elapsed());
    let second = run(&id, 2, 2);
    assert_eq!(bench.sh(&second, TREE).await.unwrap(), tree);
    assert_eq!(bench.sh(&second, TELL).await.unwrap(), sum);
    assert_eq!(bench.sh(&second, "cat /etc/machine-id; echo $MARK").await.unwrap(), format!("{machine}\nkept"));
    let late = bench.begin(first, None, false).await.unwrap_err();
    assert_eq!(late.code(), Code::FailedPrecondition);
    let listed = bench.client.list_checkpoints(ListCheckpointsRequest { sandbox: id.to_string() }).await.unwrap();
    assert_eq!(listed.into_inner().checkpoints.len(), 1);
    let named = CheckpointRef { sandbox: id.to_string(), checkpoint: cp };
    bench.client.delete_checkpoint(named.clone()).await.unwrap();
    bench.client.delete_checkpoint(named).await.unwrap();
    assert!(bench.checkpoints().is_empty());
    assert_eq!(bench.sh(&second, TREE).await.unwrap(), tree, "deleting the checkpoint hurt the run");
}

#[tokio::test]
async fn forks_are_others_and_share_nothing() {
    let Some((mut bench, id, first)) = started().await else { return };
    let sum = bench.sh(&first, HOLDER).await.unwrap();
    let cp = CheckpointId::new().to_string();
    bench.checkpoint(first.clone(), &cp, false).await.unwrap();
    let children: Vec<RunRef> = (0..3).map(|_| run(&SandboxId::new(), 1, 1)).collect();
    for child in &children {
        bench.begin(child.clone(), from_checkpoint(&id, &cp), true).await.unwrap();
    }
    // The parent and its checkpoint go; the children do not notice.
    bench.client.delete_run(first).await.unwrap();
    let mut ids = BTreeSet::new();
    for (n, child) in children.iter().enumerate() {
        ids.insert(bench.sh(child, "cat /etc/machine-id").await.unwrap());
        bench.sh(child, &format!("echo {n} > /srv/mine; sync")).await.unwrap();
    }
    assert_eq!(ids.len(), 3, "{ids:?}");
    for (n, child) in children.iter().enumerate() {
        assert_eq!(bench.sh(child, "cat /srv/mine").await.unwrap(), n.to_string());
        assert_eq!(bench.sh(child, TELL).await.unwrap(), sum);
        bench.client.delete_run(child.clone()).await.unwrap();
    }
    assert!(bench.everything().is_empty(), "{:?}", bench.everything());
}

#[tokio::test]
async fn a_stopped_run_keeps_its_disk() {
    let Some((mut bench, id, first)) = started().await else { return };
    let machine = bench.sh(&first, "echo here > /srv/file; cat /etc/machine-id").await.unwrap();
    for (point, state) in [("stop.quiet", RunState::Running), ("stop.noted", RunState::Stopped)] {
        bench.drill(point);
        assert!(bench.client.stop_run(first.clone()).await.is_err() && bench.drilled(), "{point}");
        bench.kill();
        bench.start().await;
        assert_eq!(bench.state(&id).await, Some(state), "{point}");
    }
    let stopped = bench.client.stop_run(first.clone()).await.unwrap().into_inner();
    assert_eq!(stopped.state(), RunState::Stopped);
    assert_eq!(bench.vmm(&id), None);
    assert!(!bench.folder(Area::Sandboxes, id.as_str()).join("memory.img").exists());
    assert_eq!(bench.client.stop_run(first.clone()).await.unwrap().into_inner().state(), RunState::Stopped);
    bench.kill();
    bench.start().await;
    assert_eq!(bench.state(&id).await, Some(RunState::Stopped));
    let disk = || Some(Source::Disk(DiskSource {}));
    assert!(bench.begin(first, disk(), false).await.is_err(), "the stopped run began again");
    // A node that dies during the boot has not lost the disk.
    bench.drill("run.named");
    assert!(bench.begin(run(&id, 2, 2), disk(), false).await.is_err());
    assert!(bench.drilled());
    bench.kill();
    bench.start().await;
    assert_eq!(bench.state(&id).await, Some(RunState::Stopped));
    let begun = Instant::now();
    let up = bench.begin(run(&id, 2, 2), disk(), false).await.unwrap_or_else(|e| panic!("{e}: {}", bench.log()));
    eprintln!("booted in {:?}", begun.elapsed());
    assert_eq!(up.state(), RunState::Running);
    let second = run(&id, 2, 2);
    let seen = bench.sh(&second, "cat /srv/file /etc/machine-id; hostname; echo $MARK").await.unwrap();
    assert_eq!(seen, format!("here\n{machine}\nlives\nkept"));
    let error = clock_error(&bench.sh(&second, "date +%s%3N").await.unwrap());
    assert!(error.abs() < 10_000, "{error} ms");
    bench.client.delete_run(second).await.unwrap();
    assert!(bench.everything().is_empty());
}

#[tokio::test]
async fn a_suspended_run_wakes_after_a_restart() {
    let Some((mut bench, id, first)) = started().await else { return };
    let sum = bench.sh(&first, HOLDER).await.unwrap();
    let cp = CheckpointId::new().to_string();
    bench.checkpoint(first.clone(), &cp, true).await.unwrap();
    assert_eq!(bench.state(&id).await, Some(RunState::Paused));
    // Asked for again: nothing has run since, so it is the same one.
    bench.checkpoint(first.clone(), &cp, true).await.unwrap();
    bench.client.end_run(first).await.unwrap();
    bench.kill();
    bench.start().await;
    assert_eq!(bench.state(&id).await, None);
    for point in ["unpack.recorded", "run.recorded", "run.started", "run.refreshed"] {
        bench.drill(point);
        let cut = bench.begin(run(&id, 2, 2), from_checkpoint(&id, &cp), false).await;
        assert!(cut.is_err() && bench.drilled(), "{point}");
        bench.kill();
        bench.start().await;
        assert_eq!((bench.state(&id).await, bench.everything().len()), (None, 1), "{point}");
    }
    bench.begin(run(&id, 2, 2), from_checkpoint(&id, &cp), false).await.unwrap();
    assert_eq!(bench.sh(&run(&id, 2, 2), TELL).await.unwrap(), sum);
}

#[tokio::test]
async fn a_node_that_dies_during_a_checkpoint_leaves_no_half_one() {
    let Some((mut bench, id, first)) = started().await else { return };
    let sum = bench.sh(&first, HOLDER).await.unwrap();
    let pid = bench.vmm(&id);
    for point in ["checkpoint.quiet", "checkpoint.saved", "checkpoint.facts", "checkpoint.taken", "checkpoint.resumed"]
    {
        let before = bench.checkpoints().len();
        let cp = CheckpointId::new().to_string();
        bench.drill(point);
        assert!(bench.checkpoint(first.clone(), &cp, false).await.is_err(), "{point}");
        assert!(bench.drilled(), "{point} was not reached");
        bench.kill();
        bench.start().await;
        assert_eq!(bench.state(&id).await, Some(RunState::Running), "{point}");
        assert_eq!(bench.vmm(&id), pid, "{point}");
        // Its programs run: no freeze is left.
        assert_eq!(bench.sh(&first, TELL).await.unwrap(), sum, "{point}");
        let whole = matches!(point, "checkpoint.taken" | "checkpoint.resumed");
        assert_eq!(bench.checkpoints().len(), before + usize::from(whole), "{point}");
        // Asked for again, it is there.
        bench.checkpoint(first.clone(), &cp, false).await.unwrap();
        fsck(&bench, &format!("{id}.{cp}"));
    }
    for point in ["pause.quiet", "pause.noted", "pause.paused", "resume.refreshed"] {
        bench.drill(point);
        let asked = if point == "resume.refreshed" {
            bench.client.pause_run(first.clone()).await.unwrap();
            bench.client.resume_run(first.clone()).await
        } else {
            bench.client.pause_run(first.clone()).await
        };
        assert!(asked.is_err() && bench.drilled(), "{point}");
        bench.kill();
        bench.start().await;
        let state = bench.state(&id).await.unwrap();
        assert_eq!(state == RunState::Running, point == "pause.quiet", "{point}: {state:?}");
        bench.client.resume_run(first.clone()).await.unwrap();
        assert_eq!(bench.sh(&first, TELL).await.unwrap(), sum, "{point}");
    }
}

#[tokio::test]
async fn a_delete_waits_for_nobody() {
    let Some((mut bench, id, first)) = started().await else { return };
    let cp = CheckpointId::new().to_string();
    bench.checkpoint(first.clone(), &cp, false).await.unwrap();
    let pid = nix::unistd::Pid::from_raw(bench.vmm(&id).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let mut other = bench.client.clone();
    let taking = tokio::spawn({
        let checkpoint = CheckpointId::new().to_string();
        let request =
            space_proto::node::TakeCheckpointRequest { run: Some(first.clone()), checkpoint, keep_paused: false };
        async move { other.take_checkpoint(request).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = Instant::now();
    bench.client.delete_run(first).await.unwrap();
    eprintln!("deleted in {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert!(taking.await.unwrap().is_err());
    assert!(bench.everything().is_empty(), "{:?}", bench.everything());
}

#[tokio::test]
async fn rolling_checkpoints_come_by_themselves_and_stay_few() {
    let Some(mut bench) = Bench::new().await else { return };
    let id = SandboxId::new();
    let first = run(&id, 1, 1);
    let rolling = Some(Rolling { every_s: 1, keep: Vec::new() });
    let request = StartRunRequest { rolling, ..bench.request(first.clone(), None) };
    bench.client.start_run(request).await.unwrap();
    let mut seen = BTreeSet::new();
    let begun = Instant::now();
    while seen.len() < 3 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{seen:?}: {}", bench.log());
        bench.sh(&first, "date > /srv/now").await.unwrap();
        let all = bench.client.list_checkpoints(ListCheckpointsRequest::default()).await.unwrap().into_inner();
        assert!(all.checkpoints.len() <= 2 && all.checkpoints.iter().all(|cp| cp.rolling), "{all:?}");
        seen.extend(all.checkpoints.into_iter().map(|cp| cp.checkpoint));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    bench.client.delete_run(first).await.unwrap();
    assert!(bench.everything().is_empty(), "{:?}", bench.everything());
}
