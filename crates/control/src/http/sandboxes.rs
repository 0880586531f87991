//! Sandboxes: create, look, change, delete.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderValue, Uri, header};
use space_api::problem::Code;
use space_api::{CreateSandbox, ListSandboxesQuery, Operation, PatchSandbox, Problem, Sandbox, SandboxPage, WaitQuery};
use space_core::admission::{Admission, Refusal, Verb, admit};
use space_core::limits::METADATA_KEYS_MAX;
use space_core::name::TemplateRef;
use space_core::{OperationId, SandboxId, SandboxState};

use super::error::{Failed, Problems};
use super::extract::{Body, Params, Path};
use super::{once, operations, present, templates};
use crate::app::App;
use crate::clock::now_ms;
use crate::node::{SHORT, node_problem, run_ref, timed};
use crate::store::{Deletion, NewSandbox, Patch, SandboxFilter, SandboxRow, StoreError};
use crate::validate::{self, invalid};
use crate::work;

/// A name that was made up is made up again when it is taken, so often.
const NAME_TRIES: usize = 4;

pub fn no_sandbox(id_or_name: &str) -> Problem {
    let shown: String = id_or_name.chars().take(80).collect();
    Problem::new(Code::NotFound, format!("there is no sandbox {shown:?}; GET /v1/sandboxes lists what there is"))
}

pub async fn find(app: &App, id_or_name: &str) -> Result<SandboxRow, Failed> {
    let row = app.store.find_sandbox(&app.project, id_or_name).await?;
    row.ok_or_else(|| no_sandbox(id_or_name).into())
}

/// A sandbox whose guest can be spoken to.
pub async fn usable(app: &App, id_or_name: &str) -> Result<SandboxRow, Failed> {
    let row = find(app, id_or_name).await?;
    match admit(Verb::Use, row.state) {
        Admission::Accept(_) | Admission::AlreadySo => Ok(row),
        Admission::Refuse(refusal) => {
            let code = if refusal == Refusal::Gone { Code::Gone } else { Code::NotRunning };
            let why = row.reason.as_deref().map(|r| format!(" ({r})")).unwrap_or_default();
            Err(Problem::new(code, format!("{refusal}; it is {}{why}", row.state)).into())
        }
    }
}

/// Memory and CPUs are frozen in the template: another number cannot be had.
fn check_sizes(body: &CreateSandbox, template: &crate::store::TemplateRow) -> Result<(), Problem> {
    if let Some(memory) = body.memory_mib
        && memory != template.memory_mib
    {
        let text = format!(
            "the template was frozen with {} MiB of memory, so a sandbox of it has as much; build a template with {memory} MiB",
            template.memory_mib
        );
        return Err(invalid("memory_mib", text));
    }
    if let Some(vcpus) = body.vcpus
        && vcpus != template.vcpus
    {
        let text = format!(
            "the template was frozen with {} CPUs, so a sandbox of it has as many; build a template with {vcpus}",
            template.vcpus
        );
        return Err(invalid("vcpus", text));
    }
    Ok(())
}

/// Creates a sandbox: 202 with the operation, or 200 when it ended within `wait`.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = CreateSandbox,
    params(WaitQuery, ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 200, description = "It has ended, well or not: see `state`", body = Operation),
        (status = 202, description = "It is under way", body = Operation), Problems))]
