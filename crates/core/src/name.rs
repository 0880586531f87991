//! Names that people choose: sandboxes, template tags, metadata keys. What is not accepted here is stored nowhere.

use crate::limits;

/// Why a name was refused; the text says what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    #[error(
        "a name has 1 to {max} characters of a-z 0-9 and -, starts with a letter, does not end with -, and is not an id; got {got:?}",
        max = limits::NAME_MAX_BYTES
    )]
    Sandbox { got: String },
    #[error("a template is NAME[:TAG] or NAME@sha256:DIGEST, with names and tags of a-z 0-9 . _ - (at most {max} characters); got {got:?}", max = limits::NAME_MAX_BYTES)]
    Template { got: String },
    #[error("metadata keys have 1 to {max} characters of A-Z a-z 0-9 . _ - /; got {got:?}", max = limits::METADATA_KEY_MAX_BYTES)]
    MetadataKey { got: String },
}

fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

/// A sandbox's name; it can be told from an id at a glance and is a valid host name label.
pub fn check_sandbox_name(name: &str) -> Result<(), InvalidName> {
    let bytes = name.as_bytes();
    let good = !bytes.is_empty()
        && bytes.len() <= limits::NAME_MAX_BYTES
        && bytes[0].is_ascii_lowercase()
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
        && bytes[bytes.len() - 1] != b'-'
        && !name.starts_with("sbx-");
    if good { Ok(()) } else { Err(InvalidName::Sandbox { got: shorten(name) }) }
}

/// A metadata key.
pub fn check_metadata_key(key: &str) -> Result<(), InvalidName> {
    let good = !key.is_empty()
        && key.len() <= limits::METADATA_KEY_MAX_BYTES
        && key.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b));
    if good { Ok(()) } else { Err(InvalidName::MetadataKey { got: shorten(key) }) }
}

/// How a user names a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateRef {
    /// `name:tag`; the tag is `latest` when none was given.
    Tag { name: String, tag: String },
    /// `name@sha256:<64 hex>` or `sha256:<64 hex>`.
    Digest(String),
}

fn valid_word(word: &str) -> bool {
    !word.is_empty()
        && word.len() <= limits::NAME_MAX_BYTES
        && word.as_bytes()[0].is_ascii_alphanumeric()
        && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b))
}

/// Whether the text is `sha256:` and 64 lower-case hex digits.
pub fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:")
        .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))
}

impl std::str::FromStr for TemplateRef {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let refuse = || InvalidName::Template { got: shorten(text) };
        if is_digest(text) {
            return Ok(Self::Digest(text.to_owned()));
        }
        if let Some((name, digest)) = text.split_once('@') {
            return if valid_word(name) && is_digest(digest) {
                Ok(Self::Digest(digest.to_owned()))
            } else {
                Err(refuse())
            };
        }
        let (name, tag) = text.split_once(':').unwrap_or((text, "latest"));
        if valid_word(name) && valid_word(tag) {
            Ok(Self::Tag { name: name.to_owned(), tag: tag.to_owned() })
        } else {
            Err(refuse())
        }
    }
}

impl std::fmt::Display for TemplateRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tag { name, tag } => write!(f, "{name}:{tag}"),
            Self::Digest(digest) => f.write_str(digest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_references() {
        let hex = "a".repeat(64);
        let tag = |n: &str, t: &str| TemplateRef::Tag { name: n.into(), tag: t.into() };
        assert_eq!("seed".parse(), Ok(tag("seed", "latest")));
        assert_eq!("seed:v1.2".parse(), Ok(tag("seed", "v1.2")));
        assert_eq!(format!("seed@sha256:{hex}").parse(), Ok(TemplateRef::Digest(format!("sha256:{hex}"))));
        for bad in ["", ":", "a:", ":a", "../x", "a/b", "A", "a@sha256:12", "a:b:c", "a\0", ".x"] {
            assert!(bad.parse::<TemplateRef>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sandbox_names() {
        for good in ["a", "my-box-2"] {
            assert!(check_sandbox_name(good).is_ok(), "{good}");
        }
        let long = "a".repeat(64);
        for bad in ["", "-a", "a-", "1a", "A", "a_b", "sbx-x", "é", "a/b", long.as_str()] {
            assert!(check_sandbox_name(bad).is_err(), "{bad:?}");
        }
    }
}
