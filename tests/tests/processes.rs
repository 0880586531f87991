//! Commands in a real guest: exact output, input, signals, floods, and programs that mean harm.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use space_api::TerminalSize;
use space_api::frame::Frame;
use space_tests::{Attached, server_memory_kib, shared_or_skip};

#[tokio::test]
async fn bytes_pass_unharmed() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let script =
        "import sys; sys.stdout.buffer.write(bytes(range(256))*300); sys.stderr.buffer.write(b'\\xff\\xfe\\xe2\\x82')";
    let ended = sandbox.run(&["python3", "-c", script]).await?;
    let expected: Vec<u8> = (0..300).flat_map(|_| 0..=255u8).collect();
    assert_eq!(ended.stdout, expected);
    assert_eq!(ended.stderr, b"\xff\xfe\xe2\x82");
    let mut cat = sandbox.attach(&["cat"], json!({"stdin": true})).await?;
    for byte in "ä€🙂".as_bytes() {
        cat.input(&[*byte]).await?;
    }
    cat.send(Frame::CloseStdin).await?;
    assert_eq!(cat.finish().await?.stdout, "ä€🙂".as_bytes());
    Ok(())
}

#[tokio::test]
async fn fast_commands_lose_nothing() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    for n in 0..40u32 {
        let ended = sandbox.sh(&format!("echo line {n}; exit {}", n % 5)).await?;
        assert_eq!((ended.text(), ended.code), (format!("line {n}"), (n % 5) as i32));
    }
    Ok(())
}

#[tokio::test]
async fn two_hundred_megabytes_arrive_and_the_server_stays_small() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let before = server_memory_kib()?;
    let size = 64 * 1024 * 1024usize;
    let mut flood = sandbox.attach(&["head", "-c", &size.to_string(), "/dev/zero"], json!({})).await?;
    let (mut hash, mut total) = (Sha256::new(), 0);
    let exit = loop {
        match flood.next(60).await? {
            Frame::Stdout { data, .. } => {
                hash.update(&data);
                total += data.len();
                flood.stdout.clear();
            }
            Frame::Exit(exit) => break exit,
            other => anyhow::ensure!(matches!(other, Frame::Started(_)), "{other:?}"),
        }
    };
    assert_eq!((exit.code, total), (0, size));
    let zeros = Sha256::digest(vec![0u8; size]);
    assert_eq!(hash.finalize(), zeros);
    let after = server_memory_kib()?;
    assert!(after < 150 * 1024, "{before} KiB before, {after} KiB after");
    Ok(())
}

#[tokio::test]
async fn a_reader_that_does_not_read_costs_no_memory() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let mut lazy = sandbox.attach(&["sh", "-c", "echo begin; exec cat /dev/zero"], json!({})).await?;
    lazy.until("begin", 60).await?;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let memory = server_memory_kib()?;
    assert!(memory < 150 * 1024, "{memory} KiB");
    // The sandbox and its other commands feel nothing.
    assert_eq!(sandbox.sh("echo alive").await?.ok()?, "alive");
    Ok(())
}

#[tokio::test]
async fn many_small_writes_arrive_in_order() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    // One write call per line.
    let script = "import os\nfor i in range(100000): os.write(1, b'%d\\n' % i)";
    let ended = sandbox.run(&["python3", "-c", script]).await?;
    let expected: String = (0..100_000).map(|i| format!("{i}\n")).collect();
    assert_eq!(ended.code, 0);
    assert!(ended.stdout == expected.as_bytes(), "{} bytes of {}", ended.stdout.len(), expected.len());
    Ok(())
}

#[tokio::test]
async fn a_client_comes_back_to_where_it_left() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let session =
        sandbox.command(&["sh", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.5; done"], json!({})).await?;
    let mut first = Attached::open(&session, 0).await?;
    first.until("2\n", 60).await?;
    let (offset, mut seen) = (first.offset, first.stdout.clone());
    drop(first);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let id = session["id"].as_str().unwrap_or("");
    let again = sandbox.api.post(&sandbox.path(&format!("/commands/{id}/attach")), json!({})).await?;
    let ended = Attached::open(&again, offset).await?.finish().await?;
    seen.extend(ended.stdout);
    assert_eq!(String::from_utf8(seen)?, "1\n2\n3\n4\n5\n6\n");
    // The status can be read later, by anyone entitled, with all of the output.
    let late = Attached::open(&again, 0).await?.finish().await?;
    assert_eq!((late.code, late.text().as_str()), (0, "1\n2\n3\n4\n5\n6"));
    let process = sandbox.api.get(&sandbox.path(&format!("/processes/{id}"))).await?;
    assert_eq!(process["exit"]["code"], 0, "{process}");
    Ok(())
}

#[tokio::test]
async fn two_readers_see_the_same() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let session = sandbox.command(&["sh", "-c", "seq 1 2000"], json!({})).await?;
    let (a, b) = tokio::try_join!(Attached::open(&session, 0), Attached::open(&session, 0))?;
    let (a, b) = tokio::try_join!(a.finish(), b.finish())?;
    assert_eq!(a.stdout, b.stdout);
    assert_eq!(a.text().lines().count(), 2000);
    Ok(())
}

