//! `make test`: everything that must hold before a change goes in, with real VMs, and a count of what it left behind.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::{root, run, space_binary, stage, tidy};

fn title(text: &str) {
    println!("\n=== {text}");
}

fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(args).current_dir(root());
    command
}

fn has(args: &[&str]) -> bool {
    cargo(args).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Format, lints, licences, house rules.
pub fn lint() -> Result<()> {
    title("format");
    run(&mut cargo(&["fmt", "--all", "--check"]))?;
    title("clippy");
    run(&mut cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))?;
    title("tidy");
    tidy::run()?;
    if has(&["deny", "--version"]) {
        title("cargo-deny");
        run(&mut cargo(&["deny", "--offline", "check", "licenses", "bans", "sources"]))?;
    }
    Ok(())
}

fn leaks(what: &str) -> Command {
    let mut command = Command::new(root().join("target/debug/leaks"));
    command.arg(what).arg(root().join("target/leaks.txt"));
    command
}

/// nextest where it is installed; cargo's own runner does the same one program after the other.
fn runner(build_only: bool) -> Command {
    let nextest = has(&["nextest", "--version"]);
    let args: &[&str] = match (nextest, build_only) {
        (true, true) => &["nextest", "run", "--workspace", "--locked", "--no-run"],
        (true, false) => &["nextest", "run", "--workspace", "--locked"],
        (false, true) => &["test", "--workspace", "--locked", "--no-run"],
        (false, false) => &["test", "--workspace", "--locked", "--no-fail-fast"],
    };
    cargo(args)
}

pub fn run_tests() -> Result<()> {
    if !space_binary().is_file() || !space_binary().with_file_name("space-daemon").is_file() {
        bail!("the release binaries are missing: `make test` builds them first");
    }
    title("test set-up");
    stage::packages();
    let venv = stage::python();
    title("building the tests");
    run(&mut cargo(&["build", "--locked", "--package", "space-tests", "--bins"]))?;
    run(&mut runner(true))?;
    run(&mut leaks("save"))?;
    title("stage");
    let server = stage::Server::start()?;
    title("tests");
    let mut tests = runner(false);
    tests
        .env("SPACE_TEST_DATA_DIR", stage::data_dir())
        .env("SPACE_TEST_BIN", space_binary())
        .env("SPACE_TEST_DAEMON", space_binary().with_file_name("space-daemon"))
        .env("SPACE_TEST_SERVER_PID", &server.pid)
        .env("SPACE_TEST_KERNEL", stage::data_dir().join("kernel"));
    if let Some(venv) = venv {
        tests.env("SPACE_TEST_VENV", venv);
    }
    let outcome = run(&mut tests);
    let log: PathBuf = server.log();
    title("taking the stage down");
    drop(server);
    let left = run(&mut leaks("check"));
    if outcome.is_err() {
        println!("the server's log: {}", log.display());
    }
    outcome.and(left)
}

pub fn run_all() -> Result<()> {
    lint()?;
    run_tests()?;
    println!("\nAll good.");
    Ok(())
}
