//! Firecracker: the driver for hosts whose KVM runs guests.
//!
//! Guest memory is `memory.img`, mapped privately: clones of one template share its pages, and what a guest writes is in
//! its VMM only, until a save merges what changed into a new `memory.img` (see `saved`). All paths that a device state
//! holds are relative to the VM's folder in its jail and the same for every VM, so a state opens nothing but the files beside
//! it.
//!
//! The guest's channel is a vsock port of `space-daemon`. Connections do not survive a save or a restore, the listening
//! socket does: both ends begin anew. Firecracker ends when the guest reboots or its kernel panics; a guest that powers
//! off without a way to say so only stands still.

pub mod api;
mod saved;
mod start;
mod version;
mod vm;

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use space_hostd::host::Host;
use space_hostd::jail::Contents;
use space_hostd::seccomp::Profile;
use space_hostd::service::Program;
use tokio::sync::OnceCell;

pub use api::{RateLimiter, TokenBucket};
pub use version::{PINNED, Version};

use crate::{AfterRestore, DEFAULT_PATIENCE, Driver, ProcessIdentity, Vm, VmDir, VmSpec, VmmError};

/// The driver's name.
pub const NAME: &str = "firecracker";
/// Where the program is looked for, in this order.
pub const PROGRAM_PLACES: [&str; 3] =
    ["/opt/firecracker/firecracker", "/usr/local/bin/firecracker", "/usr/bin/firecracker"];
/// Raise it with any change of devices: saved states of another layout cannot be loaded.
const LAYOUT: u32 = 1;
/// Where `space-daemon` listens, see its `vsock`.
const AGENT_PORT: u32 = 5252;

// What Firecracker opens, relative to its working folder, which is the VM's.
const API_SOCKET: &str = "run/api.sock";
const VSOCK_SOCKET: &str = "run/vsock.sock";
const CONSOLE_PIPE: &str = "run/console";

/// How devices are attached. A saved state keeps what it was made with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    #[default]
    Mmio,
    /// For kernels with PCI and MSI-X.
    Pci,
}

/// What the driver needs to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FirecrackerConfig {
    pub program: PathBuf,
    pub transport: Transport,
    /// Of each VM's disk. Applies to a boot; a saved state keeps its own.
    pub disk_limit: Option<RateLimiter>,
    /// For anything but a snapshot; see [`crate::DEFAULT_PATIENCE`].
    pub patience: Duration,
}

impl FirecrackerConfig {
    pub fn new(program: impl Into<PathBuf>) -> Self {
        FirecrackerConfig {
            program: program.into(),
            transport: Transport::default(),
            disk_limit: None,
            patience: DEFAULT_PATIENCE,
        }
    }

    /// What the root process is told: Firecracker's jail, with the guest's kernel and first file system for a boot. Its sockets
    /// it makes itself.
    pub fn host_program(&self, kernel: PathBuf, initramfs: PathBuf) -> Program {
        // A build for the distribution's C library needs that; the release is static.
        let files = vec![PathBuf::from("/etc/ld.so.cache")];
        let contents = Contents { program: self.program.clone(), files, kvm: true };
        Program { contents, profile: Profile::UnixSockets, boot: Some((kernel, initramfs)) }
    }
}

/// The program, if it is in one of the usual places.
pub fn find_program() -> Option<PathBuf> {
    PROGRAM_PLACES.iter().map(PathBuf::from).find(|path| space_hostd::process::is_program(path))
}

/// The driver.
#[derive(Debug)]
pub struct Firecracker {
    config: FirecrackerConfig,
    host: Host,
    version: OnceCell<Version>,
}

impl Firecracker {
    /// `host` was started with this driver's [`FirecrackerConfig::host_program`] under the name [`NAME`].
    pub fn new(config: FirecrackerConfig, host: Host) -> Self {
        Firecracker { config, host, version: OnceCell::new() }
    }

    /// Asks the program once; refuses one that must not be used.
    async fn fit(&self) -> Result<Version, VmmError> {
        let ask = || check(&self.config.program);
        self.version.get_or_try_init(ask).await.copied()
    }
}

/// The version of a program, if it may be driven.
///
/// # Errors
/// When it is missing, says nothing that makes sense, or is a version that must not be used.
pub async fn check(program: &Path) -> Result<Version, VmmError> {
    if !space_hostd::process::is_program(program) {
        return Err(VmmError::MissingProgram(program.to_owned()));
    }
    version::program(program).await
}

#[async_trait]
impl Driver for Firecracker {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn version(&self) -> Result<String, VmmError> {
        Ok(self.fit().await?.to_string())
    }

    async fn compatibility(&self) -> Result<String, VmmError> {
        let version = self.fit().await?;
        let transport = match self.config.transport {
            Transport::Mmio => "mmio",
            Transport::Pci => "pci",
        };
        let cpu = crate::own_cpu()?;
        Ok(format!("firecracker={version} transport={transport} layout={LAYOUT} {cpu}"))
    }

    async fn boot(&self, spec: &VmSpec, dir: &VmDir) -> Result<Box<dyn Vm>, VmmError> {
        self.fit().await?;
        Ok(Box::new(start::boot((&self.config, &self.host), spec, dir).await?))
    }

    async fn restore(&self, spec: &VmSpec, dir: &VmDir, then: AfterRestore) -> Result<Box<dyn Vm>, VmmError> {
        self.fit().await?;
        Ok(Box::new(start::restore((&self.config, &self.host), spec, dir, then).await?))
    }

    async fn adopt(&self, dir: &VmDir, identity: ProcessIdentity) -> Result<Box<dyn Vm>, VmmError> {
        Ok(Box::new(start::adopt((&self.config, &self.host), dir, identity).await?))
    }
}
