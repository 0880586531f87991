//! How a long build tells what it does and learns that it should stop. Must never block for long:
//! the methods are called from the middle of copy loops.

use crate::error::{ImageError, Result};

/// Receives progress. All methods may be called from any thread, often.
pub trait Progress: Send + Sync {
    /// A new step has begun; `text` is one short line for a person.
    fn step(&self, text: &str);

    /// Bytes done within the step; `total` where it is known.
    fn bytes(&self, done: u64, total: Option<u64>);

    /// Whether the build should stop. Asked at least every 100 ms or every 64 KiB.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Reports nothing, never cancels.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn step(&self, _text: &str) {}
    fn bytes(&self, _done: u64, _total: Option<u64>) {}
}

/// Ends the build when the caller wants that.
pub(crate) fn check(progress: &dyn Progress) -> Result<()> {
    if progress.cancelled() {
        return Err(ImageError::Cancelled);
    }
    Ok(())
}
