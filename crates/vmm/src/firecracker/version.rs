//! Which Firecracker is driven, and which saved states it may load.
//!
//! One minor version is pinned: what a release changes in its state file, its seccomp filters or its devices is tried
//! before it is trusted. A state is loaded only by the very version that wrote it.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::VmmError;

/// The release that this driver is tested with. Others of its minor version are taken, unless they are known to be bad.
pub const PINNED: Version = Version { major: 1, minor: 16, patch: 1 };

/// Releases that must not run, and why.
const KNOWN_BAD: &[(Version, &str)] = &[(
    Version { major: 1, minor: 16, patch: 0 },
    "after a restore its vsock device can hang with a request in flight, so the guest is not reachable; fixed in 1.16.1",
)];

const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    /// The first word that is one, as in `Firecracker v1.16.1` or `v10.0.0`. A build with a suffix, as `1.16.1-dev`, is none.
    pub fn find(text: &str) -> Option<Version> {
        text.split_whitespace().find_map(|word| {
            let mut numbers = word.strip_prefix('v')?.split('.').map(|part| part.parse().ok());
            let version = Version { major: numbers.next()??, minor: numbers.next()??, patch: numbers.next()?? };
            numbers.next().is_none().then_some(version)
        })
    }
}

/// Whether this release may be driven; `Err` says why not.
pub(super) fn judge(version: Version) -> Result<(), String> {
    if let Some((_, why)) = KNOWN_BAD.iter().find(|(bad, _)| *bad == version) {
        return Err(format!("it is known to be bad: {why}"));
    }
    if (version.major, version.minor) != (PINNED.major, PINNED.minor) {
        return Err(format!("this driver is tested with {PINNED}; take that release"));
    }
    Ok(())
}

/// The version of the program, if it may be driven.
pub(super) async fn program(program: &Path) -> Result<Version, VmmError> {
    const QUESTION: &str = "--version";
    let mut command = tokio::process::Command::new(program);
    command.arg(QUESTION).env_clear().stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await;
    let output = output.map_err(|_| VmmError::Timeout { what: QUESTION, limit: PATIENCE })?;
    let output = output.map_err(|source| VmmError::File { action: "run", path: program.to_owned(), source })?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().chars().take(500).collect::<String>();
    if !output.status.success() {
        return Err(VmmError::Refused { command: QUESTION, message: said(&output.stderr) });
    }
    let text = said(&output.stdout);
    let message = format!("no version in {text:?}");
    let version = Version::find(&text).ok_or(VmmError::Refused { command: QUESTION, message })?;
    judge(version).map(|()| version).map_err(|why| VmmError::UnfitVersion {
        program: program.to_owned(),
        version: version.to_string(),
        why,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_and_judged() {
        let find = |text: &str| Version::find(text).map(|version| version.to_string());
        assert_eq!(find("Firecracker v1.16.1\n\n").as_deref(), Some("1.16.1"));
        assert_eq!(find("v10.0.0").as_deref(), Some("10.0.0"));
        for text in ["", "Firecracker", "v1.16", "v1.16.1-dev", "v1.2.3.4", "1.16.1"] {
            assert_eq!(find(text), None, "{text}");
        }
        assert_eq!(judge(PINNED), Ok(()));
        assert!(judge(Version { patch: 0, ..PINNED }).unwrap_err().contains("vsock"));
        assert!(judge(Version { minor: 15, ..PINNED }).unwrap_err().contains("1.16.1"));
        assert_eq!(judge(Version { patch: 2, ..PINNED }), Ok(()));
    }
}
