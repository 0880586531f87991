//! Operations: the record of each asynchronous request, and the lease of those that no sandbox's driver carries.

use space_api::{OperationKind, OperationState};
use space_core::{OperationId, SandboxId};
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row as _, Sqlite, SqliteConnection};

use super::{IdempotencyKey, Store, StoreError, idempotency, signed, templates, unsigned};
use crate::store::TemplateRow;

#[derive(Clone, Debug)]
pub struct OperationRow {
    pub id: OperationId,
    pub kind: OperationKind,
    pub state: OperationState,
    pub sandbox: Option<SandboxId>,
    /// The request of a build, JSON.
    pub spec: Option<String>,
    pub error: Option<(String, String)>,
    /// Step, done, total.
    pub progress: Option<(String, u64, u64)>,
    pub result_digest: Option<String>,
    pub attempts: u32,
    pub created_at_ms: i64,
    pub ended_at_ms: Option<i64>,
}

pub struct NewOperation<'a> {
    pub id: OperationId,
    pub project: &'a str,
    pub kind: &'static str,
    pub sandbox: Option<&'a SandboxId>,
    pub spec: Option<&'a str>,
}

impl<'a> NewOperation<'a> {
    pub(super) fn of_sandbox(id: OperationId, kind: &'static str, project: &'a str, sandbox: &'a SandboxId) -> Self {
        Self { id, project, kind, sandbox: Some(sandbox), spec: None }
    }
}

const COLUMNS: &str = "id, kind, state, sandbox, spec, error_code, error_message, step, done, total, result_digest, \
     attempts, created_at_ms, ended_at_ms";

fn parse(row: &SqliteRow) -> Result<OperationRow, StoreError> {
    let word = |column: &str| -> Result<serde_json::Value, StoreError> { Ok(row.try_get::<String, _>(column)?.into()) };
    let corrupt = |e: serde_json::Error| StoreError::Corrupt(e.to_string());
    let step: Option<String> = row.try_get("step")?;
    let (done, total) = (row.try_get("done")?, row.try_get("total")?);
    let error: (Option<String>, Option<String>) = (row.try_get("error_code")?, row.try_get("error_message")?);
    let id = |text: String| text.parse().map_err(|e| StoreError::Corrupt(format!("{e}")));
    Ok(OperationRow {
        id: id(row.try_get("id")?)?,
        kind: serde_json::from_value(word("kind")?).map_err(corrupt)?,
        state: serde_json::from_value(word("state")?).map_err(corrupt)?,
        sandbox: match row.try_get::<Option<String>, _>("sandbox")? {
            Some(text) => Some(text.parse().map_err(|e| StoreError::Corrupt(format!("{e}")))?),
            None => None,
        },
        spec: row.try_get("spec")?,
        error: error.0.zip(error.1),
        progress: step.map(|step| (step, unsigned(done), unsigned(total))),
        result_digest: row.try_get("result_digest")?,
        attempts: unsigned(row.try_get("attempts")?),
        created_at_ms: row.try_get("created_at_ms")?,
        ended_at_ms: row.try_get("ended_at_ms")?,
    })
}

pub(super) async fn insert(conn: &mut SqliteConnection, new: &NewOperation<'_>, now_ms: i64) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO operations (id, project, kind, state, sandbox, spec, created_at_ms) VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(new.id.as_str())
    .bind(new.project)
    .bind(new.kind)
    .bind("pending")
    .bind(new.sandbox.map(SandboxId::as_str))
    .bind(new.spec)
    .bind(now_ms)
    .execute(conn)
    .await?;
    Ok(())
}

/// Ends the open operations of one kind of a sandbox: well, or with a code and a message.
pub(super) async fn end_of_sandbox(
    conn: &mut SqliteConnection,
    sandbox: &SandboxId,
    kind: &str,
    error: Option<(&str, &str)>,
    now_ms: i64,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE operations SET state = $1, error_code = $2, error_message = $3, ended_at_ms = $4 \
         WHERE sandbox = $5 AND kind = $6 AND state IN ('pending', 'running')",
    )
    .bind(if error.is_some() { "failed" } else { "succeeded" })
    .bind(error.map(|e| e.0))
    .bind(error.map(|e| e.1))
    .bind(now_ms)
    .bind(sandbox.as_str())
    .bind(kind)
    .execute(conn)
    .await?;
    Ok(())
}

pub(super) async fn last_of_sandbox(
    conn: &mut SqliteConnection,
    sandbox: &SandboxId,
    kind: &str,
) -> Result<Option<OperationId>, StoreError> {
    let id: Option<String> =
        sqlx::query_scalar("SELECT id FROM operations WHERE sandbox = $1 AND kind = $2 ORDER BY id DESC LIMIT 1")
            .bind(sandbox.as_str())
            .bind(kind)
            .fetch_optional(conn)
            .await?;
    id.map(|id| id.parse().map_err(|e| StoreError::Corrupt(format!("{e}")))).transpose()
}

