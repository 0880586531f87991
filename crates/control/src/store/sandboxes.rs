//! Sandboxes and their runs.

use std::collections::BTreeMap;

use space_core::{Generation, OperationId, RunNumber, RunRef, SandboxId, SandboxState};
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row as _, Sqlite, SqliteConnection};

use super::operations;
use super::{IdempotencyKey, NewOperation, Store, StoreError, idempotency, signed, unsigned};

/// A sandbox together with its current run.
#[derive(Clone, Debug)]
pub struct SandboxRow {
    pub id: SandboxId,
    pub name: String,
    pub state: SandboxState,
    pub reason: Option<String>,
    pub generation: Generation,
    pub run: RunNumber,
    pub run_generation: Generation,
    pub node: Option<String>,
    pub template_ref: String,
    pub template_digest: String,
    pub memory_mib: u32,
    pub vcpus: u32,
    pub disk_bytes: u64,
    pub env: BTreeMap<String, String>,
    pub metadata: BTreeMap<String, String>,
    pub created_at_ms: i64,
    pub updated_at_ms: i64,
    pub expires_at_ms: Option<i64>,
}

impl SandboxRow {
    /// What calls to the node name.
    pub fn run_ref(&self) -> RunRef {
        RunRef { sandbox: self.id.clone(), run: self.run, generation: self.run_generation }
    }
}

pub struct NewSandbox {
    pub id: SandboxId,
    pub project: String,
    pub name: String,
    pub template_ref: String,
    pub template_digest: String,
    pub memory_mib: u32,
    pub vcpus: u32,
    pub disk_bytes: u64,
    pub env: BTreeMap<String, String>,
    pub metadata: BTreeMap<String, String>,
    pub now_ms: i64,
    pub expires_at_ms: Option<i64>,
}

/// The outcome of a guarded update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    Updated(Generation),
    /// Somebody else changed the row first: read it again.
    Lost,
}

/// The words of a run's state in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunWord {
    Starting,
    Running,
    Paused,
    Gone,
}

impl RunWord {
    pub const ALL: [Self; 4] = [Self::Starting, Self::Running, Self::Paused, Self::Gone];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Gone => "gone",
        }
    }
}

/// What a node says about a run, and the count of its change.
#[derive(Clone, Debug)]
pub struct Observation {
    pub run: RunNumber,
    pub state: RunWord,
    pub node: String,
    pub observation: u64,
    pub reason: Option<String>,
}

/// The answer to "delete it".
#[derive(Clone, Debug)]
pub enum Deletion {
    /// The operation that does it, or did it.
    Operation(OperationId),
    NotThere,
}

#[derive(Clone, Debug, Default)]
pub struct SandboxFilter {
    /// Empty: all but deleted.
    pub states: Vec<SandboxState>,
    pub template_ref: Option<String>,
    pub template_digest: Option<String>,
    pub metadata: Vec<(String, String)>,
    /// Only those made before this one.
    pub before: Option<SandboxId>,
    pub limit: u32,
}

#[derive(Clone, Debug, Default)]
pub struct Patch {
    pub name: Option<String>,
    pub metadata: BTreeMap<String, Option<String>>,
    pub expires_at_ms: Option<Option<i64>>,
}

pub(super) const COLUMNS: &str = "s.id, s.name, s.state, s.reason, s.generation, s.run, s.template_ref, s.template_digest, \
     s.memory_mib, s.vcpus, s.disk_bytes, s.env, s.metadata, s.created_at_ms, s.updated_at_ms, s.expires_at_ms, \
     r.generation AS run_generation, r.node";
pub(super) const FROM: &str = "FROM sandboxes s JOIN runs r ON r.sandbox = s.id AND r.run = s.run";

pub(super) fn corrupt(what: &dyn std::fmt::Display) -> StoreError {
    StoreError::Corrupt(what.to_string())
}

pub(super) fn parse(row: &SqliteRow) -> Result<SandboxRow, StoreError> {
    let json = |column: &str| -> Result<BTreeMap<String, String>, StoreError> {
        serde_json::from_str(row.try_get::<&str, _>(column)?).map_err(|e| corrupt(&e))
    };
    Ok(SandboxRow {
        id: row.try_get::<String, _>("id")?.parse().map_err(|e| corrupt(&e))?,
        name: row.try_get("name")?,
        state: row.try_get::<&str, _>("state")?.parse().map_err(|e| corrupt(&e))?,
        reason: row.try_get("reason")?,
        generation: Generation(unsigned(row.try_get("generation")?)),
        run: RunNumber(unsigned(row.try_get("run")?)),
        run_generation: Generation(unsigned(row.try_get("run_generation")?)),
        node: row.try_get("node")?,
        template_ref: row.try_get("template_ref")?,
        template_digest: row.try_get("template_digest")?,
        memory_mib: unsigned(row.try_get("memory_mib")?),
        vcpus: unsigned(row.try_get("vcpus")?),
        disk_bytes: unsigned(row.try_get("disk_bytes")?),
        env: json("env")?,
        metadata: json("metadata")?,
        created_at_ms: row.try_get("created_at_ms")?,
        updated_at_ms: row.try_get("updated_at_ms")?,
        expires_at_ms: row.try_get("expires_at_ms")?,
    })
}

