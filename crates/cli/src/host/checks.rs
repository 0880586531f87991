//! Everything `doctor` looks at, in the order of the way down: rights, host, what set-up makes, the server, what is left over.

use std::collections::BTreeSet;
use std::path::Path;

use space_api::ListSandboxesQuery;
use space_api::client::Client;
use space_hostd::probe::HostFacts;

use super::{Finding, atrest, initramfs, kernel, leftovers, packages, pool, seed, vmm};
use crate::config::ServerConfig;
use crate::connect::ClientFile;
use crate::output::size;

fn rights(facts: &HostFacts) -> Finding {
    const NAME: &str = "rights";
    match facts.root {
        true => Finding::ok(NAME, "root"),
        false => Finding::warn(NAME, "not root: some things cannot be seen", "sudo space doctor"),
    }
}

fn system() -> Finding {
    const NAME: &str = "system";
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let field = |name: &str| {
        let value = release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_default().trim_matches('"').to_owned()
    };
    let name = field("PRETTY_NAME");
    if std::env::consts::ARCH != "x86_64" {
        return Finding::fail(NAME, format!("{name} on {}", std::env::consts::ARCH), "use an x86-64 machine");
    }
    match field("ID").as_str() {
        "debian" => Finding::ok(NAME, name),
        _ => Finding::warn(NAME, format!("{name}: tried on Debian 12 only"), "expect to install packages by hand"),
    }
}

fn host(facts: &HostFacts) -> Vec<Finding> {
    let mut findings = vec![Finding::ok("kernel", facts.kernel.clone())];
    findings.push(match (facts.cgroup_version, &facts.cgroup_problem) {
        (Some(version), _) => Finding::ok("cgroup", format!("version {version} with memory, cpu and pids")),
        (None, problem) => Finding::fail(
            "cgroup",
            problem.clone().unwrap_or_else(|| "no controllers for memory, cpu and pids".into()),
            "boot with systemd.unified_cgroup_hierarchy=1, or mount the controllers memory, cpu and pids",
        ),
    });
    findings.push(match facts.btrfs {
        true => Finding::ok("btrfs", "the kernel has it"),
        false => Finding::fail("btrfs", "the kernel has no btrfs", "modprobe btrfs, or boot a kernel with it"),
    });
    findings.push(match facts.loop_devices {
        true => Finding::ok("loop devices", "/dev/loop-control"),
        false => Finding::fail("loop devices", "no /dev/loop-control", "modprobe loop, or use --pool DEVICE"),
    });
    let memory = format!(
        "{} of {} available, {} CPUs",
        size(facts.memory_available_bytes),
        size(facts.memory_bytes),
        facts.cpus
    );
    findings.push(match facts.memory_available_bytes {
        0..=0x3fff_ffff => Finding::warn("memory", memory, "a sandbox of `seed` needs 512 MiB: free some, or add some"),
        _ => Finding::ok("memory", memory),
    });
    findings
}

