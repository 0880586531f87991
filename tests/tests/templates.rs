//! Templates from a folder, a tar and an OCI image; what they carry, and when they may go.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use space_tests::{Api, Registry, Sandbox, Server, shared_or_skip};

async fn build(api: &Api, tag: &str, source: &str, mut options: Value) -> Result<Value> {
    options["memory_mib"] = json!(128);
    options["disk_bytes"] = json!(128 * 1024 * 1024);
    let body = json!({
        "tag": tag, "source": source, "options": options, "insecure_registry": source.starts_with("docker://127.")
    });
    let started = api.post("/v1/templates", body).await?;
    let path = format!("/v1/operations/{}?wait=200", started["id"].as_str().context("no id")?);
    api.get(&path).await
}

/// The smallest root file system there is: busybox and its names.
fn rootfs(at: &Path) -> Result<()> {
    for name in ["bin", "etc", "tmp", "proc", "sys", "dev", "run", "home/app"] {
        std::fs::create_dir_all(at.join(name))?;
    }
    std::fs::copy("/bin/busybox", at.join("bin/busybox")).context("busybox-static")?;
    for name in ["sh", "cat", "echo", "id", "pwd", "sleep", "test", "head", "true", "ls"] {
        std::os::unix::fs::symlink("busybox", at.join("bin").join(name))?;
    }
    std::fs::write(at.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\napp:x:4321:4321::/home/app:/bin/sh\n")?;
    std::fs::write(at.join("etc/group"), "root:x:0:\napp:x:4321:\n")?;
    Ok(())
}

fn tar(folder: &Path, to: &Path) -> Result<()> {
    let done = Command::new("/usr/bin/tar").arg("-C").arg(folder).args(["-cf"]).arg(to).arg(".").status()?;
    anyhow::ensure!(done.success(), "tar: {done}");
    Ok(())
}

/// Puts bytes into the blobs of a layout and returns their descriptor.
fn blob(layout: &Path, media_type: &str, bytes: &[u8]) -> Result<Value> {
    let hex: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    std::fs::create_dir_all(layout.join("blobs/sha256"))?;
    std::fs::write(layout.join("blobs/sha256").join(&hex), bytes)?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{hex}"), "size": bytes.len()}))
}

/// An image of two layers; the second takes a file of the first away.
fn oci_layout(at: &Path, work: &Path) -> Result<()> {
    let (one, two) = (work.join("one"), work.join("two"));
    rootfs(&one)?;
    std::fs::write(one.join("etc/removed"), "must not be seen")?;
    std::fs::create_dir_all(two.join("etc"))?;
    std::fs::write(two.join("etc/.wh.removed"), "")?;
    std::fs::write(two.join("etc/added"), "from the second layer")?;
    let (mut layers, mut diff_ids) = (Vec::new(), Vec::new());
    for folder in [&one, &two] {
        let file = folder.with_extension("tar");
        tar(folder, &file)?;
        let layer = blob(at, "application/vnd.oci.image.layer.v1.tar", &std::fs::read(file)?)?;
        diff_ids.push(layer["digest"].clone());
        layers.push(layer);
    }
    let config = json!({
        "architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "config": {"User": "app", "WorkingDir": "/home/app", "Env": ["PATH=/bin", "COLOUR=green"], "Entrypoint": ["/bin/sh"]}
    });
    let config = blob(at, "application/vnd.oci.image.config.v1+json", config.to_string().as_bytes())?;
    let manifest = "application/vnd.oci.image.manifest.v1+json";
    let body = json!({"schemaVersion": 2, "mediaType": manifest, "config": config, "layers": layers});
    let entry = blob(at, manifest, body.to_string().as_bytes())?;
    std::fs::write(at.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    std::fs::write(at.join("index.json"), json!({"schemaVersion": 2, "manifests": [entry]}).to_string())?;
    Ok(())
}

#[tokio::test]
async fn an_oci_image_becomes_a_sandbox_with_its_user_folder_and_environment() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let work = tempfile::tempdir()?;
    oci_layout(&work.path().join("image"), work.path())?;
    let source = format!("oci:{}", work.path().join("image").display());
    let made = build(&api, "oci-test", &source, json!({})).await?;
    let sandbox = image_sandbox(&api, "oci-test", &made).await?;

    let refused = api.call("DELETE", "/v1/templates/oci-test", None).await?;
    assert_eq!((refused.status, refused.code()), (409, "in_use"), "{refused:?}");
    drop(sandbox);
    let gone = api.call("DELETE", "/v1/templates/oci-test", None).await?;
    assert!(gone.status < 300, "{gone:?}");
    let missing = api.call("GET", "/v1/templates/oci-test", None).await?;
    assert_eq!(missing.status, 404);
    Ok(())
}

/// A sandbox of the image, which is what its layers and its configuration say.
async fn image_sandbox(api: &Api, tag: &str, made: &Value) -> Result<Sandbox> {
    assert_eq!(made["state"], "succeeded", "{made}");
    assert_eq!(made["template"]["entrypoint"], json!(["/bin/sh"]));
    let sandbox = api.sandbox(tag).await?;
    let said =
        sandbox.sh("id -u; pwd; echo $COLOUR; cat /etc/added; echo; test -e /etc/removed; echo $?").await?.ok()?;
    assert_eq!(said, "4321\n/home/app\ngreen\nfrom the second layer\n1");
    Ok(sandbox)
}

#[tokio::test]
async fn an_image_comes_from_a_registry() -> Result<()> {
    let server = shared_or_skip!();
    let Some(registry) = Registry::start()? else { return Ok(()) };
    let api = server.api()?;
    let work = tempfile::tempdir()?;
    let layout = work.path().join("image");
    oci_layout(&layout, work.path())?;
    registry.push(&layout, "team/app", "v1").await?;
    let made = build(&api, "registry-test", &registry.source("team/app", "v1"), json!({})).await?;
    drop(image_sandbox(&api, "registry-test", &made).await?);
    let missing = build(&api, "registry-none", &registry.source("team/app", "v2"), json!({})).await?;
    assert_eq!(missing["state"], "failed", "{missing}");
    assert!(missing["error"]["message"].as_str().is_some_and(|m| m.contains("v2")), "{missing}");
    drop(registry);
    // What was pulled does not need the registry any more.
    drop(image_sandbox(&api, "registry-test", &made).await?);
    let gone = api.call("DELETE", "/v1/templates/registry-test", None).await?;
    assert!(gone.status < 300, "{gone:?}");
    Ok(())
}

#[tokio::test]
async fn a_start_command_is_warm_in_every_sandbox() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let work = tempfile::tempdir()?;
    rootfs(&work.path().join("root"))?;
    let file = work.path().join("root.tar");
    tar(&work.path().join("root"), &file)?;
    let options =
        json!({"start_command": "echo up > /tmp/up; while :; do sleep 1; done", "ready_command": "test -e /tmp/up"});
    let made = build(&api, "warm-test", &format!("tar:{}", file.display()), options).await?;
    assert_eq!(made["state"], "succeeded", "{made}");
    for _ in 0..2 {
        let sandbox = api.sandbox("warm-test").await?;
        assert_eq!(sandbox.sh("cat /tmp/up").await?.ok()?, "up");
        let running = api.get(&sandbox.path("/processes")).await?;
        let running = running["processes"].as_array().cloned().unwrap_or_default();
        assert!(
            running.iter().any(|p| p["state"] == "running" && p["argv"][2].to_string().contains("/tmp/up")),
            "{running:?}"
        );
    }
    api.call("DELETE", "/v1/templates/warm-test", None).await?;
    Ok(())
}