fn json(map: &BTreeMap<String, String>) -> String {
    serde_json::to_string(map).expect("a map of strings is JSON")
}

/// The only way a sandbox changes its state: from a state and a generation that the caller has read.
async fn advance(
    conn: &mut SqliteConnection,
    row: &SandboxRow,
    to: SandboxState,
    reason: Option<&str>,
    now_ms: i64,
) -> Result<Moved, StoreError> {
    if !row.state.may_become(to) {
        return Err(StoreError::IllegalMove { from: row.state, to });
    }
    let ending = matches!(to, SandboxState::Deleting | SandboxState::Deleted);
    let done = sqlx::query(
        "UPDATE sandboxes SET state = $1, reason = $2, desired = $3, deleted_at_ms = $4, updated_at_ms = $5, \
         generation = generation + 1 WHERE id = $6 AND state = $7 AND generation = $8",
    )
    .bind(to.as_str())
    .bind(reason)
    .bind(if ending { "deleted" } else { "running" })
    .bind((to == SandboxState::Deleted).then_some(now_ms))
    .bind(now_ms)
    .bind(row.id.as_str())
    .bind(row.state.as_str())
    .bind(signed(row.generation.0))
    .execute(conn)
    .await?;
    Ok(if done.rows_affected() == 1 { Moved::Updated(row.generation.next()) } else { Moved::Lost })
}

/// Takes over what the node says of a run; an older observation changes nothing, except that a run that is gone never
/// comes back, whenever that is heard.
async fn observe(
    conn: &mut SqliteConnection,
    sandbox: &SandboxId,
    seen: &Observation,
    now_ms: i64,
) -> Result<bool, StoreError> {
    let gone = seen.state == RunWord::Gone;
    let done = sqlx::query(
        "UPDATE runs SET state = $1, node = $2, observation = $3, reason = $4, \
         started_at_ms = COALESCE(started_at_ms, $5), ended_at_ms = $6 \
         WHERE sandbox = $7 AND run = $8 AND (observation < $3 OR $1 = 'gone') AND state <> 'gone'",
    )
    .bind(seen.state.as_str())
    .bind(&seen.node)
    .bind(signed(seen.observation))
    .bind(&seen.reason)
    .bind((seen.state != RunWord::Starting).then_some(now_ms))
    .bind(gone.then_some(now_ms))
    .bind(sandbox.as_str())
    .bind(i64::from(seen.run.0))
    .execute(conn)
    .await?;
    Ok(done.rows_affected() == 1)
}

async fn insert_metadata(
    conn: &mut SqliteConnection,
    id: &SandboxId,
    metadata: &BTreeMap<String, String>,
) -> Result<(), StoreError> {
    if metadata.is_empty() {
        return Ok(());
    }
    let mut query = QueryBuilder::<Sqlite>::new("INSERT INTO metadata (sandbox, key, value) ");
    query.push_values(metadata, |mut row, (key, value)| {
        row.push_bind(id.as_str().to_owned()).push_bind(key.clone()).push_bind(value.clone());
    });
    query.build().execute(conn).await?;
    Ok(())
}

async fn insert(conn: &mut SqliteConnection, new: &NewSandbox) -> Result<(), StoreError> {
    let made = sqlx::query(
        "INSERT INTO sandboxes (id, project, name, desired, state, generation, run, template_ref, template_digest, \
         memory_mib, vcpus, disk_bytes, env, metadata, created_at_ms, updated_at_ms, expires_at_ms) \
         SELECT $1, $2, $3, 'running', 'creating', 1, 1, $4, $5, $6, $7, $8, $9, $10, $11, $11, $12 \
         WHERE EXISTS (SELECT 1 FROM templates WHERE digest = $5 AND state = 'ready')",
    )
    .bind(new.id.as_str())
    .bind(&new.project)
    .bind(&new.name)
    .bind(&new.template_ref)
    .bind(&new.template_digest)
    .bind(i64::from(new.memory_mib))
    .bind(i64::from(new.vcpus))
    .bind(signed(new.disk_bytes))
    .bind(json(&new.env))
    .bind(json(&new.metadata))
    .bind(new.now_ms)
    .bind(new.expires_at_ms)
    .execute(&mut *conn)
    .await;
    match made {
        Ok(done) if done.rows_affected() == 0 => return Err(StoreError::NoTemplate),
        Ok(_) => {}
        Err(e) if StoreError::is_unique_violation(&e) => return Err(StoreError::NameTaken),
        Err(e) => return Err(e.into()),
    }
    insert_metadata(conn, &new.id, &new.metadata).await?;
    sqlx::query("INSERT INTO runs (sandbox, run, state, generation, observation) VALUES ($1, 1, 'starting', 1, 0)")
        .bind(new.id.as_str())
        .execute(conn)
        .await?;
    Ok(())
}

