//! The project's own tasks: checks of the repository, the whole test run, the demo. Never shipped.
//!
//! `make` builds the release binaries and calls this; `cargo xtask TASK` does as well.

mod demo;
mod fuzz;
mod stage;
mod test;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};

/// The top of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository").to_owned()
}

/// The release binary that `make build` made.
fn space_binary() -> PathBuf {
    root().join("target/release/space")
}

/// Runs a command with our own streams; a failure is an error that names it.
fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    if !status.success() {
        bail!("{} failed with {status}", shown(command));
    }
    Ok(())
}

/// Runs a command for what it prints.
fn output_of(command: &mut Command) -> Result<String> {
    let out = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !out.status.success() {
        bail!("{} failed with {}: {}", shown(command), out.status, String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8(out.stdout)?)
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

const USAGE: &str = "usage: xtask tidy | demo | measure | test | lint | fuzz [TARGET …]";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => tidy::run(),
        ["demo"] => demo::run(),
        ["measure"] => demo::figures(),
        ["lint"] => test::lint(),
        ["test"] => test::run_all(),
        ["fuzz", ref targets @ ..] => fuzz::run_all(targets),
        _ => Err(anyhow::anyhow!(USAGE)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
