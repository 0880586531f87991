//! `console.log`: the end of what a guest wrote to its console, in a file that never outgrows its cap.
//!
//! A guest can write without end; nobody needs to read for that to stay harmless.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};

use crate::dir::CONSOLE_LOG;
use crate::{VmDir, VmmError};

/// The most that `console.log` holds.
pub const CONSOLE_LOG_BYTES: u64 = 256 << 10;
const NEW_LOG: &str = "console.log.new";

/// Adds to the log; of the oldest bytes, what is too much goes.
pub(crate) fn append(dir: &VmDir, bytes: &[u8]) -> Result<(), VmmError> {
    if bytes.is_empty() {
        return Ok(());
    }
    write(dir, bytes).map_err(dir.error("write", CONSOLE_LOG))
}

fn write(dir: &VmDir, bytes: &[u8]) -> std::io::Result<()> {
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
