//! The guest's console: the last bytes are in a ring in QEMU, and go from there to the log.

use base64::Engine;
use serde_json::json;

use super::args::CONSOLE_BYTES;
use super::qmp::Qmp;
use crate::{VmDir, VmmError, console};

pub(super) async fn drain(qmp: &Qmp, dir: &VmDir) -> Result<(), VmmError> {
    let arguments = json!({"device": "console", "size": CONSOLE_BYTES, "format": "base64"});
    let text = qmp.call("ringbuf-read", arguments).await?;
    let decoded = base64::engine::general_purpose::STANDARD.decode(text.as_str().unwrap_or_default());
    let mut bytes = decoded.unwrap_or_default();
    bytes.truncate(CONSOLE_BYTES);
    console::append(dir, &bytes)
}
