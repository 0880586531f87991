//! Root file systems from Debian packages, through mmdebstrap, and what every one of them gets:
//! a user with passwordless sudo, no machine's identity. Users and settings are written as files;
//! nothing of the new system is run except what its packages run themselves.

use std::path::Path;
use std::time::Duration;

use crate::apt_sources;
use crate::error::{ImageError, IoContext, Result};
use crate::progress::Progress;
use crate::rootfs::RootDir;
use crate::tool::Tool;

const MAX_PACKAGES: usize = 500;
const MAX_ETC_FILE_BYTES: u64 = 1 << 20;
const USER: &str = "user";
const UID: u32 = 1000;
const BUILD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Packages of the default template; what they recommend is left out.
pub fn seed_packages() -> Vec<String> {
    ["ca-certificates", "curl", "git", "procps", "python3", "python3-pip", "python3-venv", "sudo"]
        .map(str::to_owned)
        .to_vec()
}

/// A Debian system to put together. Names are checked on construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DebianSource {
    pub suite: String,
    /// Beyond the minimal system.
    pub packages: Vec<String>,
    /// `http(s)://…`, `file:///…` or `copy:///…`; otherwise the host's own package sources.
    pub mirror: Option<String>,
}

impl DebianSource {
    pub fn new(suite: &str, packages: Vec<String>) -> Result<Self> {
        let source = Self { suite: suite.to_owned(), packages, mirror: None };
        source.check()?;
        Ok(source)
    }

    /// The default template.
    pub fn seed(suite: &str) -> Result<Self> {
        Self::new(suite, seed_packages())
    }

    /// Names a mirror instead of the host's sources.
    pub fn with_mirror(mut self, mirror: &str) -> Result<Self> {
        self.mirror = Some(mirror.to_owned());
        self.check()?;
        Ok(self)
    }

    /// Everything here becomes an argument of a program that runs as root.
    fn check(&self) -> Result<()> {
        let bad = |given: &str, why: &str| ImageError::BadSource {
            given: given.chars().take(200).collect(),
            why: why.to_owned(),
        };
        let plain = |text: &str, extra: &[u8]| {
            text.len() <= 128
                && text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
                && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || extra.contains(&b))
        };
        if !plain(&self.suite, b".-") {
            return Err(bad(&self.suite, "a suite is a word like `bookworm`"));
        }
        if self.packages.len() > MAX_PACKAGES {
            return Err(bad(&self.suite, "more than 500 packages"));
        }
        if let Some(p) = self.packages.iter().find(|p| !plain(p, b"+.-:")) {
            return Err(bad(p, "this is not the name of a Debian package"));
        }
        if let Some(mirror) = &self.mirror {
            let known = ["http://", "https://", "file:///", "copy:///"];
            let clean = mirror.bytes().all(|b| b.is_ascii_graphic());
            if !known.iter().any(|k| mirror.starts_with(k)) || !clean || mirror.len() > 1000 {
                return Err(bad(mirror, "a mirror is an http(s), file or copy address"));
            }
        }
        Ok(())
    }
}

