//! What a guest or a client does over and over must leave every process of the server as it was: descriptors, threads, memory.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;
use space_tests::{Api, Sandbox, Server, processes_of, shared_or_skip, status_of, vmms_in};

/// What one process holds.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Held {
    pid: u32,
    descriptors: usize,
    threads: u32,
    /// Resident and its own, not of files.
    anonymous_kib: u64,
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Held { pid, descriptors, threads, anonymous_kib } = self;
        write!(f, "{pid}: {descriptors} descriptors, {threads} threads, {anonymous_kib} KiB")
    }
}

fn held(pid: u32) -> Result<Held> {
    Ok(Held {
        pid,
        descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
        threads: status_of(pid, "Threads")?.parse()?,
        anonymous_kib: status_of(pid, "RssAnon")?.trim_end_matches("kB").trim().parse()?,
    })
}

fn all(server: &Server) -> Result<Vec<Held>> {
    processes_of(server.pid().context("no server")?).into_iter().map(held).collect()
}

/// Several sandboxes at once, each used and deleted.
async fn lives(api: &Api, count: usize) -> Result<()> {
    for _ in 0..count / 5 {
        let one = || async {
            let sandbox = api.sandbox("tiny").await?;
            sandbox.sh("echo a > f; cat f").await?.ok()?;
            let gone = api.call("DELETE", &sandbox.path("?wait=60"), None).await?;
            anyhow::ensure!(gone.body["state"] == "succeeded", "{gone:?}");
            std::mem::forget(sandbox);
            Ok(())
        };
        futures::future::try_join_all((0..5).map(|_| one())).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_hundred_lives_leave_every_process_as_it_was() -> Result<()> {
    let _ = shared_or_skip!();
    let server = Server::own("[warm]\nper_template = \"1\"\n").await?;
    // One client: a forgotten sandbox would keep one of its own, and its connections.
    let api = server.api()?;
    lives(&api, 20).await?;
    // Threads and connections that are kept for a while go.
    let settled = || tokio::time::sleep(Duration::from_secs(12));
    settled().await;
    let before = all(&server)?;
    lives(&api, 100).await?;
    settled().await;
    let after = all(&server)?;
    assert_eq!(before.len(), 4, "{before:?}");
    println!("before {before:?}\nafter  {after:?}");
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before.pid, after.pid, "a process was started anew: {}", server.log());
        assert!(after.descriptors <= before.descriptors + 2, "{before:?} → {after:?}");
        assert!(after.threads <= before.threads + 2, "{before:?} → {after:?}");
        assert!(after.anonymous_kib <= before.anonymous_kib + 8 * 1024, "{before:?} → {after:?}");
    }
    Ok(())
}

/// Starts a program of root's in the guest that nobody reads.
async fn begin(sandbox: &Sandbox, script: &str) -> Result<space_tests::Attached> {
    let mut stream = sandbox.attach(&["sh", "-c", &format!("echo go; {script}")], json!({"user": "root"})).await?;
    stream.until("go", 60).await?;
    Ok(stream)
}

#[tokio::test]
async fn a_guest_that_floods_grows_no_process_of_the_host() -> Result<()> {
    let _ = shared_or_skip!();
    let server = Server::own("[warm]\nper_template = \"1\"\n").await?;
    let sandbox = server.api()?.sandbox("tiny").await?;
    sandbox.sh("true").await?.ok()?;
    let vmm = vmms_in(&server.data_dir.join("pool/sandboxes").join(&sandbox.id));
    let vmm = *vmm.first().context("no VMM")?;
    let (before, vmm_before) = (all(&server)?, held(vmm)?);
    // The console, the kernel's log, the disk's queue, the guest channel with readers that do not read, new processes.
    let floods = [
        "while :; do cat /dev/zero; done > /dev/console",
        "while :; do echo flood > /dev/kmsg; done",
        "while :; do dd if=/dev/zero of=/flood bs=64k count=64 conv=fsync; done 2> /dev/null",
        "cat /dev/zero",
        "cat /dev/zero >&2",
        "while :; do true | true; done",
    ];
    let mut readers = Vec::new();
    for flood in floods {
        readers.push(begin(&sandbox, flood).await?);
    }
    let (mut most, mut vmm_most) = (before.clone(), vmm_before);
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        for (most, now) in most.iter_mut().zip(all(&server)?) {
            most.anonymous_kib = most.anonymous_kib.max(now.anonymous_kib);
            most.descriptors = most.descriptors.max(now.descriptors);
        }
        let now = held(vmm)?;
        vmm_most.anonymous_kib = vmm_most.anonymous_kib.max(now.anonymous_kib);
    }
    println!("before {before:?} {vmm_before:?}\nmost   {most:?} {vmm_most:?}");
    for (before, most) in before.iter().zip(&most) {
        assert!(most.anonymous_kib <= before.anonymous_kib + 24 * 1024, "{before:?} → {most:?}");
        assert!(most.descriptors <= before.descriptors + 32, "{before:?} → {most:?}");
    }
    // A guest's memory is a file; what is anonymous is the VMM's own, its cache of translated code most of it.
    assert!(vmm_most.anonymous_kib <= 192 * 1024, "{vmm_before:?} → {vmm_most:?}");
    drop(readers);
    assert_eq!(sandbox.sh("echo alive").await?.ok()?, "alive");
    Ok(())
}
