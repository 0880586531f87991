//! What the program says and how it ends where no server is needed: help, wrong use, configuration, nobody there.

use std::path::Path;
use std::process::{Command, Stdio};

struct Said {
    code: i32,
    stdout: String,
    stderr: String,
}

/// `space ARGS` in an empty folder with nothing of ours in the environment.
fn space_in(folder: &Path, args: &[&str], variables: &[(&str, &str)]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_space"));
    command.args(args).current_dir(folder).stdin(Stdio::null()).env("SPACE_DATA_DIR", folder.join("data"));
    for name in ["SPACE_URL", "SPACE_API_KEY", "SPACE_CONFIG", "SPACE_LISTEN"] {
        command.env_remove(name);
    }
    let out = command.envs(variables.iter().copied()).output().expect("the program starts");
    Said {
        code: out.status.code().unwrap_or(-1),
        stdout: String::from_utf8(out.stdout).expect("text"),
        stderr: String::from_utf8(out.stderr).expect("text"),
    }
}

fn space(args: &[&str]) -> Said {
    let folder = tempfile::tempdir().expect("a folder");
    space_in(folder.path(), args, &[])
}

#[test]
fn help_is_help_and_no_command_is_wrong_use() {
    let said = space(&["--help"]);
    assert_eq!(said.code, 0);
    for word in ["setup", "doctor", "run", "exec", "Exit status", "Examples"] {
        assert!(said.stdout.contains(word), "{word}");
    }
    for wrong in
        [&[][..], &["no-such-command"], &["exec", "box"], &["delete"], &["run", "--memory", "much", "--", "true"]]
    {
        let said = space(wrong);
        assert_eq!(said.code, 2, "{wrong:?}: {}", said.stderr);
        assert!(said.stdout.is_empty() && !said.stderr.is_empty(), "{wrong:?}");
    }
}

#[test]
fn nobody_there_says_what_to_do() {
    for args in [&["ls"][..], &["run", "--", "true"], &["exec", "box", "--", "true"], &["cp", "box:/x", "-"]] {
        let said = space(&[&["--url", "http://127.0.0.1:1"], args].concat());
        assert_eq!(said.code, 125, "{args:?}");
        assert!(
            said.stderr.contains("no server at http://127.0.0.1:1") && said.stderr.contains("space up"),
            "{}",
            said.stderr
        );
        assert!(said.stdout.is_empty() && !said.stderr.contains('\u{1b}'), "{args:?}");
    }
    let said = space(&["--url", "http://127.0.0.1:1", "--json", "ls"]);
    let error: serde_json::Value = serde_json::from_str(&said.stderr).expect("JSON");
    assert_eq!(error["error"]["code"], "no_server");
}

#[test]
fn copies_without_a_sandbox_are_wrong_use() {
    for args in [["cp", "a", "b"], ["cp", "x:a", "y:b"], ["cp", "-", "-"]] {
        let said = space(&args);
        assert_eq!(said.code, 2, "{args:?}: {}", said.stderr);
    }
}

#[test]
fn configuration_comes_in_layers_and_says_from_where() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("space.toml"), "listen = \"127.0.0.1:1111\"\n[limits]\nsandboxes = 7\n")
        .expect("written");
    let show = |variables: &[(&str, &str)]| {
        let said = space_in(folder.path(), &["config", "show", "--json"], variables);
        assert_eq!(said.code, 0, "{}", said.stderr);
        serde_json::from_str::<serde_json::Value>(&said.stdout).expect("JSON")
    };
    let file = show(&[]);
    assert_eq!((&file["listen"]["value"], &file["listen"]["origin"]), (&"127.0.0.1:1111".into(), &"space.toml".into()));
    assert_eq!(file["limits.sandboxes"]["value"], "7");
    assert_eq!(file["log"]["origin"], "default");
    let variable = show(&[("SPACE_LISTEN", "127.0.0.1:2222")]);
    assert_eq!(variable["listen"]["origin"], "SPACE_LISTEN");
    let flag = space_in(folder.path(), &["config", "show", "--data-dir", "/elsewhere"], &[]);
    assert!(flag.stdout.contains("/elsewhere") && flag.stdout.contains("--data-dir"), "{}", flag.stdout);
}

#[test]
fn a_wrong_configuration_is_refused_with_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("space.toml");
    std::fs::write(&file, "listen = \"127.0.0.1:1\"\npol = 3\n").expect("written");
    let said = space_in(folder.path(), &["config", "show"], &[]);
    assert_eq!(said.code, 2);
    assert!(said.stderr.contains("line 2") && said.stderr.contains("pol"), "{}", said.stderr);
    std::fs::remove_file(&file).expect("removed");
    let said = space_in(folder.path(), &["config", "show"], &[("SPACE_LISTEN", "nowhere")]);
    assert_eq!(said.code, 2);
    assert!(said.stderr.contains("SPACE_LISTEN"), "{}", said.stderr);
    let said = space_in(folder.path(), &["up", "--config", "missing.toml"], &[]);
    assert_eq!(said.code, 2);
    assert!(said.stderr.contains("missing.toml"), "{}", said.stderr);
}

#[test]
fn a_local_key_is_not_sent_to_another_server() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("data")).expect("made");
    let file = "url = \"http://127.0.0.1:1\"\nkey = \"sk-local\"\n";
    std::fs::write(folder.path().join("data/client.toml"), file).expect("written");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let heard = std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        let (mut stream, _) = listener.accept().expect("a connection");
        let mut request = vec![0; 4096];
        let n = stream.read(&mut request).expect("a request");
        let _ = stream.write_all(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        String::from_utf8_lossy(&request[..n]).into_owned()
    });
    let said = space_in(folder.path(), &["--url", &url, "ls"], &[]);
    assert_eq!(said.code, 125);
    let request = heard.join().expect("heard");
    assert!(request.starts_with("GET /v1/sandboxes") && !request.contains("sk-local"), "{request}");
}

#[test]
fn completions_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let said = space(&["completions", shell]);
        assert_eq!(said.code, 0);
        for command in ["setup", "template", "delete"] {
            assert!(said.stdout.contains(command), "{shell} {command}");
        }
    }
}

#[test]
fn doctor_reports_and_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = space_in(folder.path(), &["doctor", "--json"], &[]);
    assert_eq!(said.code, 1, "a machine without a pool is not ready");
    let report: serde_json::Value = serde_json::from_str(&said.stdout).expect("JSON");
    assert_eq!(report["ok"], false);
    let findings = report["findings"].as_array().expect("a list");
    for finding in findings {
        let needs_fix = finding["level"] != "ok";
        assert_eq!(needs_fix, finding["fix"].is_string(), "{finding}");
    }
    let driver = findings.iter().find(|finding| finding["name"] == "driver").expect("the driver is named");
    assert!(driver["detail"].as_str().is_some_and(|text| text.contains("qemu")), "{driver}");
    assert!(!folder.path().join("data").exists());
}

#[test]
fn what_is_not_ours_is_not_uninstalled() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("data")).expect("made");
    std::fs::write(folder.path().join("data/pool.img"), "precious").expect("written");
    let said = space_in(folder.path(), &["setup", "--uninstall", "--yes"], &[]);
    assert_eq!(said.code, 125);
    assert!(folder.path().join("data/pool.img").exists());
}