impl Store {
    pub async fn operation(&self, project: &str, id: &OperationId) -> Result<Option<OperationRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM operations WHERE id = $1 AND project = $2");
        let row = sqlx::query(&sql).bind(id.as_str()).bind(project).fetch_optional(&self.readers).await?;
        row.as_ref().map(parse).transpose()
    }

    /// Newest first; one more than `limit` when there are more.
    pub async fn list_operations(
        &self,
        project: &str,
        sandbox: Option<&SandboxId>,
        before: Option<&OperationId>,
        limit: u32,
    ) -> Result<Vec<OperationRow>, StoreError> {
        let mut query = QueryBuilder::<Sqlite>::new(format!("SELECT {COLUMNS} FROM operations WHERE project = "));
        query.push_bind(project);
        if let Some(sandbox) = sandbox {
            query.push(" AND sandbox = ").push_bind(sandbox.as_str());
        }
        if let Some(before) = before {
            query.push(" AND id < ").push_bind(before.as_str());
        }
        query.push(" ORDER BY id DESC LIMIT ").push_bind(i64::from(limit) + 1);
        query.build().fetch_all(&self.readers).await?.iter().map(parse).collect()
    }

    /// The operations of a sandbox, open or ended.
    pub async fn operation_ids_of(&self, sandbox: &SandboxId) -> Result<Vec<String>, StoreError> {
        Ok(sqlx::query_scalar("SELECT id FROM operations WHERE sandbox = $1")
            .bind(sandbox.as_str())
            .fetch_all(&self.readers)
            .await?)
    }

    pub async fn create_build(
        &self,
        id: OperationId,
        project: String,
        spec: String,
        key: Option<IdempotencyKey>,
        now_ms: i64,
    ) -> Result<(), StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    if let Some(key) = key {
                        idempotency::insert(c, &key, Some(id.as_str()), now_ms).await?;
                    }
                    let new = NewOperation {
                        id,
                        project: &project,
                        kind: "build_template",
                        sandbox: None,
                        spec: Some(&spec),
                    };
                    insert(c, &new, now_ms).await
                })
            })
            .await
    }

    /// Builds that nobody is at.
    pub async fn open_builds(&self, now_ms: i64) -> Result<Vec<OperationId>, StoreError> {
        let ids: Vec<String> = sqlx::query_scalar(
            "SELECT id FROM operations WHERE kind = 'build_template' AND state IN ('pending', 'running') \
             AND (lease_until_ms IS NULL OR lease_until_ms < $1) ORDER BY id LIMIT 100",
        )
        .bind(now_ms)
        .fetch_all(&self.readers)
        .await?;
        ids.into_iter().map(|id| id.parse().map_err(|e| StoreError::Corrupt(format!("{e}")))).collect()
    }

    /// Takes the build for `owner` until `until_ms`, when nobody else has it. Counts the attempt.
    pub async fn claim_build(
        &self,
        id: OperationId,
        owner: String,
        now_ms: i64,
        until_ms: i64,
    ) -> Result<Option<OperationRow>, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let done = sqlx::query(
                        "UPDATE operations SET state = 'running', owner = $1, lease_until_ms = $2, attempts = attempts + 1 \
                         WHERE id = $3 AND state IN ('pending', 'running') AND (lease_until_ms IS NULL OR lease_until_ms < $4)",
                    )
                    .bind(owner)
                    .bind(until_ms)
                    .bind(id.as_str())
                    .bind(now_ms)
                    .execute(&mut *c)
                    .await?;
                    if done.rows_affected() == 0 {
                        return Ok(None);
                    }
                    let sql = format!("SELECT {COLUMNS} FROM operations WHERE id = $1");
                    parse(&sqlx::query(&sql).bind(id.as_str()).fetch_one(c).await?).map(Some)
                })
            })
            .await
    }

    /// Writes progress and keeps the lease. False: the operation is no longer the owner's.
    pub async fn build_progress(
        &self,
        id: OperationId,
        owner: String,
        progress: (String, u64, u64),
        until_ms: i64,
    ) -> Result<bool, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let done = sqlx::query(
                        "UPDATE operations SET step = $1, done = $2, total = $3, lease_until_ms = $4 \
                         WHERE id = $5 AND owner = $6 AND state = 'running'",
                    )
                    .bind(progress.0)
                    .bind(signed(progress.1))
                    .bind(signed(progress.2))
                    .bind(until_ms)
                    .bind(id.as_str())
                    .bind(owner)
                    .execute(c)
                    .await?;
                    Ok(done.rows_affected() == 1)
                })
            })
            .await
    }

    /// Gives a claimed build back, to be taken up again.
    pub async fn release_build(&self, id: OperationId, owner: String, until_ms: i64) -> Result<(), StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    sqlx::query(
                        "UPDATE operations SET lease_until_ms = $1 WHERE id = $2 AND owner = $3 AND state = 'running'",
                    )
                    .bind(until_ms)
                    .bind(id.as_str())
                    .bind(owner)
                    .execute(c)
                    .await?;
                    Ok(())
                })
            })
            .await
    }

    /// Ends a build: the template and its tag, or a code and a message. False: it was no longer the owner's.
    pub async fn end_build(
        &self,
        id: OperationId,
        owner: String,
        result: Result<(TemplateRow, (String, String)), (String, String)>,
        now_ms: i64,
    ) -> Result<bool, StoreError> {
        self.writer
            .write(move |c| {
                Box::pin(async move {
                    let error = result.as_ref().err();
                    let done = sqlx::query(
                        "UPDATE operations SET state = $1, error_code = $2, error_message = $3, result_digest = $4, \
                         ended_at_ms = $5 WHERE id = $6 AND owner = $7 AND state = 'running'",
                    )
                    .bind(if error.is_some() { "failed" } else { "succeeded" })
                    .bind(error.map(|e| e.0.as_str()))
                    .bind(error.map(|e| e.1.as_str()))
                    .bind(result.as_ref().ok().map(|t| t.0.digest.as_str()))
                    .bind(now_ms)
                    .bind(id.as_str())
                    .bind(owner)
                    .execute(&mut *c)
                    .await?;
                    if done.rows_affected() == 0 {
                        return Ok(false);
                    }
                    if let Ok((template, (name, tag))) = &result {
                        templates::upsert(c, template).await?;
                        templates::set_tag(c, name, tag, &template.digest).await?;
                    }
                    Ok(true)
                })
            })
            .await
    }
}
