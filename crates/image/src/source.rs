//! Where a template's files come from, and how a person writes that.
//!
//! ```text
//! source   = "seed" [":" suite]                    our default: Debian, Python 3, pip, git, curl, user `user`
//!          | "debian:" suite ["+" package {"," package}]
//!          | "tar:" path                           root file system, plain or gzip, zstd, xz
//!          | "dir:" path                           root file system
//!          | "oci:" path ["#" tag]                 OCI layout directory
//!          | "oci-archive:" path ["#" tag]         tar of an OCI layout, or of `docker save`
//!          | "docker://" host [":" port] "/" repository [":" tag] ["@sha256:" hex]
//! suite    = "bookworm" and the like: letters, digits, ".", "-"
//! tag      = tag or annotation of the wanted image where a layout has several
//! ```
//! Paths are those of the machine that builds. Parsing does no look-ups.

use std::path::PathBuf;

use crate::debian::DebianSource;
use crate::error::{ImageError, Result};
use crate::reference::RegistryReference;

const MAX_SOURCE_BYTES: usize = 8192;
/// Used where no suite is named.
pub const DEFAULT_SUITE: &str = "bookworm";

/// Where the files come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Debian packages, through mmdebstrap.
    Debian(DebianSource),
    /// A tar of a root file system; plain or compressed with gzip, zstd or xz.
    RootfsTar(PathBuf),
    /// A directory that is a root file system. Read only.
    RootfsDir(PathBuf),
    /// A directory in the OCI image layout; `tag` picks one of several images.
    OciLayoutDir { path: PathBuf, tag: Option<String> },
    /// A tar of such a directory, or what `docker save` writes.
    OciArchive { path: PathBuf, tag: Option<String> },
    /// An image in a registry.
    Registry(RegistryReference),
}

impl Source {
    /// The file or folder of a local source.
    pub fn local(&self) -> Option<&std::path::Path> {
        match self {
            Source::RootfsTar(path)
            | Source::RootfsDir(path)
            | Source::OciLayoutDir { path, .. }
            | Source::OciArchive { path, .. } => Some(path),
            Source::Debian(_) | Source::Registry(_) => None,
        }
    }
}

/// Reads a source as the grammar above writes it.
pub fn parse(given: &str) -> Result<Source> {
    let bad = |why: &str| ImageError::BadSource { given: given.chars().take(200).collect(), why: why.to_owned() };
    if given.len() > MAX_SOURCE_BYTES || given.contains('\0') {
        return Err(bad("too long, or contains a NUL byte"));
    }
    if given == "seed" {
        return Ok(Source::Debian(DebianSource::seed(DEFAULT_SUITE)?));
    }
    if given.starts_with("docker://") {
        return Ok(Source::Registry(RegistryReference::parse(given)?));
    }
    let (kind, rest) = given
        .split_once(':')
        .ok_or_else(|| bad("expected seed, debian:, tar:, dir:, oci:, oci-archive: or docker://"))?;
    if rest.is_empty() {
        return Err(bad("nothing stands after the colon"));
    }
    match kind {
        "seed" => Ok(Source::Debian(DebianSource::seed(rest)?)),
        "debian" => {
            let (suite, packages) = rest.split_once('+').unwrap_or((rest, ""));
            let packages = packages.split(',').filter(|p| !p.is_empty());
            Ok(Source::Debian(DebianSource::new(suite, packages.map(str::to_owned).collect())?))
        }
        "tar" => Ok(Source::RootfsTar(rest.into())),
        "dir" => Ok(Source::RootfsDir(rest.into())),
        "oci" | "oci-archive" => {
            let (path, tag) = match rest.rsplit_once('#') {
                Some((path, tag)) if !path.is_empty() && !tag.is_empty() => (path.into(), Some(tag.to_owned())),
                Some(_) => return Err(bad("a path and a tag must stand around `#`")),
                None => (rest.into(), None),
            };
            Ok(match kind {
                "oci" => Source::OciLayoutDir { path, tag },
                _ => Source::OciArchive { path, tag },
            })
        }
        _ => Err(bad("expected seed, debian:, tar:, dir:, oci:, oci-archive: or docker://")),
    }
}

impl std::str::FromStr for Source {
    type Err = ImageError;

    fn from_str(s: &str) -> Result<Self> {
        parse(s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form() {
        assert!(matches!(parse("seed").unwrap(), Source::Debian(d) if d.suite == "bookworm"));
        assert!(matches!(parse("seed:trixie").unwrap(), Source::Debian(d) if d.suite == "trixie"));
        let Source::Debian(d) = parse("debian:bookworm+git,libstdc++6").unwrap() else { panic!() };
        assert_eq!(d.packages, ["git", "libstdc++6"]);
        assert_eq!(parse("tar:/a/b.tar.zst").unwrap(), Source::RootfsTar("/a/b.tar.zst".into()));
        assert_eq!(parse("dir:.").unwrap(), Source::RootfsDir(".".into()));
        let tag = Some("v1".to_owned());
        assert_eq!(parse("oci:/x#v1").unwrap(), Source::OciLayoutDir { path: "/x".into(), tag });
        assert!(matches!(parse("oci-archive:x.tar").unwrap(), Source::OciArchive { tag: None, .. }));
        assert!(matches!(parse("docker://localhost:5000/a").unwrap(), Source::Registry(_)));
    }

    #[test]
    fn bad_forms() {
        for bad in [
            "",
            "x",
            "tar:",
            "oci:#t",
            "oci:/x#",
            "debian:",
            "debian:Book Worm",
            "debian:bookworm+--evil",
            "debian:../x",
            "http://a/b",
            "docker://",
            "debian:a+b c",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
