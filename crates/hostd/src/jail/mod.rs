//! The jail of a VMM: what a process that a guest may have taken over can see and do on this host.
//!
//! Its root is a read-only folder with the VMM's program, the libraries and firmware it needs and nothing else ([`root`]);
//! its own subvolume is at [`FOLDER`], without devices and programs; its devices are `null`, `urandom` and, for hardware
//! virtualization, `kvm`. It has user, group, cgroup and mount, process, IPC, host name and network namespaces of its own,
//! no capability, no way to new privileges, no core dumps and two system call filters: its own and ours
//! ([`crate::seccomp`]). There is no `/proc` and no `/sys` in it.
//!
//! A jail must never hold a path, a descriptor or a mount that belongs to another sandbox: whatever arguments the VMM is
//! given, it reaches only what is here.

pub mod elf;
pub mod mounts;
pub mod root;

use std::path::PathBuf;

pub use root::{Contents, JailRoot};

/// Where a VMM finds its own files. Also its working folder.
pub const FOLDER: &str = "/vm";
/// Where a VMM that boots finds the guest's kernel.
pub const KERNEL: &str = "/boot/kernel";
/// Where a VMM that boots finds the guest's first file system.
pub const INITRAMFS: &str = "/boot/initramfs";

/// The jail of one process.
#[derive(Clone, Debug)]
pub struct Jail {
    pub root: JailRoot,
    /// The only writable place: seen at [`FOLDER`].
    pub folder: PathBuf,
    /// For a boot: the guest's kernel and first file system, seen at [`KERNEL`] and [`INITRAMFS`].
    pub boot: Option<(PathBuf, PathBuf)>,
    /// Never share a core's threads with another process: see [`crate::process::core_scheduling`].
    pub own_core: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error("cannot {action} {path}: {source}")]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{path} is not a program for this machine: {why}")]
    BadProgram { path: PathBuf, why: String },
}

impl JailError {
    pub(crate) fn file(
        action: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(std::io::Error) -> JailError + use<> {
        let path = path.to_owned();
        move |source| JailError::File { action, path, source }
    }
}
