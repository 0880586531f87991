//! Which driver a host gets, and why: one place for the server, which starts it, and for `doctor`, which explains it.

use std::path::PathBuf;

use space_hostd::probe::{HostFacts, KvmVerdict};
use space_vmm::DriverConfig;
use space_vmm::firecracker::{self, FirecrackerConfig};
use space_vmm::guest_kernel;
use space_vmm::qemu::{Accel, QemuConfig};

use super::Finding;
use crate::config::{DriverChoice, ServerConfig};

const EMULATION: &str = "Emulation runs CPU work at about a tenth, and QEMU's own policy does not call it a security boundary; the \
                         jail around it holds all the same.";

pub struct Chosen {
    pub driver: DriverConfig,
    /// For people.
    pub label: &'static str,
    pub reason: String,
}

/// Firecracker where it is asked for; otherwise QEMU, with hardware virtualization where a trial guest ran.
/// `installed`: where set-up puts Firecracker.
pub fn choose(asked: DriverChoice, named: Option<PathBuf>, installed: PathBuf, kvm: &KvmVerdict) -> Chosen {
    let sentence = kvm.sentence();
    let (label, reason) = match asked {
        DriverChoice::Firecracker => ("firecracker", format!("It was asked for. {sentence}")),
        DriverChoice::QemuKvm => ("qemu-kvm", format!("It was asked for. {sentence}")),
        DriverChoice::QemuTcg => ("qemu-tcg", format!("It was asked for. {EMULATION}")),
        DriverChoice::Auto if kvm.is_usable() => ("qemu-kvm", sentence),
        DriverChoice::Auto => ("qemu-tcg", format!("{sentence} So guests are emulated. {EMULATION}")),
    };
    let driver = if label == "firecracker" {
        let there = || Some(installed.clone()).filter(|path| space_hostd::process::is_program(path));
        let program = named.or_else(there).or_else(firecracker::find_program).unwrap_or(installed);
        DriverConfig::Firecracker(FirecrackerConfig::new(program))
    } else {
        let defaults = QemuConfig::default();
        let accel = if label == "qemu-kvm" { Accel::Kvm } else { defaults.accel };
        DriverConfig::Qemu(QemuConfig { program: named.unwrap_or(defaults.program.clone()), accel, ..defaults })
    };
    Chosen { driver, label, reason }
}

/// What keeps Firecracker from running guests here, and what to do about it.
async fn obstacle(config: &ServerConfig, facts: &HostFacts, program: &std::path::Path) -> Option<(String, String)> {
    let found = |text: &str, fix: &str| Some((text.to_owned(), fix.to_owned()));
    if let Err(error) = firecracker::check(program).await {
        let fix = format!(
            "install release {} (sudo space setup --firecracker), or name another program with vmm.program",
            firecracker::PINNED
        );
        return Some((error.to_string(), fix));
    }
    match facts.kvm {
        KvmVerdict::Absent => return found("it needs KVM", "set vmm.driver to auto"),
        KvmVerdict::NoPermission => return found("it needs KVM", "run as root"),
        _ => {}
    }
    let Ok(kernel) = guest_kernel::open(&config.kernel_dir) else {
        return found("there is no guest kernel", "name one with vmm.kernel");
    };
    if !guest_kernel::is_uncompressed(&kernel.image) {
        return found("it boots uncompressed kernels only", "name a vmlinux with vmm.kernel");
    }
    None
}

pub async fn check(config: &ServerConfig, facts: &HostFacts) -> Finding {
    const NAME: &str = "driver";
    let Chosen { driver, label, reason } =
        choose(config.driver, config.vmm_program.clone(), super::firecracker::place(config), &facts.kvm);
    let text = format!("{label} ({}). {reason}", driver.program().display());
    if let DriverConfig::Firecracker(firecracker) = &driver {
        return match obstacle(config, facts, &firecracker.program).await {
            Some((why, fix)) => Finding::fail(NAME, format!("{text} But {why}"), fix),
            None if facts.kvm.is_usable() => Finding::ok(NAME, text),
            None => {
                let kernel = config.kernel_dir.display();
                Finding::ok(NAME, format!("{text} The guest kernel {kernel} must be made for that."))
            }
        };
    }
    match (config.driver, &facts.kvm) {
        (DriverChoice::QemuKvm, kvm) if !kvm.is_usable() => Finding::fail(NAME, text, "set vmm.driver to auto"),
        (DriverChoice::Auto, KvmVerdict::NoPermission) => {
            Finding::warn(NAME, text, "run the server as root, or add the user to the group kvm")
        }
        _ => Finding::ok(NAME, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firecracker_is_the_one_that_set_up_installed() {
        let folder = tempfile::tempdir().expect("a folder");
        let installed = folder.path().join("firecracker");
        std::fs::copy("/bin/true", &installed).expect("a program");
        let chosen = choose(DriverChoice::Firecracker, None, installed.clone(), &KvmVerdict::Absent);
        assert_eq!(chosen.driver.program(), installed);
    }

    #[test]
    fn what_is_chosen_and_why() {
        let pvm = KvmVerdict::Pvm { evidence: "the module kvm_pvm is loaded".into() };
        let usable = KvmVerdict::Usable { module: "kvm_amd".into() };
        for (asked, kvm, label, words) in [
            (DriverChoice::Auto, &pvm, "qemu-tcg", "PVM"),
            (DriverChoice::Auto, &usable, "qemu-kvm", "kvm_amd"),
            (DriverChoice::Auto, &KvmVerdict::Absent, "qemu-tcg", "no /dev/kvm"),
            (DriverChoice::QemuTcg, &usable, "qemu-tcg", "asked for"),
            (DriverChoice::Firecracker, &pvm, "firecracker", "kvm_pvm"),
        ] {
            let chosen = choose(asked, Some("/vmm".into()), "/installed".into(), kvm);
            assert_eq!((chosen.label, chosen.driver.program()), (label, std::path::Path::new("/vmm")));
            assert!(chosen.reason.contains(words), "{}", chosen.reason);
        }
    }
}
