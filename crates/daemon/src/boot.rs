//! From the initramfs to the template's own root: modules, disk, mounts. Templates need nothing of ours in them.

use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};

use crate::{log, sys};

const DISK: &str = "/dev/vda";
const ROOT: &str = "/newroot";
const DISK_PATIENCE: Duration = Duration::from_secs(30);
const MODULES_MAX: usize = 64;

fn failed(what: impl std::fmt::Display) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

fn mount_at(source: &str, target: &str, kind: &str, flags: MsFlags, data: &str) -> io::Result<()> {
    fs::create_dir_all(target).map_err(failed(format!("create {target}")))?;
    mount(Some(source), target, Some(kind), flags, Some(data))
        .map_err(|errno| failed(format!("mount {kind} at {target}"))(errno.into()))
}

pub fn boot() -> io::Result<()> {
    let hidden = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NODEV;
    mount_at("proc", "/proc", "proc", hidden, "")?;
    mount_at("sys", "/sys", "sysfs", hidden, "")?;
    mount_at("dev", "/dev", "devtmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, "mode=0755")?;
    load_modules()?;
    wait_for_disk()?;
    mount_at(DISK, ROOT, "ext4", MsFlags::MS_NOATIME, "")?;
    enter_root()?;
    mounts_of_the_guest(hidden)?;
    protect_self();
    if let Err(error) = sys::loopback_up() {
        log::say(&format!("no loopback interface: {error}"));
    }
    Ok(())
}

fn load_modules() -> io::Result<()> {
    let order = fs::read_to_string("/modules/order").map_err(failed("read /modules/order"))?;
    for name in order.lines().filter(|l| !l.is_empty()).take(MODULES_MAX) {
        let file = fs::File::open(Path::new("/modules").join(name)).map_err(failed(name))?;
        match sys::load_module(file.as_fd()) {
            // Built in, or loaded by another.
            Err(error) if error.raw_os_error() == Some(nix::libc::EEXIST) => {}
            other => other.map_err(failed(format!("load {name}")))?,
        }
    }
    Ok(())
}

fn wait_for_disk() -> io::Result<()> {
    let begun = Instant::now();
    while !Path::new(DISK).exists() {
        if begun.elapsed() > DISK_PATIENCE {
            return Err(io::Error::other(format!("the disk {DISK} did not appear")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Makes the disk the root, and gives the initramfs' memory back.
fn enter_root() -> io::Result<()> {
    for name in ["proc", "sys", "dev"] {
        let (from, to) = (format!("/{name}"), format!("{ROOT}/{name}"));
        fs::create_dir_all(&to).map_err(failed(&to))?;
        mount(Some(from.as_str()), to.as_str(), None::<&str>, MsFlags::MS_MOVE, None::<&str>)
            .map_err(|errno| failed(format!("move {from}"))(errno.into()))?;
    }
    let _ = fs::remove_dir_all("/modules");
    let _ = fs::remove_file("/init");
    std::env::set_current_dir(ROOT)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)
        .map_err(|errno| failed("move the root")(errno.into()))?;
    nix::unistd::chroot(".").map_err(|errno| failed("enter the root")(errno.into()))?;
    std::env::set_current_dir("/")
}

fn mounts_of_the_guest(hidden: MsFlags) -> io::Result<()> {
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount_at("devpts", "/dev/pts", "devpts", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666")?;
    mount_at("shm", "/dev/shm", "tmpfs", quiet, "mode=1777")?;
    mount_at("run", "/run", "tmpfs", quiet, "mode=0755,size=25%")?;
    mount_at("cgroup", "/sys/fs/cgroup", "cgroup2", hidden, "")?;
    // devtmpfs has the nodes, not the links that every program expects.
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, format!("/dev/{link}"));
    }
    let _ = fs::remove_file("/dev/ptmx");
    let _ = std::os::unix::fs::symlink("pts/ptmx", "/dev/ptmx");
    for dir in ["/tmp", "/var/tmp"] {
        if !Path::new(dir).exists() && fs::create_dir_all(dir).is_ok() {
            let _ = fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o1777));
        }
    }
    let _ = fs::create_dir_all("/etc");
    if !Path::new("/etc/hosts").exists() {
        let _ = fs::write("/etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost\n");
    }
    Ok(())
}

/// The kernel never chooses us when memory runs out.
fn protect_self() {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-1000") {
        log::say(&format!("not protected from the out-of-memory killer: {error}"));
    }
    let limit = nix::sys::resource::Resource::RLIMIT_NOFILE;
    let _ = nix::sys::resource::setrlimit(limit, 65_536, 65_536);
}
