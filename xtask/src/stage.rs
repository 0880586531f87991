//! The stage of the system tests: packages they need, a data folder under `target/`, templates `seed` and `tiny`, one running server.
//! Kept between runs; what its inputs changed is made again.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::{output_of, root, run, space_binary};

const TEST_PACKAGES: [&str; 4] = ["busybox-static", "docker-registry", "python3-venv", "btrfs-progs"];
/// Enough for `seed`, `tiny` and fifty sandboxes at once; the file is sparse.
const POOL_SIZE: &str = "12GiB";

fn folder() -> PathBuf {
    root().join("target/test-stage")
}

pub fn data_dir() -> PathBuf {
    folder().join("data")
}

/// `space ARGS` on the stage.
pub fn space(args: &[&str]) -> Command {
    let mut command = Command::new(space_binary());
    command.args(args).env("SPACE_DATA_DIR", data_dir());
    command.env("SPACE_LISTEN", "127.0.0.1:0").env("SPACE_DATA_LISTEN", "127.0.0.1:0");
    // Tests come in bursts that say nothing of the next; the cores are for them.
    command.env("SPACE_WARM_PER_TEMPLATE", "3");
    for name in ["SPACE_URL", "SPACE_API_KEY", "SPACE_CONFIG"] {
        command.env_remove(name);
    }
    command
}

fn installed(package: &str) -> bool {
    let args = ["-W", "-f", "${db:Status-Status}", package];
    Command::new("dpkg-query").args(args).stderr(Stdio::null()).output().is_ok_and(|out| out.stdout == b"installed")
}

/// Packages that only tests need. A machine without a package mirror runs the tests that can do without.
pub fn packages() {
    let missing: Vec<&str> = TEST_PACKAGES.into_iter().filter(|name| !installed(name)).collect();
    if missing.is_empty() {
        return;
    }
    println!("installing for the tests: {}", missing.join(" "));
    let mut update = Command::new("apt-get");
    let mut install = Command::new("apt-get");
    install
        .args(["install", "--yes", "--no-install-recommends"])
        .args(&missing)
        .env("DEBIAN_FRONTEND", "noninteractive");
    let quiet = |command: &mut Command| output_of(command);
    let outcome = quiet(update.arg("update")).and_then(|_| quiet(&mut install));
    if let Err(error) = outcome {
        println!("the tests that need them will be skipped: {error:#}");
    }
}

/// A virtual environment with the OpenAPI validator, or `None` with the reason printed.
pub fn python() -> Option<PathBuf> {
    let venv = root().join("target/venv");
    if venv.join("complete").is_file() {
        return Some(venv);
    }
    let make = || -> Result<()> {
        let _ = fs::remove_dir_all(&venv);
        output_of(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let pip = venv.join("bin/pip");
        output_of(Command::new(pip).args([
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "openapi-spec-validator",
        ]))?;
        fs::write(venv.join("complete"), "")?;
        Ok(())
    };
    match make() {
        Ok(()) => Some(venv),
        Err(error) => {
            println!("the OpenAPI validator cannot be installed, its test will be skipped: {error:#}");
            None
        }
    }
}

/// A root file system with busybox and nothing else.
fn tiny_rootfs() -> Result<PathBuf> {
    let rootfs = folder().join("tiny");
    let _ = fs::remove_dir_all(&rootfs);
    for name in ["bin", "etc", "tmp", "root", "proc", "sys", "dev", "run", "var"] {
        fs::create_dir_all(rootfs.join(name))?;
    }
    fs::set_permissions(rootfs.join("tmp"), fs::Permissions::from_mode(0o1777))?;
    let busybox = ["/usr/bin/busybox", "/bin/busybox"].into_iter().map(Path::new).find(|path| path.is_file());
    fs::copy(busybox.context("busybox-static is not installed")?, rootfs.join("bin/busybox"))?;
    let names = output_of(Command::new(rootfs.join("bin/busybox")).arg("--list"))?;
    for name in names.lines().filter(|name| *name != "busybox") {
        std::os::unix::fs::symlink("busybox", rootfs.join("bin").join(name))?;
    }
    fs::write(rootfs.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    fs::write(rootfs.join("etc/group"), "root:x:0:\n")?;
    Ok(rootfs)
}

/// What `tiny` was built with: rebuilt when the guest's kernel or daemon changes.
fn stamp() -> Result<String> {
    fs::read_to_string(data_dir().join("initramfs.json")).context("set-up left no initramfs.json")
}

fn tiny() -> Result<()> {
    let note = folder().join("tiny.stamp");
    let there = output_of(&mut space(&["template", "inspect", "tiny", "--json"])).is_ok();
    if there && fs::read_to_string(&note).is_ok_and(|text| stamp().is_ok_and(|now| now == text)) {
        return Ok(());
    }
    let rootfs = tiny_rootfs()?;
    let source = format!("dir:{}", rootfs.display());
    run(&mut space(&["template", "build", "tiny", "--source", &source, "--memory", "128", "--disk", "256MiB"]))?;
    fs::write(note, stamp()?)?;
    Ok(())
}

/// The running server; taken down when it goes, also when tests fail.
pub struct Server {
    pub pid: String,
}

impl Server {
    pub fn start() -> Result<Self> {
        fs::create_dir_all(folder())?;
        // One that an interrupted run left.
        stop();
        run(&mut space(&["setup", "--pool-size", POOL_SIZE, "--yes"]))?;
        run(&mut space(&["up", "--detach"]))?;
        let server = Self { pid: fs::read_to_string(data_dir().join("run/server.lock"))?.trim().to_owned() };
        if server.pid.is_empty() {
            bail!("the server did not write its process id");
        }
        tiny()?;
        Ok(server)
    }

    pub fn log(&self) -> PathBuf {
        data_dir().join("server.log")
    }
}

fn stop() {
    let quiet = |args: &[&str]| space(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !data_dir().join("run/server.lock").is_file() {
        return;
    }
    // Sandboxes of a run that was killed: only a server can end them.
    let _ = quiet(&["up", "--detach"]);
    let _ = quiet(&["down", "--sandboxes", "--unmount"]);
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = space(&["down", "--sandboxes", "--unmount"]).status();
    }
}