#[tokio::test]
async fn a_build_that_cannot_work_says_why_and_leaves_nothing() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let work = tempfile::tempdir()?;
    rootfs(&work.path().join("root"))?;
    let source = format!("dir:{}", work.path().join("root").display());
    let failing = [
        (build(&api, "bad-test", "dir:/nowhere/at/all", json!({})).await?, "/nowhere/at/all"),
        (build(&api, "bad-test", &source, json!({"start_command": "echo broken; exit 3"})).await?, "broken"),
        (
            build(&api, "bad-test", &source, json!({"ready_command": "test -e /never", "ready_timeout_seconds": 3}))
                .await?,
            "ready",
        ),
    ];
    for (made, says) in failing {
        assert_eq!(made["state"], "failed", "{made}");
        assert!(made["error"]["message"].as_str().is_some_and(|m| m.contains(says)), "{says}: {made}");
    }
    assert_eq!(api.call("GET", "/v1/templates/bad-test", None).await?.status, 404);
    // Other tests build as well; theirs end too.
    let builds = || -> Result<usize> {
        let names = std::fs::read_dir(server.data_dir.join("pool/tmp"))?.flatten().map(|e| e.file_name());
        Ok(names.filter(|n| n.to_string_lossy().starts_with("build-")).count())
    };
    for _ in 0..600 {
        if builds()? == 0 {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    anyhow::bail!("{} builds left something behind", builds()?)
}

#[tokio::test]
async fn a_full_pool_refuses_new_sandboxes_and_keeps_the_old() -> Result<()> {
    let _ = shared_or_skip!();
    let server = Server::own_small(640).await?;
    let api = server.api()?;
    let work = tempfile::tempdir()?;
    rootfs(&work.path().join("root"))?;
    let made = build(&api, "small", &format!("dir:{}", work.path().join("root").display()), json!({})).await?;
    // A pool that cannot even take the template says so as well.
    if made["state"] == "failed" {
        assert_eq!(made["error"]["code"], "no_capacity", "{made}");
        return Ok(());
    }
    let sandbox = api.sandbox("small").await?;
    let _ = sandbox.root_sh("head -c 90000000 /dev/urandom > /fill").await?;
    std::fs::write(server.data_dir.join("pool/filler"), vec![7u8; 500 << 20]).ok();
    let refused = api.post("/v1/sandboxes?wait=60", json!({"template": "small"})).await?;
    assert_eq!(refused["state"], "failed", "{refused}");
    assert_eq!(refused["error"]["code"], "no_capacity", "{refused}");
    std::fs::remove_file(server.data_dir.join("pool/filler"))?;
    assert_eq!(sandbox.sh("echo alive").await?.ok()?, "alive");
    Ok(())
}
