//! QEMU: the driver for hosts without usable hardware virtualization, and an alternative where there is.
//!
//! Guest memory is `memory.img`, mapped shared, so it is always current: a saved state is `device.state` alone (about
//! 70 KB) and a restore loads only that. The sockets are made here and inherited by QEMU, so they can be connected and
//! written before it has even begun. QEMU stops, and does not end, when the guest shuts down: the reason and the console
//! are still there for whoever comes back.

mod args;
mod console;
pub mod qmp;
mod start;
mod tsc;
mod vm;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use space_hostd::host::Host;
use space_hostd::jail::Contents;
use space_hostd::seccomp::Profile;
use space_hostd::service::Program;
use tokio::sync::OnceCell;

use crate::{AfterRestore, DEFAULT_PATIENCE, Driver, ProcessIdentity, Vm, VmDir, VmSpec, VmmError};

/// The driver's name.
pub const NAME: &str = "qemu";
/// Default place of the program on Debian.
pub const DEFAULT_PROGRAM: &str = "/usr/bin/qemu-system-x86_64";
const MODULES: [&str; 2] = ["lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so", "lib/qemu/accel-tcg-x86_64.so"];
const FIRMWARE: [&str; 4] = ["bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin", "kvmvapic.bin"];
/// How guest instructions are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Accel {
    /// Software emulation; works everywhere.
    Tcg {
        /// Most memory for translated code, in MiB.
        code_cache_mib: u32,
    },
    Kvm,
}

/// What the driver needs to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QemuConfig {
    pub program: PathBuf,
    pub accel: Accel,
    /// See [`crate::DEFAULT_PATIENCE`].
    pub patience: Duration,
}

impl Default for QemuConfig {
    /// The distribution's QEMU, without hardware virtualization.
    fn default() -> Self {
        QemuConfig {
            program: PathBuf::from(DEFAULT_PROGRAM),
            accel: Accel::Tcg { code_cache_mib: 64 },
            patience: DEFAULT_PATIENCE,
        }
    }
}

impl QemuConfig {
    /// What the root process is told: QEMU's jail, with the guest's kernel and first file system for a boot.
    ///
    /// Beyond its libraries QEMU needs the module of emulation, and the firmware of the one machine we use, from where QEMU
    /// itself looks for it.
    pub fn host_program(&self, kernel: PathBuf, initramfs: PathBuf) -> Program {
        let prefix = self.program.parent().and_then(Path::parent).unwrap_or(Path::new("/usr"));
        let mut files = vec![PathBuf::from("/etc/ld.so.cache"), PathBuf::from("/lib/x86_64-linux-gnu/libgcc_s.so.1")];
        for folder in [Path::new("/usr"), prefix] {
            files.extend(MODULES.map(|name| folder.join(name)));
            for place in ["share/qemu", "share/seabios"] {
                files.extend(FIRMWARE.map(|name| folder.join(place).join(name)));
            }
        }
        let contents = Contents { program: self.program.clone(), files, kvm: self.accel == Accel::Kvm };
        Program { contents, profile: Profile::NoSockets, boot: Some((kernel, initramfs)) }
    }
}

/// The driver.
#[derive(Debug)]
pub struct Qemu {
    config: QemuConfig,
    version: OnceCell<String>,
    /// Only for emulation: with hardware virtualization the guest asks the hypervisor.
    tsc_khz: OnceCell<u64>,
    host: Host,
}

impl Qemu {
    /// `host` was started with this driver's [`QemuConfig::host_program`] under the name [`NAME`].
    pub fn new(config: QemuConfig, host: Host) -> Self {
        Qemu { config, version: OnceCell::new(), tsc_khz: OnceCell::new(), host }
    }

    async fn tsc_khz(&self) -> Option<u64> {
        if self.config.accel == Accel::Kvm {
            return None;
        }
        let measured = || async { tokio::task::spawn_blocking(tsc::measure_khz).await };
        self.tsc_khz.get_or_try_init(measured).await.ok().copied()
    }

    fn check_program(&self) -> Result<(), VmmError> {
        if space_hostd::process::is_program(&self.config.program) {
            return Ok(());
        }
        Err(VmmError::MissingProgram(self.config.program.clone()))
    }
}

async fn ask_version(program: &Path) -> Result<String, VmmError> {
    let missing = |source| VmmError::File { action: "run", path: program.to_owned(), source };
    let mut command = tokio::process::Command::new(program);
    command.arg("--version").env_clear().stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let limit = Duration::from_secs(10);
    let output = tokio::time::timeout(limit, command.output()).await;
    let output = output.map_err(|_| VmmError::Timeout { what: "--version", limit })?.map_err(missing)?;
    let text = String::from_utf8_lossy(&output.stdout);
    // "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)"
    let version = text.split_whitespace().skip_while(|word| *word != "version").nth(1);
    version
        .map(str::to_owned)
        .ok_or(VmmError::Refused { command: "--version", message: text.chars().take(200).collect() })
}

#[async_trait]
impl Driver for Qemu {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn version(&self) -> Result<String, VmmError> {
        self.check_program()?;
        self.version.get_or_try_init(|| ask_version(&self.config.program)).await.cloned()
    }

    async fn compatibility(&self) -> Result<String, VmmError> {
        let version = self.version().await?;
        // Saved states are stable within a minor version only as far as tried: take major.minor.
        let minor = version.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
        let accel = match self.tsc_khz().await {
            // In steps of 10 MHz: finer ones would tell one host from itself.
            Some(khz) => format!("tcg{}", (khz + 5_000) / 10_000 * 10),
            None => format!("kvm {}", crate::own_cpu()?),
        };
        Ok(format!("qemu={minor} accel={accel} layout={}", args::LAYOUT))
    }

    async fn boot(&self, spec: &VmSpec, dir: &VmDir) -> Result<Box<dyn Vm>, VmmError> {
        self.check_program()?;
        Ok(Box::new(start::boot((&self.config, &self.host), spec, dir, self.tsc_khz().await).await?))
    }

    async fn restore(&self, spec: &VmSpec, dir: &VmDir, then: AfterRestore) -> Result<Box<dyn Vm>, VmmError> {
        self.check_program()?;
        Ok(Box::new(start::restore((&self.config, &self.host), spec, dir, then).await?))
    }

    async fn adopt(&self, dir: &VmDir, identity: ProcessIdentity) -> Result<Box<dyn Vm>, VmmError> {
        Ok(Box::new(start::adopt((&self.config, &self.host), dir, identity).await?))
    }
}
