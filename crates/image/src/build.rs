//! From a source to a disk: the one function most callers need.
//!
//! The work directory gets `rootfs/` (the files), `image/` (blobs of an image) and `tmp/`. It is
//! made private first: the files of an image keep their owners, set-uid bits and devices there.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::config::ImageConfig;
use crate::debian;
use crate::decompress;
use crate::disk::{self, DiskOptions};
use crate::docker_archive;
use crate::error::{ImageError, IoContext, Result};
use crate::extract::{Extractor, Limits};
use crate::oci::{Image, Layout};
use crate::progress::{self, Progress};
use crate::registry::{self, RegistryOptions};
use crate::rootfs::RootDir;
use crate::source::Source;
use crate::users::{self, ResolvedUser};

/// What to build and where.
#[derive(Debug, Clone)]
pub struct BuildRequest {
    pub source: Source,
    /// An empty or absent directory on a file system with extended attributes; the caller removes
    /// it afterwards, whatever came out.
    pub work_dir: PathBuf,
    /// Where the disk appears. On a file system with room for the content.
    pub disk_path: PathBuf,
    pub disk: DiskOptions,
    pub registry: RegistryOptions,
}

/// What was built.
#[derive(Debug, Clone)]
pub struct Built {
    pub config: ImageConfig,
    /// `config.user` as the image's own files resolve it.
    pub user: ResolvedUser,
    /// Digest of the image's manifest, where the source was an image with one.
    pub image_digest: Option<String>,
}

/// Builds the disk. Blocks, for minutes with some sources; call it from a blocking thread. Needs
/// root: the files of the guest belong to many users.
pub fn build(request: &BuildRequest, progress: &dyn Progress) -> Result<Built> {
    // Before anything is fetched.
    let disk_bytes = request.disk.rounded_bytes()?;
    let limits = Limits::for_disk(disk_bytes);
    let work_dir = std::path::absolute(&request.work_dir).ctx(|| format!("find {}", request.work_dir.display()))?;
    let work = Work::prepare(&work_dir)?;
    let rootfs = work.dir("rootfs", 0o755)?;
    let mut config = ImageConfig::default();
    let mut image_digest = None;
    let mut tree = rootfs.clone();

    match &request.source {
        Source::Debian(source) => {
            debian::build(source, &work.dir("tmp", 0o1777)?, &rootfs, progress)?;
            config = ImageConfig::for_user();
        }
        Source::RootfsTar(path) => {
            progress.step("unpacking the root file system");
            let file = std::fs::File::open(path).ctx(|| format!("open {}", path.display()))?;
            let stream = decompress::file(file)?;
            Extractor::new(RootDir::open(&rootfs)?, limits, progress).apply(stream, false)?;
        }
        Source::RootfsDir(path) => {
            tree = std::fs::canonicalize(path).ctx(|| format!("open {}", path.display()))?;
        }
        Source::OciLayoutDir { path, tag } => {
            let layout = Layout::open(path)?;
            let image = layout.image(tag.as_deref())?;
            (config, image_digest) = unpack(&layout, image, &rootfs, limits, progress)?;
        }
        Source::OciArchive { path, tag } => {
            let into = work.dir("image", 0o700)?;
            let (layout, image) = docker_archive::open(path, tag.as_deref(), &into, limits, progress)?;
            (config, image_digest) = unpack(&layout, image, &rootfs, limits, progress)?;
        }
        Source::Registry(reference) => {
            let into = work.dir("image", 0o700)?;
            registry::pull(reference, &request.registry, &into, limits.data_bytes, progress)?;
            let layout = Layout::open(&into)?;
            let image = layout.image(None)?;
            (config, image_digest) = unpack(&layout, image, &rootfs, limits, progress)?;
        }
    }
    progress::check(progress)?;
    let user = users::resolve_in(&RootDir::open(&tree)?, &config.user)?;
    disk::make(&tree, &request.disk_path, &request.disk, progress)?;
    Ok(Built { config, user, image_digest })
}

fn unpack(
    layout: &Layout,
    image: Image,
    rootfs: &Path,
    limits: Limits,
    progress: &dyn Progress,
) -> Result<(ImageConfig, Option<String>)> {
    let mut extractor = Extractor::new(RootDir::open(rootfs)?, limits, progress);
    layout.apply(&image, &mut extractor, progress)?;
    Ok((image.config, image.digest))
}

struct Work<'a> {
    path: &'a Path,
}

impl<'a> Work<'a> {
    fn prepare(path: &'a Path) -> Result<Self> {
        std::fs::create_dir_all(path).ctx(|| format!("create {}", path.display()))?;
        set_mode(path, 0o700)?;
        Ok(Self { path })
    }

    /// A new directory: content of a build that was killed must not get into this one.
    fn dir(&self, name: &str, mode: u32) -> Result<PathBuf> {
        let path = self.path.join(name);
        match std::fs::create_dir(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                return Err(ImageError::Io {
                    what: format!("the work directory {} is not empty; remove it first", self.path.display()),
                    source: e,
                });
            }
            Err(e) => return Err(e).ctx(|| format!("create {}", path.display())),
        }
        set_mode(&path, mode)?;
        Ok(path)
    }
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).ctx(|| format!("protect {}", path.display()))
}