#[tokio::test]
async fn a_background_child_does_not_hold_the_exit_back() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let ended = sandbox.attach(&["sh", "-c", "sleep 300 & echo foreground; exit 3"], json!({})).await?;
    let ended = ended.finish_within(20).await?;
    assert_eq!((ended.code, ended.text().as_str()), (3, "foreground"));
    assert_eq!(sandbox.sh("pgrep -c sleep").await?.text(), "1");
    Ok(())
}

#[tokio::test]
async fn signals_timeouts_and_terminals() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let mut trap = sandbox
        .attach(&["sh", "-c", "trap 'echo got; exit 9' TERM; echo ready; while :; do sleep 0.1; done"], json!({}))
        .await?;
    trap.until("ready", 60).await?;
    trap.send(Frame::Signal(15)).await?;
    let ended = trap.finish().await?;
    assert_eq!((ended.code, ended.text().ends_with("got")), (9, true));

    let slow =
        sandbox.attach(&["sh", "-c", "sleep 100 & sleep 100"], json!({"timeout_seconds": 1})).await?.finish().await?;
    assert_eq!(slow.reason, "timeout");
    assert_eq!(sandbox.sh("pgrep -x sleep | wc -l").await?.text(), "0");

    let size = json!({"terminal": {"cols": 93, "rows": 31}, "stdin": true});
    let mut shell = sandbox.attach(&["sh", "-c", "stty size; tty; read x; stty size; exec cat"], size).await?;
    shell.until("31 93", 60).await?;
    shell.until("/dev/pts/", 60).await?;
    shell.send(Frame::Resize(TerminalSize { cols: 100, rows: 40 })).await?;
    shell.input(b"\n").await?;
    shell.until("40 100", 60).await?;
    // A shell may lose it while it starts a program; this one has answered.
    shell.input(b"well\n").await?;
    shell.until("well\r\nwell", 60).await?;
    shell.input(b"\x03").await?;
    assert_eq!(shell.finish().await?.code, 130);
    Ok(())
}

#[tokio::test]
async fn a_fork_bomb_ends_in_its_own_sandbox() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let (bad, good) = (api.sandbox("seed").await?, api.sandbox("seed").await?);
    let session = bad.command(&["sh", "-c", "f() { f | f & }; f; sleep 1000"], json!({"start": true})).await?;
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(good.sh("echo fine").await?.ok()?, "fine");
    let id = session["id"].as_str().unwrap_or("");
    let body = json!({"signal": "KILL", "tree": true});
    bad.api.post(&bad.path(&format!("/processes/{id}/signal")), body).await?;
    let ended = tokio::time::timeout(Duration::from_secs(90), bad.sh("echo back")).await??;
    assert_eq!(ended.ok()?, "back");
    Ok(())
}

#[tokio::test]
async fn a_memory_hog_is_told_so_and_the_daemon_lives() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let script = "b = []\nwhile True: b.append(bytearray(8*1024*1024))";
    let ended = sandbox.run(&["python3", "-c", script]).await?;
    assert!(ended.reason == "oom_killed" || ended.code == 1, "{ended:?}");
    assert_eq!(sandbox.sh("echo alive").await?.ok()?, "alive");
    Ok(())
}

#[tokio::test]
async fn a_full_disk_is_the_guests_own() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("tiny").await?;
    let ended = sandbox.root_sh("dd if=/dev/zero of=/fill bs=1M; df / | tail -1; rm /fill").await?;
    assert!(String::from_utf8_lossy(&ended.stderr).contains("No space left"), "{ended:?}");
    assert_eq!(sandbox.sh("echo alive").await?.ok()?, "alive");
    Ok(())
}

#[tokio::test]
async fn zombies_are_reaped() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    sandbox.sh("i=0; while [ $i -lt 200 ]; do (sleep 0 & ) ; i=$((i+1)); done").await?.ok()?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let zombies: u32 = sandbox.sh("ps -eo stat= | grep -c ^Z").await?.text().parse()?;
    assert!(zombies <= 5, "{zombies} zombies");
    Ok(())
}

#[tokio::test]
async fn sandboxes_share_no_randomness_and_know_the_time() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3 {
        let sandbox = api.sandbox("seed").await?;
        let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map(|d| d.as_millis() as i64);
        let before = now()?;
        let text = sandbox
            .sh("head -c 16 /dev/urandom | od -An -tx1; cat /etc/machine-id; hostname; date +%s%3N")
            .await?
            .ok()?;
        let after = now()?;
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[..3] {
            assert!(seen.insert(line.trim().to_owned()), "twice: {line}");
        }
        let guest: i64 = lines[3].trim().parse()?;
        assert!(guest > before - 500 && guest < after + 500, "{before} ≤ {guest} ≤ {after}");
    }
    Ok(())
}

#[tokio::test]
async fn a_guest_has_no_network() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    // A kernel may bring tunnels that nobody has set up; what counts is hardware, and anything that is up.
    let look = "for n in /sys/class/net/*; do echo seen ${n##*/}; [ ! -e $n/device ] || echo hardware ${n##*/}; \
                [ $(( $(cat $n/flags) & 1 )) = 0 ] || echo up ${n##*/}; done";
    let text = sandbox.sh(look).await?.text();
    assert!(text.lines().any(|line| line == "seen lo"), "{text}");
    let found: Vec<_> = text.lines().filter(|line| !line.starts_with("seen ") && *line != "up lo").collect();
    assert!(found.is_empty(), "{text}");
    Ok(())
}
