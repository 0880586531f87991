//! What every driver must do, with real VMs. Each scenario starts from the bench's template and leaves nothing.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use space_hostd::pool::Area;
use space_vmm::{AfterRestore, CONSOLE_LOG_BYTES, ExitReason, SaveKind, Vm, VmDir, VmStatus, VmmError};

use super::{Agent, Bench, Frozen, Kind, SHORT_PATIENCE};

pub async fn end(vm: &dyn Vm) {
    vm.kill().await.unwrap();
    assert_eq!(vm.wait().await, ExitReason::Killed { signal: 9 });
}

pub async fn two_sandboxes_continue_one_memory_each_for_itself(bench: &Bench) {
    let (first, second) = tokio::join!(bench.restore("a", AfterRestore::Run), bench.restore("b", AfterRestore::Run));
    let (mut a, mut b) = (Agent::connect(&*first.0).await, Agent::connect(&*second.0).await);
    let before = a.counter().await;
    assert!(before > 0 && b.counter().await > 0, "the memory of the template goes on");
    assert_eq!(a.ask("disk hello").await, "disk hello");
    assert_eq!(b.ask("disk").await, "disk", "the disks are apart");
    assert!(a.ask("random").await.starts_with("random 8 "));

    // The VMM runs as its own user, which owns its files, in its own cgroup.
    let pid = first.0.identity().pid;
    let owner = std::fs::metadata(format!("/proc/{pid}")).unwrap().uid();
    assert!(owner >= 290_000 && owner == std::fs::metadata(first.1.file("memory.img")).unwrap().uid());
    assert_eq!(bench.cgroups.open("a").unwrap().pids().unwrap(), [pid]);

    // Paused: no answer, no counting. Resumed: the answer comes.
    first.0.pause().await.unwrap();
    first.0.pause().await.unwrap();
    assert_eq!(first.0.status().await.unwrap(), VmStatus::Paused);
    a.send("ping").await;
    assert!(tokio::time::timeout(Duration::from_millis(300), a.line()).await.is_err(), "a paused guest answers");
    first.0.resume().await.unwrap();
    assert_eq!(first.0.status().await.unwrap(), VmStatus::Running);
    assert!(a.line().await.starts_with("pong "));
    assert!(a.counter().await > before);

    // A save, a snapshot and a restore of that: memory and disk of the same instant.
    a.ask("touch 1").await;
    first.0.sync_ahead().await.unwrap();
    let begun = Instant::now();
    first.0.save(SaveKind::Changed).await.unwrap();
    first.0.save(SaveKind::Changed).await.unwrap();
    bench.pool.snapshot((Area::Sandboxes, "a"), (Area::Sandboxes, "c"), false).unwrap();
    first.0.resume().await.unwrap();
    eprintln!("save and snapshot: {:?}", begun.elapsed());
    let dir = VmDir::new(bench.pool.path(Area::Sandboxes, "c").unwrap());
    let third = bench.driver.restore(&bench.spec("c"), &dir, AfterRestore::StayPaused).await.unwrap();
    assert_eq!(third.status().await.unwrap(), VmStatus::Paused);
    third.resume().await.unwrap();
    let mut c = Agent::connect(&*third).await;
    assert_eq!(c.ask("disk").await, "disk hello");
    assert!(c.counter().await > before);
    first.0.save(SaveKind::Full).await.unwrap();
    first.0.resume().await.unwrap();
    for vm in [&first.0, &second.0, &third] {
        end(&**vm).await;
    }
    bench.assert_nothing_left();
}

pub async fn a_vm_outlives_its_driver_and_is_adopted(bench: &Bench) {
    let (vm, dir) = bench.restore("a", AfterRestore::Run).await;
    let mut agent = Agent::connect(&*vm).await;
    let before = agent.counter().await;
    let identity = vm.identity();
    drop((agent, vm));

    let vm = bench.driver.adopt(&dir, identity).await.unwrap();
    assert_eq!(vm.status().await.unwrap(), VmStatus::Running);
    let mut agent = Agent::connect(&*vm).await;
    assert!(agent.counter().await > before);
    vm.save(SaveKind::Full).await.unwrap();
    vm.resume().await.unwrap();

    // The guest ends while nobody listens: whoever adopts then learns of it, as far as the VMM still stands. A save may end a
    // stream, and one that is still held keeps the next one silent.
    drop(agent);
    let mut agent = Agent::connect(&*vm).await;
    agent.send("reboot").await;
    drop((agent, vm));
    tokio::time::sleep(Duration::from_millis(1500)).await;
    if bench.kind == Kind::Qemu {
        let vm = bench.driver.adopt(&dir, identity).await.unwrap();
        let reason = tokio::time::timeout(Duration::from_secs(20), vm.wait()).await.unwrap();
        assert!(matches!(reason, ExitReason::GuestEnded | ExitReason::GuestReset), "{reason:?}");
    }
    let gone = bench.driver.adopt(&dir, identity).await.err().unwrap();
    assert!(matches!(gone, VmmError::Host(space_hostd::protocol::HostError::Gone { .. })), "{gone:?}");
    bench.assert_nothing_left();
}

