//! Guests and VMMs that die: the sandbox says so, the server lives, nothing hangs and nothing is left.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;
use space_api::frame::Frame;
use space_tests::{Sandbox, Server, shared_or_skip};

async fn fails_with_a_reason(sandbox: &Sandbox) -> Result<()> {
    let row = sandbox.wait_state("failed", 60).await?;
    assert!(row["reason"].as_str().is_some_and(|r| r.len() > 10), "{row}");
    let answer = sandbox.api.call("POST", &sandbox.path("/commands"), Some(json!({"argv": ["true"]}))).await?;
    assert_eq!(answer.status, 409, "{answer:?}");
    let gone = sandbox.api.call("DELETE", &sandbox.path("?wait=60"), None).await?;
    assert_eq!(gone.body["state"], "succeeded", "{gone:?}");
    Ok(())
}

#[tokio::test]
async fn pid_1_cannot_be_killed_from_inside() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    sandbox.root_sh("kill -9 1; kill -TERM 1; kill -INT 1; sleep 0.5").await?;
    assert_eq!(sandbox.sh("echo alive").await?.ok()?, "alive");
    assert_eq!(sandbox.state().await?, "running");
    Ok(())
}

#[tokio::test]
async fn a_reboot_from_inside_ends_the_run() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let ended = sandbox.root_sh("python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x01234567)'").await;
    assert!(ended.is_err(), "a broken stream passed for an exit: {ended:?}");
    fails_with_a_reason(&sandbox).await
}

#[tokio::test]
async fn a_kernel_panic_ends_the_run() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let ended = sandbox.root_sh("echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger; sleep 60").await;
    assert!(ended.is_err(), "a broken stream passed for an exit: {ended:?}");
    fails_with_a_reason(&sandbox).await
}

fn vmm_of(server: &Server, sandbox: &Sandbox) -> Result<u32> {
    let home = server.data_dir.join("pool/sandboxes").join(&sandbox.id);
    space_tests::vmms_in(&home).first().copied().context("no VMM")
}

#[tokio::test]
async fn a_killed_vmm_is_noticed_and_its_streams_end() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let mut stream = sandbox.attach(&["sh", "-c", "echo up; sleep 1000"], json!({})).await?;
    stream.until("up", 60).await?;
    let pid = vmm_of(&server, &sandbox)?;
    std::process::Command::new("/bin/kill").args(["-9", &pid.to_string()]).status()?;
    match stream.next(20).await {
        Ok(Frame::Error(problem)) => assert!(!problem.code.is_empty()),
        Ok(other) => anyhow::bail!("{other:?}"),
        Err(_) => {}
    }
    fails_with_a_reason(&sandbox).await
}

#[tokio::test]
async fn a_flood_on_the_console_stays_bounded() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    sandbox.root_sh("timeout 5 cat /dev/zero > /dev/console; true").await?;
    let home = server.data_dir.join("pool/sandboxes").join(&sandbox.id);
    let mut total = 0;
    for entry in std::fs::read_dir(home)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().contains("console") {
            total += entry.metadata()?.len();
        }
    }
    assert!(total <= 2 * 1024 * 1024, "{total} bytes of console");
    assert_eq!(sandbox.sh("echo alive").await?.ok()?, "alive");
    Ok(())
}

#[tokio::test]
async fn a_killed_server_comes_back_to_running_sandboxes() -> Result<()> {
    let _ = shared_or_skip!();
    let mut server = Server::own("").await?;
    let api = server.api()?;
    let mut sandboxes = Vec::new();
    for _ in 0..5 {
        let sandbox = api.sandbox("tiny").await?;
        let script = "i=0; while :; do echo tick $i; i=$((i+1)); sleep 0.2; done";
        let session = sandbox.command(&["sh", "-c", script], json!({})).await?;
        let mut stream = space_tests::Attached::open(&session, 0).await?;
        stream.until("tick 3\n", 60).await?;
        sandboxes.push((sandbox, session, stream.offset, stream.stdout.clone()));
    }
    let before = server.vmms();
    server.kill_dead();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(server.vmms(), before, "the VMMs outlive the server");
    server.start().await?;
    let api = server.api()?;
    assert_eq!(server.vmms(), before, "adopted, not started anew");
    for (sandbox, session, offset, mut seen) in sandboxes {
        let sandbox = Sandbox {
            api: api.clone(),
            id: {
                let id = sandbox.id.clone();
                std::mem::forget(sandbox);
                id
            },
        };
        sandbox.wait_state("running", 30).await?;
        let id = session["id"].as_str().unwrap_or("");
        let again = api.post(&sandbox.path(&format!("/commands/{id}/attach")), json!({})).await?;
        let mut stream = space_tests::Attached::open(&again, offset).await?;
        let target = format!("tick {}\n", 12);
        stream.until(&target, 60).await?;
        assert_eq!(stream.dropped_until, 0);
        seen.extend(&stream.stdout);
        let text = String::from_utf8(seen)?;
        for (n, line) in text.lines().take(12).enumerate() {
            assert_eq!(line, format!("tick {n}"));
        }
    }
    assert_eq!(server.vmms().len(), 0, "deleted sandboxes leave no VMM");
    Ok(())
}

#[tokio::test]
async fn a_server_killed_at_any_moment_of_a_create_leaks_nothing() -> Result<()> {
    let _ = shared_or_skip!();
    let mut server = Server::own("").await?;
    for pause in [1u64, 10, 25, 40, 60, 90, 150] {
        let api = server.api()?;
        let create =
            tokio::spawn(
                async move { api.call("POST", "/v1/sandboxes?wait=60", Some(json!({"template": "tiny"}))).await },
            );
        tokio::time::sleep(Duration::from_millis(pause)).await;
        server.kill_dead();
        let _ = create.await;
        server.start().await?;
        let api = server.api()?;
        // Whatever was accepted ends in a state that has a way on; then all of it can be deleted.
        for _ in 0..300 {
            let list = api.get("/v1/sandboxes").await?;
            let list = list["sandboxes"].as_array().cloned().unwrap_or_default();
            if list.iter().all(|s| s["state"] == "running" || s["state"] == "failed") {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let list = api.get("/v1/sandboxes").await?;
        for sandbox in list["sandboxes"].as_array().cloned().unwrap_or_default() {
            assert!(sandbox["state"] == "running" || sandbox["state"] == "failed", "stuck: {sandbox}");
            let id = sandbox["id"].as_str().unwrap_or("").to_owned();
            let gone = api.call("DELETE", &format!("/v1/sandboxes/{id}?wait=60"), None).await?;
            assert_eq!(gone.body["state"], "succeeded", "{gone:?}");
        }
        assert!(server.vmms().is_empty());
        let left: Vec<_> = std::fs::read_dir(server.data_dir.join("pool/sandboxes"))?.flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
    Ok(())
}
