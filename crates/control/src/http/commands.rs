//! Commands and processes of a sandbox. The guest is the only one that knows them: nothing of a process is stored here.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, StatusCode, Uri};
use space_api::problem::Code;
use space_api::{CommandSession, CreateCommand, Exit, Problem, Process, ProcessList, SendSignal, WaitQuery};
use space_core::CommandId;
use space_core::limits::{ATTACH_TOKEN_SECONDS, RESERVATION_SECONDS};
use space_core::token::Claims;
use space_proto::guest::{
    ExitReason, GetProcessRequest, ListProcessesRequest, ProcessInfo, ProcessRef, ProcessSpec, ProcessState, PtySize,
    ReserveRequest, SignalRequest,
};

use super::error::{Failed, Problems};
use super::extract::{Body, Params, Path};
use super::sandboxes::usable;
use super::{once, operations};
use crate::app::App;
use crate::clock::now_ms;
use crate::node::{SHORT, guest_problem, passed_on, to_guest};
use crate::store::{SandboxRow, StoreError};
use crate::validate;

/// Bounds on what a guest may make us say of its processes.
const ARGV_SHOWN: usize = 4096;
const PROCESSES_SHOWN: usize = 10_000;

pub fn command_id(text: &str) -> Result<CommandId, Problem> {
    text.parse().map_err(|_| {
        let shown: String = text.chars().take(80).collect();
        Problem::new(Code::NotFound, format!("there is no command {shown:?} in this sandbox"))
    })
}

fn guest_failed(status: tonic::Status) -> Failed {
    guest_problem(&status, false).into()
}

async fn session(app: &App, row: &SandboxRow, command: CommandId) -> Result<CommandSession, Failed> {
    let base = match app.data_url() {
        Some(url) => url,
        None => operations::node_info(app).await?.data_url,
    };
    let expires_ms = now_ms() + i64::try_from(ATTACH_TOKEN_SECONDS * 1000).unwrap_or(i64::MAX);
    let expires = u64::try_from(expires_ms / 1000).unwrap_or(0);
    let claims = Claims { sandbox: row.id.clone(), run: row.run, command: command.clone(), expires };
    Ok(CommandSession {
        id: command.to_string(),
        sandbox_id: row.id.to_string(),
        url: format!("{}/v1/attach", base.trim_end_matches('/')),
        token: app.signer.sign(&claims),
        token_expires_at_ms: i64::try_from(expires * 1000).unwrap_or(i64::MAX),
    })
}

fn spec(body: CreateCommand) -> ProcessSpec {
    ProcessSpec {
        argv: body.argv,
        env: body.env.into_iter().collect(),
        workdir: body.workdir.unwrap_or_default(),
        user: body.user.unwrap_or_default(),
        pty: body.terminal.map(|t| PtySize { cols: t.cols.into(), rows: t.rows.into() }),
        stdin: body.stdin,
        timeout_ms: body.timeout_seconds.unwrap_or(0).saturating_mul(1000),
        foreground: !body.start,
    }
}

/// Reserves a process; the first attach starts it, `start` at once.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/commands", tag = "commands", request_body = CreateCommand,
    params(("id" = String, Path, description = "Id or name"), ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 201, description = "The right to attach", body = CommandSession), Problems))]
pub async fn create(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Body(body): Body<CreateCommand>,
) -> Result<Response, Failed> {
    validate::create_command(&body)?;
    let row = usable(&app, &id).await?;
    let path = format!("/v1/sandboxes/{}/runs/{}/commands", row.id, row.run);
    let mut command = CommandId::new();
    if let Some(key) = once::key(&app, &headers, &path, &body)? {
        let inserted = app.store.insert_key_row(key.clone(), command.to_string(), now_ms()).await;
        match inserted {
            Ok(()) => {}
            // The first request may have died before it reserved: reserving again under its id is the same.
            Err(StoreError::KeySeen) => {
                let seen = once::seen(&app, Some(&key)).await?.and_then(|seen| seen.resource);
                command = command_id(&seen.unwrap_or_default())?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let start = body.start;
    let run = row.run_ref();
    let reserve = ReserveRequest {
        process_id: command.to_string(),
        spec: Some(spec(body)),
        expires_ms: RESERVATION_SECONDS * 1000,
    };
    app.node.guest().reserve(to_guest(&run, reserve, Some(SHORT))).await.map_err(guest_failed)?;
    if start {
        let process = ProcessRef { process_id: command.to_string() };
        app.node.guest().start(to_guest(&run, process, Some(SHORT))).await.map_err(guest_failed)?;
    }
    Ok((StatusCode::CREATED, Json(session(&app, &row, command).await?)).into_response())
}

/// A new token for a command that the sandbox knows: reserved, running, or ended not long ago.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/commands/{command}/attach", tag = "commands",
    params(("id" = String, Path, description = "Id or name"), ("command" = String, Path)),
    responses((status = 200, description = "The right to attach", body = CommandSession), Problems))]
pub async fn attach(
    State(app): State<Arc<App>>,
    Path((id, command)): Path<(String, String)>,
) -> Result<Json<CommandSession>, Failed> {
    let row = usable(&app, &id).await?;
    let command = command_id(&command)?;
    get_process(&app, &row, &command, Duration::ZERO).await?;
    Ok(Json(session(&app, &row, command).await?))
}

async fn get_process(app: &App, row: &SandboxRow, id: &CommandId, wait: Duration) -> Result<ProcessInfo, Failed> {
    let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    let request = GetProcessRequest { process_id: id.to_string(), wait_ms };
    let request = to_guest(&row.run_ref(), request, Some(wait + SHORT));
    Ok(app.node.guest().get_process(request).await.map_err(guest_failed)?.into_inner())
}

/// Processes of the sandbox: reserved, running, and ended not long ago.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes", operation_id = "list", tag = "processes", params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, description = "The processes", body = ProcessList), Problems))]
pub async fn processes(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<ProcessList>, Failed> {
    let row = usable(&app, &id).await?;
    let request = to_guest(&row.run_ref(), ListProcessesRequest {}, Some(SHORT));
    let list = app.node.guest().list_processes(request).await.map_err(guest_failed)?.into_inner();
    Ok(Json(ProcessList { processes: list.processes.into_iter().take(PROCESSES_SHOWN).map(process_shown).collect() }))
}

/// One process; `wait` holds the answer until it has ended.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes/{command}", operation_id = "get", tag = "processes",
    params(("id" = String, Path, description = "Id or name"), ("command" = String, Path), WaitQuery),
    responses((status = 200, description = "As it is now", body = Process), Problems))]
