//! Turns a source (Debian packages, a root file system, an OCI image) into a guest disk and the
//! settings that came with it.
//!
//! ```text
//! Source ──▶ private root directory ──mke2fs -d──▶ disk.img (ext4, sparse) + ImageConfig
//! ```
//!
//! Invariants
//! * Nothing here boots, mounts or attaches anything: the result is a file.
//! * Every byte of a source is hostile. Entries are written below the root directory and nowhere
//!   else, whatever links the image contains; every size, count and time has a limit ([`Limits`]).
//! * Everything is written inside the work directory and to the one output path, which appears by
//!   rename. After an error, a cancel or a crash, the caller removes the work directory and is done.
//! * All functions block. Call [`build`] from a blocking thread.

pub mod build;
pub mod config;
pub mod debian;
pub mod decompress;
pub mod digest;
pub mod disk;
pub mod docker_archive;
pub mod error;
pub mod extract;
pub mod oci;
pub mod progress;
pub mod reference;
pub mod registry;
pub mod remote;
pub mod rootfs;
pub mod source;
pub mod tarball;
pub mod token;
pub mod tool;
pub mod users;

mod apt_sources;

pub use build::{BuildRequest, Built, build};
pub use config::ImageConfig;
pub use disk::{DEFAULT_DISK_BYTES, DiskOptions};
pub use error::{ImageError, Result};
pub use extract::Limits;
pub use progress::{NoProgress, Progress};
pub use reference::RegistryReference;
pub use registry::RegistryOptions;
pub use source::Source;
pub use users::{ResolvedUser, resolve_user};
