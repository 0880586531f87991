//! Sandboxes that a node holds and the store does not know: the store was lost, or an older copy of it was put back. The
//! node's runs are work that somebody wants, so they get rows again instead of being removed.

use space_core::{Generation, RunNumber, SandboxId, SandboxState};

use super::sandboxes::Observation;
use super::{Store, StoreError, signed};

/// What the node knows of one.
#[derive(Clone, Debug)]
pub struct Rescue {
    pub id: SandboxId,
    pub project: String,
    pub template_digest: String,
    pub run_generation: Generation,
    pub seen: Observation,
    pub state: SandboxState,
    pub started_at_ms: i64,
}

impl Store {
    /// Makes the rows, unless there are some by now. False: there are, or the template is not known (yet).
    pub async fn rescue_sandbox(&self, rescue: Rescue, now_ms: i64) -> Result<bool, StoreError> {
        self.writer.write(move |c| Box::pin(insert(c, rescue, now_ms))).await
    }
}

async fn insert(c: &mut sqlx::SqliteConnection, rescue: Rescue, now_ms: i64) -> Result<bool, StoreError> {
    let id = rescue.id.as_str();
    // Its own name is lost; this one is as unique as the id.
    let name = format!("rescued-{}", &id[id.len() - 12..]);
    let reason = matches!(rescue.state, SandboxState::Failed | SandboxState::Paused);
    let made = sqlx::query(
        "INSERT INTO sandboxes (id, project, name, desired, state, reason, generation, run, template_ref, template_digest, \
         memory_mib, vcpus, disk_bytes, env, metadata, created_at_ms, updated_at_ms) \
         SELECT $1, $2, $3, 'running', $4, $5, 1, $6, $7, $7, memory_mib, vcpus, disk_bytes, '{}', '{}', $8, $9 \
         FROM templates WHERE digest = $7 ON CONFLICT (id) DO NOTHING",
    )
    .bind(id)
    .bind(&rescue.project)
    .bind(&name)
    .bind(rescue.state.as_str())
    .bind(reason.then(|| rescue.seen.reason.clone().unwrap_or_else(|| "unknown: the store was lost".to_owned())))
    .bind(i64::from(rescue.seen.run.0))
    .bind(&rescue.template_digest)
    .bind(rescue.started_at_ms)
    .bind(now_ms)
    .execute(&mut *c)
    .await?;
    if made.rows_affected() == 0 {
        return Ok(false);
    }
    let RunNumber(run) = rescue.seen.run;
    let ended = (rescue.state == SandboxState::Failed).then_some(now_ms);
    sqlx::query(
        "INSERT INTO runs (sandbox, run, node, state, generation, observation, reason, started_at_ms, ended_at_ms) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
    )
    .bind(id)
    .bind(i64::from(run))
    .bind(&rescue.seen.node)
    .bind(rescue.seen.state.as_str())
    .bind(signed(rescue.run_generation.0))
    .bind(signed(rescue.seen.observation))
    .bind(&rescue.seen.reason)
    .bind(rescue.started_at_ms)
    .bind(ended)
    .execute(c)
    .await?;
    Ok(true)
}
