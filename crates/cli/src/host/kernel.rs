//! The guest's kernel: Debian's cloud kernel, downloaded with apt-get, unpacked, never installed.

use std::path::Path;

use space_vmm::guest_kernel;

use super::{Finding, packages};
use crate::config::ServerConfig;
use crate::failure::Failure;

const META_PACKAGE: &str = "linux-image-cloud-amd64";
const APT_CACHE: &str = "/usr/bin/apt-cache";
const TRIES: usize = 3;

/// Its version, when it is there and whole.
pub fn version(config: &ServerConfig) -> Option<String> {
    let kernel = guest_kernel::open(&config.kernel_dir).ok()?;
    (kernel.image.is_file() && kernel.modules.iter().all(|module| module.path.is_file())).then_some(kernel.version)
}

pub fn check(config: &ServerConfig) -> Finding {
    const NAME: &str = "guest kernel";
    match version(config) {
        Some(version) => Finding::ok(NAME, format!("{version} in {}", config.kernel_dir.display())),
        None => Finding::fail(NAME, format!("{} holds no kernel", config.kernel_dir.display()), "sudo space setup"),
    }
}

/// The package with the kernel in it that the other one depends on.
fn real_package() -> Result<String, Failure> {
    let shown = packages::run(APT_CACHE, &["show", "--no-all-versions", META_PACKAGE], None)?;
    let depends = shown.lines().find_map(|line| line.strip_prefix("Depends:")).unwrap_or_default();
    let name = depends.split([',', '|']).filter_map(|part| part.split_whitespace().next());
    name.filter(|name| name.starts_with("linux-image-") && name.ends_with("-cloud-amd64"))
        .map(str::to_owned)
        .next()
        .ok_or_else(|| Failure::new(format!("the package {META_PACKAGE} does not say which kernel it stands for")))
}

fn try_once(config: &ServerConfig, step: &dyn Fn(&str)) -> Result<String, Failure> {
    let package = real_package().or_else(|_| {
        step("fetching the package lists");
        packages::update()?;
        real_package()
    })?;
    let folder = config.data_dir.join("kernel-download");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).map_err(|e| Failure::new(format!("cannot make {}: {e}", folder.display())))?;
    step(&format!("downloading {package}"));
    let downloaded = packages::download(&package, &folder).and_then(|()| find_deb(&folder));
    let result = downloaded.and_then(|deb| {
        step("unpacking the guest kernel");
        let kernel = guest_kernel::extract(&deb, &config.kernel_dir);
        kernel.map(|kernel| kernel.version).map_err(|e| Failure::new(e.to_string()))
    });
    let _ = std::fs::remove_dir_all(&folder);
    result
}

/// Downloads and unpacks it; its version. A mirror that stumbles is asked again.
pub fn fetch(config: &ServerConfig, step: &dyn Fn(&str)) -> Result<String, Failure> {
    let mut last = Failure::new("not tried");
    for attempt in 0..TRIES {
        if attempt > 0 {
            std::thread::sleep(std::time::Duration::from_secs(2));
            // The lists may name a version that the mirror has replaced.
            let _ = packages::update();
        }
        match try_once(config, step) {
            Ok(version) => return Ok(version),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// From a package that is already here.
pub fn from_package(config: &ServerConfig, deb: &Path) -> Result<String, Failure> {
    let kernel = guest_kernel::extract(deb, &config.kernel_dir).map_err(|e| Failure::new(e.to_string()))?;
    Ok(kernel.version)
}

fn find_deb(folder: &Path) -> Result<std::path::PathBuf, Failure> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries
        .into_iter()
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .ok_or_else(|| Failure::new("apt-get reported success and downloaded nothing"))
}
