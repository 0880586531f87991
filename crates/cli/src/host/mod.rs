//! What set-up makes of this machine and what `doctor` looks at: one file per thing, each with a look that changes nothing and,
//! where there is something to make, a step that can be repeated after it was cut short anywhere.

mod atrest;
pub mod checks;
pub mod firecracker;
pub mod initramfs;
pub mod kernel;
pub mod leftovers;
pub mod packages;
pub mod pool;
pub mod seed;
pub mod vmm;

use std::io;
use std::path::Path;

use serde::Serialize;

/// Writes a small file under a passing name first, so that it is never half of one.
pub fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    use std::io::Write as _;
    let new = path.with_extension("new");
    let mut file = std::fs::File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}

/// SHA-256 of a file, hex.
pub fn sha256(path: &Path) -> io::Result<String> {
    use sha2::Digest as _;
    let mut hash = sha2::Sha256::new();
    io::copy(&mut std::fs::File::open(path)?, &mut hash)?;
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Ok,
    Warn,
    Fail,
}

/// One finding: what, how it stands, what to do.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub name: &'static str,
    pub level: Level,
    pub detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Finding {
    pub fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, level: Level::Ok, detail: detail.into(), fix: None }
    }

    pub fn warn(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, level: Level::Warn, detail: detail.into(), fix: Some(fix.into()) }
    }

    pub fn fail(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, level: Level::Fail, detail: detail.into(), fix: Some(fix.into()) }
    }
}
