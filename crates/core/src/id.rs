//! Typed ids. An id is a prefix that says what it names and 26 lower-case base-32 characters of a UUIDv7, so ids sort by
//! their time of creation, are safe in file names, host names and URLs, and one kind cannot be passed for another.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text is not an id of the asked kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a {kind} id: expected `{prefix}` and 26 characters of 0-9 a-z, got {got:?}")]
pub struct InvalidId {
    kind: &'static str,
    prefix: &'static str,
    got: String,
}

const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const BODY: usize = 26;

fn encode(value: u128) -> String {
    (0..BODY).rev().map(|i| ALPHABET[((value >> (5 * i)) & 31) as usize] as char).collect()
}

fn valid_body(body: &str) -> bool {
    body.len() == BODY && body.bytes().all(|b| ALPHABET.contains(&b))
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The text every id of this kind starts with.
            pub const PREFIX: &'static str = $prefix;

            /// A new id, unique without coordination.
            #[allow(clippy::new_without_default, reason = "a default id would read as a constant")]
            pub fn new() -> Self {
                Self(format!("{}{}", $prefix, encode(uuid::Uuid::now_v7().as_u128())))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                match text.strip_prefix($prefix) {
                    Some(body) if valid_body(body) => Ok(Self(text.to_owned())),
                    _ => Err(InvalidId {
                        kind: $kind,
                        prefix: $prefix,
                        got: text.chars().take(64).collect(),
                    }),
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(
    /// A sandbox. Never changes, never reused.
    SandboxId, "sbx-", "sandbox"
);
id!(
    /// The memory, disk and device state of a sandbox at one instant.
    CheckpointId, "cp-", "checkpoint"
);
id!(
    /// A command session, and at the same time its process in the guest.
    CommandId, "cmd-", "command"
);
id!(
    /// The record of one asynchronous request.
    OperationId, "op-", "operation"
);
id!(
    /// An API key's public name; not the secret.
    KeyId, "key-", "key"
);

/// Counts the lives of a sandbox: 1, 2, 3 … A run is from a boot or restore until its VM is gone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunNumber(pub u32);

impl fmt::Display for RunNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The fencing number of a row: only the writer that knows the current one may write, and each write makes it larger.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What every call to a node names.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct RunRef {
    pub sandbox: SandboxId,
    pub run: RunNumber,
    pub generation: Generation,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_a_round_trip_and_sort_by_time() {
        let a = SandboxId::new();
        std::thread::sleep(std::time::Duration::from_millis(2));
        let b = SandboxId::new();
        assert!(a < b);
        assert_eq!(a.as_str().parse::<SandboxId>().expect("own id"), a);
    }

    proptest::proptest! {
        #[test]
        fn no_other_text_is_an_id(text in ".*") {
            proptest::prop_assume!(!text.starts_with("sbx-"));
            proptest::prop_assert!(text.parse::<SandboxId>().is_err());
        }

        #[test]
        fn path_tricks_are_not_ids(body in "[./\\\\\\x00A-Z]{1,40}") {
            let id = format!("sbx-{body}").parse::<SandboxId>();
            proptest::prop_assert!(id.is_err());
        }
    }
}
