//! What every process of a server may do, read from `/proc`: only the root process keeps some of root's rights, and a VMM sees
//! nothing of the host.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use space_tests::{Server, processes_of, shared_or_skip, status_of, vmms_in};

/// Of CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, SYS_CHROOT, SYS_ADMIN, SYS_RESOURCE, MKNOD, SETFCAP.
const HOST: u64 =
    1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 18 | 1 << 21 | 1 << 24 | 1 << 27 | 1 << 31;
/// And NET_BIND_SERVICE.
const STARTER: u64 = HOST | 1 << 10;
const SETS: [&str; 5] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
const NAMESPACES: [&str; 5] = ["mnt", "pid", "ipc", "uts", "net"];

fn set(pid: u32, name: &str) -> Result<u64> {
    Ok(u64::from_str_radix(&status_of(pid, name)?, 16)?)
}

/// Real, effective, saved and file system id, which must be one.
fn id(pid: u32, field: &str) -> Result<u32> {
    let text = status_of(pid, field)?;
    let all: BTreeSet<&str> = text.split_whitespace().collect();
    anyhow::ensure!(all.len() == 1, "{pid}: {field} {text}");
    Ok(text.split_whitespace().next().context("no id")?.parse()?)
}

fn only(pid: u32, allowed: u64) -> Result<()> {
    for name in SETS {
        let found = set(pid, name)?;
        assert_eq!(found & !allowed, 0, "{pid}: {name} {found:x}");
    }
    Ok(())
}

/// No capability, no way to one, a filter, and no other group.
fn has_nothing(pid: u32) -> Result<()> {
    only(pid, 0)?;
    assert_eq!(status_of(pid, "NoNewPrivs")?, "1", "{pid}");
    assert_eq!(status_of(pid, "Seccomp")?, "2", "{pid}");
    assert_eq!(status_of(pid, "Groups")?, "", "{pid}");
    assert_ne!(id(pid, "Uid")?, 0, "{pid}");
    assert_ne!(id(pid, "Gid")?, 0, "{pid}");
    assert_eq!(core_size(pid)?, ["0", "0"], "{pid}");
    Ok(())
}

fn core_size(pid: u32) -> Result<Vec<String>> {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).context("no core size")?;
    Ok(line.split_whitespace().take(2).map(str::to_owned).collect())
}

/// The words it was started with.
fn arguments(pid: u32) -> Result<Vec<String>> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline"))?;
    Ok(line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect())
}

fn starter() -> Result<u32> {
    Ok(std::env::var("SPACE_TEST_SERVER_PID")?.parse()?)
}

#[tokio::test]
async fn only_the_root_process_has_rights_of_roots() -> Result<()> {
    let _ = shared_or_skip!();
    let all = processes_of(starter()?);
    let mut found = BTreeSet::new();
    let mut users = BTreeSet::new();
    for pid in all {
        let words = arguments(pid)?;
        let name = words.get(2).filter(|_| words.get(1).is_some_and(|word| word == "role"));
        if pid == starter()? {
            only(pid, STARTER)?;
            assert_eq!(status_of(pid, "NoNewPrivs")?, "1");
        } else if let Some(name) = name {
            has_nothing(pid)?;
            users.insert(id(pid, "Uid")?);
            found.insert(name.clone());
        } else {
            assert!(words[0].ends_with("space-hostd"), "{words:?}");
            only(pid, HOST)?;
            assert_eq!((status_of(pid, "NoNewPrivs")?.as_str(), status_of(pid, "Seccomp")?.as_str()), ("1", "2"));
            found.insert("hostd".to_owned());
        }
    }
    assert_eq!(found, ["control", "hostd", "node"].map(str::to_owned).into(), "the processes of the server");
    assert_eq!(users.len(), 2, "node and control plane have users of their own");
    Ok(())
}

#[tokio::test]
async fn what_serves_the_network_is_not_root() -> Result<()> {
    let server = shared_or_skip!();
    let open = |pid: u32| -> Result<Vec<String>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
            found.extend(std::fs::read_link(entry.path()).ok().map(|to| to.display().to_string()));
        }
        Ok(found)
    };
    let host = processes_of(starter()?)
        .into_iter()
        .find(|pid| arguments(*pid).is_ok_and(|words| words[0].ends_with("space-hostd")))
        .context("no root process")?;
    let inet = sockets_of_the_network()?;
    let held: Vec<String> = open(host)?.into_iter().filter(|to| inet.contains(to)).collect();
    assert!(held.is_empty(), "the root process holds {held:?}");
    // Keys of clients are the control plane's alone.
    for name in ["control/admin.key", "control/token.seed", "control/control.db"] {
        let meta = std::fs::metadata(server.data_dir.join(name)).with_context(|| name.to_owned())?;
        assert_eq!(meta.mode() & 0o077, 0, "{name}");
        assert_ne!(meta.uid(), 0, "{name}");
    }
    assert_eq!(std::fs::metadata(server.data_dir.join("control"))?.mode() & 0o077, 0);
    Ok(())
}

/// As `/proc/PID/fd` names them.
fn sockets_of_the_network() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for table in ["tcp", "tcp6", "udp", "udp6"] {
        let Ok(text) = std::fs::read_to_string(Path::new("/proc/net").join(table)) else { continue };
        found.extend(
            text.lines().skip(1).filter_map(|line| line.split_whitespace().nth(9)).map(|n| format!("socket:[{n}]")),
        );
    }
    anyhow::ensure!(!found.is_empty(), "a server listens, and /proc/net shows no socket");
    Ok(found)
}

fn vmm_of(server: &Server, id: &str) -> Result<u32> {
    vmms_in(&server.data_dir.join("pool/sandboxes").join(id)).first().copied().context("no VMM")
}

#[tokio::test]
async fn a_vmm_has_nothing_and_sees_nothing() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let (one, two) = (api.sandbox("tiny").await?, api.sandbox("tiny").await?);
    let mut users = BTreeSet::new();
    for sandbox in [&one, &two] {
        let pid = vmm_of(&server, &sandbox.id)?;
        has_nothing(pid)?;
        users.insert((id(pid, "Uid")?, id(pid, "Gid")?));
        for name in NAMESPACES {
            let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{name}"));
            assert_ne!(of(&pid.to_string())?, of("self")?, "{name}");
        }
        // Its root is a folder of few names; what it may write to is its own.
        let root = std::fs::read_dir(format!("/proc/{pid}/root"))?.flatten();
        let names: BTreeSet<String> = root.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        for absent in ["proc", "sys", "home", "root", "var", "tmp", "run", "bin"] {
            assert!(!names.contains(absent), "{names:?}");
        }
        let settings = std::fs::read_dir(format!("/proc/{pid}/root/etc")).into_iter().flatten().flatten();
        let settings: Vec<_> = settings.map(|entry| entry.file_name()).filter(|name| name != "ld.so.cache").collect();
        assert!(settings.is_empty(), "{settings:?}");
        let mounts = std::fs::read_to_string(format!("/proc/{pid}/mounts"))?;
        for line in mounts.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let options: Vec<&str> = words[3].split(',').collect();
            assert!(words[1] == "/vm" || options.contains(&"ro"), "{line}");
            assert!(options.contains(&"nosuid"), "{line}");
        }
        let devices = std::fs::read_dir(format!("/proc/{pid}/root/dev"))?.flatten().count();
        assert!(devices <= 4, "{devices} devices");
        let group = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        assert!(group.lines().any(|line| line.contains("/space/")), "{group}");
    }
    assert_eq!(users.len(), 2, "each VMM has a user of its own");
    Ok(())
}