pub async fn create(
    State(app): State<Arc<App>>,
    uri: Uri,
    headers: HeaderMap,
    Body(body): Body<CreateSandbox>,
) -> Result<Response, Failed> {
    let wait = Params::parse(&uri, &["wait"])?.wait()?;
    let reference = validate::create_sandbox(&body)?;
    let key = once::key(&app, &headers, "/v1/sandboxes", &body)?;
    if let Some(answer) = replay(&app, key.as_ref(), wait).await? {
        return Ok(answer);
    }
    let template = templates::resolve(&app, &reference, &body.template).await?;
    check_sizes(&body, &template)?;
    let operation = OperationId::new();
    let mut tries = 0;
    let id = loop {
        tries += 1;
        let new = new_sandbox(&app, &body, &reference, &template);
        let id = new.id.clone();
        match app.store.create_sandbox(new, operation.clone(), key.clone()).await {
            Ok(()) => break id,
            Err(StoreError::NameTaken) if body.name.is_none() && tries < NAME_TRIES => {}
            Err(StoreError::KeySeen) => {
                let answer = replay(&app, key.as_ref(), wait).await?;
                let lost =
                    || Problem::new(Code::Conflict, "the idempotency key was just forgotten; send the request again");
                return answer.ok_or_else(|| lost().into());
            }
            Err(error) => return Err(error.into()),
        }
    };
    app.points.reach("create.intent").await;
    work::drive(&app, &id);
    operations::answer(&app, &operation, wait).await
}

fn new_sandbox(
    app: &App,
    body: &CreateSandbox,
    reference: &TemplateRef,
    template: &crate::store::TemplateRow,
) -> NewSandbox {
    let id = SandboxId::new();
    let now_ms = now_ms();
    let tail = &id.as_str()[id.as_str().len() - 10..];
    NewSandbox {
        project: app.project.clone(),
        name: body.name.clone().unwrap_or_else(|| format!("box-{tail}")),
        id,
        template_ref: reference.to_string(),
        template_digest: template.digest.clone(),
        memory_mib: template.memory_mib,
        vcpus: template.vcpus,
        disk_bytes: template.disk_bytes,
        env: body.env.clone(),
        metadata: body.metadata.clone(),
        now_ms,
        expires_at_ms: body.ttl_seconds.map(|s| after(now_ms, s)),
    }
}

fn after(now_ms: i64, seconds: u64) -> i64 {
    now_ms.saturating_add(i64::try_from(seconds.saturating_mul(1000)).unwrap_or(i64::MAX))
}

/// The answer to a repeated request that made an operation.
pub async fn replay(
    app: &App,
    key: Option<&crate::store::IdempotencyKey>,
    wait: Option<std::time::Duration>,
) -> Result<Option<Response>, Failed> {
    let Some(seen) = once::seen(app, key).await? else { return Ok(None) };
    let id = seen.resource.and_then(|id| id.parse::<OperationId>().ok());
    let id = id.ok_or_else(|| Problem::new(Code::Conflict, "a request with this key is being carried out"))?;
    operations::answer(app, &id, wait).await.map(Some)
}

/// Sandboxes, newest first. `metadata.KEY=VALUE` parameters must all match.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", params(ListSandboxesQuery),
    responses((status = 200, description = "A page", body = SandboxPage), Problems))]
pub async fn list(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<SandboxPage>, Failed> {
    let params = Params::parse(&uri, &["state", "template", "cursor", "limit", "metadata."])?;
    let mut filter = SandboxFilter { limit: params.limit()?, ..SandboxFilter::default() };
    for word in params.text("state").unwrap_or("").split(',').filter(|w| !w.is_empty()) {
        let state: SandboxState = word.parse().map_err(|e| invalid("state", format!("{e}")))?;
        filter.states.push(state);
    }
    match params.text("template").map(|t| validate::template_ref("template", t)).transpose()? {
        Some(TemplateRef::Digest(digest)) => filter.template_digest = Some(digest),
        Some(tag) => filter.template_ref = Some(tag.to_string()),
        None => {}
    }
    for (key, value) in params.starting_with("metadata.") {
        validate::metadata_pair(key, Some(value))?;
        filter.metadata.push((key.to_owned(), value.to_owned()));
    }
    if filter.metadata.len() > METADATA_KEYS_MAX {
        return Err(validate::too_much_metadata().into());
    }
    filter.before = match params.text("cursor") {
        Some(text) => Some(text.parse().map_err(|_| operations::bad_cursor())?),
        None => None,
    };
    let mut rows = app.store.list_sandboxes(&app.project, &filter).await?;
    let more = rows.len() > filter.limit as usize;
    rows.truncate(filter.limit as usize);
    let next_cursor = more.then(|| rows.last().map(|row| row.id.to_string())).flatten();
    Ok(Json(SandboxPage { sandboxes: rows.into_iter().map(present::sandbox).collect(), next_cursor }))
}

/// One sandbox, by id or name. A deleted one can be read by id for an hour.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, description = "The sandbox", body = Sandbox), Problems))]
pub async fn get(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Sandbox>, Failed> {
    Ok(Json(present::sandbox(find(&app, &id).await?)))
}

/// Changes name, metadata and time to live.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path, description = "Id or name")),
    request_body = PatchSandbox, responses((status = 200, description = "As it is now", body = Sandbox), Problems))]
