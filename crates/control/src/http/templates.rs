//! Templates: build, list, tag, delete. The node makes and holds them; tags are kept here.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use axum::{Extension, Json};
use http::{HeaderMap, StatusCode, Uri};
use space_api::problem::Code;
use space_api::{BuildTemplate, Operation, Problem, Scope, TagTemplate, Template, TemplateList, WaitQuery};
use space_core::OperationId;
use space_core::name::TemplateRef;

use super::auth::{Caller, forbidden};
use super::error::{Failed, Problems};
use super::extract::{Body, Params, Path};
use super::sandboxes::replay;
use super::{once, operations, present};
use crate::app::App;
use crate::clock::now_ms;
use crate::store::{StoreError, TagRemoval, TemplateRow};
use crate::validate;
use crate::work::{build, reconcile};

fn no_template(given: &str) -> Problem {
    let shown: String = given.chars().take(160).collect();
    Problem::new(Code::NotFound, format!("there is no template {shown:?}; GET /v1/templates lists what there is"))
}

async fn look_up(app: &App, reference: &TemplateRef) -> Result<Option<TemplateRow>, StoreError> {
    match reference {
        TemplateRef::Tag { name, tag } => app.store.template_by_tag(name, tag).await,
        TemplateRef::Digest(digest) => app.store.template_by_digest(digest).await,
    }
}

/// The template a reference means; the node is asked when it is not known here.
pub async fn resolve(app: &App, reference: &TemplateRef, given: &str) -> Result<TemplateRow, Failed> {
    if let Some(row) = look_up(app, reference).await? {
        return Ok(row);
    }
    reconcile::sync_templates(app).await?;
    look_up(app, reference).await?.ok_or_else(|| no_template(given).into())
}

/// Starts a build: 202 with the operation, whose progress can be watched.
#[utoipa::path(post, path = "/v1/templates", tag = "templates", request_body = BuildTemplate,
    params(WaitQuery, ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 200, description = "It has ended, well or not: see `state`", body = Operation),
        (status = 202, description = "It is under way", body = Operation), Problems))]
pub async fn build(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
    headers: HeaderMap,
    Body(body): Body<BuildTemplate>,
) -> Result<Response, Failed> {
    let wait = Params::parse(&uri, &["wait"])?.wait()?;
    validate::build_template(&body)?;
    if validate::needs_admin(&body) && caller.scope != Scope::Admin {
        let what = "building from a path of the node, or from a registry without TLS,";
        return Err(forbidden(Scope::Admin, what).into());
    }
    let key = once::key(&app, &headers, "/v1/templates", &body)?;
    if let Some(answer) = replay(&app, key.as_ref(), wait).await? {
        return Ok(answer);
    }
    let operation = OperationId::new();
    let spec = serde_json::to_string(&body).expect("a request is plain data");
    let made = app.store.create_build(operation.clone(), app.project.clone(), spec, key.clone(), now_ms()).await;
    match made {
        Ok(()) => build::start(&app, operation.clone()),
        Err(StoreError::KeySeen) => {
            let answer = replay(&app, key.as_ref(), wait).await?;
            let lost =
                || Problem::new(Code::Conflict, "the idempotency key was just forgotten; send the request again");
            return answer.ok_or_else(|| lost().into());
        }
        Err(error) => return Err(error.into()),
    }
    operations::answer(&app, &operation, wait).await
}

/// Every template that the node has.
#[utoipa::path(get, path = "/v1/templates", tag = "templates",
    responses((status = 200, description = "The templates, oldest first", body = TemplateList), Problems))]
pub async fn list(State(app): State<Arc<App>>) -> Result<Json<TemplateList>, Failed> {
    // What is known is an answer too when the node cannot be asked.
    if let Err(problem) = reconcile::sync_templates(&app).await {
        tracing::debug!(detail = problem.detail, "templates are listed from memory");
    }
    let rows = app.store.templates().await?;
    Ok(Json(TemplateList { templates: present::templates(&app, rows).await? }))
}

/// One template, by tag or digest.
#[utoipa::path(get, path = "/v1/templates/{reference}", tag = "templates",
    params(("reference" = String, Path, description = "`name`, `name:tag` or `sha256:…`")),
    responses((status = 200, description = "The template", body = Template), Problems))]
pub async fn get(State(app): State<Arc<App>>, Path(given): Path<String>) -> Result<Json<Template>, Failed> {
    let reference = validate::template_ref("reference", &given)?;
    let row = resolve(&app, &reference, &given).await?;
    present::template(&app, row).await?.map(Json).ok_or_else(|| no_template(&given).into())
}

/// Makes a tag point to the template.
#[utoipa::path(put, path = "/v1/templates/{reference}/tags", tag = "templates", request_body = TagTemplate,
    params(("reference" = String, Path, description = "`name`, `name:tag` or `sha256:…`")),
    responses((status = 200, description = "The template", body = Template), Problems))]
pub async fn tag(
    State(app): State<Arc<App>>,
    Path(given): Path<String>,
    Body(body): Body<TagTemplate>,
) -> Result<Json<Template>, Failed> {
    let reference = validate::template_ref("reference", &given)?;
    let (name, tag) = validate::tag(&body.tag)?;
    let row = resolve(&app, &reference, &given).await?;
    if !app.store.tag_template(row.digest.clone(), name, tag).await? {
        return Err(no_template(&given).into());
    }
    present::template(&app, row).await?.map(Json).ok_or_else(|| no_template(&given).into())
}

/// Deletes a template that no sandbox uses. By tag: only the tag, while other tags point to it.
#[utoipa::path(delete, path = "/v1/templates/{reference}", tag = "templates",
    params(("reference" = String, Path, description = "`name`, `name:tag` or `sha256:…`")),
    responses((status = 204, description = "It is gone"), Problems))]
pub async fn delete(State(app): State<Arc<App>>, Path(given): Path<String>) -> Result<StatusCode, Failed> {
    let reference = validate::template_ref("reference", &given)?;
    let row = resolve(&app, &reference, &given).await?;
    let removal = match reference {
        TemplateRef::Tag { name, tag } => app.store.untag_template(name, tag).await?,
        TemplateRef::Digest(_) => app.store.mark_template_deleting(row.digest).await?,
    };
    match removal {
        TagRemoval::NotThere => Err(no_template(&given).into()),
        TagRemoval::Untagged => Ok(StatusCode::NO_CONTENT),
        TagRemoval::Deleting { digest } => {
            app.points.reach("template_delete.intent").await;
            // Goes on when the client goes away.
            let (answer, done) = tokio::sync::oneshot::channel();
            let app_ = app.clone();
            app.spawn(async move {
                let _ = answer.send(build::remove_template(&app_, &digest).await);
            });
            match done.await {
                Ok(Ok(())) => Ok(StatusCode::NO_CONTENT),
                Ok(Err(problem)) => Err(problem.into()),
                Err(_) => {
                    Err(Problem::new(Code::Unavailable, "the server is stopping; it goes on after its start").into())
                }
            }
        }
    }
}
