//! API keys. The secret is in one answer only, the one that made it.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, StatusCode};
use space_api::problem::Code;
use space_api::{ApiKey, ApiKeyList, CreateKey, NewApiKey, Problem};
use space_core::KeyId;

use super::error::{Failed, Problems};
use super::extract::{Body, Path};
use super::once;
use crate::app::App;
use crate::clock::now_ms;
use crate::secrets::{new_key, sha256};
use crate::store::{KeyRow, StoreError};
use crate::validate;

fn no_key(id: &str) -> Problem {
    let shown: String = id.chars().take(80).collect();
    Problem::new(Code::NotFound, format!("there is no key {shown:?}; GET /v1/keys lists them by id"))
}

fn shown(row: KeyRow) -> ApiKey {
    ApiKey {
        id: row.id.to_string(),
        name: row.name,
        scope: row.scope,
        created_at_ms: row.created_at_ms,
        last_used_at_ms: row.last_used_at_ms,
    }
}

fn made(row: KeyRow, secret: String) -> Response {
    (StatusCode::CREATED, Json(NewApiKey { key: shown(row), secret })).into_response()
}

/// Makes a key. Its secret is shown in this answer only.
#[utoipa::path(post, path = "/v1/keys", tag = "keys", request_body = CreateKey,
    params(("Idempotency-Key" = Option<String>, Header)),
    responses((status = 201, description = "The key with its secret", body = NewApiKey), Problems))]
pub async fn create(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Body(body): Body<CreateKey>,
) -> Result<Response, Failed> {
    validate::key_name(&body.name)?;
    let random = || {
        new_key().map_err(|error| {
            tracing::error!(%error, "no key could be made");
            Problem::new(Code::Internal, "a fault on our side; the server's log has it")
        })
    };
    let row = |id: KeyId, secret: &str| KeyRow {
        id,
        name: body.name.clone(),
        scope: body.scope,
        hash: sha256(secret.as_bytes()),
        created_at_ms: now_ms(),
        last_used_at_ms: None,
    };
    let (Some(key), Some(raw)) = (once::key(&app, &headers, "/v1/keys", &body)?, once::raw(&headers)?) else {
        let secret = random()?;
        let row = row(KeyId::new(), &secret);
        app.store.insert_key(row.clone()).await?;
        return Ok(made(row, secret));
    };
    let id = KeyId::new();
    let secret = app.seed.derived_key(&id, raw);
    let new = row(id, &secret);
    match app.store.insert_key_once(new.clone(), key.clone()).await {
        Ok(()) => Ok(made(new, secret)),
        Err(StoreError::KeySeen) => {
            let first = once::seen(&app, Some(&key)).await?.and_then(|seen| seen.resource).unwrap_or_default();
            let id: KeyId = first.parse().map_err(|_| no_key(&first))?;
            let gone = || Problem::new(Code::Gone, "the key that this request made has been revoked");
            let row = app.store.key(&id).await?.ok_or_else(gone)?;
            let secret = app.seed.derived_key(&id, raw);
            Ok(made(row, secret))
        }
        Err(error) => Err(error.into()),
    }
}

/// Every key, without secrets.
#[utoipa::path(get, path = "/v1/keys", tag = "keys",
    responses((status = 200, description = "The keys, oldest first", body = ApiKeyList), Problems))]
pub async fn list(State(app): State<Arc<App>>) -> Result<Json<ApiKeyList>, Failed> {
    Ok(Json(ApiKeyList { keys: app.store.keys().await?.into_iter().map(shown).collect() }))
}

/// Revokes a key, at once. The last admin key stays.
#[utoipa::path(delete, path = "/v1/keys/{id}", tag = "keys", params(("id" = String, Path)),
    responses((status = 204, description = "It works no longer"), Problems))]
pub async fn revoke(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<StatusCode, Failed> {
    let key: KeyId = id.parse().map_err(|_| no_key(&id))?;
    if app.store.revoke_key(key).await? { Ok(StatusCode::NO_CONTENT) } else { Err(no_key(&id).into()) }
}
