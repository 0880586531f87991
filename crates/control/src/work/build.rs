//! Template builds and removals. A build belongs to one copy at a time, by a lease it keeps while progress is written; a
//! build whose copy died is begun again by another, a few times at most.

use std::sync::Arc;
use std::time::{Duration, Instant};

use space_api::problem::Code;
use space_api::{BuildTemplate, Problem, Template};
use space_core::OperationId;
use space_core::name::TemplateRef;
use space_proto::node::build_event::Kind;
use space_proto::node::{BuildTemplateRequest, DeleteTemplateRequest, TemplateInfo, TemplateOptions};

use crate::app::App;
use crate::clock::now_ms;
use crate::node::{self, timed};
use crate::store::{OperationRow, StoreError, TemplateRow};

const LEASE: Duration = Duration::from_secs(10);
/// At most so often progress is written.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);
const RENEW_EVERY: Duration = Duration::from_secs(3);
const ATTEMPTS_MAX: u32 = 3;

type Failure = (String, String);

/// Works on the build, when it is nobody else's.
pub fn start(app: &Arc<App>, id: OperationId) {
    let at_it = app.clone();
    app.spawn(async move {
        if let Err(error) = run(&at_it, &id).await
            && !matches!(error, StoreError::Closed)
        {
            tracing::error!(operation = %id, %error, "the build could not be recorded");
        }
        at_it.waiters.wake(id.as_str());
    });
}

fn until() -> i64 {
    now_ms() + i64::try_from(LEASE.as_millis()).unwrap_or(i64::MAX)
}

async fn run(app: &App, id: &OperationId) -> Result<(), StoreError> {
    let claimed = app.store.claim_build(id.clone(), app.instance.clone(), now_ms(), until()).await?;
    let Some(row) = claimed else { return Ok(()) };
    let result = if row.attempts > ATTEMPTS_MAX {
        let text = format!("the server ended {ATTEMPTS_MAX} times during this build; see its log");
        Err((Code::Internal.as_str().to_owned(), text))
    } else {
        match build(app, &row).await? {
            Some(result) => result,
            None => return Ok(()),
        }
    };
    app.points.reach("build.node_done").await;
    let result = match result {
        Ok((template, tag)) => Ok((template, tag)),
        Err((code, message)) => {
            tracing::warn!(operation = %id, code, message, "the build failed");
            Err((code, message))
        }
    };
    app.store.end_build(id.clone(), app.instance.clone(), result, now_ms()).await?;
    app.points.reach("build.recorded").await;
    Ok(())
}

fn request(row: &OperationRow) -> Result<(BuildTemplateRequest, (String, String)), Failure> {
    let corrupt = |e: &dyn std::fmt::Display| (Code::Internal.as_str().to_owned(), e.to_string());
    let spec: BuildTemplate = serde_json::from_str(row.spec.as_deref().unwrap_or("")).map_err(|e| corrupt(&e))?;
    let tag = match spec.tag.parse() {
        Ok(TemplateRef::Tag { name, tag }) => (name, tag),
        _ => return Err(corrupt(&"the tag is not a tag")),
    };
    let options = spec.options;
    let request = BuildTemplateRequest {
        build_id: row.id.to_string(),
        source: spec.source,
        options: Some(TemplateOptions {
            memory_mib: options.memory_mib.unwrap_or(0),
            vcpus: options.vcpus.unwrap_or(0),
            disk_bytes: options.disk_bytes.unwrap_or(0),
            start_command: options.start_command.unwrap_or_default(),
            ready_command: options.ready_command.unwrap_or_default(),
            ready_timeout_ms: options.ready_timeout_seconds.unwrap_or(0).saturating_mul(1000),
            env: options.env.into_iter().collect(),
            user: options.user.unwrap_or_default(),
            workdir: options.workdir.unwrap_or_default(),
        }),
        insecure_registry: spec.insecure_registry,
    };
    Ok((request, tag))
}

