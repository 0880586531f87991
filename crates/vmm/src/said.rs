//! What a VMM says of itself: the end of its standard output and error, for the message when it fails.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use crate::{VmDir, VmmError};

/// How much is kept.
const SAID_BYTES: usize = 4096;

#[derive(Clone, Default)]
pub(crate) struct Said(Arc<Mutex<Vec<u8>>>);

impl Said {
    /// Reads until the other side closes. A pipe, not a file: without a reader a VMM's messages go nowhere and fill nothing.
    pub fn listen(dir: &VmDir) -> Result<(Said, OwnedFd), VmmError> {
        let (write, mut read) = pipe::pipe().map_err(dir.error("make a pipe for", "the VMM"))?;
        let write = write.into_blocking_fd().map_err(dir.error("make a pipe for", "the VMM"))?;
        let said = Said::default();
        let kept = said.clone();
        tokio::spawn(async move {
            let mut buffer = [0; 1024];
            while let Ok(count @ 1..) = read.read(&mut buffer).await {
                let mut text = kept.0.lock().unwrap_or_else(PoisonError::into_inner);
                text.extend_from_slice(&buffer[..count]);
                let surplus = text.len().saturating_sub(SAID_BYTES);
                text.drain(..surplus);
            }
        });
        Ok((said, write))
    }

    /// Everything that came within a moment: last words may still be in the pipe.
    pub async fn last_words(&self) -> String {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        let text = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&text).trim().to_owned()
    }
}
