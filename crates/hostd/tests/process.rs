//! Detached processes and their groups, for real.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use space_hostd::cgroup::{Cgroup, CgroupRoot, Limits, Weight};
use space_hostd::process::{
    Exit, FIRST_INHERITED, Output, ProcessError, ProcessIdentity, Rights, Rlimits, SpawnSpec, open_existing, spawn,
};

const UID: u32 = 299_001;

fn root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIP: changing users and making cgroups needs root");
    }
    root
}

fn shell(script: &str, cwd: &Path, cgroup: Option<Cgroup>, inherited: Vec<OwnedFd>) -> SpawnSpec {
    SpawnSpec {
        program: PathBuf::from("/bin/sh"),
        args: vec!["-c".into(), script.into()],
        cwd: cwd.to_owned(),
        uid: UID,
        gid: UID,
        cgroup,
        output: Output::File(cwd.join("out")),
        limits: Rlimits { open_files: Some(64), file_size_bytes: Some(1 << 20) },
        inherited,
        env: Vec::new(),
        rights: Rights::None,
        profile: None,
        jail: None,
    }
}

/// A group of its own root, removed when the test ends.
struct TestGroup(CgroupRoot, Cgroup);

impl TestGroup {
    fn new(name: &str) -> Self {
        let root = CgroupRoot::new(&format!("test-{}-{name}", std::process::id())).unwrap();
        let group = root
            .create("one", Limits { memory_bytes: 256 << 20, cpu_millis: 500, pids: 16, weight: Weight::Normal })
            .unwrap();
        TestGroup(root, group)
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        drop(self.1.kill());
        drop(self.1.remove());
        self.0.remove_if_empty();
    }
}

#[tokio::test]
async fn the_child_has_what_it_was_given_and_nothing_else() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let group = TestGroup::new("child");
    let passed = File::open("/dev/zero").unwrap();
    let fd = FIRST_INHERITED;
    let script = format!(
        "pwd; id -u; id -g; id -G; grep -E 'NoNewPrivs' /proc/self/status; cat /proc/self/cgroup; env | grep -v -e ^PWD -e ^_ -e ^SHLVL -e ^OLDPWD; \
         echo session $(cut -d' ' -f6 /proc/$$/stat) $$; ulimit -n; ulimit -c; head -c 3 <&{fd} | wc -c; exit 7"
    );
    let process = spawn(shell(&script, dir.path(), Some(group.1.clone()), vec![passed.into()])).unwrap();
    assert_eq!(process.wait().await, Exit::Code(7));
    let out = fs::read_to_string(dir.path().join("out")).unwrap();
    for line in ["299001\n299001\n299001\n", "NoNewPrivs:\t1\n", "/one\n", "\n64\n0\n3\n"] {
        assert!(out.contains(line), "no {line:?} in {out}");
    }
    let pid = process.identity().pid;
    assert!(out.contains(&format!("session {pid} {pid}\n")), "{out}");
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "not reaped");
    assert!(matches!(open_existing(process.identity()), Err(ProcessError::Gone { .. })));
}

#[tokio::test]
async fn a_stopped_process_stands_until_it_is_let_go() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let process = spawn(shell("while :; do echo x; sleep 0.01; done", dir.path(), None, vec![])).unwrap();
    let length = || fs::metadata(dir.path().join("out")).map_or(0, |meta| meta.len());
    while length() < 4 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(!process.is_stopped());
    process.stop().await.unwrap();
    assert!(process.is_stopped() && open_existing(process.identity()).unwrap().is_stopped());
    let before = length();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(length(), before);
    process.go_on().unwrap();
    while length() == before {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    process.stop().await.unwrap();
    process.kill().unwrap();
    assert_eq!(process.wait().await, Exit::Signal(9));
    process.stop().await.unwrap();
    assert!(!process.is_stopped());
}

#[tokio::test]
async fn a_group_is_killed_and_removed_with_all_its_processes() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let group = TestGroup::new("kill");
    let process = spawn(shell("sleep 1000 & sleep 1000 & wait", dir.path(), Some(group.1.clone()), vec![])).unwrap();
    while group.1.pids().unwrap().len() < 3 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(group.0.list().unwrap(), ["one"]);
    group.1.kill().unwrap();
    assert_eq!(process.wait().await, Exit::Signal(9));
    group.1.remove().unwrap();
    group.1.remove().unwrap();
    assert!(group.0.list().unwrap().is_empty() && !group.1.exists());
}

#[tokio::test]
async fn a_process_is_found_again_by_pid_and_start_time_only() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let process = spawn(shell("exec sleep 1000", dir.path(), None, vec![])).unwrap();
    let identity = process.identity();
    let other = ProcessIdentity { start_time: identity.start_time + 1, ..identity };
    assert!(matches!(open_existing(other), Err(ProcessError::Gone { .. })));
    let again = open_existing(identity).unwrap();
    assert!(again.is_alive() && process.is_alive());
    again.kill().unwrap();
    assert_eq!(process.wait().await, Exit::Signal(9));
    assert_eq!(again.wait().await, Exit::Unknown);
    assert!(!again.is_alive());
    again.kill().unwrap();
}

#[tokio::test]
async fn a_program_that_cannot_start_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = shell("", dir.path(), None, vec![]);
    spec.program = dir.path().join("missing");
    assert!(matches!(spawn(spec), Err(ProcessError::Spawn { .. })));
    let mut spec = shell("", dir.path(), None, vec![]);
    spec.program = PathBuf::from("sh");
    assert!(matches!(spawn(spec), Err(ProcessError::NotAbsolute(_))));
}

#[test]
fn what_we_were_given_is_not_passed_on() {
    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    let file = tempfile::NamedTempFile::new().unwrap();
    fcntl(file.as_file(), FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
    let passed = || {
        let list = std::process::Command::new("/bin/ls").args(["-l", "/proc/self/fd"]).output().unwrap();
        String::from_utf8(list.stdout).unwrap().contains(file.path().to_str().unwrap())
    };
    assert!(passed());
    space_hostd::process::keep_descriptors();
    assert!(!passed());
}