fn reads(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// What lets one guest learn of another, or the disk of a guest's memory.
fn hygiene(config: &ServerConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    let swaps = reads("/proc/swaps").lines().count().saturating_sub(1);
    findings.push(match swaps {
        0 => Finding::ok("swap", "off"),
        _ => Finding::warn("swap", "on: the memory of guests can be written to it", "swapoff -a, or encrypt it"),
    });
    findings.push(match reads("/sys/kernel/mm/ksm/run").as_str() {
        "" | "0" => Finding::ok("page merging (KSM)", "off"),
        _ => Finding::warn(
            "page merging (KSM)",
            "on: guests can learn of each other's memory",
            "echo 2 > /sys/kernel/mm/ksm/run",
        ),
    });
    findings.push(match reads("/sys/devices/system/cpu/smt/active").as_str() {
        "1" => Finding::warn(
            "hyper-threads (SMT)",
            "on: guests on one core can learn of each other",
            "boot with nosmt where tenants do not trust each other",
        ),
        _ => Finding::ok("hyper-threads (SMT)", "off"),
    });
    findings.push(core_scheduling(config.core_scheduling, space_hostd::process::core_scheduling()));
    findings.push(pool_encryption(config));
    findings
}

/// `possible` as [`space_hostd::process::core_scheduling`] has it.
fn core_scheduling(asked: bool, possible: Option<bool>) -> Finding {
    const NAME: &str = "core scheduling";
    match (asked, possible) {
        (_, None) => Finding::ok(NAME, "not needed: no two threads share a core"),
        (true, Some(true)) => Finding::ok(NAME, "on: no two VMs on one core at a time"),
        (true, Some(false)) => Finding::fail(
            NAME,
            "asked for, and the kernel has none (CONFIG_SCHED_CORE)",
            "set vmm.core_scheduling to off, and boot with nosmt",
        ),
        (false, Some(true)) => {
            Finding::warn(NAME, "off", "set vmm.core_scheduling to on where tenants do not trust each other")
        }
        (false, Some(false)) => Finding::warn(NAME, "off; the kernel has none", "boot with nosmt"),
    }
}

/// Whether what guests leave on the disk under the pool is encrypted, as far as the device tells.
fn pool_encryption(config: &ServerConfig) -> Finding {
    const NAME: &str = "pool at rest";
    match atrest::encrypted(&config.data_dir.join("pool")) {
        Some(true) => Finding::ok(NAME, "on an encrypted device"),
        Some(false) => Finding::ok(NAME, "in clear: see docs/security.md for a key made at each boot"),
        None => Finding::ok(NAME, "the pool is not mounted"),
    }
}

async fn server(config: &ServerConfig) -> (Vec<Finding>, Option<Client>) {
    const NAME: &str = "server";
    let held = crate::server::lock::is_held(config);
    let Some(file) = ClientFile::read(&config.client_file()) else {
        let text = if held { "it runs; client.toml cannot be read" } else { "not running" };
        return (vec![Finding::warn(NAME, text, "sudo space up --detach")], None);
    };
    if !held {
        return (vec![Finding::warn(NAME, "not running", "sudo space up --detach")], None);
    }
    let client = match Client::new(&file.url, Some(&file.key)) {
        Ok(client) => client,
        Err(e) => return (vec![Finding::fail(NAME, e.to_string(), "space down && space up --detach")], None),
    };
    match client.info().await {
        Ok(info) => {
            let text = format!(
                "{} at {}, driver {} {}, {} sandboxes",
                info.version, file.url, info.driver, info.driver_version, info.runs
            );
            (vec![Finding::ok(NAME, text)], Some(client))
        }
        Err(e) => (vec![Finding::fail(NAME, e.to_string(), "space down && space up --detach")], None),
    }
}

/// Every finding.
pub async fn all(config: &ServerConfig, daemon: Option<&Path>) -> Vec<Finding> {
    let facts = tokio::task::spawn_blocking(space_hostd::probe::host).await.expect("the probe does not panic");
    let mut findings = vec![rights(&facts), system(), packages::check()];
    findings.extend(host(&facts));
    findings.push(vmm::check(config, &facts).await);
    findings.push(pool::check(config));
    findings.push(kernel::check(config));
    findings.push(initramfs::check(config, daemon));
    let (server, client) = server(config).await;
    findings.extend(server);
    let mut known = None;
    if let Some(client) = &client {
        findings.push(seed::check(config, client).await);
        let all = client.all_sandboxes(&ListSandboxesQuery::default(), &[]).await;
        known = all.ok().map(|all| all.into_iter().map(|sandbox| sandbox.id).collect::<BTreeSet<_>>());
    }
    if client.is_none() || known.is_some() {
        findings.push(leftovers::check(config, known.as_ref()));
    }
    findings.extend(hygiene(config));
    findings
}
