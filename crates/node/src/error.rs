//! Why the node could not do a thing, and what that is for the caller.

use std::io;

use space_hostd::protocol::HostError;
use space_image::ImageError;
use space_proto::link::LinkError;
use space_vmm::{SaveError, VmmError};
use tonic::Status;

/// A text goes into the header of an answer, where it may take three times its length; a longer header is not taken at all. What
/// a guest said may be in it.
const TEXT_MAX_BYTES: usize = 4096;

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("cannot listen on {address}: {source}; is another server running, or is the address not this machine's?")]
    Listen { address: String, source: io::Error },
    #[error("cannot {action}: {source}")]
    Io { action: String, source: io::Error },
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    NotFound(String),
    /// The caller's knowledge is older than the node's.
    #[error("{0}")]
    Stale(String),
    #[error("{0}")]
    InUse(String),
    #[error("{0}")]
    NoCapacity(String),
    #[error("the template cannot be used by this node: {0}; build it again")]
    Incompatible(String),
    /// Of a checkpoint.
    #[error("this node cannot go on from the checkpoint: {0}; a node like the one that took it can")]
    OtherVmm(String),
    #[error("the guest did not come up: {0}")]
    Guest(String),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Vmm(#[from] VmmError),
    #[error(transparent)]
    Save(#[from] SaveError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("the work was cancelled")]
    Cancelled,
}

impl NodeError {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }

    /// A stable word for the API.
    pub(crate) fn code(&self) -> &str {
        match self {
            Self::Invalid(_) => "invalid_request",
            Self::NotFound(_) | Self::Host(HostError::NotFound(_)) => "not_found",
            Self::Stale(_) => "conflict",
            Self::InUse(_) => "in_use",
            Self::NoCapacity(_) | Self::Host(HostError::Full(_)) => "no_capacity",
            Self::Incompatible(_) => "incompatible_template",
            Self::OtherVmm(_) => "incompatible_checkpoint",
            Self::Guest(_) | Self::Link(_) => "guest_failed",
            Self::Image(error) => error.code(),
            Self::Vmm(_) | Self::Save(_) => "vmm_failed",
            Self::Cancelled => "cancelled",
            Self::Listen { .. } | Self::Io { .. } | Self::Host(_) => "internal",
        }
    }

    /// The whole chain in one line; no cause is said twice. At most [`TEXT_MAX_BYTES`].
    pub(crate) fn text(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            let next = error.to_string();
            if !text.contains(&next) {
                text.push_str(": ");
                text.push_str(&next);
            }
            source = error.source();
        }
        text.truncate(text.floor_char_boundary(TEXT_MAX_BYTES));
        text
    }
}

impl From<NodeError> for Status {
    fn from(error: NodeError) -> Self {
        let text = error.text();
        match error.code() {
            "invalid_request" => Self::invalid_argument(text),
            "not_found" => Self::not_found(text),
            "conflict" | "in_use" | "incompatible_template" | "incompatible_checkpoint" => {
                Self::failed_precondition(text)
            }
            "no_capacity" => Self::resource_exhausted(text),
            "cancelled" => Self::cancelled(text),
            _ => Self::internal(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_guest_fits_into_an_answer() {
        let status = Status::from(NodeError::Guest("ü".repeat(50_000)));
        assert!(
            status.message().starts_with("the guest did not come up: ü") && status.message().len() <= TEXT_MAX_BYTES
        );
        let answer = status.into_http::<()>();
        assert!(answer.headers().values().map(|value| value.len()).sum::<usize>() < 16 << 10);
    }
}
