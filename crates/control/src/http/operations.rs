//! Operations, waiting for them, and what the server and its node are.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use http::Uri;
use space_api::problem::Code;
use space_api::{Operation, OperationPage, Problem, ServerInfo, WaitQuery};
use space_core::{OperationId, SandboxId};
use space_proto::node::{GetInfoRequest, NodeInfo};

use super::error::{Failed, Problems};
use super::extract::{Params, Path};
use super::present;
use crate::app::App;
use crate::node::{SHORT, node_problem, timed};
use crate::store::OperationRow;
use crate::validate::invalid;

/// Another copy of the control plane may end an operation; then nobody here is woken.
const POLL: Duration = Duration::from_secs(1);

fn no_operation(id: &str) -> Problem {
    let shown: String = id.chars().take(80).collect();
    Problem::new(Code::NotFound, format!("there is no operation {shown:?}; ended ones are kept for an hour or longer"))
}

/// Waits until the operation has ended, at most `wait`, and answers with it.
pub async fn answer(app: &App, id: &OperationId, wait: Option<Duration>) -> Result<Response, Failed> {
    let row = wait_for(app, id, wait).await?;
    present::operation_answer(app, row).await
}

pub async fn wait_for(app: &App, id: &OperationId, wait: Option<Duration>) -> Result<OperationRow, Failed> {
    let begun = Instant::now();
    let waiter = app.waiters.register(id.as_str());
    loop {
        // Registered before the look, so that an end in between is not missed.
        let woken = waiter.notify.notified();
        let row = app.store.operation(&app.project, id).await?.ok_or_else(|| no_operation(id.as_str()))?;
        let left = wait.unwrap_or_default().saturating_sub(begun.elapsed());
        if row.state.ended() || left.is_zero() || app.stopping.is_cancelled() {
            return Ok(row);
        }
        tokio::select! {
            () = woken => {}
            () = tokio::time::sleep(left.min(POLL)) => {}
            () = app.stopping.cancelled() => {}
        }
    }
}

/// One operation; `wait` holds the answer until it has ended.
#[utoipa::path(get, path = "/v1/operations/{id}", tag = "operations", params(("id" = String, Path), WaitQuery),
    responses((status = 200, description = "It has ended", body = Operation),
        (status = 202, description = "It is under way", body = Operation), Problems))]
pub async fn get(State(app): State<Arc<App>>, Path(id): Path<String>, uri: Uri) -> Result<Response, Failed> {
    let wait = Params::parse(&uri, &["wait"])?.wait()?;
    let id: OperationId = id.parse().map_err(|_| no_operation(&id))?;
    answer(&app, &id, wait).await
}

/// Operations, newest first.
#[utoipa::path(get, path = "/v1/operations", tag = "operations", params(
        ("sandbox" = Option<String>, Query, description = "Only those of this sandbox, by id"),
        ("cursor" = Option<String>, Query), ("limit" = Option<u32>, Query)),
    responses((status = 200, description = "A page", body = OperationPage), Problems))]
pub async fn list(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<OperationPage>, Failed> {
    let params = Params::parse(&uri, &["sandbox", "cursor", "limit"])?;
    let limit = params.limit()?;
    let sandbox: Option<SandboxId> = match params.text("sandbox") {
        Some(text) => Some(text.parse().map_err(|e| invalid("sandbox", format!("{e}")))?),
        None => None,
    };
    let before: Option<OperationId> = match params.text("cursor") {
        Some(text) => Some(text.parse().map_err(|_| bad_cursor())?),
        None => None,
    };
    let mut rows = app.store.list_operations(&app.project, sandbox.as_ref(), before.as_ref(), limit).await?;
    let more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    let next_cursor = more.then(|| rows.last().map(|row| row.id.to_string())).flatten();
    Ok(Json(OperationPage { operations: rows.into_iter().map(present::operation).collect(), next_cursor }))
}

pub fn bad_cursor() -> Problem {
    invalid("cursor", "cursor is not one that a list has given; leave it out for the first page")
}

/// What the node is and has, as it says.
pub async fn node_info(app: &App) -> Result<NodeInfo, Problem> {
    let answer = app.node.node().get_info(timed(GetInfoRequest {}, SHORT)).await;
    let info = answer.map_err(|status| node_problem(&status))?.into_inner();
    app.remember_node(&info.node_id, &info.data_url);
    Ok(info)
}

/// The server, its node, and how full that is.
#[utoipa::path(get, path = "/v1/info", tag = "server",
    responses((status = 200, description = "The server", body = ServerInfo), Problems))]
pub async fn info(State(app): State<Arc<App>>) -> Result<Json<ServerInfo>, Failed> {
    let node = node_info(&app).await?;
    Ok(Json(ServerInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: node.node_id,
        driver: node.driver,
        driver_version: node.driver_version,
        driver_reason: node.driver_reason,
        cpus: node.cpus,
        memory_total_bytes: node.memory_total_bytes,
        memory_reserved_bytes: node.memory_reserved_bytes,
        pool_total_bytes: node.pool_total_bytes,
        pool_free_bytes: node.pool_free_bytes,
        runs: node.runs,
    }))
}
