//! The guest's first file system: our daemon and the kernel's modules. Made again when either has changed; a note beside it says
//! what it was made of.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use space_vmm::{guest_kernel, initramfs};

use super::{Finding, sha256, write_whole};
use crate::config::ServerConfig;
use crate::failure::Failure;

/// What it was made of: `<data>/initramfs.json`.
#[derive(Serialize, Deserialize, PartialEq, Eq, Clone, Debug)]
pub struct Made {
    /// SHA-256 of space-daemon.
    pub daemon: String,
    pub kernel: String,
    /// SHA-256 of the image itself.
    pub image: String,
}

pub enum Outcome {
    UpToDate,
    Built { replaced: bool },
}

fn record(config: &ServerConfig) -> PathBuf {
    config.data_dir.join("initramfs.json")
}

/// `None` when there is none, or only half.
pub fn made(config: &ServerConfig) -> Option<Made> {
    if !config.initramfs().is_file() {
        return None;
    }
    serde_json::from_str(&std::fs::read_to_string(record(config)).ok()?).ok()
}

/// The daemon for guests: the one named, or the one beside this program.
pub fn find_daemon(named: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(path) = named {
        return if path.is_file() {
            Ok(path.to_owned())
        } else {
            Err(Failure::usage(format!("there is no file {}", path.display())))
        };
    }
    let own = std::env::current_exe().and_then(|path| path.canonicalize());
    let own = own.map_err(|e| Failure::new(format!("cannot find this program's own file: {e}")))?;
    let beside = own.with_file_name("space-daemon");
    if beside.is_file() {
        return Ok(beside);
    }
    Err(Failure::new(format!(
        "{} is missing: `make build` makes it beside `space`, or name it with --daemon",
        beside.display()
    )))
}

/// A guest has no libraries for it, so a program that asks for a loader would not start there.
fn check_static(path: &Path) -> Result<(), Failure> {
    let bytes = std::fs::read(path).map_err(|e| Failure::new(format!("cannot read {}: {e}", path.display())))?;
    let number = |at: usize, len: usize| -> Option<u64> {
        let part = bytes.get(at..at.checked_add(len)?)?;
        Some(part.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    const INTERPRETER: u64 = 3;
    let is_elf64 = bytes.starts_with(b"\x7fELF\x02\x01");
    let headers = (|| {
        let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        let at = |index: u64| number(usize::try_from(start + index * size).ok()?, 4);
        Some((0..count).filter_map(at).any(|kind| kind == INTERPRETER))
    })();
    match (is_elf64, headers) {
        (true, Some(false)) => Ok(()),
        (true, Some(true)) => Err(Failure::new(format!(
            "{} is not a static program, and guests have no libraries for it: build it with `make build`",
            path.display()
        ))),
        _ => Err(Failure::new(format!("{} is not a program for x86-64 Linux", path.display()))),
    }
}

/// Whether the image is there and was made of this daemon and this kernel.
pub fn check(config: &ServerConfig, daemon: Option<&Path>) -> Finding {
    const NAME: &str = "initramfs";
    let Some(made) = made(config) else {
        return Finding::fail(NAME, format!("{} is missing", config.initramfs().display()), "sudo space setup");
    };
    if super::kernel::version(config).is_some_and(|version| version != made.kernel) {
        return Finding::fail(NAME, format!("it was made for the kernel {}", made.kernel), "sudo space setup");
    }
    let daemon = find_daemon(daemon).ok().and_then(|path| sha256(&path).ok());
    match daemon {
        Some(hash) if hash != made.daemon => Finding::warn(
            NAME,
            "it holds another space-daemon than the one beside this program",
            "sudo space setup rebuilds it; templates that are there keep the old one",
        ),
        _ => Finding::ok(NAME, format!("for the kernel {}", made.kernel)),
    }
}

/// Makes it when it is missing or when daemon or kernel have changed.
pub fn ensure(config: &ServerConfig, daemon: Option<&Path>) -> Result<Outcome, Failure> {
    let before = made(config);
    let daemon = match find_daemon(daemon) {
        Ok(path) => path,
        // An installed machine without the file beside us still has its image.
        Err(_) if before.is_some() && daemon.is_none() => return Ok(Outcome::UpToDate),
        Err(e) => return Err(e),
    };
    check_static(&daemon)?;
    let io = |e: std::io::Error| Failure::new(format!("cannot make {}: {e}", config.initramfs().display()));
    let kernel = guest_kernel::open(&config.kernel_dir).map_err(|e| Failure::new(e.to_string()))?;
    let hash = sha256(&daemon).map_err(io)?;
    if before.as_ref().is_some_and(|made| made.daemon == hash && made.kernel == kernel.version) {
        return Ok(Outcome::UpToDate);
    }
    // Without its note an image counts as missing: a crash in between makes it again.
    let _ = std::fs::remove_file(record(config));
    initramfs::build(&kernel.modules, &daemon, &config.initramfs()).map_err(|e| Failure::new(e.to_string()))?;
    let made = Made { daemon: hash, kernel: kernel.version, image: sha256(&config.initramfs()).map_err(io)? };
    let text = serde_json::to_string(&made).expect("plain data");
    write_whole(&record(config), &text).map_err(io)?;
    Ok(Outcome::Built { replaced: before.is_some() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_is_refused() {
        let own = std::env::current_exe().expect("a test program");
        let text = check_static(&own).expect_err("cargo links tests to libc").to_string();
        assert!(text.contains("not a static program"), "{text}");
        assert!(check_static(Path::new("/etc/passwd")).is_err());
    }
}
