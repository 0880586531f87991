//! `make fuzz`: each parser of bytes from a guest, a VMM, an image or a client against libFuzzer for a while, on the stable compiler:
//! the flags that cargo-fuzz would set, without a sanitizer, which only a nightly one has. What a run learned is kept in `target/fuzz`
//! for the next; what broke a promise is named, and belongs into `fuzz/seeds`, where the tests replay it for ever.
//!
//! Must end whatever a parser does: time and address space of each program are bounded from outside of it too.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use crate::{root, run};

const HOST: &str = "x86_64-unknown-linux-gnu";
const FLAGS: [&str; 5] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];
const DEFAULT_SECONDS: u32 = 30;
const INPUT_MAX_BYTES: u32 = 16 << 10;
/// For one input.
const TIMEOUT_SECONDS: u32 = 10;
/// A parser that grows beyond it is a fault; looked at once a second.
const MEMORY_MAX_MIB: u32 = 1024;
/// The kernel gives no more, however fast it is asked for.
const ADDRESS_SPACE_MAX_BYTES: u64 = 4 << 30;
const FILE_MAX_BYTES: u64 = 64 << 20;
/// Where a program's folders are, if it is there: on a disk, what unpacks archives is a seventh as fast.
const FOLDERS_IN_MEMORY: &str = "/dev/shm";
/// A program that is still there so long after its time is ended: for reading what earlier runs learned, and one last input.
const GRACE_SECONDS: u32 = 120;

fn target_dir() -> PathBuf {
    root().join("target/fuzz")
}

fn targets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(root().join("fuzz/fuzz_targets"))? {
        let path = entry?.path();
        names.extend(path.file_stem().and_then(|name| name.to_str()).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

fn build() -> Result<()> {
    println!("building the fuzz targets");
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--release", "--locked", "--target", HOST]).current_dir(root().join("fuzz"));
    run(cargo.env("CARGO_TARGET_DIR", target_dir()).env("RUSTFLAGS", FLAGS.join(" ")))
}

/// What a person wants to see of libFuzzer's output: that it goes on, how far it got, and everything about a fault.
fn is_news(line: &str, fault: bool) -> bool {
    fault || ["INITED", "pulse", "DONE", "Done "].iter().any(|word| line.contains(word))
}

fn is_fault(line: &str) -> bool {
    line.contains("panicked at") || line.contains("ERROR: libFuzzer")
}

/// Whether the promises of one parser held.
fn fuzz(name: &str, seconds: u32) -> Result<bool> {
    let made = |folder: &str| -> Result<PathBuf> {
        let path = target_dir().join(folder).join(name);
        std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    };
    let (corpus, artifacts) = (made("corpus")?, made("artifacts")?);
    let scratch = scratch()?;
    let mut program = bounded(&target_dir().join(HOST).join("release").join(name), seconds);
    program.env("TMPDIR", scratch.path()).arg(format!("-max_total_time={seconds}"));
    program.arg(format!("-max_len={INPUT_MAX_BYTES}")).arg(format!("-timeout={TIMEOUT_SECONDS}"));
    program.arg(format!("-rss_limit_mb={MEMORY_MAX_MIB}"));
    program.arg(format!("-artifact_prefix={}/", artifacts.display()));
    // Read from both, written to the first only.
    program.arg(&corpus).arg(root().join("fuzz/seeds").join(name));
    let mut child = program.stderr(Stdio::piped()).spawn().with_context(|| format!("cannot run {name}"))?;
    let log_path = artifacts.join("log");
    let mut log = std::fs::File::create(&log_path).with_context(|| log_path.display().to_string())?;
    let mut fault = false;
    for line in BufReader::new(child.stderr.take().context("no output")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(log, "{line}")?;
        fault |= is_fault(&line);
        if is_news(&line, fault) {
            println!("  {line}");
        }
    }
    let status = child.wait()?;
    // A program that died left its folders behind.
    scratch.close().context("cannot remove the program's folders")?;
    if !status.success() {
        println!("  {name}: {status}; all that was said is in {}", shown(&log_path));
    }
    Ok(status.success())
}

fn scratch() -> Result<tempfile::TempDir> {
    let memory = Path::new(FOLDERS_IN_MEMORY);
    let place = if memory.is_dir() { memory.to_owned() } else { target_dir() };
    tempfile::Builder::new().prefix("space-fuzz-").tempdir_in(&place).with_context(|| place.display().to_string())
}

/// The program, with an end that does not depend on it.
fn bounded(program: &Path, seconds: u32) -> Command {
    let mut command = Command::new("prlimit");
    command.arg(format!("--as={ADDRESS_SPACE_MAX_BYTES}")).arg(format!("--fsize={FILE_MAX_BYTES}")).arg("--core=0");
    command.args(["timeout", "--kill-after=10"]).arg(seconds.saturating_add(GRACE_SECONDS).to_string()).arg(program);
    command
}

fn seconds() -> Result<u32> {
    let Ok(text) = std::env::var("FUZZ_SECONDS") else { return Ok(DEFAULT_SECONDS) };
    match text.parse() {
        // To libFuzzer it means for ever.
        Ok(0) | Err(_) => bail!("FUZZ_SECONDS={text}: expected a number of seconds, 1 at least"),
        Ok(seconds) => Ok(seconds),
    }
}

/// `wanted`: names of targets; none means all.
pub fn run_all(wanted: &[&str]) -> Result<()> {
    let (seconds, all) = (seconds()?, targets()?);
    if let Some(unknown) = wanted.iter().find(|name| !all.iter().any(|known| known == *name)) {
        bail!("there is no fuzz target {unknown}; there are: {}", all.join(", "));
    }
    let chosen: Vec<&String> = all.iter().filter(|name| wanted.is_empty() || wanted.contains(&name.as_str())).collect();
    build()?;
    let mut broken = Vec::new();
    for (at, name) in chosen.iter().enumerate() {
        println!("\n=== {name} ({} of {}), {seconds} s", at + 1, chosen.len());
        let started = Instant::now();
        if !fuzz(name, seconds)? {
            broken.push(name.as_str());
        }
        println!("  {name}: {:.0} s", started.elapsed().as_secs_f64());
    }
    if broken.is_empty() {
        println!("\nAll {} targets kept their promises.", chosen.len());
        return Ok(());
    }
    bail!("{}: see {}; copy the input to fuzz/seeds/NAME/", broken.join(", "), shown(&target_dir().join("artifacts")))
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
