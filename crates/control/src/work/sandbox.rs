//! Carries one sandbox on: starts the run of one that is `creating`, removes one that is `deleting`.
//!
//! Each step reads the row, does one idempotent thing at the node, and records it by a guarded update; a lost race means
//! that the row says something new, so it is read again.

use std::time::{Duration, Instant};

use space_core::{SandboxId, SandboxState};
use space_proto::node::{RunState, RunStatus, StartRunRequest};
use tonic::Status;

use crate::app::App;
use crate::clock::now_ms;
use crate::node::{self, run_ref, timed};
use crate::store::{Moved, Observation, RunWord, SandboxRow, StoreError};

/// A node that cannot be reached is tried this long before a create gives up.
const START_RETRY: Duration = Duration::from_secs(60);
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long a start that is no longer wanted is still waited for.
const ABANDON: Duration = Duration::from_secs(10);

/// What is left to do after a step.
enum Next {
    ReadAgain,
    /// Nothing now; the reconciler comes back when something is left.
    Rest,
}

pub async fn drive(app: &App, id: &SandboxId) {
    loop {
        let step = match app.store.sandbox(id).await {
            Ok(None) => return,
            Ok(Some(row)) => step(app, row).await,
            Err(error) => Err(error),
        };
        match step {
            Ok(Next::ReadAgain) => {}
            Ok(Next::Rest) => return,
            Err(StoreError::Closed) => return,
            Err(error) => {
                tracing::error!(sandbox = %id, %error, "the store refused a step; it is tried again");
                tokio::time::sleep(PAUSE_MAX).await;
                return;
            }
        }
    }
}

async fn step(app: &App, row: SandboxRow) -> Result<Next, StoreError> {
    match row.state {
        SandboxState::Creating => create(app, row).await,
        SandboxState::Deleting => delete(app, row).await,
        // Waking, suspending and stopping have no verb yet; the rest needs nobody.
        _ => Ok(Next::Rest),
    }
}

async fn create(app: &App, row: SandboxRow) -> Result<Next, StoreError> {
    let id = row.id.clone();
    let started = Instant::now();
    let moved = match start_run(app, &row).await {
        Ok(None) => return Ok(Next::ReadAgain),
        Ok(Some(status)) => {
            let node_ms = started.elapsed().as_millis();
            app.points.reach("create.node_done").await;
            let moved = app.store.create_succeeded(row, observation(app, &status), now_ms()).await?;
            tracing::debug!(sandbox = %id, node_ms, total_ms = started.elapsed().as_millis(), "started");
            moved
        }
        Err(status) => {
            let problem = node::node_problem(&status);
            tracing::warn!(sandbox = %id, code = problem.code, detail = problem.detail, "could not be started");
            let ambiguous = node::is_transient(&status) || node::is_timeout(&status);
            let moved = app.store.create_failed(row, problem.code, problem.detail, now_ms()).await?;
            if ambiguous
                && let Some(row) = app.store.sandbox(&id).await?
                && row.state == SandboxState::Failed
            {
                // It may have been carried out all the same. The reconciler tries again when this fails too.
                let _ = app.node.node().delete_run(timed(run_ref(&row.run_ref()), node::DELETE)).await;
            }
            moved
        }
    };
    app.points.reach("create.recorded").await;
    if moved == Moved::Lost {
        return Ok(Next::ReadAgain);
    }
    wake(app, &id).await;
    Ok(Next::Rest)
}

/// Starts the run, again and again while the node cannot be reached. `None`: it is no longer wanted.
async fn start_run(app: &App, row: &SandboxRow) -> Result<Option<RunStatus>, Status> {
    let request = StartRunRequest {
        run: Some(run_ref(&row.run_ref())),
        template: row.template_digest.clone(),
        hostname: row.name.clone(),
        env: row.env.clone().into_iter().collect(),
        memory_mib: row.memory_mib,
        vcpus: row.vcpus,
        ..StartRunRequest::default()
    };
    let begun = Instant::now();
    let mut pause = PAUSE_FIRST;
    loop {
        let mut client = app.node.node();
        let call = client.start_run(timed(request.clone(), node::START));
        let answer = tokio::select! {
            answer = call => answer,
            () = unwanted(app, row) => return Ok(None),
        };
        match answer {
            Ok(status) => {
                let status = status.into_inner();
                return match status.state() {
                    RunState::Running | RunState::Paused => Ok(Some(status)),
                    _ => Err(Status::aborted(match status.reason.is_empty() {
                        true => "the node started no run and did not say why".to_owned(),
                        false => status.reason,
                    })),
                };
            }
            Err(status) if node::is_transient(&status) && begun.elapsed() < START_RETRY => {
                tracing::debug!(sandbox = %row.id, %status, "the node cannot be reached; trying again");
            }
            Err(status) => return Err(status),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
        match app.store.sandbox(&row.id).await {
            Ok(Some(now)) if now.generation == row.generation => {}
            _ => return Ok(None),
        }
    }
}

/// Returns some time after the row has changed under a start: the user deletes it, and may not have to wait for a start
/// that hangs. The node is told by the call being dropped, and by the delete that follows.
async fn unwanted(app: &App, row: &SandboxRow) {
    loop {
        let waiter = app.waiters.register(row.id.as_str());
        let woken = waiter.notify.notified();
        let _ = tokio::time::timeout(Duration::from_secs(5), woken).await;
        if let Ok(now) = app.store.sandbox(&row.id).await
            && now.is_none_or(|now| now.generation != row.generation)
        {
            tokio::time::sleep(ABANDON).await;
            return;
        }
    }
}

async fn delete(app: &App, row: SandboxRow) -> Result<Next, StoreError> {
    let id = row.id.clone();
    let mut pause = PAUSE_FIRST;
    let begun = Instant::now();
    loop {
        match app.node.node().delete_run(timed(run_ref(&row.run_ref()), node::DELETE)).await {
            Ok(_) => break,
            // The reconciler starts another driver; a delete is never given up.
            Err(status) if begun.elapsed() > START_RETRY => {
                tracing::warn!(sandbox = %id, %status, "cannot be removed from its node yet; it is tried again");
                return Ok(Next::Rest);
            }
            Err(status) => tracing::debug!(sandbox = %id, %status, "not removed yet; trying again"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    app.points.reach("delete.node_done").await;
    let moved = app.store.delete_done(row, now_ms()).await?;
    app.points.reach("delete.recorded").await;
    if moved == Moved::Lost {
        return Ok(Next::ReadAgain);
    }
    wake(app, &id).await;
    Ok(Next::Rest)
}

/// Wakes whoever waits for the sandbox or one of its operations.
pub async fn wake(app: &App, id: &SandboxId) {
    app.waiters.wake(id.as_str());
    for operation in app.store.operation_ids_of(id).await.unwrap_or_default() {
        app.waiters.wake(&operation);
    }
}

/// What the node said, in the store's words.
pub fn observation(app: &App, status: &RunStatus) -> Observation {
    Observation {
        run: space_core::RunNumber(status.run.as_ref().map_or(0, |r| r.run)),
        state: match status.state() {
            RunState::Running => RunWord::Running,
            RunState::Paused => RunWord::Paused,
            RunState::Gone | RunState::Stopped => RunWord::Gone,
            RunState::Starting | RunState::Unspecified => RunWord::Starting,
        },
        node: app.node_id(),
        observation: status.observation,
        reason: (!status.reason.is_empty()).then(|| node::passed_on(&status.reason)),
    }
}
