//! The builder of root file systems: a process that needs some of root's rights, in a workshop of its own.
//!
//! It unpacks images and packages, so it changes owners and makes device nodes; it does so in a root that holds the host's
//! `/usr` and `/etc` read-only (without password hashes), its work folder, and the one subvolume that the disk goes to. Device
//! nodes it makes cannot be opened. Mounting is for builds from packages only, whose tool binds `/proc` into the new system.
//! What is to be built the node tells it over a stream that nothing here reads.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::jail::mounts::{self, Kind};
use crate::jail::{JailError, root};
use crate::pool::Area;
use crate::process::{self, Output, ProcessIdentity, Rights, Rlimits, SpawnSpec};
use crate::protocol::{Build, HostError};
use crate::seccomp::Profile;
use crate::service::Service;
use crate::spawn::{Cage, Inner, c_string};

/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SYS_CHROOT, MKNOD, SETFCAP.
const UNPACK: &[u8] = &[0, 1, 3, 4, 5, 6, 7, 18, 27, 31];
/// And SYS_ADMIN, to mount.
const PACKAGES: &[u8] = &[0, 1, 3, 4, 5, 6, 7, 18, 21, 27, 31];

/// Where the builder finds itself, its work folder, the disk's folder and a local source.
pub const PROGRAM: &str = "/builder";
pub const WORK: &str = "/work";
pub const OUT: &str = "/out";
pub const SOURCE_FILE: &str = "/source/file";
pub const SOURCE_FOLDER: &str = "/source/folder";

const FOLDERS: [&str; 13] =
    ["usr", "etc", "proc", "sys", "dev", "tmp", "work", "out", "source", "source/folder", "run", "root", "var"];
const DEVICES: [(&str, (u64, u64)); 6] =
    [("null", (1, 3)), ("zero", (1, 5)), ("full", (1, 7)), ("random", (1, 8)), ("urandom", (1, 9)), ("tty", (5, 0))];
/// Of the host's settings what is nobody's business.
const HIDDEN: [&str; 4] = ["etc/shadow", "etc/gshadow", "etc/shadow-", "etc/gshadow-"];

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HostError {
    let error = JailError::file(action, path);
    move |source| error(source).into()
}

/// The root of the workshop: mount points, devices, and the links that merge `/bin` and the like into `/usr`.
fn workshop(parent: &Path) -> Result<PathBuf, HostError> {
    let path = parent.join("workshop");
    for folder in FOLDERS {
        root::make_folder(&path.join(folder))?;
    }
    for file in ["builder", "source/file", "empty"] {
        let file = path.join(file);
        if !file.exists() {
            File::create(&file).map_err(failed("create", &file))?;
        }
    }
    for (name, number) in DEVICES {
        let device = path.join("dev").join(name);
        if !device.exists() {
            root::make_device(&device, number)?;
        }
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        let (host, inside) = (Path::new("/").join(name), path.join(name));
        match fs::read_link(&host) {
            Ok(target) if inside.symlink_metadata().is_err() => {
                symlink(target, &inside).map_err(failed("create", &inside))?;
            }
            Err(_) if host.is_dir() => root::make_folder(&inside)?,
            _ => {}
        }
    }
    Ok(path)
}

fn inner(path: &Path, kind: Kind, target: &str) -> io::Result<Inner> {
    Ok((mounts::detached(path, kind)?, c_string(Path::new(target))?))
}

