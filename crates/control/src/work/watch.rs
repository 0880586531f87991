//! Listens to the node: a run that ends unexpectedly is a failed sandbox within moments. The stream is a hint; what it
//! misses, `reconcile` finds.

use std::sync::Arc;
use std::time::Duration;

use space_core::{RunNumber, SandboxId};
use space_proto::node::{RunStatus, WatchRunsRequest};

use super::sandbox::{observation, wake};
use crate::app::App;
use crate::clock::now_ms;
use crate::store::StoreError;

const PAUSE: Duration = Duration::from_millis(500);

pub async fn run(app: Arc<App>) {
    let mut known = true;
    loop {
        match app.node.node().watch_runs(WatchRunsRequest {}).await {
            Ok(answer) => {
                if !known {
                    tracing::info!("the node is reachable again");
                }
                known = true;
                // Another process may be there now, with another address.
                if let Err(problem) = crate::http::node_info(&app).await {
                    tracing::debug!(detail = problem.detail, "the node does not say what it is");
                }
                // What was missed in between.
                app.look.notify_one();
                let mut runs = answer.into_inner();
                loop {
                    match runs.message().await {
                        Ok(Some(status)) => take_over(&app, &status).await,
                        Ok(None) => break,
                        Err(error) => {
                            tracing::debug!(%error, "the node's stream of changes ended");
                            break;
                        }
                    }
                }
            }
            Err(error) if known => {
                tracing::warn!(%error, "the node cannot be reached; trying again");
                known = false;
            }
            Err(_) => {}
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Applies one status to the store.
pub async fn take_over(app: &App, status: &RunStatus) {
    let Some(run) = &status.run else { return };
    let Ok(id) = run.sandbox.parse::<SandboxId>() else { return };
    let mut seen = observation(app, status);
    seen.run = RunNumber(run.run);
    match app.store.observe_run(id.clone(), seen, now_ms()).await {
        Ok(true) => {
            tracing::info!(sandbox = %id, state = ?status.state(), reason = status.reason, "the node reports a change");
            wake(app, &id).await;
        }
        Ok(false) | Err(StoreError::Closed) => {}
        Err(error) => tracing::error!(sandbox = %id, %error, "a change could not be recorded"),
    }
}
