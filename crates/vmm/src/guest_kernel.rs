//! The guest's kernel, taken out of a distribution's package: the image and the few modules a microVM needs.
//!
//! Nothing of the package is run, and nothing of it is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Debian's tool that unpacks a package.
const DPKG_DEB: &str = "/usr/bin/dpkg-deb";
/// What a guest needs beyond what the kernel has built in; what these need in turn is found in them.
/// Both buses, since drivers differ; vsock and network for the drivers and parts that use them; overlay for containers.
const WANTED: [&str; 10] = [
    "virtio_mmio",
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_rng",
    "virtio_balloon",
    "vmw_vsock_virtio_transport",
    "virtio_net",
    "overlay",
    "fuse",
];
/// Without these no driver of ours can start a guest.
const NEEDED: [&str; 3] = ["virtio_mmio", "virtio_blk", "virtio_console"];

/// With all debugging symbols a kernel has a few hundred MiB.
const IMAGE_MAX_BYTES: u64 = 1 << 30;
const VERSION_MAX_BYTES: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error("{0} is missing: install the package dpkg")]
    MissingTool(&'static str),
    #[error("cannot unpack {deb}: {message}")]
    Unpack { deb: PathBuf, message: String },
    #[error(
        "{deb} holds no kernel: give the linux-image-<version>-cloud-amd64 package, not the one that only depends on it"
    )]
    NoKernel { deb: PathBuf },
    #[error("the kernel {version} has no module {module}, and none built in: take a kernel with virtio drivers")]
    NoModule { version: String, module: String },
    #[error("{file} is not an uncompressed kernel image (vmlinux)")]
    NotAKernel { file: PathBuf },
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
}

/// A kernel module as a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// With `_`, as the kernel names it.
    pub name: String,
    /// Not compressed.
    pub path: PathBuf,
}

/// A kernel that [`extract`] has laid out: `vmlinuz`, `version` and `modules/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestKernel {
    pub version: String,
    pub image: PathBuf,
    /// In the order of loading.
    pub modules: Vec<Module>,
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> KernelError {
    let path = path.to_owned();
    move |source| KernelError::File { action, path, source }
}

/// Takes the kernel out of `deb` and lays it out in the folder `out`, which it replaces as a whole.
pub fn extract(deb: &Path, out: &Path) -> Result<GuestKernel, KernelError> {
    let unpacked = out.with_extension("unpack");
    let new = out.with_extension("new");
    for path in [&unpacked, &new] {
        remove_tree(path)?;
        fs::create_dir_all(path).map_err(failed("create", path))?;
    }
    unpack(deb, &unpacked)?;
    let version = find_version(&unpacked).ok_or_else(|| KernelError::NoKernel { deb: deb.to_owned() })?;
    let image = unpacked.join(format!("boot/vmlinuz-{version}"));
    fs::copy(&image, new.join("vmlinuz")).map_err(failed("copy", &image))?;
    let modules = select_modules(&unpacked, &version)?;
    let folder = new.join("modules");
    fs::create_dir_all(&folder).map_err(failed("create", &folder))?;
    let mut order = String::new();
    for (index, module) in modules.iter().enumerate() {
        let name = format!("{index:02}-{}.ko", module.name);
        fs::copy(&module.path, folder.join(&name)).map_err(failed("copy", &module.path))?;
        order += &name;
        order.push('\n');
    }
    fs::write(folder.join("order"), order).map_err(failed("write", &folder))?;
    fs::write(new.join("version"), format!("{version}\n")).map_err(failed("write", &new))?;
    remove_tree(&unpacked)?;
    remove_tree(out)?;
    fs::rename(&new, out).map_err(failed("put in place", out))?;
    open(out)
}

/// Finds what an earlier [`extract`] has laid out in `out`, or takes a file as a kernel that has all it needs built in.
pub fn open(out: &Path) -> Result<GuestKernel, KernelError> {
    if out.is_file() {
        let version = find_banner(out)?.ok_or_else(|| KernelError::NotAKernel { file: out.to_owned() })?;
        return Ok(GuestKernel { version, image: out.to_owned(), modules: Vec::new() });
    }
    let read = |path: PathBuf| fs::read_to_string(&path).map_err(failed("read", &path));
    let version = read(out.join("version"))?.trim().to_owned();
    let order = read(out.join("modules/order"))?;
    let module = |line: &str| {
        let name = line.strip_suffix(".ko")?.split_once('-')?.1;
        Some(Module { name: name.to_owned(), path: out.join("modules").join(line) })
    };
    Ok(GuestKernel { version, image: out.join("vmlinuz"), modules: order.lines().filter_map(module).collect() })
}

/// Whether a kernel is an ELF file, which every VMM can boot as it is.
pub fn is_uncompressed(image: &Path) -> bool {
    let mut head = [0; 4];
    let read = fs::File::open(image).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut head));
    read.is_ok() && head == *b"\x7fELF"
}

