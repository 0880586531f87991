//! What the driver adds to Firecracker: the same files, restored and saved through the driver and by a Firecracker started by
//! hand without a jail, in turns. A measurement, so it runs only when it is asked for (`SPACE_BENCH=1`); its bounds are those that
//! only a fault exceeds.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use space_vmm::{AfterRestore, SaveKind, Vm, VmDir};
use support::{Agent, Bench, Kind, scenarios};

const ROUNDS: usize = 25;
const CLONES: usize = 10;

/// Times of one kind, in milliseconds.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn add(&mut self, begun: Instant) {
        self.0.push(begun.elapsed().as_secs_f64() * 1000.0);
    }

    fn say(&mut self, what: &str) -> f64 {
        self.0.sort_by(f64::total_cmp);
        let at = |part: f64| self.0[((self.0.len() - 1) as f64 * part).round() as usize];
        eprintln!("{what}: median {:.1} ms, p90 {:.1} ms, of {}", at(0.5), at(0.9), self.0.len());
        at(0.5)
    }
}

/// A Firecracker without anything around it, in a folder of its own.
struct Bare {
    child: Child,
    socket: PathBuf,
}

impl Drop for Bare {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Bare {
    fn restore(dir: &VmDir) -> Bare {
        let _ = std::fs::remove_dir_all(dir.file("run"));
        std::fs::create_dir(dir.file("run")).unwrap();
        let mut command = Command::new(support::firecracker_program().unwrap());
        command.args(["--api-sock", "run/api.sock", "--id", "vm", "--level", "Warn"]).current_dir(dir.path());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let bare = Bare { child, socket: dir.file("run/api.sock") };
        while UnixStream::connect(&bare.socket).is_err() {
            std::thread::sleep(Duration::from_micros(200));
        }
        let load = r#"{"snapshot_path":"device.state","mem_backend":{"backend_type":"File","backend_path":"memory.img"},
            "track_dirty_pages":true,"resume_vm":true}"#;
        bare.ask("PUT", "/snapshot/load", load);
        bare
    }

    fn save(&self, kind: &str) {
        self.ask("PATCH", "/vm", r#"{"state":"Paused"}"#);
        let names = r#""snapshot_path":"bare.state","mem_file_path":"bare.memory""#;
        self.ask("PUT", "/snapshot/create", &format!(r#"{{"snapshot_type":"{kind}",{names}}}"#));
    }

    fn resume(&self) {
        self.ask("PATCH", "/vm", r#"{"state":"Resumed"}"#);
    }

    fn ask(&self, method: &str, path: &str, body: &str) {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n");
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut answer = [0; 512];
        let length = stream.read(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer[..length]);
        assert!(answer.contains("204"), "{method} {path}: {answer}");
    }
}

fn pss_kib(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_driver_adds() {
    if std::env::var_os("SPACE_BENCH").is_none() {
        eprintln!("SKIP: a measurement of minutes: ask for it with SPACE_BENCH=1");
        return;
    }
    let Some(bench) = Bench::new(Kind::Firecracker, "beside") else { return };
    bench.template().await;
    let [mut restore, mut bare_restore, mut diff, mut bare_diff, mut full, mut bare_full] =
        std::array::from_fn(|_| Times::default());
    for round in 0..ROUNDS {
        let (ours, theirs) = (format!("ours-{round}"), format!("theirs-{round}"));
        let (dir, spec) = (bench.sandbox(&ours), bench.spec(&ours));
        let begun = Instant::now();
        let vm = bench.driver.restore(&spec, &dir, AfterRestore::Run).await.unwrap();
        restore.add(begun);
        save(&*vm, SaveKind::Changed, &mut diff).await;
        save(&*vm, SaveKind::Full, &mut full).await;
        scenarios::end(&*vm).await;

        let dir = bench.sandbox(&theirs);
        let begun = Instant::now();
        let bare = Bare::restore(&dir);
        bare_restore.add(begun);
        for (kind, times) in [("Diff", &mut bare_diff), ("Full", &mut bare_full)] {
            std::thread::sleep(Duration::from_millis(100));
            let begun = Instant::now();
            bare.save(kind);
            times.add(begun);
            bare.resume();
        }
        drop(bare);
        bench.assert_nothing_left();
        wait_for_room(&bench);
    }
    let ratios = [
        restore.say("restore, driver") / bare_restore.say("restore, bare"),
        diff.say("save of changes, driver") / bare_diff.say("diff snapshot, bare"),
        full.say("full save, driver") / bare_full.say("full snapshot, bare"),
    ];
    eprintln!("driver / bare: {ratios:.2?}");
    assert!(ratios[0] < 10.0, "{ratios:?}");
    what_idle_clones_hold(&bench).await;
}

/// Deleted subvolumes give their space back later.
fn wait_for_room(bench: &Bench) {
    let until = Instant::now() + Duration::from_secs(60);
    while bench.pool.usage().unwrap().free < 2 << 30 {
        assert!(Instant::now() < until, "the space of deleted folders does not come back");
        nix::unistd::sync();
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// With the guest's changes of a tenth of a second.
async fn save(vm: &dyn Vm, kind: SaveKind, times: &mut Times) {
    tokio::time::sleep(Duration::from_millis(100)).await;
    let begun = Instant::now();
    vm.save(kind).await.unwrap();
    times.add(begun);
    vm.resume().await.unwrap();
}

async fn what_idle_clones_hold(bench: &Bench) {
    let mut ours = Vec::new();
    for number in 0..CLONES {
        ours.push(bench.restore(&format!("clone-{number}"), AfterRestore::Run).await.0);
    }
    let idle: u64 = ours.iter().map(|vm| pss_kib(vm.identity().pid)).sum();
    for vm in &ours {
        Agent::connect(&**vm).await.counter().await;
    }
    let answered: u64 = ours.iter().map(|vm| pss_kib(vm.identity().pid)).sum();
    for vm in &ours {
        scenarios::end(&**vm).await;
    }
    bench.assert_nothing_left();
    let bare: Vec<_> = (0..CLONES).map(|number| Bare::restore(&bench.sandbox(&format!("bare-{number}")))).collect();
    let theirs: u64 = bare.iter().map(|bare| pss_kib(bare.child.id())).sum();
    drop(bare);
    bench.assert_nothing_left();
    let each = |kib: u64| kib / CLONES as u64;
    eprintln!(
        "PSS of each of {CLONES}: idle {} KiB, after an answer {} KiB, bare idle {} KiB",
        each(idle),
        each(answered),
        each(theirs)
    );
    assert!(each(idle) < 64 << 10, "an idle clone holds {} KiB", each(idle));
}
