//! Rows as the API shows them. What a user sees of a sandbox is computed here and nowhere else.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use space_api::{Operation, OperationError, Progress, Sandbox, Template};

use super::error::Failed;
use crate::app::App;
use crate::store::{OperationRow, SandboxRow, StoreError, TemplateRow};

pub fn sandbox(row: SandboxRow) -> Sandbox {
    Sandbox {
        id: row.id.to_string(),
        name: row.name,
        state: row.state.to_string(),
        reason: row.reason,
        template: row.template_ref,
        template_digest: row.template_digest,
        memory_mib: row.memory_mib,
        vcpus: row.vcpus,
        disk_bytes: row.disk_bytes,
        env: row.env,
        metadata: row.metadata,
        run: row.run.0,
        generation: row.generation.0,
        node: row.node,
        created_at_ms: row.created_at_ms,
        updated_at_ms: row.updated_at_ms,
        expires_at_ms: row.expires_at_ms,
    }
}

/// An operation without what it is about.
pub fn operation(row: OperationRow) -> Operation {
    Operation {
        id: row.id.to_string(),
        kind: row.kind,
        state: row.state,
        sandbox_id: row.sandbox.map(String::from),
        error: row.error.map(|(code, message)| OperationError { code, message }),
        progress: row.progress.map(|(step, done, total)| Progress { step, done, total }),
        sandbox: None,
        template: None,
        created_at_ms: row.created_at_ms,
        ended_at_ms: row.ended_at_ms,
    }
}

/// An operation with the sandbox as it is now, or the template it made.
pub async fn full_operation(app: &App, row: OperationRow) -> Result<Operation, StoreError> {
    let digest = row.result_digest.clone();
    let about = row.sandbox.clone();
    let mut shown = operation(row);
    if let Some(id) = about {
        shown.sandbox = app.store.sandbox(&id).await?.map(sandbox);
    }
    if let Some(digest) = digest
        && let Some(row) = app.store.template_by_digest(&digest).await?
    {
        shown.template = template(app, row).await?;
    }
    Ok(shown)
}

/// 202 while it runs, 200 when it has ended.
pub async fn operation_answer(app: &App, row: OperationRow) -> Result<Response, Failed> {
    let status = if row.state.ended() { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(full_operation(app, row).await?)).into_response())
}

pub async fn template(app: &App, row: TemplateRow) -> Result<Option<Template>, StoreError> {
    Ok(templates(app, vec![row]).await?.pop())
}

/// Templates with their tags and how many sandboxes use them.
pub async fn templates(app: &App, rows: Vec<TemplateRow>) -> Result<Vec<Template>, StoreError> {
    let mut tags = app.store.tags().await?;
    let uses = app.store.template_uses().await?;
    rows.into_iter()
        .map(|row| {
            let mut shown: Template =
                serde_json::from_str(&row.info).map_err(|e| StoreError::Corrupt(format!("template: {e}")))?;
            shown.tags = tags.remove(&row.digest).unwrap_or_default();
            shown.sandboxes = uses.get(&row.digest).copied().unwrap_or(0);
            Ok(shown)
        })
        .collect()
}