/// The version in an uncompressed kernel's own words: `Linux version 6.12.1 (…`.
fn find_banner(image: &Path) -> Result<Option<String>, KernelError> {
    const BANNER: &[u8] = b"Linux version ";
    let size = fs::metadata(image).map_err(failed("inspect", image))?.len();
    if size > IMAGE_MAX_BYTES {
        return Err(KernelError::NotAKernel { file: image.to_owned() });
    }
    let bytes = fs::read(image).map_err(failed("read", image))?;
    // The same words stand in format strings too: a version begins with a digit.
    let found = bytes
        .windows(BANNER.len() + 1)
        .position(|window| window.starts_with(BANNER) && window.last().is_some_and(u8::is_ascii_digit));
    Ok(found.map(|at| {
        let word = bytes[at + BANNER.len()..].iter().take(VERSION_MAX_BYTES);
        word.take_while(|byte| byte.is_ascii_graphic()).map(|byte| char::from(*byte)).collect()
    }))
}

fn remove_tree(path: &Path) -> Result<(), KernelError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

fn unpack(deb: &Path, into: &Path) -> Result<(), KernelError> {
    if !Path::new(DPKG_DEB).exists() {
        return Err(KernelError::MissingTool(DPKG_DEB));
    }
    let mut command = Command::new(DPKG_DEB);
    command.arg("-x").arg(deb).arg(into).stdin(Stdio::null()).env_clear().env("PATH", "/usr/bin:/bin");
    let output = command.output().map_err(failed("run", Path::new(DPKG_DEB)))?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().chars().take(500).collect();
    Err(KernelError::Unpack { deb: deb.to_owned(), message })
}

fn find_version(unpacked: &Path) -> Option<String> {
    let entries = fs::read_dir(unpacked.join("boot")).ok()?;
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned)).max()
}

/// Every module file below `folder`. A package has a few thousand at most; links are not followed.
fn find_modules(folder: &Path, found: &mut Vec<Module>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            find_modules(&entry.path(), found);
        } else if let Some(name) = entry.file_name().to_str().and_then(|name| name.strip_suffix(".ko")) {
            found.push(Module { name: name.replace('-', "_"), path: entry.path() });
        }
    }
}

/// The names after `depends=` in a module's own description.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let rest = &module[at + KEY.len()..];
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(0);
    let names = String::from_utf8_lossy(&rest[..end]);
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

fn select_modules(unpacked: &Path, version: &str) -> Result<Vec<Module>, KernelError> {
    let mut all = Vec::new();
    // Either place: distributions move /lib into /usr at different times.
    for top in ["lib/modules", "usr/lib/modules"] {
        find_modules(&unpacked.join(top).join(version), &mut all);
    }
    let built_in: String = ["lib/modules", "usr/lib/modules"]
        .iter()
        .filter_map(|top| fs::read_to_string(unpacked.join(top).join(version).join("modules.builtin")).ok())
        .collect();
    let is_built_in = |name: &str| {
        built_in.lines().any(|line| {
            let file = line.rsplit('/').next().unwrap_or_default();
            file.strip_suffix(".ko").is_some_and(|file| file.replace('-', "_") == name)
        })
    };
    let mut order = Vec::new();
    for name in WANTED {
        if !add_module(name, &all, &mut order, 0)? && NEEDED.contains(&name) && !is_built_in(name) {
            return Err(KernelError::NoModule { version: version.to_owned(), module: name.to_owned() });
        }
    }
    Ok(order)
}

/// Adds a module after all it needs. False when there is no such file, as for what is built in.
fn add_module(name: &str, all: &[Module], order: &mut Vec<Module>, depth: u32) -> Result<bool, KernelError> {
    if order.iter().any(|module| module.name == name) {
        return Ok(true);
    }
    let Some(module) = all.iter().find(|module| module.name == name) else { return Ok(false) };
    let bytes = fs::read(&module.path).map_err(failed("read", &module.path))?;
    // The kernel forbids circles; a broken package must not make one endless here.
    if depth < 16 {
        for needed in dependencies(&bytes) {
            add_module(&needed, all, order, depth + 1)?;
        }
    }
    order.push(module.clone());
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_file_says_its_version() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("vmlinux");
        fs::write(&image, b"\x7fELF...Linux version %s\0..Linux version 6.12.1-x (gcc) #1\n").unwrap();
        let kernel = open(&image).unwrap();
        assert_eq!((kernel.version.as_str(), kernel.modules.len()), ("6.12.1-x", 0));
        assert!(is_uncompressed(&image));
        fs::write(&image, b"something else").unwrap();
        assert!(matches!(open(&image), Err(KernelError::NotAKernel { .. })) && !is_uncompressed(&image));
    }

    #[test]
    fn modules_come_after_what_they_need() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("lib/modules/6.1/kernel/drivers");
        fs::create_dir_all(&modules).unwrap();
        let module = |name: &str, needs: &str| {
            fs::write(modules.join(name), format!("\x7fELF..\0license=GPL\0depends={needs}\0name=x\0")).unwrap();
        };
        module("virtio.ko", "virtio_ring");
        module("virtio_ring.ko", "");
        module("virtio-rng.ko", "virtio,rng-core");
        module("virtio_mmio.ko", "virtio,virtio_ring");
        module("virtio_blk.ko", "virtio");
        let missing = select_modules(dir.path(), "6.1");
        assert!(
            matches!(missing, Err(KernelError::NoModule { ref module, .. }) if module == "virtio_console"),
            "{missing:?}"
        );
        fs::write(modules.join("../../modules.builtin"), "kernel/drivers/char/virtio_console.ko\n").unwrap();
        let names: Vec<String> =
            select_modules(dir.path(), "6.1").unwrap().into_iter().map(|module| module.name).collect();
        assert_eq!(names, ["virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_rng"]);
    }
}
