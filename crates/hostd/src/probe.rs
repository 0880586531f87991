//! What this host offers: facts for `space doctor` and for the choice of a VMM. Changes nothing.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::cgroup::Hierarchy;
use crate::kvm::{self, Trial};

/// Whether `/dev/kvm` can run an ordinary kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum KvmVerdict {
    /// A trial guest ran.
    Usable {
        /// The module that does it: `kvm_intel` or `kvm_amd`, or `kvm` when it is built in.
        module: String,
    },
    Absent,
    NoPermission,
    /// A variant that runs only kernels made for it.
    Pvm {
        evidence: String,
    },
    Broken {
        evidence: String,
    },
}

impl KvmVerdict {
    pub fn is_usable(&self) -> bool {
        matches!(self, KvmVerdict::Usable { .. })
    }

    /// One sentence for people.
    pub fn sentence(&self) -> String {
        match self {
            KvmVerdict::Usable { module } => format!("/dev/kvm runs ordinary guests ({module})."),
            KvmVerdict::Absent => "There is no /dev/kvm.".to_owned(),
            KvmVerdict::NoPermission => "/dev/kvm may not be opened by this user.".to_owned(),
            KvmVerdict::Pvm { evidence } => {
                format!("/dev/kvm is PVM, which runs only kernels that are made for it: {evidence}.")
            }
            KvmVerdict::Broken { evidence } => {
                format!("/dev/kvm does not run an ordinary guest: {evidence}.")
            }
        }
    }
}

/// Facts about the host.
#[derive(Clone, Debug, Serialize)]
pub struct HostFacts {
    pub root: bool,
    pub kernel: String,
    /// 2, 1, or none that has all controllers.
    pub cgroup_version: Option<u8>,
    /// Why there is none.
    pub cgroup_problem: Option<String>,
    /// The kernel has btrfs, loaded or as a module it can load.
    pub btrfs: bool,
    pub loop_devices: bool,
    pub memory_bytes: u64,
    pub memory_available_bytes: u64,
    pub cpus: usize,
    pub kvm: KvmVerdict,
}

/// Looks at everything. Blocks, for up to a second where KVM hangs.
pub fn host() -> HostFacts {
    let cgroup = Hierarchy::detect();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let amount = |key: &str| {
        let line = memory.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    HostFacts {
        root: nix::unistd::geteuid().is_root(),
        kernel: read("/proc/sys/kernel/osrelease"),
        cgroup_version: cgroup.as_ref().ok().map(Hierarchy::version),
        cgroup_problem: cgroup.err().map(|error| error.to_string()),
        btrfs: has_btrfs(),
        loop_devices: Path::new("/dev/loop-control").exists(),
        memory_bytes: amount("MemTotal:").unwrap_or(0),
        memory_available_bytes: amount("MemAvailable:").unwrap_or(0),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        kvm: kvm(),
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn has_btrfs() -> bool {
    let known = read("/proc/filesystems").lines().any(|line| line.split_whitespace().last() == Some("btrfs"));
    let module = format!("/lib/modules/{}/kernel/fs/btrfs", read("/proc/sys/kernel/osrelease"));
    known || Path::new(&module).exists()
}

/// Free bytes for an ordinary user on the file system of `path`.
pub fn free_bytes(path: &Path) -> std::io::Result<u64> {
    let stat = nix::sys::statvfs::statvfs(path)?;
    Ok(stat.blocks_available() * stat.fragment_size())
}

/// Tries `/dev/kvm` out.
pub fn kvm() -> KvmVerdict {
    match fs::File::options().read(true).write(true).open("/dev/kvm") {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return KvmVerdict::NoPermission,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return KvmVerdict::Absent,
        Err(error) => return KvmVerdict::Broken { evidence: format!("it cannot be opened ({error})") },
        Ok(_) => {}
    }
    judge(
        Path::new("/sys/module/kvm_pvm").exists(),
        ["kvm_intel", "kvm_amd"].into_iter().find(|name| Path::new("/sys/module").join(name).exists()),
        read("/proc/cpuinfo").split_whitespace().any(|flag| flag == "vmx" || flag == "svm"),
        kvm::attempt(),
    )
}

/// A trial that passes proves little where a variant emulates: the module says what it is.
fn judge(pvm: bool, vendor: Option<&str>, flag: bool, trial: Trial) -> KvmVerdict {
    let outcome = match &trial {
        Trial::Passed => "the trial guest ran, but emulated".to_owned(),
        Trial::Failed(why) => why.clone(),
    };
    match (pvm, vendor, trial) {
        (true, None, _) => {
            let flags = if flag { "" } else { " and the processor shows no vmx or svm" };
            KvmVerdict::Pvm { evidence: format!("the module kvm_pvm is loaded{flags}; {outcome}") }
        }
        (_, _, Trial::Failed(evidence)) => KvmVerdict::Broken { evidence },
        (_, None, Trial::Passed) if !flag => KvmVerdict::Broken {
            evidence: "no processor support (vmx or svm) and no module that would explain it".to_owned(),
        },
        (_, vendor, Trial::Passed) => KvmVerdict::Usable { module: vendor.unwrap_or("kvm").to_owned() },
    }
}

/// VMM processes whose folder is a subvolume of this pool: process id and the folder's path within the pool.
///
/// A VMM is in a mount namespace of its own, so its folder is known by what it is, not by its path there.
pub fn vmms(pool: &Path) -> Vec<(u32, String)> {
    use std::os::unix::fs::MetadataExt;
    let identity = |path: &Path| fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    let mut folders = std::collections::HashMap::new();
    for area in ["sandboxes", "tmp", "checkpoints"] {
        for entry in fs::read_dir(pool.join(area)).into_iter().flatten().flatten() {
            let name = format!("{area}/{}", entry.file_name().to_string_lossy());
            folders.extend(identity(&entry.path()).map(|folder| (folder, name)));
        }
    }
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if !name.starts_with("qemu-system") && !name.starts_with("firecracker") {
            continue;
        }
        let folder = identity(&entry.path().join("cwd")).and_then(|folder| folders.get(&folder));
        found.extend(folder.map(|folder| (pid, folder.clone())));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pvm_is_never_taken_for_an_ordinary_kvm() {
        let failed = Trial::Failed("stopped at rdmsr".into());
        assert!(matches!(judge(true, None, false, Trial::Passed), KvmVerdict::Pvm { .. }));
        assert!(matches!(judge(true, None, true, failed.clone()), KvmVerdict::Pvm { .. }));
        assert!(matches!(judge(false, None, false, Trial::Passed), KvmVerdict::Broken { .. }));
        assert!(matches!(judge(false, Some("kvm_amd"), true, failed), KvmVerdict::Broken { .. }));
        assert_eq!(
            judge(false, Some("kvm_intel"), true, Trial::Passed),
            KvmVerdict::Usable { module: "kvm_intel".into() }
        );
        assert_eq!(judge(false, None, true, Trial::Passed), KvmVerdict::Usable { module: "kvm".into() });
    }

    #[test]
    fn the_facts_of_this_host_come_quickly() {
        let begun = std::time::Instant::now();
        let facts = host();
        assert!(begun.elapsed() < std::time::Duration::from_secs(5));
        assert!(!facts.kernel.is_empty() && facts.memory_bytes > 0);
        eprintln!("{facts:?}\n{}", facts.kvm.sentence());
        if Path::new("/sys/module/kvm_pvm").exists() && Path::new("/dev/kvm").exists() {
            assert!(!facts.kvm.is_usable());
        }
    }
}
