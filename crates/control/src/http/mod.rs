//! The HTTP face: routes, who may call them, and how every failure becomes a problem document.
//!
//! Handlers check their input, read or write the store, and hand work to `work`; they never wait for work in a way that
//! would end it when the client goes away. Bodies of files are streamed and never held.

mod auth;
mod commands;
pub mod error;
mod extract;
mod files;
mod keys;
mod once;
pub mod openapi;
mod operations;
mod output;
mod present;
mod sandboxes;
mod templates;
mod transfer;
mod watch;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post, put};
use futures::FutureExt as _;
use space_api::Problem;
use space_api::problem::Code;

use crate::app::App;
use error::Failed;
pub use operations::node_info;

/// Every route with its methods, for the router and for the test that compares it with the description.
macro_rules! routes {
    ($($path:literal => $methods:expr, [$($method:literal),*];)*) => {
        fn table() -> Router<Arc<App>> {
            Router::new()$(.route($path, $methods))*
        }

        /// Path and method of everything that is served.
        pub const ROUTES: &[(&str, &[&str])] = &[$(($path, &[$($method),*])),*];
    };
}

routes! {
    "/v1/health" => get(health), ["get"];
    "/openapi.json" => get(openapi::serve), ["get"];
    "/v1/info" => get(operations::info), ["get"];
    "/v1/sandboxes" => get(sandboxes::list).post(sandboxes::create), ["get", "post"];
    "/v1/sandboxes/{id}" => get(sandboxes::get).patch(sandboxes::patch).delete(sandboxes::delete), ["get", "patch", "delete"];
    "/v1/sandboxes/{id}/console" => get(sandboxes::console), ["get"];
    "/v1/operations" => get(operations::list), ["get"];
    "/v1/operations/{id}" => get(operations::get), ["get"];
    "/v1/sandboxes/{id}/commands" => post(commands::create), ["post"];
    "/v1/sandboxes/{id}/commands/{command}/attach" => post(commands::attach), ["post"];
    "/v1/sandboxes/{id}/processes" => get(commands::processes), ["get"];
    "/v1/sandboxes/{id}/processes/{command}" => get(commands::process), ["get"];
    "/v1/sandboxes/{id}/processes/{command}/signal" => post(commands::signal), ["post"];
    "/v1/sandboxes/{id}/processes/{command}/output" => get(output::output), ["get"];
    "/v1/sandboxes/{id}/files" => get(transfer::read).put(transfer::write).delete(files::remove), ["get", "put", "delete"];
    "/v1/sandboxes/{id}/files/info" => get(files::info), ["get"];
    "/v1/sandboxes/{id}/files/list" => get(files::list), ["get"];
    "/v1/sandboxes/{id}/files/watch" => get(watch::watch), ["get"];
    "/v1/sandboxes/{id}/files/mkdir" => post(files::make_directory), ["post"];
    "/v1/sandboxes/{id}/files/rename" => post(files::rename), ["post"];
    "/v1/sandboxes/{id}/archive" => get(transfer::read_archive).put(transfer::write_archive), ["get", "put"];
    "/v1/templates" => get(templates::list).post(templates::build), ["get", "post"];
    "/v1/templates/{reference}" => get(templates::get).delete(templates::delete), ["get", "delete"];
    "/v1/templates/{reference}/tags" => put(templates::tag), ["put"];
    "/v1/keys" => get(keys::list).post(keys::create), ["get", "post"];
    "/v1/keys/{id}" => axum::routing::delete(keys::revoke), ["delete"];
}

/// What is answered without a key.
pub const OPEN: [&str; 2] = ["/v1/health", "/openapi.json"];

pub fn router(app: Arc<App>) -> Router {
    table()
        .method_not_allowed_fallback(method_not_allowed)
        .route_layer(middleware::from_fn_with_state(app.clone(), auth::require))
        .fallback(not_found)
        .layer(middleware::from_fn_with_state(app.clone(), around))
        .with_state(app)
}

async fn not_found(request: Request) -> Failed {
    let path: String = request.uri().path().chars().take(200).collect();
    Problem::new(Code::NotFound, format!("there is nothing at {path}; the paths are in /openapi.json")).into()
}

async fn method_not_allowed(request: Request) -> Failed {
    let method = request.method().clone();
    Problem::new(Code::MethodNotAllowed, format!("{method} does not exist here; see /openapi.json")).into()
}

/// Around everything: the bound on requests at once, panics, and one line per request.
async fn around(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let method = request.method().clone();
    // The pattern and never the address: a query may hold what should not be in a log.
    let route = request.extensions().get::<MatchedPath>().map_or("-".to_owned(), |p| p.as_str().to_owned());
    let Ok(_permit) = app.requests.try_acquire() else {
        let text = "the server is working on as many requests as it can; try again in a moment";
        return Failed::from(Problem::new(Code::TooManyRequests, text)).into_response();
    };
    let answer = std::panic::AssertUnwindSafe(next.run(request)).catch_unwind().await;
    let answer = answer.unwrap_or_else(|_| {
        tracing::error!(%method, route, "a request panicked");
        Failed::from(Problem::new(Code::Internal, "a fault on our side; the server's log has it")).into_response()
    });
    let micros = started.elapsed().as_micros();
    tracing::debug!(%method, route, status = answer.status().as_u16(), micros, "request");
    answer
}

/// Whether the server and its store work.
#[utoipa::path(get, path = "/v1/health", tag = "server", security(()),
    responses((status = 200, description = "It works", body = space_api::Health), error::Problems))]
async fn health(State(app): State<Arc<App>>) -> Result<axum::Json<space_api::Health>, Failed> {
    app.store.check().await?;
    Ok(axum::Json(space_api::Health { status: "ok".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() }))
}
