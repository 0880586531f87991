//! Who is calling, and whether that key may. A key is found by its hash; nothing here logs or returns one.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, Method, header};
use space_api::problem::Code;
use space_api::{Problem, Scope};
use space_core::KeyId;

use super::OPEN;
use super::error::Failed;
use crate::app::App;
use crate::clock::now_ms;
use crate::secrets::{is_key, sha256};

/// The time of last use is written at most so often.
const TOUCH_EVERY_MS: i64 = 60_000;

/// Who is calling; in the request's extensions.
#[derive(Clone, Debug)]
pub struct Caller {
    pub key: KeyId,
    pub scope: Scope,
}

fn given(headers: &HeaderMap) -> Option<&str> {
    if let Some(value) = headers.get("x-api-key") {
        return value.to_str().ok();
    }
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// The scope that a route needs.
fn needed(method: &Method, route: &str) -> Scope {
    if route.starts_with("/v1/keys") {
        Scope::Admin
    } else if *method == Method::GET || *method == Method::HEAD {
        Scope::Read
    } else {
        Scope::Use
    }
}

fn allows(has: Scope, needs: Scope) -> bool {
    let rank = |scope| match scope {
        Scope::Read => 0,
        Scope::Use => 1,
        Scope::Admin => 2,
    };
    rank(has) >= rank(needs)
}

pub fn forbidden(needs: Scope, what: &str) -> Problem {
    let scope = match needs {
        Scope::Admin => "admin",
        Scope::Use => "use",
        Scope::Read => "read",
    };
    Problem::new(Code::Forbidden, format!("{what} needs a key with the scope {scope}"))
}

pub async fn require(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or(String::new(), |p| p.as_str().to_owned());
    if OPEN.contains(&route.as_str()) {
        return next.run(request).await;
    }
    match caller(&app, request.headers()).await {
        Ok(caller) => {
            let needs = needed(request.method(), &route);
            if !allows(caller.scope, needs) {
                return Failed::from(forbidden(needs, "this call")).into_response();
            }
            tracing::debug!(key = %caller.key, method = %request.method(), route, "called");
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(failed) => failed.into_response(),
    }
}

async fn caller(app: &Arc<App>, headers: &HeaderMap) -> Result<Caller, Failed> {
    let refuse = |text: &str| Failed::from(Problem::new(Code::Unauthenticated, text));
    let Some(key) = given(headers) else {
        return Err(refuse("no API key: send Authorization: Bearer sk-…; `space up` leaves the first one for `space`"));
    };
    let row = if is_key(key) { app.store.key_by_hash(&sha256(key.as_bytes())).await? } else { None };
    let Some(row) = row else { return Err(refuse("the API key is not known, or has been revoked")) };
    let now = now_ms();
    if row.last_used_at_ms.is_none_or(|then| now - then > TOUCH_EVERY_MS) {
        let (app_, id) = (app.clone(), row.id.clone());
        app.spawn(async move {
            let _ = app_.store.touch_key(id, now).await;
        });
    }
    Ok(Caller { key: row.id, scope: row.scope })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_are_a_ladder() {
        assert!(allows(Scope::Admin, Scope::Use) && allows(Scope::Use, Scope::Read) && allows(Scope::Use, Scope::Use));
        assert!(!allows(Scope::Read, Scope::Use) && !allows(Scope::Use, Scope::Admin));
        assert_eq!(needed(&Method::GET, "/v1/keys"), Scope::Admin);
        assert_eq!(needed(&Method::GET, "/v1/sandboxes"), Scope::Read);
        assert_eq!(needed(&Method::DELETE, "/v1/sandboxes/{id}"), Scope::Use);
    }
}