/// Alive, and deaf: it answers nothing, and does not look stopped either.
pub async fn a_silent_vmm_costs_a_bounded_wait_and_is_ended(bench: &Bench) {
    // Whatever is asked of it ends in time, and says what did not.
    let (vm, dir) = bench.restore("asked", AfterRestore::Run).await;
    Agent::connect(&*vm).await.counter().await;
    let identity = vm.identity();
    drop(vm);
    let vm = bench.impatient.adopt(&dir, identity).await.unwrap();
    let Some(frozen) = Frozen::new(identity.pid) else { return end(&*vm).await };
    let begun = Instant::now();
    let asked = vm.status().await;
    assert!(matches!(asked, Err(VmmError::Timeout { .. })), "{asked:?}");
    assert!(begun.elapsed() < SHORT_PATIENCE * 4, "{:?}", begun.elapsed());
    // One that nobody asks anything is noticed all the same.
    let ended = tokio::time::timeout(SHORT_PATIENCE * 15, vm.wait()).await.expect("nobody noticed");
    assert_eq!(ended, ExitReason::Killed { signal: 9 });
    drop(frozen);

    // And it can be ended by hand, which needs no word of it.
    let (vm, _) = bench.restore("ended", AfterRestore::Run).await;
    let frozen = Frozen::new(vm.identity().pid).unwrap();
    let begun = Instant::now();
    end(&*vm).await;
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    drop(frozen);
    bench.assert_nothing_left();
}

pub async fn each_end_of_a_guest_has_its_reason(bench: &Bench) {
    for (command, reason) in bench.kind.ends() {
        let (vm, dir) = bench.restore(command, AfterRestore::Run).await;
        Agent::connect(&*vm).await.send(command).await;
        let ended = tokio::time::timeout(Duration::from_secs(20), vm.wait()).await.unwrap();
        assert_eq!(ended, reason, "{command}");
        assert_eq!(vm.status().await.unwrap(), VmStatus::Ended);
        vm.kill().await.unwrap();
        if command == "panic" {
            let console = std::fs::read_to_string(dir.file("console.log")).unwrap();
            assert!(console.contains("Attempted to kill init"), "{console}");
        }
    }
    // Somebody else kills the VMM.
    let (vm, _) = bench.restore("killed", AfterRestore::Run).await;
    let pid = i32::try_from(vm.identity().pid).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    assert_eq!(vm.wait().await, ExitReason::Killed { signal: 9 });
    assert!(matches!(vm.save(SaveKind::Full).await, Err(error) if !error.is_recoverable()));

    // A state that is none, one that is cut off, and one that is missing.
    let dir = bench.sandbox("broken");
    for bytes in [&b"nonsense"[..], &std::fs::read(dir.file("device.state")).unwrap()[..10_000]] {
        std::fs::write(dir.file("device.state"), bytes).unwrap();
        let error = bench.driver.restore(&bench.spec("broken"), &dir, AfterRestore::Run).await.err().unwrap();
        assert!(matches!(error, VmmError::BadState { ref message } if !message.is_empty()), "{error:?}");
    }
    std::fs::remove_file(dir.file("device.state")).unwrap();
    let error = bench.driver.restore(&bench.spec("broken"), &dir, AfterRestore::Run).await.err().unwrap();
    assert!(matches!(error, VmmError::File { .. }), "{error:?}");
    bench.assert_nothing_left();
}

pub async fn a_flooding_guest_stays_bounded_and_a_lost_connection_is_replaced(bench: &Bench) {
    let (vm, dir) = bench.restore("a", AfterRestore::Run).await;
    let mut agent = Agent::connect(&*vm).await;
    agent.ask("ping").await;
    // Vanish in the midst of a line, with an answer under way, several times.
    for _ in 0..5 {
        agent.send("ping\nping\npi").await;
        drop(agent);
        agent = Agent::connect(&*vm).await;
    }
    // What is left of the cut-off commands comes first; then the channel is in order.
    agent.send("\nmarker").await;
    while agent.line().await != "unknown marker" {}
    assert!(agent.counter().await > 0);

    assert_eq!(agent.ask("flood").await, "flooding");
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        vm.drain_console().await.unwrap();
        assert!(std::fs::metadata(dir.file("console.log")).map_or(0, |meta| meta.len()) <= CONSOLE_LOG_BYTES);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let length = std::fs::metadata(dir.file("console.log")).unwrap().len();
    assert!(length > 1024, "the flood did not reach the log: {length}");
    assert!(std::fs::metadata(dir.file("console.log")).unwrap().mode() & 0o077 == 0);
    end(&*vm).await;
    bench.assert_nothing_left();
}

/// Prints what the parts cost; the bound is one that only a fault exceeds, since tests share their processors.
pub async fn what_a_restore_costs(bench: &Bench) {
    for round in 0..8 {
        let name = format!("r{round}");
        let (dir, spec) = (bench.sandbox(&name), bench.spec(&name));
        let begun = Instant::now();
        let vm = bench.driver.restore(&spec, &dir, AfterRestore::Run).await.unwrap();
        let running = begun.elapsed();
        let mut agent = Agent::connect(&*vm).await;
        agent.counter().await;
        let answered = begun.elapsed();
        agent.counter().await;
        let again = begun.elapsed() - answered;
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", vm.identity().pid)).unwrap();
        let pss = smaps.lines().find(|line| line.starts_with("Pss:")).unwrap_or_default().to_owned();
        let begun = Instant::now();
        vm.pause().await.unwrap();
        vm.resume().await.unwrap();
        let cycle = begun.elapsed();
        let begun = Instant::now();
        vm.save(SaveKind::Changed).await.unwrap();
        let saved = begun.elapsed();
        vm.resume().await.unwrap();
        let state = std::fs::metadata(dir.file("device.state")).unwrap().len();
        eprintln!(
            "running {running:?}, answered {answered:?}, next answer {again:?}, pause+resume {cycle:?}, save {saved:?}, state {state} bytes, {pss}"
        );
        assert!(running < Duration::from_secs(5), "{running:?}");
        end(&*vm).await;
    }
    bench.assert_nothing_left();
}
