//! The backstop: every few seconds, and when something hints at it, the world is read again and whatever nobody is at gets
//! somebody. It takes no input; after a restart it is what carries on.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use space_core::limits::IDEMPOTENCY_KEEP_SECONDS;
use space_core::{Generation, RunNumber, SandboxId, SandboxState};
use space_proto::node::{ListRunsRequest, ListTemplatesRequest, RunRef, RunState, RunStatus};

use super::{build, drive, watch};
use crate::app::App;
use crate::clock::now_ms;
use crate::node::{SHORT, timed};
use crate::store::{Observation, Rescue, RunWord, StoreError};

/// How often times to live are looked at.
const TICK: Duration = Duration::from_millis(500);
/// Every so many ticks the node is asked.
const NODE_EVERY: u64 = 10;
const PRUNE_EVERY: u64 = 1200;
/// A run is lost when the node has not known it for so long; a node that has just started may still be finding its own.
const LOST_AFTER: Duration = Duration::from_secs(4);
/// Deleted sandboxes can still be read this long.
const DELETED_KEPT_MS: i64 = 3600 * 1000;

pub async fn run(app: Arc<App>) {
    let mut missing = HashMap::new();
    let mut templates_known = false;
    let mut ticks = 0u64;
    loop {
        let hinted = tokio::time::timeout(TICK, app.look.notified()).await.is_ok();
        let outcome = async {
            expire(&app).await?;
            carry_on(&app).await?;
            if hinted || ticks.is_multiple_of(NODE_EVERY) {
                compare_runs(&app, &mut missing).await?;
                remove_templates(&app).await?;
                if !templates_known {
                    templates_known = sync_templates(&app).await.is_ok();
                }
            }
            if ticks % PRUNE_EVERY == PRUNE_EVERY - 1 {
                let now = now_ms();
                app.store.prune(now - DELETED_KEPT_MS, now - IDEMPOTENCY_KEEP_SECONDS * 1000).await?;
            }
            Ok::<(), StoreError>(())
        }
        .await;
        match outcome {
            Err(StoreError::Closed) => return,
            Err(error) => tracing::error!(%error, "reconciling failed; it is tried again"),
            Ok(()) => {}
        }
        ticks += 1;
    }
}

async fn expire(app: &Arc<App>) -> Result<(), StoreError> {
    for id in app.store.expired_sandboxes(now_ms()).await? {
        tracing::info!(sandbox = %id, "its time to live is over");
        app.store.request_delete(id.clone(), now_ms()).await?;
        app.waiters.wake(id.as_str());
        drive(app, &id);
    }
    Ok(())
}

async fn carry_on(app: &Arc<App>) -> Result<(), StoreError> {
    for id in app.store.transient_sandboxes().await? {
        let driven = {
            let drivers = app.drivers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            drivers.contains_key(id.as_str())
        };
        if !driven {
            drive(app, &id);
        }
    }
    for id in app.store.open_builds(now_ms()).await? {
        build::start(app, id);
    }
    Ok(())
}

/// Compares what should run with what does. A run that the node keeps not knowing is lost; one that nobody wants is
/// removed.
async fn compare_runs(app: &Arc<App>, missing: &mut HashMap<(String, u32), Instant>) -> Result<(), StoreError> {
    // Rows first: what is settled here was known to the node before it is asked.
    let rows = app.store.settled_sandboxes().await?;
    let Ok(answer) = app.node.node().list_runs(timed(ListRunsRequest {}, SHORT)).await else {
        missing.clear();
        return Ok(());
    };
    let runs = answer.into_inner().runs;
    let key = |r: &RunRef| (r.sandbox.clone(), r.run);
    let known: HashMap<(String, u32), &RunStatus> =
        runs.iter().filter_map(|status| Some((key(status.run.as_ref()?), status))).collect();
    let mut still_missing = HashMap::new();
    for row in rows {
        let key = (row.id.to_string(), row.run.0);
        if known.contains_key(&key) {
            continue;
        }
        let since = missing.get(&key).copied().unwrap_or_else(Instant::now);
        if since.elapsed() < LOST_AFTER {
            still_missing.insert(key, since);
            continue;
        }
        tracing::warn!(sandbox = %row.id, "the node does not know its run");
        let seen = Observation {
            run: row.run,
            state: RunWord::Gone,
            node: row.node.clone().unwrap_or_default(),
            observation: u64::try_from(i64::MAX).unwrap_or_default(),
            reason: Some("vm_lost: the node does not know the run any more".to_owned()),
        };
        if app.store.observe_run(row.id.clone(), seen, now_ms()).await? {
            super::sandbox::wake(app, &row.id).await;
        }
    }
    *missing = still_missing;
    for status in &runs {
        watch::take_over(app, status).await;
        remove_unwanted(app, status).await?;
    }
    Ok(())
}

