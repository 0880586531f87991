//! Failures of requests: everything becomes a `Problem`, and every `Problem` an `application/problem+json` answer.

use std::collections::BTreeMap;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use space_api::Problem;
use space_api::problem::{CONTENT_TYPE, Code};
use utoipa::openapi::{Content, RefOr, Response as ResponseDoc, ResponseBuilder, schema::Ref};

use crate::store::StoreError;

/// A refusal on its way out.
#[derive(Debug)]
pub struct Failed(pub Box<Problem>);

impl From<Problem> for Failed {
    fn from(problem: Problem) -> Self {
        Self(Box::new(problem))
    }
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        store_problem(&error).into()
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self.0).expect("a problem is plain data");
        let mut answer = (status, body).into_response();
        let headers = answer.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if matches!(self.0.status, 429 | 503) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        answer
    }
}

/// What a failure of the store means to the caller. The text of SQL stays in the log.
pub fn store_problem(error: &StoreError) -> Problem {
    match error {
        StoreError::NameTaken => {
            Problem::new(Code::NameTaken, "another sandbox has this name; choose another one, or delete that sandbox")
                .at("name")
        }
        StoreError::MetadataLimit => crate::validate::too_much_metadata(),
        StoreError::NoTemplate => {
            Problem::new(Code::NotFound, "the template has just been removed; GET /v1/templates lists what there is")
                .at("template")
        }
        StoreError::InUse(count) => Problem::new(
            Code::InUse,
            format!("{count} sandboxes that are not deleted were made from it; delete them first"),
        ),
        StoreError::LastAdminKey => {
            Problem::new(Code::Conflict, "it is the last admin key; make another one first, or nobody could make any")
        }
        StoreError::Closed => Problem::new(Code::Unavailable, "the server is stopping; try again in a moment"),
        other => {
            tracing::error!(error = %other, "the store failed");
            Problem::new(Code::Internal, "a fault of the store; the server's log has it")
        }
    }
}

/// The error answers that any call can give, for the description.
pub struct Problems;

impl utoipa::IntoResponses for Problems {
    fn responses() -> BTreeMap<String, RefOr<ResponseDoc>> {
        let answer = |text: &str| {
            let content = Content::new(Some(Ref::from_schema_name("Problem")));
            RefOr::T(ResponseBuilder::new().description(text).content(CONTENT_TYPE, content).build())
        };
        BTreeMap::from([
            ("4XX".to_owned(), answer("The request was refused; `code` says why")),
            ("5XX".to_owned(), answer("A fault, or something that cannot be reached; `code` says what")),
        ])
    }
}
