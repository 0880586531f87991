//! `Idempotency-Key`: one effect however often a request is sent, also when it is sent twice at once.
//!
//! A mutation that leaves a row puts its key into the same transaction (`resource`). A call to a guest has no row: its key
//! is claimed first and the answer put there afterwards; when the process dies in between, the claim runs out and a retry
//! is carried out again. Refusals are not kept: a retry after one is a new try.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::Serialize;
use space_api::Problem;
use space_api::problem::Code;
use space_core::limits::IDEMPOTENCY_KEY_MAX_BYTES;

use super::error::Failed;
use crate::app::App;
use crate::clock::now_ms;
use crate::store::{Claim, IdempotencyKey, Seen, StoreError};
use crate::validate::invalid;

pub const HEADER: &str = "idempotency-key";
const CLAIM_MS: i64 = 60_000;
/// How long a second request waits for the first.
const WAIT: Duration = Duration::from_secs(60);

/// The key as sent; it must not be stored or logged.
pub fn raw(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get(HEADER) else { return Ok(None) };
    match value.to_str() {
        Ok(key) if !key.is_empty() && key.len() <= IDEMPOTENCY_KEY_MAX_BYTES => Ok(Some(key)),
        _ => Err(invalid(
            "Idempotency-Key",
            format!("an idempotency key has 1 to {IDEMPOTENCY_KEY_MAX_BYTES} printable ASCII characters"),
        )),
    }
}

/// The key of this request: what must be the same is the path and the body, not how long the caller waits.
pub fn key(
    app: &App,
    headers: &HeaderMap,
    path: &str,
    body: &impl Serialize,
) -> Result<Option<IdempotencyKey>, Problem> {
    let Some(key) = raw(headers)? else { return Ok(None) };
    let body = serde_json::to_vec(body).expect("bodies are plain data");
    let mut request = format!("POST {path}\n").into_bytes();
    request.extend(body);
    Ok(Some(IdempotencyKey::new(&app.project, key, &request)))
}

/// What an earlier request with the key made; a different request with it is refused.
pub async fn seen(app: &App, key: Option<&IdempotencyKey>) -> Result<Option<Seen>, Failed> {
    let Some(key) = key else { return Ok(None) };
    match app.store.seen_key(key).await? {
        Some(seen) => checked(seen).map(Some),
        None => Ok(None),
    }
}

fn checked(seen: Seen) -> Result<Seen, Failed> {
    if seen.same_request {
        return Ok(seen);
    }
    let text = "this idempotency key was used for another request; use a new key for every new request";
    Err(Problem::new(Code::IdempotencyMismatch, text).at("Idempotency-Key").into())
}

/// Carries out `work` once for the key and answers with 200 and its JSON, or with what the first request got. With a key,
/// a client that goes away does not leave it half done.
pub async fn json_once<T: Serialize + Send + 'static>(
    app: &Arc<App>,
    key: Option<IdempotencyKey>,
    work: impl Future<Output = Result<T, Failed>> + Send + 'static,
) -> Result<Response, Failed> {
    let Some(key) = key else { return Ok(axum::Json(work.await?).into_response()) };
    let owner = space_core::OperationId::new().to_string();
    let begun = Instant::now();
    loop {
        let now = now_ms();
        match app.store.claim_key(key.clone(), owner.clone(), now, now + CLAIM_MS).await? {
            Claim::Mine => break,
            Claim::Seen(seen) => {
                if let Some((status, body)) = checked(seen)?.answer {
                    return Ok(stored(status, body));
                }
            }
        }
        if begun.elapsed() > WAIT {
            let text = "a request with this idempotency key is still being carried out; ask again";
            return Err(Problem::new(Code::Conflict, text).into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (to, answer) = tokio::sync::oneshot::channel();
    let app_ = app.clone();
    app.spawn(async move {
        let _ = to.send(work_and_keep(&app_, key, owner, work).await);
    });
    answer.await.unwrap_or_else(|_| Err(StoreError::Closed.into()))
}

async fn work_and_keep<T: Serialize>(
    app: &App,
    key: IdempotencyKey,
    owner: String,
    work: impl Future<Output = Result<T, Failed>>,
) -> Result<Response, Failed> {
    match work.await {
        Ok(value) => {
            let body = serde_json::to_string(&value).expect("answers are plain data");
            app.store.answer_key(key, owner, Some((200, body.clone()))).await?;
            Ok(stored(200, body))
        }
        Err(failed) => {
            app.store.answer_key(key, owner, None).await?;
            Err(failed)
        }
    }
}

fn stored(status: u16, body: String) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    (status, [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
}
