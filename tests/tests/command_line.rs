//! What the README promises, typed as a person would.

use anyhow::Result;
use space_tests::{Sandbox, shared_or_skip, space};

#[test]
fn a_program_runs_under_a_kernel_of_its_own() -> Result<()> {
    let server = shared_or_skip!();
    let out = space(&server, &["run", "--", "uname", "-r"], "")?;
    assert_eq!(out.code, 0, "{out:?}");
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    assert!(!out.stdout.trim().is_empty());
    assert_ne!(out.stdout.trim(), host.trim());
    Ok(())
}

#[test]
fn the_exit_status_is_the_programs() -> Result<()> {
    let server = shared_or_skip!();
    assert_eq!(space(&server, &["run", "--", "sh", "-c", "exit 7"], "")?.code, 7);
    assert_eq!(space(&server, &["run", "--", "sh", "-c", "kill -TERM $$"], "")?.code, 128 + 15);
    let out = space(&server, &["run", "--", "no-such-program"], "")?;
    assert_eq!(out.code, 127, "{out:?}");
    assert!(out.stderr.contains("no-such-program"), "{out:?}");
    Ok(())
}

#[test]
fn input_and_output_are_streamed() -> Result<()> {
    let server = shared_or_skip!();
    let out = space(&server, &["run", "-i", "--", "cat"], "hi\n")?;
    assert_eq!((out.code, out.stdout.as_str()), (0, "hi\n"), "{out:?}");
    let out = space(&server, &["run", "--", "python3", "-c", "print(6*7)"], "")?;
    assert_eq!((out.code, out.stdout.as_str()), (0, "42\n"), "{out:?}");
    let out = space(&server, &["run", "--", "sh", "-c", "echo to-err >&2"], "")?;
    assert_eq!((out.stdout.as_str(), out.stderr.trim()), ("", "to-err"), "{out:?}");
    Ok(())
}

#[test]
fn nothing_is_left_of_a_run() -> Result<()> {
    let server = shared_or_skip!();
    let name = format!("gone-{}", std::process::id());
    assert_eq!(space(&server, &["run", "--name", &name, "--", "true"], "")?.code, 0);
    let out = space(&server, &["inspect", &name], "")?;
    assert_ne!(out.code, 0, "{out:?}");
    Ok(())
}

#[test]
fn the_user_is_the_templates_and_can_become_root() -> Result<()> {
    let server = shared_or_skip!();
    let out = space(&server, &["run", "--", "sh", "-c", "id -un; pwd; sudo -n id -u"], "")?;
    assert_eq!(out.stdout, "user\n/home/user\n0\n", "{out:?}");
    let out = space(
        &server,
        &["run", "-u", "root", "-w", "/tmp", "-e", "GREETING=hello", "--", "sh", "-c", "id -un; pwd; echo $GREETING"],
        "",
    )?;
    assert_eq!(out.stdout, "root\n/tmp\nhello\n", "{out:?}");
    Ok(())
}

#[tokio::test]
async fn a_named_sandbox_lives_until_it_is_deleted() -> Result<()> {
    let server = shared_or_skip!();
    let name = format!("named-{}", std::process::id());
    let out = space(&server, &["create", "--name", &name, "--json"], "")?;
    assert_eq!(out.code, 0, "{out:?}");
    let api = server.api()?;
    let id = api.get(&format!("/v1/sandboxes/{name}")).await?["id"].as_str().unwrap_or("").to_owned();
    let _guard = Sandbox { id, api };
    assert_eq!(space(&server, &["exec", &name, "--", "sh", "-c", "echo kept > f"], "")?.code, 0);
    assert_eq!(space(&server, &["exec", &name, "--", "cat", "f"], "")?.stdout, "kept\n");
    assert!(space(&server, &["ls"], "")?.stdout.contains(&name));
    let twice = space(&server, &["create", "--name", &name], "")?;
    assert_ne!(twice.code, 0);
    assert!(twice.stderr.contains("name_taken"), "{twice:?}");
    let out = space(&server, &["delete", &name], "")?;
    assert_eq!(out.code, 0, "{out:?}");
    assert!(!space(&server, &["ls"], "")?.stdout.contains(&name));
    Ok(())
}

#[tokio::test]
async fn files_and_folders_are_copied_both_ways() -> Result<()> {
    let server = shared_or_skip!();
    let sandbox = server.api()?.sandbox("seed").await?;
    let host = tempfile::tempdir()?;
    let tree = host.path().join("tree");
    std::fs::create_dir_all(tree.join("a/b"))?;
    std::fs::write(tree.join("a/b/bytes"), (0..=255u8).cycle().take(300_000).collect::<Vec<_>>())?;
    std::fs::write(tree.join("empty"), "")?;
    std::os::unix::fs::symlink("a/b/bytes", tree.join("link"))?;
    let up = format!("{}:/home/user/tree", sandbox.id);
    let out = space(&server, &["cp", tree.to_str().unwrap_or(""), &up], "")?;
    assert_eq!(out.code, 0, "{out:?}");
    let back = host.path().join("back");
    let out = space(&server, &["cp", &up, back.to_str().unwrap_or("")], "")?;
    assert_eq!(out.code, 0, "{out:?}");
    assert_eq!(std::fs::read(back.join("a/b/bytes"))?, std::fs::read(tree.join("a/b/bytes"))?);
    assert_eq!(std::fs::read_link(back.join("link"))?.to_str(), Some("a/b/bytes"));
    assert!(back.join("empty").exists());
    Ok(())
}

#[test]
fn errors_say_what_and_what_next() -> Result<()> {
    let server = shared_or_skip!();
    let out = space(&server, &["run", "--template", "nowhere", "--", "true"], "")?;
    assert_eq!(out.code, 125, "{out:?}");
    assert!(out.stderr.contains("nowhere") && out.stderr.contains("template"), "{out:?}");
    let out = space(&server, &["exec", "nobody", "--", "true"], "")?;
    assert_eq!(out.code, 125, "{out:?}");
    assert!(out.stderr.contains("nobody"), "{out:?}");
    let out = space(&server, &["--url", "http://127.0.0.1:1", "ls"], "")?;
    assert!(out.code != 0 && out.stderr.contains("space up"), "{out:?}");
    Ok(())
}

#[tokio::test]
async fn a_client_that_is_killed_leaves_no_sandbox() -> Result<()> {
    let server = shared_or_skip!();
    let name = format!("killed-{}", std::process::id());
    let mut child = std::process::Command::new(std::env::var("SPACE_TEST_BIN")?)
        .args(["run", "--name", &name, "--", "sleep", "1000"])
        .env("SPACE_DATA_DIR", &server.data_dir)
        .stdin(std::process::Stdio::null())
        .spawn()?;
    let api = server.api()?;
    let path = format!("/v1/sandboxes/{name}");
    let mut seen = false;
    for _ in 0..300 {
        if api.call("GET", &path, None).await?.body["state"] == "running" {
            seen = true;
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    // As a closed terminal does it; a handler deletes the sandbox.
    std::process::Command::new("/bin/kill").args(["-HUP", &child.id().to_string()]).status()?;
    child.wait()?;
    assert!(seen);
    let answer = api.call("GET", &path, None).await?;
    assert!(answer.status == 404 || answer.body["state"] == "deleted", "{answer:?}");
    Ok(())
}
