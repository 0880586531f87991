//! Which driver a node has, as plain data: the root process gets its program, the node makes the driver.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use space_hostd::host::Host;
use space_hostd::service::Program;

use crate::Driver;
use crate::firecracker::{self, Firecracker, FirecrackerConfig};
use crate::qemu::{self, Qemu, QemuConfig};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverConfig {
    Qemu(QemuConfig),
    Firecracker(FirecrackerConfig),
}

impl DriverConfig {
    pub fn name(&self) -> &'static str {
        match self {
            DriverConfig::Qemu(_) => qemu::NAME,
            DriverConfig::Firecracker(_) => firecracker::NAME,
        }
    }

    pub fn program(&self) -> &Path {
        match self {
            DriverConfig::Qemu(config) => &config.program,
            DriverConfig::Firecracker(config) => &config.program,
        }
    }

    /// What the root process is told under [`DriverConfig::name`].
    pub fn host_program(&self, kernel: PathBuf, initramfs: PathBuf) -> Program {
        match self {
            DriverConfig::Qemu(config) => config.host_program(kernel, initramfs),
            DriverConfig::Firecracker(config) => config.host_program(kernel, initramfs),
        }
    }

    pub fn driver(self, host: Host) -> Arc<dyn Driver> {
        match self {
            DriverConfig::Qemu(config) => Arc::new(Qemu::new(config, host)),
            DriverConfig::Firecracker(config) => Arc::new(Firecracker::new(config, host)),
        }
    }
}