/// Everything the builder sees.
fn cage(
    root: &Path,
    program: &Path,
    work: &Path,
    out: &Path,
    source: Option<&OwnedFd>,
    network: bool,
) -> io::Result<Cage> {
    let mut all = vec![
        inner(&root.join("dev"), Kind::Devices, "dev")?,
        inner(Path::new("/usr"), Kind::Root, "usr")?,
        inner(Path::new("/etc"), Kind::ReadOnly, "etc")?,
        inner(program, Kind::Root, "builder")?,
        inner(work, Kind::Work, "work")?,
        inner(out, Kind::Folder, "out")?,
    ];
    for name in ["bin", "sbin", "lib", "lib64"] {
        let host = Path::new("/").join(name);
        if host.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
            all.push(inner(&host, Kind::Root, name)?);
        }
    }
    for hidden in HIDDEN.iter().filter(|name| Path::new("/").join(name).is_file()) {
        all.push(inner(&root.join("empty"), Kind::ReadOnly, hidden)?);
    }
    // Name servers: in a container the file is a mount of its own, elsewhere often a link into /run.
    for name in ["etc/resolv.conf", "etc/hosts"] {
        let host = Path::new("/").join(name);
        match host.symlink_metadata() {
            Ok(meta) if meta.is_file() && network => all.push(inner(&host, Kind::ReadOnly, name)?),
            Ok(meta) if meta.is_symlink() && network => {
                if let Some(folder) = host.canonicalize().ok().as_deref().and_then(Path::parent)
                    && let Ok(place) = folder.strip_prefix("/run")
                    && let Some(first) = place.iter().next()
                {
                    let inside = Path::new("run").join(place);
                    root::make_folder(&root.join(&inside)).map_err(io::Error::other)?;
                    debug_assert!(!first.is_empty());
                    all.push(inner(folder, Kind::ReadOnly, &inside.to_string_lossy())?);
                }
            }
            _ => {}
        }
    }
    if let Some(source) = source {
        let folder = File::from(source.try_clone()?).metadata()?.is_dir();
        let target = if folder { SOURCE_FOLDER } else { SOURCE_FILE };
        all.push((mounts::detached_fd(source, Kind::Source)?, c_string(Path::new(&target[1..]))?));
    }
    Cage::workshop(root, all, network)
}

impl Service {
    pub(crate) fn build(&self, build: &Build, fds: Vec<OwnedFd>) -> Result<(ProcessIdentity, OwnedFd), HostError> {
        let (program, args) =
            self.config.builder.clone().ok_or_else(|| HostError::Refused("there is no builder".into()))?;
        let out = self.pool.subvolume(Area::Tmp, &build.name)?;
        let work = self.config.builds.join(&build.name);
        root::make_folder(&self.config.builds)?;
        // What is in it keeps owners and set-uid bits of the image.
        let private = Permissions::from_mode(0o700);
        fs::set_permissions(&self.config.builds, private.clone()).map_err(failed("close up", &self.config.builds))?;
        fs::create_dir(&work).map_err(failed("create", &work))?;
        fs::set_permissions(&work, private).map_err(failed("close up", &work))?;
        let mut fds = fds.into_iter();
        let stream = fds.next().ok_or_else(|| HostError::Refused("a build needs a stream".into()))?;
        let program = program.canonicalize().map_err(failed("find", &program))?;
        let cage = workshop(&self.config.jails).and_then(|root| {
            cage(&root, &program, &work, &out, fds.next().as_ref(), build.network).map_err(failed("mount for", &work))
        })?;
        let spec = SpawnSpec {
            program: PathBuf::from(PROGRAM),
            args,
            cwd: PathBuf::from("/"),
            uid: 0,
            gid: 0,
            cgroup: None,
            output: Output::Null,
            limits: Rlimits::default(),
            inherited: vec![stream],
            env: self.config.build_env.clone(),
            rights: Rights::Root(if build.packages { PACKAGES } else { UNPACK }),
            profile: Some(Profile::Root),
            jail: None,
        };
        let (identity, pidfd) = process::start_in(spec, Some(cage))?;
        self.keep(identity, &pidfd)?;
        Ok((identity, pidfd))
    }

    pub(crate) fn end_build(&self, name: Option<&str>) -> Result<(), HostError> {
        let folder = match name {
            Some(name) => {
                // The same rule as for subvolumes: one plain name.
                self.pool.path(Area::Tmp, name)?;
                self.config.builds.join(name)
            }
            None => self.config.builds.clone(),
        };
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &folder)(error)),
            _ => Ok(()),
        }
    }
}