/// Runs the build at the node. `None`: it is no longer ours, or it is to be tried again later.
async fn build(
    app: &App,
    row: &OperationRow,
) -> Result<Option<Result<(TemplateRow, (String, String)), Failure>>, StoreError> {
    let (request, tag) = match request(row) {
        Ok(parts) => parts,
        Err(failure) => return Ok(Some(Err(failure))),
    };
    let failed = |status: &tonic::Status| {
        let problem = node::node_problem(status);
        (problem.code, problem.detail)
    };
    let mut events = match app.node.node().build_template(request).await {
        Ok(answer) => answer.into_inner(),
        Err(status) if node::is_transient(&status) => {
            // As many attempts as the limit allows, each a lease apart.
            app.store.release_build(row.id.clone(), app.instance.clone(), until()).await?;
            return Ok(None);
        }
        Err(status) => return Ok(Some(Err(failed(&status)))),
    };
    let mut progress = (String::new(), 0, 0);
    let mut written = Instant::now();
    let mut changed = false;
    loop {
        let event = tokio::time::timeout(RENEW_EVERY, events.message()).await;
        match event {
            Err(_) => changed = true,
            Ok(Ok(Some(event))) => match event.kind {
                Some(Kind::Progress(now)) => {
                    let new_step = now.step != progress.0;
                    progress = (node::passed_on(&now.step), now.done, now.total);
                    changed = new_step || written.elapsed() >= PROGRESS_EVERY;
                }
                Some(Kind::Error(error)) => {
                    let code =
                        if error.code.is_empty() { "build_failed".to_owned() } else { node::passed_on(&error.code) };
                    return Ok(Some(Err((code, node::passed_on(&error.message)))));
                }
                Some(Kind::Result(info)) => {
                    let template = template_row(info).ok_or_else(|| {
                        (Code::Internal.as_str().to_owned(), "the node's answer has no digest".to_owned())
                    });
                    return Ok(Some(template.map(|template| (template, tag))));
                }
                None => {}
            },
            Ok(Ok(None)) => {
                let text = "the node ended the build without a result; see its log";
                return Ok(Some(Err((Code::Internal.as_str().to_owned(), text.to_owned()))));
            }
            Ok(Err(status)) if node::is_transient(&status) => {
                app.store.release_build(row.id.clone(), app.instance.clone(), until()).await?;
                return Ok(None);
            }
            Ok(Err(status)) => return Ok(Some(Err(failed(&status)))),
        }
        if changed {
            changed = false;
            written = Instant::now();
            let ours =
                app.store.build_progress(row.id.clone(), app.instance.clone(), progress.clone(), until()).await?;
            if !ours {
                // Dropping the stream cancels the build at the node.
                return Ok(None);
            }
        }
    }
}

/// Lets the node remove a template that is marked for it. A refusal puts it back.
pub async fn remove_template(app: &App, digest: &str) -> Result<(), Problem> {
    let request = DeleteTemplateRequest { digest: digest.to_owned() };
    let refused = match app.node.node().delete_template(timed(request, node::DELETE)).await {
        Ok(_) => None,
        Err(status) if status.code() == tonic::Code::NotFound => None,
        Err(status) if status.code() == tonic::Code::FailedPrecondition => {
            Some(Problem::new(Code::InUse, node::passed_on(status.message())))
        }
        // Stays marked: the reconciler tries again.
        Err(status) => return Err(node::node_problem(&status)),
    };
    app.points.reach("template_delete.node_done").await;
    let done = app.store.template_delete_done(digest.to_owned(), refused.is_none()).await;
    done.map_err(|error| crate::http::error::store_problem(&error))?;
    refused.map_or(Ok(()), Err)
}

/// The node's template in the store's form; `None` when its digest is not one.
pub fn template_row(info: TemplateInfo) -> Option<TemplateRow> {
    if !space_core::name::is_digest(&info.digest) {
        return None;
    }
    let options = info.options.unwrap_or_default();
    let defaults = info.defaults.unwrap_or_default();
    let template = Template {
        digest: info.digest.clone(),
        tags: Vec::new(),
        source: node::passed_on(&info.source),
        memory_mib: options.memory_mib,
        vcpus: options.vcpus,
        disk_bytes: options.disk_bytes,
        disk_bytes_used: info.disk_bytes_used,
        memory_bytes_used: info.memory_bytes_used,
        user: node::passed_on(&defaults.user),
        workdir: node::passed_on(&defaults.workdir),
        entrypoint: info.entrypoint,
        cmd: info.cmd,
        kernel: node::passed_on(&info.kernel),
        vmm: node::passed_on(&info.vmm),
        sandboxes: 0,
        created_at_ms: info.created_unix_ms,
    };
    Some(TemplateRow {
        digest: info.digest,
        memory_mib: template.memory_mib,
        vcpus: template.vcpus,
        disk_bytes: template.disk_bytes,
        info: serde_json::to_string(&template).ok()?,
        created_at_ms: template.created_at_ms,
    })
}
