//! How the program ends: exit statuses, and one way to print an error.

use space_api::client::ClientError;

use crate::output::{Paint, note, paint_err};

/// SPACE itself failed; a program in a sandbox has its own statuses.
pub const OWN_FAILURE: i32 = 125;
/// `doctor` found something that must be fixed, or a command has nothing to say yes to.
pub const NO: i32 = 1;
pub const USAGE: i32 = 2;

/// An error for a person: what happened, why, what next. `status` is the exit status.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub message: String,
    pub status: i32,
    /// For `--json`: the server's code, or ours.
    pub code: String,
}

impl Failure {
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), status: OWN_FAILURE, code: "client".into() }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), status: USAGE, code: "usage".into() }
    }

    /// Prints it and gives the status to end with.
    pub fn report(&self, json: bool) -> i32 {
        if json {
            let error = serde_json::json!({ "error": { "code": self.code, "message": self.message } });
            note(error.to_string());
        } else if !self.message.is_empty() {
            note(format!("{} {}", paint_err("error:", Paint::Red), crate::output::clean(&self.message)));
        }
        self.status
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let code = match &error {
            ClientError::Problem(problem) => problem.code.clone(),
            ClientError::Operation(operation) => operation.code.clone(),
            ClientError::Connect { .. } => "no_server".into(),
            _ => "client".into(),
        };
        Self { message: error.to_string(), status: OWN_FAILURE, code }
    }
}

/// The text of an error and of what caused it.
impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        match error.downcast::<Failure>() {
            Ok(failure) => failure,
            Err(error) => match error.downcast::<ClientError>() {
                Ok(error) => error.into(),
                Err(error) => Self::new(format!("{error:#}")),
            },
        }
    }
}
