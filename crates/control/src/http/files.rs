//! Files of a sandbox: what they are, folders, renaming, removing. Their content is `transfer`'s.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, StatusCode, Uri};
use space_api::{FileInfo, FileList, MakeDirectory, Problem, RenameFile};
use space_proto::guest::{
    FileKind, FileStat, ListDirRequest, MakeDirRequest, PathRequest, RemoveFileRequest, RenameFileRequest,
};

use super::error::{Failed, Problems};
use super::extract::{Body, Params, Path};
use super::once;
use super::sandboxes::usable;
use crate::app::App;
use crate::node::{DELETE, SHORT, guest_problem, passed_on, to_guest};
use crate::validate;

const LIST_DEFAULT: u32 = 500;
const LIST_MAX: u64 = 2000;

/// `path` and `user` of a query, checked.
pub fn target(params: &Params) -> Result<(String, String), Problem> {
    let path =
        params.text("path").ok_or_else(|| validate::invalid("path", "path is missing: ?path=/home/user/file"))?;
    validate::path("path", path)?;
    validate::user("user", params.text("user"))?;
    Ok((path.to_owned(), params.text("user").unwrap_or_default().to_owned()))
}

pub fn file_failed(status: tonic::Status) -> Failed {
    guest_problem(&status, true).into()
}

pub fn shown(stat: FileStat) -> FileInfo {
    let kind = match stat.kind() {
        FileKind::File => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Other | FileKind::Unspecified => "other",
    };
    FileInfo {
        kind: kind.to_owned(),
        path: stat.path.chars().take(8192).collect(),
        size: stat.size,
        mode: format!("{:04o}", stat.mode & 0o7777),
        uid: stat.uid,
        gid: stat.gid,
        modified_at_ms: stat.modified_unix_ns / 1_000_000,
        target: (!stat.target.is_empty()).then(|| passed_on(&stat.target)),
    }
}

/// What a path is; a symbolic link is shown itself.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/info", tag = "files",
    params(("id" = String, Path, description = "Id or name"), ("path" = String, Query), ("user" = Option<String>, Query)),
    responses((status = 200, description = "The file", body = FileInfo), Problems))]
pub async fn info(State(app): State<Arc<App>>, Path(id): Path<String>, uri: Uri) -> Result<Json<FileInfo>, Failed> {
    let (path, user) = target(&Params::parse(&uri, &["path", "user"])?)?;
    let row = usable(&app, &id).await?;
    let request = to_guest(&row.run_ref(), PathRequest { path, user, follow: false }, Some(SHORT));
    let stat = app.node.guest().stat_file(request).await.map_err(file_failed)?;
    Ok(Json(shown(stat.into_inner())))
}

/// What is in a folder, sorted by name.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/list", tag = "files",
    params(("id" = String, Path, description = "Id or name"), ("path" = String, Query), ("user" = Option<String>, Query),
        ("after" = Option<String>, Query, description = "`next_after` of the page before"), ("limit" = Option<u32>, Query)),
    responses((status = 200, description = "A page", body = FileList), Problems))]
pub async fn list(State(app): State<Arc<App>>, Path(id): Path<String>, uri: Uri) -> Result<Json<FileList>, Failed> {
    let params = Params::parse(&uri, &["path", "user", "after", "limit"])?;
    let (path, user) = target(&params)?;
    let limit = params.number("limit", LIST_MAX)?.map_or(LIST_DEFAULT, |n| u32::try_from(n).unwrap_or(LIST_DEFAULT));
    let after = params.text("after").unwrap_or_default().to_owned();
    if !after.is_empty() {
        validate::path("after", &after)?;
    }
    let row = usable(&app, &id).await?;
    let request = ListDirRequest { path, user, limit: limit.max(1), after };
    let request = to_guest(&row.run_ref(), request, Some(SHORT));
    let list = app.node.guest().list_dir(request).await.map_err(file_failed)?.into_inner();
    let entries: Vec<FileInfo> = list.entries.into_iter().take(LIST_MAX as usize).map(shown).collect();
    let name = |entry: &FileInfo| entry.path.rsplit('/').next().unwrap_or_default().to_owned();
    let next_after = if list.more { entries.last().map(name) } else { None };
    Ok(Json(FileList { entries, next_after }))
}

/// Makes a folder.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/mkdir", tag = "files", request_body = MakeDirectory,
    params(("id" = String, Path, description = "Id or name"), ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 200, description = "The folder", body = FileInfo), Problems))]
pub async fn make_directory(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Body(body): Body<MakeDirectory>,
) -> Result<Response, Failed> {
    validate::path("path", &body.path)?;
    validate::user("user", body.user.as_deref())?;
    let row = usable(&app, &id).await?;
    let key = once::key(&app, &headers, &format!("/v1/sandboxes/{}/files/mkdir", row.id), &body)?;
    let app_ = app.clone();
    let call = async move {
        let user = body.user.clone().unwrap_or_default();
        let request = MakeDirRequest { path: body.path.clone(), user, parents: body.parents, mode: 0o755 };
        let request = to_guest(&row.run_ref(), request, Some(SHORT));
        Ok(shown(app_.node.guest().make_dir(request).await.map_err(file_failed)?.into_inner()))
    };
    once::json_once(&app, key, call).await
}

/// Renames a file or folder within the sandbox.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/rename", tag = "files", request_body = RenameFile,
    params(("id" = String, Path, description = "Id or name"), ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 200, description = "Under its new name", body = FileInfo), Problems))]
pub async fn rename(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Body(body): Body<RenameFile>,
) -> Result<Response, Failed> {
    validate::path("from", &body.from)?;
    validate::path("to", &body.to)?;
    validate::user("user", body.user.as_deref())?;
    let row = usable(&app, &id).await?;
    let key = once::key(&app, &headers, &format!("/v1/sandboxes/{}/files/rename", row.id), &body)?;
    let app_ = app.clone();
    let call = async move {
        let user = body.user.clone().unwrap_or_default();
        let request = RenameFileRequest { from: body.from.clone(), to: body.to.clone(), user };
        let request = to_guest(&row.run_ref(), request, Some(SHORT));
        Ok(shown(app_.node.guest().rename_file(request).await.map_err(file_failed)?.into_inner()))
    };
    once::json_once(&app, key, call).await
}

/// Removes a file, or with `recursive` a folder and what is in it.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(("id" = String, Path, description = "Id or name"), ("path" = String, Query), ("user" = Option<String>, Query),
        ("recursive" = Option<bool>, Query)),
    responses((status = 204, description = "It is gone"), Problems))]
pub async fn remove(State(app): State<Arc<App>>, Path(id): Path<String>, uri: Uri) -> Result<StatusCode, Failed> {
    let params = Params::parse(&uri, &["path", "user", "recursive"])?;
    let (path, user) = target(&params)?;
    let recursive = params.flag("recursive")?;
    let row = usable(&app, &id).await?;
    let request = to_guest(&row.run_ref(), RemoveFileRequest { path, user, recursive }, Some(DELETE));
    app.node.guest().remove_file(request).await.map_err(file_failed)?;
    Ok(StatusCode::NO_CONTENT)
}