/// What stays out of the guest: nobody reads manuals there, and each page costs memory and disk.
const DPKG_OPTIONS: [&str; 9] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/linda/*",
    "path-exclude=/usr/share/groff/*",
];

/// Builds the system in `root` (an empty directory). `work` is for helper files. Needs root.
pub(crate) fn build(source: &DebianSource, work: &Path, root: &Path, progress: &dyn Progress) -> Result<()> {
    source.check()?;
    progress.step(&format!("putting together Debian {} with {} packages", source.suite, source.packages.len()));
    let mut tool = Tool::new("/usr/bin/mmdebstrap", "mmdebstrap")
        .args(["--mode=root", "--format=directory", "--variant=minbase"])
        .arg("--architectures=amd64")
        .arg("--aptopt=Acquire::Languages \"none\"")
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .arg("--aptopt=Acquire::Retries \"3\"")
        .args(DPKG_OPTIONS.map(|o| format!("--dpkgopt={o}")))
        .env("HOME", "/root")
        .env("TMPDIR", work)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .timeout(BUILD_TIMEOUT)
        // It mounts /proc and /sys of the host into the new root.
        .isolated();
    for key in ["http_proxy", "https_proxy", "no_proxy"] {
        if let Some(value) = std::env::var_os(key) {
            tool = tool.env(key, value);
        }
    }
    if !source.packages.is_empty() {
        tool = tool.arg(format!("--include={}", source.packages.join(",")));
    }
    tool = tool.arg(&source.suite).arg(root);
    tool = match &source.mirror {
        Some(mirror) => tool.arg(mirror),
        None => {
            let list = work.join("debian.sources");
            let text = apt_sources::of_host(Path::new("/etc/apt"), &source.suite)?;
            std::fs::write(&list, text).ctx(|| format!("write {}", list.display()))?;
            tool.arg(list)
        }
    };
    tool.run(progress, &|line| {
        if let Some(info) = line.strip_prefix("I: ") {
            progress.step(info);
        }
    })?;
    prepare(&RootDir::open(root)?)
}

/// The user, and nothing of the machine it was built on.
fn prepare(root: &RootDir) -> Result<()> {
    add_user(root)?;
    root.write_file("etc/sudoers.d/user", b"user ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440, (0, 0))?;
    root.write_file("etc/hostname", b"space\n", 0o644, (0, 0))?;
    root.write_file(
        "etc/hosts",
        b"127.0.0.1\tlocalhost\n127.0.1.1\tspace\n::1\tlocalhost ip6-localhost ip6-loopback\n",
        0o644,
        (0, 0),
    )?;
    // Empty: filled at each start, so that no two sandboxes share an identity.
    root.write_file("etc/machine-id", b"", 0o444, (0, 0))?;
    root.write_file("etc/resolv.conf", b"", 0o644, (0, 0))?;
    for leftover in [
        "var/lib/dbus/machine-id",
        "var/log/apt",
        "var/log/dpkg.log",
        "var/log/bootstrap.log",
        "var/cache/apt/archives",
        "var/cache/debconf/templates.dat-old",
    ] {
        root.remove(leftover)?;
    }
    // apt wants these to be there.
    root.make_dir("var/cache/apt/archives/partial", 0o755, (0, 0))?;
    root.make_dir("var/log/apt", 0o755, (0, 0))
}

fn add_user(root: &RootDir) -> Result<()> {
    let passwd = etc(root, "etc/passwd")?;
    let taken = passwd.lines().any(|line| {
        let mut f = line.split(':');
        f.next() != Some(USER) && f.nth(1) == Some("1000")
    });
    if taken {
        return Err(ImageError::image("uid 1000 belongs to another user"));
    }
    let lines = [
        ("etc/passwd", format!("{USER}:x:{UID}:{UID}::/home/{USER}:/bin/bash"), 0o644, 0),
        ("etc/group", format!("{USER}:x:{UID}:"), 0o644, 0),
        // No password: neither log-in by password nor an expired account.
        ("etc/shadow", format!("{USER}:*:19000:0:99999:7:::"), 0o640, 42),
        ("etc/gshadow", format!("{USER}:!::"), 0o640, 42),
    ];
    for (file, line, mode, group) in lines {
        let mut text = etc(root, file)?;
        let named = |l: &str| l.split(':').next() == Some(USER);
        if !text.lines().any(named) {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&line);
            text.push('\n');
            root.write_file(file, text.as_bytes(), mode, (0, group))?;
        }
    }
    root.make_dir("home/user", 0o755, (UID, UID))?;
    for name in [".bashrc", ".profile", ".bash_logout"] {
        let skeleton = root.read_file(&format!("etc/skel/{name}"), MAX_ETC_FILE_BYTES)?;
        if let Some(data) = skeleton {
            root.write_file(&format!("home/user/{name}"), &data, 0o644, (UID, UID))?;
        }
    }
    Ok(())
}

fn etc(root: &RootDir, name: &str) -> Result<String> {
    let data = root.read_file(name, MAX_ETC_FILE_BYTES)?.unwrap_or_default();
    String::from_utf8(data).map_err(|_| ImageError::image(format!("{name} is not text")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn names_cannot_become_options() {
        assert!(DebianSource::new("bookworm", vec!["--setup-hook=x".into()]).is_err());
        assert!(DebianSource::new("bookworm", vec!["a,b".into()]).is_err());
        assert!(DebianSource::new("--help", vec![]).is_err());
        let ok = DebianSource::seed("bookworm").unwrap();
        assert!(ok.clone().with_mirror("http://m.test/debian").is_ok());
        assert!(ok.clone().with_mirror("--simulate").is_err());
        assert!(ok.with_mirror("http://m.test/ x").is_err());
    }

    #[test]
    fn user_and_identity_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("etc/skel")).unwrap();
        std::fs::write(dir.path().join("etc/passwd"), "root:x:0:0::/root:/bin/sh").unwrap();
        std::fs::write(dir.path().join("etc/skel/.profile"), "p").unwrap();
        let root = RootDir::open(dir.path()).unwrap();
        prepare(&root).unwrap();
        prepare(&root).unwrap(); // Twice is as good as once.
        let passwd = std::fs::read_to_string(dir.path().join("etc/passwd")).unwrap();
        assert_eq!(passwd.lines().count(), 2, "{passwd}");
        let sudo = std::fs::metadata(dir.path().join("etc/sudoers.d/user")).unwrap();
        assert_eq!(sudo.permissions().mode() & 0o7777, 0o440);
        let home = std::fs::metadata(dir.path().join("home/user/.profile")).unwrap();
        assert_eq!((home.uid(), home.gid()), (1000, 1000));
        let user = crate::users::resolve_in(&root, "user").unwrap();
        assert_eq!((user.uid, user.home.as_str()), (1000, "/home/user"));
        assert_eq!(std::fs::read(dir.path().join("etc/machine-id")).unwrap(), b"");
    }
}
