//! What a call of the client can come back with. Callers decide by variant and by `Problem::code`, never by text.

use crate::{OperationError, Problem};

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server understood the request and refused it.
    #[error("{0}")]
    Problem(Problem),
    /// The request was accepted, and its work failed.
    #[error("{} ({})", .0.message, .0.code)]
    Operation(OperationError),
    /// Nobody listens at the address, or the connection could not be made.
    #[error("no server at {url}: start one with `space up`, or set SPACE_URL ({reason})")]
    Connect { url: String, reason: String },
    /// The connection broke, or the answer did not come in time. Whether the request was carried out is not known.
    #[error("the connection to {url} broke: {reason}; the request may or may not have been carried out")]
    Broken { url: String, reason: String },
    /// The answer is not what the API promises: another program, or another version.
    #[error("{url} does not answer as a SPACE server does: {reason}; check the address")]
    Protocol { url: String, reason: String },
    #[error("{given:?} is not the address of a server: {reason}; an address looks like http://127.0.0.1:7070")]
    BadUrl { given: String, reason: String },
    #[error("an API key is printable ASCII; this one has other bytes")]
    BadKey,
    /// The attach connection broke while input was on its way.
    #[error("the connection broke while input was being sent: whether all of it arrived is not known")]
    InputLost,
    /// The operation did not end within the time the caller gave.
    #[error("the operation {id} has not ended; ask again with GET /v1/operations/{id}")]
    StillRunning { id: String },
}

impl ClientError {
    /// Whether the server answered with this code.
    pub fn is(&self, code: crate::problem::Code) -> bool {
        match self {
            Self::Problem(problem) => problem.is(code),
            Self::Operation(error) => error.code == code.as_str(),
            _ => false,
        }
    }

    /// Whether asking again later can help: nobody there, a broken connection, a busy server.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Broken { .. } => true,
            Self::Problem(problem) => matches!(problem.status, 429 | 502 | 503 | 504),
            _ => false,
        }
    }
}

/// The causes of an error in one line; an HTTP library's own text names only the outermost.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
