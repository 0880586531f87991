//! Files over the API: large, hostile, out of room.

use anyhow::Result;
use bytes::Bytes;
use futures::StreamExt as _;
use sha2::{Digest as _, Sha256};
use space_tests::{server_memory_kib, shared_or_skip};

const MIB: usize = 1024 * 1024;

fn block(n: usize) -> Bytes {
    let seed = (n as u32).wrapping_mul(2_654_435_761);
    (0..MIB as u32).map(|i| (i.wrapping_mul(31) ^ seed).to_le_bytes()[1]).collect::<Vec<u8>>().into()
}

#[tokio::test]
async fn a_large_file_survives_both_ways_in_constant_memory() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let blocks = 96;
    let mut hash = Sha256::new();
    (0..blocks).for_each(|n| hash.update(block(n)));
    let sum = hash.finalize();
    let body = futures::stream::iter((0..blocks).map(|n| Ok::<_, std::io::Error>(block(n))));
    let request = sandbox.api.request("PUT", &sandbox.path("/files?path=big"));
    let answer = sandbox.api.send(request.body(reqwest::Body::wrap_stream(body))).await?;
    assert!(answer.status < 300, "{answer:?}");
    assert_eq!(answer.body["size"], blocks * MIB);
    let download = sandbox.api.request("GET", &sandbox.path("/files?path=big")).send().await?;
    assert_eq!(download.status(), 200);
    let (mut stream, mut hash) = (download.bytes_stream(), Sha256::new());
    while let Some(part) = stream.next().await {
        hash.update(part?);
    }
    assert_eq!(hash.finalize(), sum);
    let memory = server_memory_kib()?;
    assert!(memory < 150 * 1024, "{memory} KiB");
    Ok(())
}

#[tokio::test]
async fn ranges_are_served() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    sandbox.sh("printf 0123456789 > f").await?.ok()?;
    let get =
        |range: &'static str| sandbox.api.request("GET", &sandbox.path("/files?path=f")).header("Range", range).send();
    let part = get("bytes=2-4").await?;
    assert_eq!((part.status().as_u16(), part.text().await?.as_str()), (206, "234"));
    let rest = get("bytes=7-").await?;
    assert_eq!((rest.status().as_u16(), rest.text().await?.as_str()), (206, "789"));
    assert_eq!(get("bytes=20-").await?.status(), 416);
    Ok(())
}

#[tokio::test]
async fn a_watched_folder_tells_what_changes_in_it() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let missing = sandbox.api.call("GET", &sandbox.path("/files/watch?path=/nowhere"), None).await?;
    assert_eq!((missing.status, missing.code()), (404, "file_not_found"), "{missing:?}");
    sandbox.sh("mkdir -p w/below").await?.ok()?;
    let answer = sandbox.api.request("GET", &sandbox.path("/files/watch?path=w&recursive=true")).send().await?;
    assert_eq!(answer.status(), 200);
    let (mut stream, mut told) = (answer.bytes_stream(), String::new());
    let script = "cd w; echo 1 > a; mv a below/b; mkdir -p new/deep; sleep 1; echo 2 > new/deep/c; cd ..; rm -r w";
    let (mut begun, mut work) = (false, None);
    while let Some(part) = tokio::time::timeout(std::time::Duration::from_secs(60), stream.next()).await? {
        told.push_str(std::str::from_utf8(&part?)?);
        if !begun && told.contains("event: ready") {
            begun = true;
            work = Some(sandbox.sh(script));
        }
        if let Some(work) = work.take() {
            work.await?.ok()?;
        }
    }
    // The stream has ended by itself: the folder is gone.
    for line in
        ["created|w/a", "modified|w/a", "moved_away|w/a", "moved_here|w/below/b", "created|w/new/deep/c", "removed|w"]
    {
        let (change, path) = line.split_once('|').unwrap_or_default();
        let data = format!("event: {change}\ndata: {{\"change\":\"{change}\",\"path\":\"/home/user/{path}\"");
        assert!(told.contains(&data), "{line} is missing in:\n{told}");
    }
    Ok(())
}

#[tokio::test]
async fn an_upload_that_cannot_fit_is_refused_before_it_starts() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("tiny").await?;
    let request = sandbox.api.request("PUT", &sandbox.path("/files?path=/tmp/huge&user=root"));
    let body = futures::stream::iter((0..2048).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![0u8; MIB]))));
    let answer =
        sandbox.api.send(request.header("Content-Length", 2048 * MIB).body(reqwest::Body::wrap_stream(body))).await;
    // The server may answer and close while the client still sends.
    if let Ok(answer) = answer {
        assert_eq!((answer.status, answer.code()), (507, "guest_disk_full"), "{answer:?}");
    }
    assert_eq!(sandbox.root_sh("ls -A /tmp").await?.text(), "");
    Ok(())
}

#[tokio::test]
async fn an_upload_that_breaks_leaves_no_file() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let broken =
        futures::stream::iter([Ok(Bytes::from(vec![1u8; MIB])), Err(std::io::Error::other("the client went away"))]);
    let request = sandbox.api.request("PUT", &sandbox.path("/files?path=/home/user/half"));
    assert!(request.body(reqwest::Body::wrap_stream(broken)).send().await.is_err());
    for _ in 0..50 {
        if sandbox.sh("ls -A | grep -v '^\\.[bp]' | wc -l").await?.text() == "0" {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    anyhow::bail!("left: {}", sandbox.sh("ls -A").await?.text())
}

#[tokio::test]
async fn hostile_paths_get_a_clear_error() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let long = format!("/{}", "a/".repeat(5000));
    let wide = format!("/tmp/{}", "b".repeat(300));
    for (path, status) in [
        ("", 400),
        ("/tmp/%00x", 400),
        (long.as_str(), 400),
        (wide.as_str(), 400),
        ("/nowhere/at/all", 404),
        ("/etc/shadow", 403),
        ("/tmp", 409),
        ("/dev/zero", 409),
        ("../../../../../../etc/hostname", 200),
    ] {
        let answer = sandbox.api.call("GET", &sandbox.path(&format!("/files?path={path}")), None).await?;
        assert_eq!(answer.status, status, "{path:.60}: {answer:?}");
    }
    // Links are the guest's own business and stay inside the guest.
    sandbox.sh("ln -s /etc/hostname link; mkfifo pipe").await?.ok()?;
    let answer = sandbox.api.call("GET", &sandbox.path("/files?path=link"), None).await?;
    assert_eq!(answer.status, 200);
    let answer = sandbox.api.call("GET", &sandbox.path("/files?path=pipe"), None).await?;
    assert_eq!(answer.status, 409, "{answer:?}");
    Ok(())
}