pub async fn patch(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Body(body): Body<PatchSandbox>,
) -> Result<Json<Sandbox>, Failed> {
    if let Some(name) = &body.name {
        validate::sandbox_name(name)?;
    }
    for (key, value) in &body.metadata {
        validate::metadata_pair(key, value.as_deref())?;
    }
    if let Some(Some(seconds)) = body.ttl_seconds {
        validate::ttl(seconds)?;
    }
    let row = find(&app, &id).await?;
    if matches!(row.state, SandboxState::Deleting | SandboxState::Deleted) {
        return Err(Problem::new(Code::Gone, format!("the sandbox is {}", row.state)).into());
    }
    let now = now_ms();
    let patch = Patch {
        name: body.name,
        metadata: body.metadata,
        expires_at_ms: body.ttl_seconds.map(|ttl| ttl.map(|seconds| after(now, seconds))),
    };
    let row = app.store.patch_sandbox(row.id, patch, METADATA_KEYS_MAX, now).await?;
    row.map(|row| Json(present::sandbox(row))).ok_or_else(|| no_sandbox(&id).into())
}

/// Deletes it, whatever it is doing. Asked again: the same operation.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    params(("id" = String, Path, description = "Id or name"), WaitQuery),
    responses((status = 200, description = "It is gone", body = Operation),
        (status = 202, description = "It is going", body = Operation), Problems))]
pub async fn delete(State(app): State<Arc<App>>, Path(id): Path<String>, uri: Uri) -> Result<Response, Failed> {
    let wait = Params::parse(&uri, &["wait"])?.wait()?;
    let row = find(&app, &id).await?;
    let Deletion::Operation(operation) = app.store.request_delete(row.id.clone(), now_ms()).await? else {
        return Err(no_sandbox(&id).into());
    };
    app.points.reach("delete.intent").await;
    work::drive(&app, &row.id);
    // A create that is under way learns that it is no longer wanted, and whoever waits for it.
    let (app_, sandbox) = (app.clone(), row.id.clone());
    app.spawn(async move { work::wake(&app_, &sandbox).await });
    operations::answer(&app, &operation, wait).await
}

/// The console of the guest, its last part when it is long.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/console", tag = "sandboxes", params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, description = "Text as the guest wrote it", body = String, content_type = "text/plain",
        headers(("space-truncated" = bool, description = "Whether the beginning is missing"))), Problems))]
pub async fn console(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, Failed> {
    let row = find(&app, &id).await?;
    if row.state == SandboxState::Deleted {
        return Err(Problem::new(Code::Gone, "the sandbox is deleted, and its console with it").into());
    }
    let answer = app.node.node().read_console(timed(run_ref(&row.run_ref()), SHORT)).await;
    let console = answer.map_err(|status| node_problem(&status))?.into_inner();
    let truncated = HeaderValue::from_static(if console.truncated { "true" } else { "false" });
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    let mut response = console.text.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response.headers_mut().insert("space-truncated", truncated);
    // A browser must not take what a guest wrote for a page.
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Ok(response)
}
