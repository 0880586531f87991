//! The Debian packages the server needs. Only what is missing is installed, with apt-get; nothing is removed or upgraded.

use std::path::Path;
use std::process::{Command, Stdio};

use super::Finding;
use crate::failure::Failure;

pub struct Package {
    pub name: &'static str,
    pub why: &'static str,
}

const fn package(name: &'static str, why: &'static str) -> Package {
    Package { name, why }
}

pub const NEEDED: &[Package] = &[
    package("qemu-system-x86", "runs the microVMs"),
    package("btrfs-progs", "makes the pool"),
    package("e2fsprogs", "makes the disks of guests"),
    package("mmdebstrap", "builds templates from Debian packages"),
    package("util-linux", "mounts the pool"),
    package("mount", "mounts the pool"),
    package("xz-utils", "unpacks root file systems"),
    package("nftables", "the network policy of sandboxes"),
    package("iproute2", "the network of sandboxes"),
];

const DPKG_QUERY: &str = "/usr/bin/dpkg-query";
const APT_GET: &str = "/usr/bin/apt-get";
const INSTALL: [&str; 4] = ["install", "--yes", "--no-install-recommends", "--no-remove"];

fn is_installed(name: &str) -> bool {
    let output = Command::new(DPKG_QUERY).args(["-W", "-f", "${db:Status-Status}", name]).stdin(Stdio::null()).output();
    output.is_ok_and(|out| out.status.success() && out.stdout == b"installed")
}

/// Names of the packages that are not there.
pub fn missing() -> Vec<&'static str> {
    NEEDED.iter().filter(|package| !is_installed(package.name)).map(|package| package.name).collect()
}

/// `name (what for)`
fn with_reason(name: &str) -> String {
    let why = NEEDED.iter().find(|package| package.name == name).map_or("", |package| package.why);
    format!("{name} ({why})")
}

/// The command that installs them.
pub fn command_line(names: &[&str]) -> String {
    format!("apt-get {} {}", INSTALL.join(" "), names.join(" "))
}

pub fn check() -> Finding {
    const NAME: &str = "packages";
    if !Path::new(DPKG_QUERY).exists() {
        return Finding::warn(
            NAME,
            "this is not a Debian system, so packages cannot be checked",
            "install QEMU, btrfs-progs, e2fsprogs and mmdebstrap yourself",
        );
    }
    match missing() {
        names if names.is_empty() => Finding::ok(NAME, format!("all {} are installed", NEEDED.len())),
        names => Finding::fail(
            NAME,
            format!("missing: {}", names.iter().map(|name| with_reason(name)).collect::<Vec<_>>().join(", ")),
            format!("sudo space setup, or sudo {}", command_line(&names)),
        ),
    }
}

/// Runs an apt tool; the end of what it said is the error.
pub fn run(program: &str, args: &[&str], folder: Option<&Path>) -> Result<String, Failure> {
    if !Path::new(program).exists() {
        return Err(Failure::new(format!("{program} is missing: set-up knows Debian only; see docs/operations.md")));
    }
    let mut command = Command::new(program);
    command.args(args).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C.UTF-8").stdin(Stdio::null());
    if let Some(folder) = folder {
        command.current_dir(folder);
    }
    let shown = || format!("{program} {}", args.join(" "));
    let output = command.output().map_err(|e| Failure::new(format!("cannot run {}: {e}", shown())))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = lines[lines.len().saturating_sub(4)..].join("; ");
    let hint = if said.contains("Could not get lock") {
        "another package manager is at work: try again when it has ended"
    } else if said.contains("Temporary failure resolving") || said.contains("Could not connect") {
        "the package mirror cannot be reached: check the network and /etc/apt/sources.list"
    } else {
        "run it yourself to see all of it"
    };
    Err(Failure::new(format!("{} failed: {tail} ({hint})", shown())))
}

/// Installs what is missing; the lists are fetched first, since a fresh machine may have none.
pub fn install(names: &[&str]) -> Result<(), Failure> {
    run(APT_GET, &["update"], None)?;
    let args: Vec<&str> = INSTALL.iter().copied().chain(names.iter().copied()).collect();
    run(APT_GET, &args, None).map(drop)
}

/// Fetches the package lists.
pub fn update() -> Result<(), Failure> {
    run(APT_GET, &["update"], None).map(drop)
}

/// Downloads a package into a folder, without installing it.
pub fn download(name: &str, folder: &Path) -> Result<(), Failure> {
    run(APT_GET, &["download", name], Some(folder)).map(drop)
}
