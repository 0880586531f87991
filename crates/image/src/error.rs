//! The one error type of this crate. A variant exists where the caller can act differently on it;
//! each message says what happened, why, and what to do next. Must never carry credentials.

use std::fmt::Display;
use std::io;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, ImageError>;

/// Why a disk could not be built.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The source is not written as the grammar in [`crate::source`] wants it.
    #[error("cannot understand the source `{given}`: {why}")]
    BadSource { given: String, why: String },

    /// A file operation of the host failed.
    #[error("{what}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },

    /// A program of the host that is needed is not installed.
    #[error("{tool} is missing; install it with `apt-get install {package}`")]
    ToolMissing { tool: String, package: String },

    /// A program of the host ended with an error. `stderr` is the end of what it said.
    #[error("{tool} failed ({status}): {stderr}")]
    ToolFailed { tool: String, status: String, stderr: String },

    /// A program of the host took too long and was killed.
    #[error("{tool} did not finish within {seconds} s and was stopped")]
    ToolTimeout { tool: String, seconds: u64 },

    /// The caller asked to stop.
    #[error("the build was cancelled")]
    Cancelled,

    /// An image wants to write outside its root, or uses a name no file system takes.
    #[error("the image is refused: unsafe path `{path}`: {why}")]
    UnsafePath { path: String, why: &'static str },

    /// An image is beyond a limit.
    #[error("the image is refused: {what} exceeds the limit of {limit}")]
    LimitExceeded { what: &'static str, limit: u64 },

    /// The content is larger than the disk it should go to.
    #[error(
        "the content needs a disk of about {needed_bytes} bytes, but {given_bytes} were given; \
         ask for a larger disk"
    )]
    DoesNotFit { needed_bytes: u64, given_bytes: u64 },

    /// A size of a disk that cannot be built.
    #[error("a disk of {given_bytes} bytes cannot be built: {why}")]
    BadDiskSize { given_bytes: u64, why: &'static str },

    /// A damaged or unsupported tar stream.
    #[error("the archive is damaged or not supported: {why}")]
    BadArchive { why: String },

    /// An image whose manifest, configuration or layers do not make sense.
    #[error("the image is not usable: {why}")]
    BadImage { why: String },

    /// Content that is not what its digest says.
    #[error("{what} is damaged or was tampered with: expected {expected}, got {actual}")]
    DigestMismatch { what: String, expected: String, actual: String },

    /// No image for this platform in a multi-platform image.
    #[error("the image has no {wanted} variant; it has: {found}")]
    NoPlatform { wanted: String, found: String },

    /// A registry refused, answered nonsense or could not be reached.
    #[error("registry {registry}: {why}")]
    Registry {
        registry: String,
        /// HTTP status, where there was an answer.
        status: Option<u16>,
        why: String,
    },

    /// The image names a user its own /etc/passwd does not have.
    #[error("the image has no user `{user}`; use a numeric uid[:gid] or another user")]
    UnknownUser { user: String },

    /// The host's package sources do not have the suite.
    #[error(
        "the host's package sources have no Debian suite `{suite}`; name a mirror for it or use \
         a suite the host has"
    )]
    NoAptSource { suite: String },

    /// What a builder in a process of its own reported: a word of [`ImageError::code`], and the text of its error.
    #[error("{text}")]
    Builder { code: String, text: String },
}

impl ImageError {
    /// A stable word for the API.
    pub fn code(&self) -> &str {
        match self {
            Self::BadSource { .. } | Self::BadDiskSize { .. } => "invalid_request",
            Self::DoesNotFit { .. } => "too_large",
            Self::Cancelled => "cancelled",
            Self::Builder { code, .. } => code,
            _ => "image_failed",
        }
    }

    pub(crate) fn archive(why: impl Display) -> Self {
        Self::BadArchive { why: why.to_string() }
    }

    pub(crate) fn image(why: impl Display) -> Self {
        Self::BadImage { why: why.to_string() }
    }
}

/// Names the act and the object of a failed host operation.
pub(crate) trait IoContext<T> {
    fn ctx(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<io::Error>> IoContext<T> for std::result::Result<T, E> {
    fn ctx(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| ImageError::Io { what: format!("cannot {}", what()), source: e.into() })
    }
}

/// A name out of an image, made fit for a message: no control characters, bounded.
pub(crate) fn show(name: &[u8]) -> String {
    const MAX_SHOWN: usize = 200;
    let cut = &name[..name.len().min(MAX_SHOWN)];
    let mut out: String = String::from_utf8_lossy(cut).chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if name.len() > MAX_SHOWN {
        out.push('…');
    }
    out
}
