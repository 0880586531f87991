//! The guest's console: the last bytes are in a ring in QEMU, and go from there to a file that never outgrows its cap.
//!
//! A guest can write without end; nobody needs to read for that to stay harmless.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};

use base64::Engine;
use serde_json::json;

use super::args::CONSOLE_BYTES;
use super::qmp::Qmp;
use crate::dir::CONSOLE_LOG;
use crate::{VmDir, VmmError};

/// The most that `console.log` holds.
pub const CONSOLE_LOG_BYTES: u64 = 256 << 10;
const NEW_LOG: &str = "console.log.new";

pub(super) async fn drain(qmp: &Qmp, dir: &VmDir) -> Result<(), VmmError> {
    let arguments = json!({"device": "console", "size": CONSOLE_BYTES, "format": "base64"});
    let text = qmp.call("ringbuf-read", arguments).await?;
    let decoded = base64::engine::general_purpose::STANDARD.decode(text.as_str().unwrap_or_default());
    let mut bytes = decoded.unwrap_or_default();
    bytes.truncate(CONSOLE_BYTES);
    if bytes.is_empty() {
        return Ok(());
    }
    append(dir, &bytes).map_err(dir.error("write", CONSOLE_LOG))
}

fn append(dir: &VmDir, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let open = |name: &str, options: &mut OpenOptions| {
        options.mode(0o600).custom_flags(nix::libc::O_NOFOLLOW).open(dir.file(name))
    };
    let mut log = open(CONSOLE_LOG, OpenOptions::new().read(true).append(true).create(true))?;
    let length = log.metadata()?.len();
    if length + bytes.len() as u64 <= CONSOLE_LOG_BYTES {
        return log.write_all(bytes);
    }
    // Keep the newer half of what was there, and let nobody see anything in between.
    log.seek(SeekFrom::Start(length.saturating_sub(CONSOLE_LOG_BYTES / 2)))?;
    let mut kept = Vec::new();
    log.take(CONSOLE_LOG_BYTES / 2).read_to_end(&mut kept)?;
    let mut new = open(NEW_LOG, OpenOptions::new().write(true).create(true).truncate(true))?;
    new.write_all(&kept)?;
    new.write_all(bytes)?;
    std::fs::rename(dir.file(NEW_LOG), dir.file(CONSOLE_LOG))
}