/// A run whose sandbox is deleted, failed at its start, or in another run. One that the store does not know is taken back.
async fn remove_unwanted(app: &Arc<App>, status: &RunStatus) -> Result<(), StoreError> {
    let Some(run) = &status.run else { return Ok(()) };
    let Ok(id) = run.sandbox.parse::<SandboxId>() else { return Ok(()) };
    let mut generation = run.generation;
    let why = match app.store.sandbox(&id).await? {
        None => return rescue(app, status, id).await,
        Some(row) if row.state == SandboxState::Deleted => {
            generation = generation.max(row.run_generation.0);
            "the sandbox is deleted"
        }
        Some(row) if row.run != RunNumber(run.run) => {
            generation += 1;
            "the sandbox has another run"
        }
        Some(row) if row.state == SandboxState::Failed && status.state() != RunState::Gone => {
            generation = generation.max(row.run_generation.0);
            "the sandbox has failed"
        }
        Some(_) => return Ok(()),
    };
    tracing::warn!(sandbox = %id, run = run.run, why, "removing a run that nobody wants");
    let request = RunRef { generation, ..run.clone() };
    if let Err(status) = app.node.node().delete_run(timed(request, crate::node::DELETE)).await {
        tracing::warn!(sandbox = %id, %status, "the run could not be removed; it is tried again");
    }
    Ok(())
}

/// Rows for a run that the store does not know. A row is there before its run and until after it, so the store has lost
/// what it knew, and the run is somebody's work.
async fn rescue(app: &Arc<App>, status: &RunStatus, id: SandboxId) -> Result<(), StoreError> {
    let Some(run) = &status.run else { return Ok(()) };
    let state = match status.state() {
        RunState::Running => SandboxState::Running,
        RunState::Paused => SandboxState::Paused,
        RunState::Gone => SandboxState::Failed,
        RunState::Stopped => SandboxState::Stopped,
        // It is looked at again when it is up.
        RunState::Starting | RunState::Unspecified => return Ok(()),
    };
    let rescue = Rescue {
        id: id.clone(),
        project: app.project.clone(),
        template_digest: status.template.clone(),
        run_generation: Generation(run.generation.max(1)),
        seen: Observation { run: RunNumber(run.run.max(1)), ..super::sandbox::observation(app, status) },
        state,
        started_at_ms: status.since_unix_ms,
    };
    if app.store.rescue_sandbox(rescue, now_ms()).await? {
        tracing::warn!(sandbox = %id, "the store did not know this sandbox of the node; it has it back, under a new name");
    } else {
        tracing::warn!(sandbox = %id, "the node holds a sandbox that the store does not know, of a template it does not know");
    }
    Ok(())
}

/// Finishes removals of templates that somebody began.
async fn remove_templates(app: &Arc<App>) -> Result<(), StoreError> {
    for digest in app.store.deleting_templates().await? {
        match build::remove_template(app, &digest).await {
            Ok(()) => {}
            Err(problem) => tracing::debug!(digest, detail = problem.detail, "the template is not removed yet"),
        }
    }
    Ok(())
}

/// Takes over the node's list of templates. Needs the node.
pub async fn sync_templates(app: &App) -> Result<(), space_api::Problem> {
    let answer = app.node.node().list_templates(timed(ListTemplatesRequest {}, SHORT)).await;
    let list = answer.map_err(|status| crate::node::node_problem(&status))?.into_inner().templates;
    let rows = list.into_iter().take(10_000).filter_map(build::template_row).collect();
    app.store.sync_templates(rows).await.map_err(|error| crate::http::error::store_problem(&error))
}
