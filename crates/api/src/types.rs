//! Bodies of the API. Ids and states are strings here and typed in `space-core`; times are milliseconds since 1970 (UTC).
//! A field that is not known is refused, so that a typing error never passes as a default.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

pub type Metadata = BTreeMap<String, String>;

/// POST /v1/sandboxes
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSandbox {
    /// `name`, `name:tag` or `name@sha256:…`
    #[schema(example = "seed")]
    pub template: String,
    /// Unique among the sandboxes of the project that are not deleted; made up when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// MiB; must be the template's when given (the memory is frozen in it).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// Environment of every command.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub metadata: Metadata,
    /// The sandbox is deleted this long after its creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    pub id: String,
    pub name: String,
    /// creating, running, paused, suspending, suspended, stopping, stopped, waking, failed, deleting, deleted
    pub state: String,
    /// Why it is failed or paused: a stable code and a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// As asked for.
    pub template: String,
    /// As resolved: sha256:…
    pub template_digest: String,
    pub memory_mib: u32,
    pub vcpus: u32,
    pub disk_bytes: u64,
    pub env: BTreeMap<String, String>,
    pub metadata: Metadata,
    /// The life it is in, from 1.
    pub run: u32,
    pub generation: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    pub created_at_ms: i64,
    pub updated_at_ms: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SandboxPage {
    pub sandboxes: Vec<Sandbox>,
    /// Pass as `cursor` for the next page; absent on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// PATCH /v1/sandboxes/{id}. Metadata keys with null are removed, others set; absent keys stay.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PatchSandbox {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default)]
    pub metadata: BTreeMap<String, Option<String>>,
    /// Counted from now; null: never.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "double_option")]
    pub ttl_seconds: Option<Option<u64>>,
}

/// Tells an absent field (leave) from null (clear).
mod double_option {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::option_option, reason = "absent and null mean different things in a PATCH")]
    pub fn serialize<S: Serializer>(value: &Option<Option<u64>>, s: S) -> Result<S::Ok, S::Error> {
        value.as_ref().and_then(|v| *v).serialize(s)
    }

    #[expect(clippy::option_option, reason = "absent and null mean different things in a PATCH")]
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Option<u64>>, D::Error> {
        Option::<u64>::deserialize(d).map(Some)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OperationKind {
    CreateSandbox,
    DeleteSandbox,
    BuildTemplate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OperationState {
    Pending,
    Running,
    Succeeded,
    Failed,
}

impl OperationState {
    pub fn ended(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// The record of one asynchronous request. Answered with 202 while it runs, 200 when it has ended.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Operation {
    pub id: String,
    pub kind: OperationKind,
    pub state: OperationState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Of a failed one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<OperationError>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// The sandbox as it is now, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// What a template build made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<Template>,
    pub created_at_ms: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at_ms: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct OperationError {
    /// Stable, snake_case.
    pub code: String,
    pub message: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    pub step: String,
    pub done: u64,
    /// 0: not known.
    pub total: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct OperationPage {
    pub operations: Vec<Operation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    pub cols: u16,
    pub rows: u16,
}

/// POST /v1/sandboxes/{id}/commands: reserves a process; the first attach starts it (`start: true`: at once).
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateCommand {
    #[schema(example = json!(["python3", "-c", "print(6*7)"]))]
    pub argv: Vec<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Name or uid[:gid]; the template's user when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Gives the process a terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
    /// Whether it may be sent input; otherwise its standard input is empty.
    #[serde(default)]
    pub stdin: bool,
    /// The whole process tree is killed after this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// Start now instead of at the first attach.
    #[serde(default)]
    pub start: bool,
}

/// The right to attach to one process.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct CommandSession {
    pub id: String,
    pub sandbox_id: String,
    /// WebSocket address; the token goes into `Authorization: Bearer`, or into the query as `token`.
    pub url: String,
    pub token: String,
    pub token_expires_at_ms: i64,
}

impl std::fmt::Debug for CommandSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommandSession")
            .field("id", &self.id)
            .field("sandbox_id", &self.sandbox_id)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Process {
    pub id: String,
    /// reserved, running, exited
    pub state: String,
    pub argv: Vec<String>,
    pub user: String,
    pub workdir: String,
    pub terminal: bool,
    /// In the guest; 0 while reserved.
    pub pid: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at_ms: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at_ms: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<Exit>,
    /// Offsets of the output that is still held: `output_start..output_end`.
    pub output_start: u64,
    pub output_end: u64,
    pub attached: u32,
}

/// How a process ended. `code` is what a shell would report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Exit {
    /// exited, signaled, timeout, oom_killed, start_failed, lost
    pub reason: String,
    pub code: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ProcessList {
    pub processes: Vec<Process>,
}

/// POST …/processes/{id}/signal
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SendSignal {
    /// `TERM`, `SIGTERM` or a number.
    #[schema(example = "TERM")]
    pub signal: String,
    /// Every process of the command, also those that left its process group.
    #[serde(default)]
    pub tree: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct FileInfo {
    pub path: String,
    /// file, directory, symlink, other
    pub kind: String,
    pub size: u64,
    /// Permission bits, octal.
    pub mode: String,
    pub uid: u32,
    pub gid: u32,
    pub modified_at_ms: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct FileList {
    pub entries: Vec<FileInfo>,
    /// Pass as `after` for the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_after: Option<String>,
}

/// One change in a folder that is watched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEvent {
    /// `ready`, `created`, `modified`, `attributes`, `removed`, `moved_away`, `moved_here`, or `missed`: too much happened
    /// at once, look again.
    pub change: String,
    pub path: String,
    pub directory: bool,
    /// The same for the two halves of one move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cookie: Option<u32>,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MakeDirectory {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Missing parents too; an existing folder is no error then.
    #[serde(default)]
    pub parents: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RenameFile {
    pub from: String,
    pub to: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ArchiveResult {
    pub entries: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TemplateOptions {
    pub memory_mib: Option<u32>,
    pub vcpus: Option<u32>,
    pub disk_bytes: Option<u64>,
    /// Run by `/bin/sh -c` before the freeze: a warm server or interpreter is then in every sandbox from the start.
    pub start_command: Option<String>,
    /// Repeated until it exits with 0, before the freeze.
    pub ready_command: Option<String>,
    pub ready_timeout_seconds: Option<u64>,
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub workdir: Option<String>,
}

/// POST /v1/templates
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BuildTemplate {
    /// `name` or `name:tag` that will point to the result.
    pub tag: String,
    /// `seed`, `debian:SUITE+PACKAGE,…`, `dir:PATH`, `tar:PATH`, `oci:PATH`, `oci-archive:PATH`, `docker://HOST/REPOSITORY:TAG`. Paths are on the node.
    pub source: String,
    #[serde(default)]
    pub options: TemplateOptions,
    /// Allows a registry without TLS that is not on this machine.
    #[serde(default)]
    pub insecure_registry: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Template {
    pub digest: String,
    pub tags: Vec<String>,
    pub source: String,
    pub memory_mib: u32,
    pub vcpus: u32,
    pub disk_bytes: u64,
    pub disk_bytes_used: u64,
    pub memory_bytes_used: u64,
    pub user: String,
    pub workdir: String,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub kernel: String,
    pub vmm: String,
    /// Sandboxes made from it that are not deleted.
    pub sandboxes: u32,
    pub created_at_ms: i64,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct TemplateList {
    pub templates: Vec<Template>,
}

/// PUT /v1/templates/{digest}/tags
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TagTemplate {
    pub tag: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Everything, keys and templates from host paths included.
    Admin,
    /// Sandboxes, commands, files; templates from registries.
    Use,
    /// Only GET, and no attach.
    Read,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateKey {
    pub name: String,
    pub scope: Scope,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ApiKey {
    pub id: String,
    pub name: String,
    pub scope: Scope,
    pub created_at_ms: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at_ms: Option<i64>,
}

/// The one answer that holds the secret.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct NewApiKey {
    #[serde(flatten)]
    pub key: ApiKey,
    /// `sk-…`; shown once.
    pub secret: String,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ApiKeyList {
    pub keys: Vec<ApiKey>,
}

/// GET /v1/health
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// ok
    pub status: String,
    pub version: String,
}

/// GET /v1/info
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ServerInfo {
    pub version: String,
    pub node: String,
    pub driver: String,
    pub driver_version: String,
    pub driver_reason: String,
    pub cpus: u32,
    pub memory_total_bytes: u64,
    pub memory_reserved_bytes: u64,
    pub pool_total_bytes: u64,
    pub pool_free_bytes: u64,
    pub runs: u32,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct WaitQuery {
    /// Seconds to hold the answer until the operation has ended, at most 300.
    pub wait: Option<u64>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListSandboxesQuery {
    /// Comma separated; all but `deleted` when absent.
    pub state: Option<String>,
    /// Tag or digest as asked for at create, or the resolved digest.
    pub template: Option<String>,
    pub cursor: Option<String>,
    pub limit: Option<u32>,
    // `metadata.KEY=VALUE` pairs are read from the query as well.
}