pub async fn process(
    State(app): State<Arc<App>>,
    Path((id, command)): Path<(String, String)>,
    uri: Uri,
) -> Result<Json<Process>, Failed> {
    let wait = Params::parse(&uri, &["wait"])?.wait()?.unwrap_or_default();
    let row = usable(&app, &id).await?;
    let command = command_id(&command)?;
    let answer = tokio::select! {
        answer = get_process(&app, &row, &command, wait) => answer?,
        () = app.stopping.cancelled() => get_process(&app, &row, &command, Duration::ZERO).await?,
    };
    Ok(Json(process_shown(answer)))
}

/// Sends a signal to the process group, or with `tree` to every process of the command.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/processes/{command}/signal", tag = "processes", request_body = SendSignal,
    params(("id" = String, Path, description = "Id or name"), ("command" = String, Path),
        ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 200, description = "The process as it was right after", body = Process), Problems))]
pub async fn signal(
    State(app): State<Arc<App>>,
    Path((id, command)): Path<(String, String)>,
    headers: HeaderMap,
    Body(body): Body<SendSignal>,
) -> Result<Response, Failed> {
    let number = validate::signal(&body.signal)?;
    let row = usable(&app, &id).await?;
    let command = command_id(&command)?;
    let path = format!("/v1/sandboxes/{}/processes/{command}/signal", row.id);
    let key = once::key(&app, &headers, &path, &body)?;
    let app_ = app.clone();
    let call = async move {
        let request = SignalRequest { process_id: command.to_string(), signal: number, kill_tree: body.tree };
        let request = to_guest(&row.run_ref(), request, Some(SHORT));
        let info = app_.node.guest().signal(request).await.map_err(guest_failed)?.into_inner();
        Ok(process_shown(info))
    };
    once::json_once(&app, key, call).await
}

/// A guest's words, bounded.
fn process_shown(info: ProcessInfo) -> Process {
    let state = match info.state() {
        ProcessState::Running => "running",
        ProcessState::Exited => "exited",
        ProcessState::Reserved | ProcessState::Unspecified => "reserved",
    };
    let spec = info.spec.unwrap_or_default();
    Process {
        id: passed_on(&info.process_id),
        state: state.to_owned(),
        argv: spec.argv.into_iter().take(ARGV_SHOWN).collect(),
        user: passed_on(&spec.user),
        workdir: passed_on(&spec.workdir),
        terminal: spec.pty.is_some(),
        pid: info.pid,
        started_at_ms: (info.started_unix_ms > 0).then_some(info.started_unix_ms),
        ended_at_ms: (info.ended_unix_ms > 0).then_some(info.ended_unix_ms),
        exit: info.exit.map(|exit| {
            let reason = match exit.reason() {
                ExitReason::ExitedNormally => "exited",
                ExitReason::Signaled => "signaled",
                ExitReason::Timeout => "timeout",
                ExitReason::OomKilled => "oom_killed",
                ExitReason::StartFailed => "start_failed",
                ExitReason::Lost | ExitReason::Unspecified => "lost",
            };
            Exit {
                reason: reason.to_owned(),
                code: exit.code,
                signal: (exit.signal != 0).then_some(exit.signal),
                message: (!exit.message.is_empty()).then(|| passed_on(&exit.message)),
            }
        }),
        output_start: info.output_start,
        output_end: info.output_end,
        attached: info.attached,
    }
}