async fn fetch(conn: &mut SqliteConnection, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
    let sql = format!("SELECT {COLUMNS} {FROM} WHERE s.id = $1");
    sqlx::query(&sql).bind(id.as_str()).fetch_optional(conn).await?.as_ref().map(parse).transpose()
}

impl Store {
    /// The intent, its operation and its idempotency key, all or nothing.
    pub async fn create_sandbox(
        &self,
        new: NewSandbox,
        operation: OperationId,
        key: Option<IdempotencyKey>,
    ) -> Result<(), StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    if let Some(key) = key {
                        idempotency::insert(c, &key, Some(operation.as_str()), new.now_ms).await?;
                    }
                    insert(c, &new).await?;
                    let operation = NewOperation::of_sandbox(operation, "create_sandbox", &new.project, &new.id);
                    operations::insert(c, &operation, new.now_ms).await
                })
            })
            .await
    }

    /// The run is up: the sandbox is running and its create has succeeded.
    pub async fn create_succeeded(&self, row: SandboxRow, seen: Observation, now_ms: i64) -> Result<Moved, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let moved = advance(c, &row, SandboxState::Running, None, now_ms).await?;
                    if moved != Moved::Lost {
                        observe(c, &row.id, &seen, now_ms).await?;
                        operations::end_of_sandbox(c, &row.id, "create_sandbox", None, now_ms).await?;
                    }
                    Ok(moved)
                })
            })
            .await
    }

    /// The run could not be started. Its generation grows, so that a late start of it is refused by the node.
    pub async fn create_failed(
        &self,
        row: SandboxRow,
        code: String,
        message: String,
        now_ms: i64,
    ) -> Result<Moved, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let reason = format!("{code}: {message}");
                    let moved = advance(c, &row, SandboxState::Failed, Some(&reason), now_ms).await?;
                    if moved != Moved::Lost {
                        end_run(c, &row, &reason, now_ms).await?;
                        let error = Some((code.as_str(), message.as_str()));
                        operations::end_of_sandbox(c, &row.id, "create_sandbox", error, now_ms).await?;
                    }
                    Ok(moved)
                })
            })
            .await
    }

    /// Writes the intent to delete. Under way or done already: the operation that is at it.
    pub async fn request_delete(&self, id: SandboxId, now_ms: i64) -> Result<Deletion, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let Some(row) = fetch(c, &id).await? else { return Ok(Deletion::NotThere) };
                    if let Some(operation) = operations::last_of_sandbox(c, &id, "delete_sandbox").await? {
                        return Ok(Deletion::Operation(operation));
                    }
                    if advance(c, &row, SandboxState::Deleting, None, now_ms).await? == Moved::Lost {
                        return Err(StoreError::Corrupt(format!("{id} changed within a transaction")));
                    }
                    let error = Some(("gone", "the sandbox was deleted before it was running"));
                    operations::end_of_sandbox(c, &id, "create_sandbox", error, now_ms).await?;
                    sqlx::query("UPDATE runs SET generation = generation + 1 WHERE sandbox = $1 AND run = $2")
                        .bind(id.as_str())
                        .bind(i64::from(row.run.0))
                        .execute(&mut *c)
                        .await?;
                    let project: String = sqlx::query_scalar("SELECT project FROM sandboxes WHERE id = $1")
                        .bind(id.as_str())
                        .fetch_one(&mut *c)
                        .await?;
                    let operation = OperationId::new();
                    let new = NewOperation::of_sandbox(operation.clone(), "delete_sandbox", &project, &id);
                    operations::insert(c, &new, now_ms).await?;
                    Ok(Deletion::Operation(operation))
                })
            })
            .await
    }

    /// Nothing of it is left on the node.
    pub async fn delete_done(&self, row: SandboxRow, now_ms: i64) -> Result<Moved, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let moved = advance(c, &row, SandboxState::Deleted, None, now_ms).await?;
                    if moved != Moved::Lost {
                        end_run(c, &row, "deleted", now_ms).await?;
                        operations::end_of_sandbox(c, &row.id, "delete_sandbox", None, now_ms).await?;
                    }
                    Ok(moved)
                })
            })
            .await
    }

    /// Takes over an observation of the current run, and what it means for the sandbox: gone → failed, paused by the
    /// node → paused, running again → running. True when the sandbox's state changed.
    pub async fn observe_run(&self, id: SandboxId, seen: Observation, now_ms: i64) -> Result<bool, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let Some(row) = fetch(c, &id).await? else { return Ok(false) };
                    // A create that is under way is its driver's; it hears the same from the node's answer.
                    let driven = row.state.is_transient();
                    if row.run != seen.run || driven || !observe(c, &id, &seen, now_ms).await? {
                        return Ok(false);
                    }
                    let reason = seen.reason.as_deref().unwrap_or("vm_exited: the VM ended");
                    let (to, reason) = match seen.state {
                        RunWord::Gone if row.state.is_live() => (SandboxState::Failed, Some(reason)),
                        RunWord::Paused if row.state == SandboxState::Running => {
                            (SandboxState::Paused, seen.reason.as_deref())
                        }
                        RunWord::Running if row.state == SandboxState::Paused => (SandboxState::Running, None),
                        _ => return Ok(false),
                    };
                    Ok(advance(c, &row, to, reason, now_ms).await? != Moved::Lost)
                })
            })
            .await
    }

    /// Changes what the user may change. The name's uniqueness is the index's.
    pub async fn patch_sandbox(
        &self,
        id: SandboxId,
        patch: Patch,
        limit: usize,
        now_ms: i64,
    ) -> Result<Option<SandboxRow>, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let Some(mut row) = fetch(c, &id).await? else { return Ok(None) };
                    for (key, value) in patch.metadata {
                        match value {
                            Some(value) => row.metadata.insert(key, value),
                            None => row.metadata.remove(&key),
                        };
                    }
                    if row.metadata.len() > limit {
                        return Err(StoreError::MetadataLimit);
                    }
                    row.name = patch.name.unwrap_or(row.name);
                    row.expires_at_ms = patch.expires_at_ms.unwrap_or(row.expires_at_ms);
                    row.updated_at_ms = now_ms;
                    let done = sqlx::query(
                        "UPDATE sandboxes SET name = $1, metadata = $2, expires_at_ms = $3, updated_at_ms = $4 WHERE id = $5",
                    )
                    .bind(&row.name)
                    .bind(json(&row.metadata))
                    .bind(row.expires_at_ms)
                    .bind(now_ms)
                    .bind(id.as_str())
                    .execute(&mut *c)
                    .await;
                    match done {
                        Err(e) if StoreError::is_unique_violation(&e) => return Err(StoreError::NameTaken),
                        other => other?,
                    };
                    sqlx::query("DELETE FROM metadata WHERE sandbox = $1").bind(id.as_str()).execute(&mut *c).await?;
                    insert_metadata(c, &id, &row.metadata).await?;
                    Ok(Some(row))
                })
            })
            .await
    }

    /// Forgets what was deleted, and operations that ended, before the given time. A sandbox's operations go with it.
    pub async fn prune(&self, before_ms: i64, keys_before_ms: i64) -> Result<u64, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let mut rows = 0;
                    for (sql, time) in [
                        ("DELETE FROM operations WHERE sandbox IN (SELECT id FROM sandboxes WHERE deleted_at_ms < $1)", before_ms),
                        ("DELETE FROM sandboxes WHERE deleted_at_ms < $1", before_ms),
                        ("DELETE FROM operations WHERE kind = 'build_template' AND ended_at_ms < $1", keys_before_ms),
                        ("DELETE FROM idempotency WHERE created_at_ms < $1", keys_before_ms),
                    ] {
                        rows += sqlx::query(sql).bind(time).execute(&mut *c).await?.rows_affected();
                    }
                    Ok(rows)
                })
            })
            .await
    }
}

/// The run is over for us: its generation grows, so that a late call with the old one is refused by the node.
async fn end_run(conn: &mut SqliteConnection, row: &SandboxRow, reason: &str, now_ms: i64) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE runs SET state = 'gone', reason = $1, ended_at_ms = COALESCE(ended_at_ms, $2), \
         generation = generation + 1 WHERE sandbox = $3 AND run = $4",
    )
    .bind(reason)
    .bind(now_ms)
    .bind(row.id.as_str())
    .bind(i64::from(row.run.0))
    .execute(conn)
    .await?;
    Ok(())
}
