//! Errors of the API: `application/problem+json` with a stable `code`. Clients decide by `code`, never by text.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub const CONTENT_TYPE: &str = "application/problem+json";

/// RFC 9457, plus `code`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{detail} ({code})")]
pub struct Problem {
    /// Stable, snake_case; see docs/api.md for the list.
    pub code: String,
    pub title: String,
    pub status: u16,
    /// What happened, why, and what to do next.
    pub detail: String,
    /// The field or parameter that was wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $status:literal, $code:literal, $title:literal;)*) => {
        /// Every code there is, with its HTTP status.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code { $($(#[$doc])* $name),* }

        impl Code {
            pub const ALL: &'static [Code] = &[$(Code::$name),*];
            pub fn as_str(self) -> &'static str { match self { $(Code::$name => $code),* } }
            pub fn status(self) -> u16 { match self { $(Code::$name => $status),* } }
            pub fn title(self) -> &'static str { match self { $(Code::$name => $title),* } }
        }
    };
}

codes! {
    InvalidRequest = 400, "invalid_request", "The request is not valid";
    Unauthenticated = 401, "unauthenticated", "No valid API key";
    Forbidden = 403, "forbidden", "The API key does not allow this";
    NotFound = 404, "not_found", "There is no such thing";
    MethodNotAllowed = 405, "method_not_allowed", "The method does not exist here";
    Conflict = 409, "conflict", "The state does not allow this";
    NameTaken = 409, "name_taken", "The name is in use";
    InUse = 409, "in_use", "Something still uses it";
    IdempotencyMismatch = 409, "idempotency_mismatch", "The idempotency key was used for another request";
    NotRunning = 409, "not_running", "The sandbox is not running";
    Gone = 410, "gone", "It has been deleted";
    TooLarge = 413, "too_large", "Too large";
    UnsupportedMediaType = 415, "unsupported_media_type", "The content type is not understood";
    RangeNotSatisfiable = 416, "range_not_satisfiable", "The range is outside the file";
    Misdirected = 421, "misdirected", "This node does not hold that run";
    FileNotFound = 404, "file_not_found", "There is no such file in the sandbox";
    FilePermission = 403, "file_permission", "The guest's user may not do this";
    FileExists = 409, "file_exists", "The file is there already";
    FileKind = 409, "file_kind", "It is not that kind of file";
    GuestDiskFull = 507, "guest_disk_full", "The sandbox's disk is full";
    GuestLimit = 429, "guest_limit", "The sandbox has reached a limit";
    TooManyRequests = 429, "too_many_requests", "Too many at once";
    NoCapacity = 503, "no_capacity", "No node has room";
    GuestUnreachable = 503, "guest_unreachable", "The sandbox does not answer";
    Unavailable = 503, "unavailable", "The node cannot be reached";
    Timeout = 504, "timeout", "It took too long";
    Internal = 500, "internal", "A fault on our side";
}

impl Problem {
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self {
            code: code.as_str().to_owned(),
            title: code.title().to_owned(),
            status: code.status(),
            detail: detail.into(),
            field: None,
        }
    }

    #[must_use]
    pub fn at(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    pub fn is(&self, code: Code) -> bool {
        self.code == code.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_errors() {
        let mut seen = std::collections::BTreeSet::new();
        for code in Code::ALL {
            assert!(seen.insert(code.as_str()), "{} twice", code.as_str());
            assert!((400..600).contains(&code.status()));
        }
    }
}
