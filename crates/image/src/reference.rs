//! Names of images in registries. Pure text, no look-ups. The registry must always be written
//! out: there is no default one.

use std::fmt;
use std::net::IpAddr;

use crate::error::{ImageError, Result};

const MAX_REPOSITORY_BYTES: usize = 255;
const MAX_TAG_BYTES: usize = 128;

/// `host[:port]/repository[:tag][@sha256:…]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryReference {
    /// Host and port as they go into the address.
    pub registry: String,
    pub repository: String,
    /// `latest` when neither a tag nor a digest was given.
    pub tag: Option<String>,
    /// `sha256:` and 64 hex digits; wins over the tag.
    pub digest: Option<String>,
}

impl RegistryReference {
    /// Reads a reference, with or without a leading `docker://`.
    pub fn parse(given: &str) -> Result<Self> {
        let bad = |why: &str| ImageError::BadSource { given: given.chars().take(200).collect(), why: why.to_owned() };
        let text = given.strip_prefix("docker://").unwrap_or(given);
        let (registry, rest) =
            text.split_once('/').ok_or_else(|| bad("write the registry too: host[:port]/repository[:tag]"))?;
        if !is_host(registry) {
            return Err(bad("the part before the first `/` must be a registry: a host with a dot or a port, \
                 or `localhost`"));
        }
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (rest, None),
        };
        if digest.is_some_and(|d| !is_sha256(d)) {
            return Err(bad("a digest is `sha256:` and 64 lower-case hex digits"));
        }
        let (repository, tag) = match rest.rsplit_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (rest, None),
        };
        if !is_repository(repository) {
            return Err(bad("a repository is lower-case words with `.`, `_`, `-` between them, separated by `/`"));
        }
        if tag.is_some_and(|t| !is_tag(t)) {
            return Err(bad("a tag is up to 128 letters, digits, `_`, `.`, `-`"));
        }
        let tag = match (tag, digest) {
            (None, None) => Some("latest"),
            (tag, _) => tag,
        };
        Ok(Self {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            tag: tag.map(str::to_owned),
            digest: digest.map(str::to_owned),
        })
    }

    /// What stands after `/manifests/`.
    pub(crate) fn manifest_name(&self) -> &str {
        self.digest.as_deref().or(self.tag.as_deref()).unwrap_or("latest")
    }

    /// Whether the registry is on this machine, where plain HTTP is good enough.
    pub fn is_loopback(&self) -> bool {
        let host = match self.registry.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
            _ => &self.registry,
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl fmt::Display for RegistryReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

fn is_host(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b".-:[]".contains(&b);
    !text.is_empty()
        && text.len() <= 255
        && text.bytes().all(allowed)
        && (text.contains('.') || text.contains(':') || text == "localhost")
        && !text.starts_with(['.', '-', ':'])
        && !text.ends_with(':')
}

fn is_repository(text: &str) -> bool {
    let word = |w: &str| {
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        edge(w.chars().next())
            && edge(w.chars().last())
            && w.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b))
            && !w.contains("..")
    };
    text.len() <= MAX_REPOSITORY_BYTES && text.split('/').all(word)
}

pub(crate) fn is_tag(text: &str) -> bool {
    let mut bytes = text.bytes();
    text.len() <= MAX_TAG_BYTES
        && bytes.next().is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

/// Whether this is `sha256:` and 64 lower-case hex digits. Only then may it become a file name.
pub(crate) fn is_sha256(text: &str) -> bool {
    text.strip_prefix("sha256:")
        .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_references() {
        let r = RegistryReference::parse("docker://localhost:5000/a/b-c:1.0").unwrap();
        assert_eq!((r.registry.as_str(), r.repository.as_str()), ("localhost:5000", "a/b-c"));
        assert_eq!(r.manifest_name(), "1.0");
        assert!(r.is_loopback());
        let r = RegistryReference::parse("r.example/x").unwrap();
        assert_eq!(r.to_string(), "r.example/x:latest");
        assert!(!r.is_loopback());
        let digest = format!("sha256:{}", "a".repeat(64));
        let r = RegistryReference::parse(&format!("127.0.0.9:1/x:t@{digest}")).unwrap();
        assert_eq!(r.manifest_name(), digest);
        assert!(r.is_loopback());
        assert!(RegistryReference::parse("[::1]:5000/x").unwrap().is_loopback());
        assert!(!RegistryReference::parse("127.0.0.1.example/x").unwrap().is_loopback());
        assert!(!RegistryReference::parse("localhost.example/x").unwrap().is_loopback());
    }

    #[test]
    fn bad_references() {
        for bad in [
            "debian",
            "debian:latest",
            "library/debian",
            "r.example/",
            "r.example/UP",
            "r.example/a//b",
            "r.example/../b",
            "r.example/a:b:c",
            "r.example/a:-x",
            "r.example/a@sha256:12",
            "r.example/a@md5:d41d8cd98f00b204e9800998ecf8427e",
            "user@r.example/a",
            "r.example/a?b",
            "r.example/a b",
            "/x",
            "",
        ] {
            assert!(RegistryReference::parse(bad).is_err(), "{bad}");
        }
    }
}
