//! Contents of files and folders, streamed both ways. Each chunk is asked for when the other side has taken the one before,
//! so that nothing is held whole and a slow reader slows the guest down, not us.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::body::{Body, BodyDataStream};
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use space_api::problem::Code;
use space_api::{ArchiveResult, FileInfo, Problem};
use space_core::limits::STREAM_CHUNK_BYTES;
use space_proto::guest::{FileChunk, FileKind, FileStat, PathRequest, ReadFileRequest, WriteFileChunk, WriteFileOpen};
use tokio::sync::oneshot;
use tonic::{Status, Streaming};

use super::error::{Failed, Problems};
use super::extract::{Params, Path};
use super::files::{file_failed, shown, target};
use super::sandboxes::usable;
use crate::app::App;
use crate::node::{SHORT, to_guest};
use crate::validate;

/// A sender or a guest that moves nothing for this long is given up.
const IDLE: Duration = Duration::from_secs(120);
/// How long a refused upload is read on.
const LINGER: Duration = Duration::from_secs(2);

/// A wanted part of a file, from `Range`. Several ranges at once are answered with the whole file, as the standard allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Whole,
    From(u64),
    /// First and last byte.
    Between(u64, u64),
    Last(u64),
}

fn wanted(headers: &HeaderMap) -> Wanted {
    let parse = || {
        let text = headers.get(header::RANGE)?.to_str().ok()?.trim();
        let range = text.strip_prefix("bytes=")?.trim();
        let (first, last) = range.split_once('-')?;
        let number = |t: &str| t.parse::<u64>().ok();
        match (first, last) {
            ("", last) => Some(Wanted::Last(number(last)?)),
            (first, "") => Some(Wanted::From(number(first)?)),
            (first, last) => {
                let (first, last) = (number(first)?, number(last)?);
                (first <= last).then_some(Wanted::Between(first, last))
            }
        }
    };
    parse().unwrap_or(Wanted::Whole)
}

fn unsatisfiable(size: u64) -> Response {
    let text = format!("the file has {size} bytes; the range is outside of it");
    let mut answer = Failed::from(Problem::new(Code::RangeNotSatisfiable, text)).into_response();
    if let Ok(value) = HeaderValue::from_str(&format!("bytes */{size}")) {
        answer.headers_mut().insert(header::CONTENT_RANGE, value);
    }
    answer
}

/// The first byte and how many, of a file of `size`. `None`: outside. A length of 0 means "to the end" to the guest.
fn resolve(wanted: Wanted, size: u64) -> Option<(u64, u64)> {
    let (first, length) = match wanted {
        Wanted::Whole => return Some((0, 0)),
        Wanted::From(first) => (first, size.checked_sub(first)?),
        Wanted::Between(first, last) => {
            (first, size.checked_sub(first)?.min(last.checked_sub(first)?.saturating_add(1)))
        }
        Wanted::Last(count) => (size.saturating_sub(count), count.min(size)),
    };
    (length > 0).then_some((first, length))
}

/// The content of a file, or with `Range` a part of it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(("id" = String, Path, description = "Id or name"), ("path" = String, Query), ("user" = Option<String>, Query),
        ("Range" = Option<String>, Header)),
    responses((status = 200, description = "The file", content_type = "application/octet-stream", body = inline(Vec<u8>)),
        (status = 206, description = "The part", content_type = "application/octet-stream", body = inline(Vec<u8>)), Problems))]
pub async fn read(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Failed> {
    let (path, user) = target(&Params::parse(&uri, &["path", "user"])?)?;
    let row = usable(&app, &id).await?;
    let wanted = wanted(&headers);
    let (mut offset, mut length) = (0, 0);
    if wanted != Wanted::Whole {
        let request = PathRequest { path: path.clone(), user: user.clone(), follow: true };
        let stat = app.node.guest().stat_file(to_guest(&row.run_ref(), request, Some(SHORT))).await;
        let stat = stat.map_err(file_failed)?.into_inner();
        if stat.kind() == FileKind::File {
            match resolve(wanted, stat.size) {
                Some((o, l)) => (offset, length) = (o, l),
                None => return Ok(unsatisfiable(stat.size)),
            }
        }
    }
    let request = to_guest(&row.run_ref(), ReadFileRequest { path, user, offset, length }, None);
    let (stat, first, rest) = begin(app.node.guest().read_file(request)).await?;
    let size = stat.size;
    let part = length > 0;
    let expected = if part { length } else { size };
    // A file without a size may have content all the same (/proc), so its length is not promised.
    let promised = part || size > 0;
    let body = content(first, rest, promised.then_some(expected));
    let mut answer = Body::from_stream(body).into_response();
    bytes_headers(&mut answer, "application/octet-stream");
    let headers = answer.headers_mut();
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if promised {
        headers.insert(header::CONTENT_LENGTH, expected.into());
    }
    if part {
        let text = format!("bytes {offset}-{}/{size}", offset + length - 1);
        headers.insert(header::CONTENT_RANGE, HeaderValue::from_str(&text).expect("numbers are ASCII"));
        *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(answer)
}

/// A guest's bytes are never a page of ours.
fn bytes_headers(answer: &mut Response, kind: &'static str) {
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

/// The stat that comes first, and the data that may have come with it.
async fn begin(
    call: impl Future<Output = Result<tonic::Response<Streaming<FileChunk>>, Status>>,
) -> Result<(FileStat, Bytes, Streaming<FileChunk>), Failed> {
    let opening = async {
        let mut chunks = call.await?.into_inner();
        let first = chunks.message().await?;
        Ok::<_, Status>((first, chunks))
    };
    let Ok(opened) = tokio::time::timeout(SHORT, opening).await else {
        return Err(Problem::new(Code::Timeout, "the sandbox did not answer in time").into());
    };
    match opened.map_err(file_failed)? {
        (Some(FileChunk { stat: Some(stat), data }), chunks) => Ok((stat, data, chunks)),
        _ => Err(Problem::new(Code::Internal, "the sandbox answered out of turn").into()),
    }
}

/// The data of a stream, at most `limit` bytes of it: the file may have grown since. When it shrank, the body ends early
/// and the client sees that less came than was promised.
fn content(
    first: Bytes,
    rest: Streaming<FileChunk>,
    limit: Option<u64>,
) -> impl Stream<Item = Result<Bytes, std::io::Error>> {
    let left = limit.unwrap_or(u64::MAX);
    futures::stream::unfold((Some(first), rest, left), |(first, mut rest, mut left)| async move {
        let mut next = first;
        loop {
            if left == 0 {
                return None;
            }
            let mut data = match next.take() {
                Some(data) => data,
                None => match tokio::time::timeout(IDLE, rest.message()).await {
                    Err(_) => return Some((Err(std::io::Error::other("the sandbox went silent")), (None, rest, 0))),
                    Ok(Err(status)) => return Some((Err(std::io::Error::other(status.to_string())), (None, rest, 0))),
                    Ok(Ok(None)) => return None,
                    Ok(Ok(Some(chunk))) => chunk.data,
                },
            };
            if data.is_empty() {
                continue;
            }
            data.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            left -= data.len() as u64;
            return Some((Ok(data), (None, rest, left)));
        }
    })
}

/// Why a body ended before its end.
#[derive(Default)]
struct Broken(Mutex<Option<Problem>>);

impl Broken {
    fn set(&self, problem: Problem) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(problem);
    }

    fn take(&self) -> Option<Problem> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A body that its last holder gives back, to be read to its end by somebody else.
struct Returned {
    body: Option<Pin<Box<BodyDataStream>>>,
    back: Option<oneshot::Sender<Pin<Box<BodyDataStream>>>>,
}

impl Returned {
    fn new(body: Body) -> (Self, oneshot::Receiver<Pin<Box<BodyDataStream>>>) {
        let (back, returned) = oneshot::channel();
        (Self { body: Some(Box::pin(body.into_data_stream())), back: Some(back) }, returned)
    }

    async fn next(&mut self) -> Option<Result<Bytes, axum::Error>> {
        self.body.as_mut()?.next().await
    }
}

impl Drop for Returned {
    fn drop(&mut self) {
        if let (Some(body), Some(back)) = (self.body.take(), self.back.take()) {
            let _ = back.send(body);
        }
    }
}

/// A refusal while the client may still be sending: what it sends is read and thrown away for a moment after the answer,
/// because closing at once would cost it the answer.
async fn refuse_upload(failed: Failed, body: oneshot::Receiver<Pin<Box<BodyDataStream>>>) -> Response {
    let Ok(Ok(rest)) = tokio::time::timeout(Duration::from_millis(100), body).await else {
        return failed.into_response();
    };
    let text = serde_json::to_vec(&failed.0).expect("a problem is plain data");
    let (mut parts, _) = failed.into_response().into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    let until = tokio::time::Instant::now() + LINGER;
    let thrown_away = futures::stream::unfold(rest, move |mut rest| async move {
        match tokio::time::timeout_at(until, rest.next()).await {
            Ok(Some(Ok(_))) => Some((Bytes::new(), rest)),
            _ => None,
        }
    });
    let thrown_away = thrown_away.filter(|_| std::future::ready(false));
    let body = tokio_stream::once(Bytes::from(text)).chain(thrown_away).map(Ok::<_, std::convert::Infallible>);
    Response::from_parts(parts, Body::from_stream(body))
}

struct Uploading {
    body: Returned,
    rest: Bytes,
    over: bool,
    broken: Arc<Broken>,
}

/// An upload as the guest wants it: `open`, data in bounded chunks, and `end` only when the body ended well.
fn upload(
    open: WriteFileOpen,
    body: Returned,
    broken: Arc<Broken>,
) -> impl Stream<Item = WriteFileChunk> + Send + 'static {
    let state = Uploading { body, rest: Bytes::new(), over: false, broken };
    let first = WriteFileChunk { open: Some(open), data: Bytes::new(), end: false };
    let data = futures::stream::unfold(state, |mut state| async move {
        while state.rest.is_empty() && !state.over {
            match tokio::time::timeout(IDLE, state.body.next()).await {
                Ok(Some(Ok(data))) => state.rest = data,
                Ok(Some(Err(_))) => {
                    let text = "the body broke off before its end; nothing was written";
                    state.broken.set(Problem::new(Code::InvalidRequest, text));
                    return None;
                }
                Ok(None) => {
                    state.over = true;
                    let end = WriteFileChunk { open: None, data: Bytes::new(), end: true };
                    return Some((end, state));
                }
                Err(_) => {
                    state.broken.set(Problem::new(Code::Timeout, "no data came for 120 s; nothing was written"));
                    return None;
                }
            }
        }
        if state.rest.is_empty() {
            return None;
        }
        let data = state.rest.split_to(state.rest.len().min(STREAM_CHUNK_BYTES));
        Some((WriteFileChunk { open: None, data, end: false }, state))
    });
    tokio_stream::once(first).chain(data)
}

fn size_hint(headers: &HeaderMap) -> u64 {
    headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok()).unwrap_or(0)
}

/// Writes a file, whole or not at all.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(("id" = String, Path, description = "Id or name"), ("path" = String, Query), ("user" = Option<String>, Query),
        ("mode" = Option<String>, Query, description = "Octal; 644 when absent"),
        ("recursive" = Option<bool>, Query, description = "Make missing folders")),
    request_body(content = inline(Vec<u8>), content_type = "application/octet-stream"),
    responses((status = 200, description = "The file as it is now", body = FileInfo), Problems))]
pub async fn write(State(app): State<Arc<App>>, Path(id): Path<String>, request: Request) -> Result<Response, Failed> {
    let params = Params::parse(request.uri(), &["path", "user", "mode", "recursive"])?;
    let (path, user) = target(&params)?;
    let mode = params.text("mode").map_or(Ok(0), |text| validate::mode("mode", text))?;
    let parents = params.flag("recursive")?;
    let row = usable(&app, &id).await?;
    let open = WriteFileOpen { path, user, mode, size_hint: size_hint(request.headers()), parents };
    let broken = Arc::new(Broken::default());
    let (body, returned) = Returned::new(request.into_body());
    let chunks = upload(open, body, broken.clone());
    let answer = app.node.guest().write_file(to_guest(&row.run_ref(), chunks, None)).await;
    if let Some(problem) = broken.take() {
        return Err(problem.into());
    }
    match answer {
        Ok(stat) => Ok(Json(shown(stat.into_inner())).into_response()),
        Err(status) => Ok(refuse_upload(file_failed(status), returned).await),
    }
}

/// A folder (or file) as a tar stream; the names in it are relative to the path.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/archive", tag = "files",
    params(("id" = String, Path, description = "Id or name"), ("path" = String, Query), ("user" = Option<String>, Query)),
    responses((status = 200, description = "A tar stream", content_type = "application/x-tar", body = inline(Vec<u8>)), Problems))]
pub async fn read_archive(State(app): State<Arc<App>>, Path(id): Path<String>, uri: Uri) -> Result<Response, Failed> {
    let (path, user) = target(&Params::parse(&uri, &["path", "user"])?)?;
    let row = usable(&app, &id).await?;
    let request = to_guest(&row.run_ref(), PathRequest { path, user, follow: true }, None);
    let opening = async {
        let mut chunks = app.node.guest().read_archive(request).await?.into_inner();
        let first = chunks.message().await?;
        Ok::<_, Status>((first, chunks))
    };
    let Ok(opened) = tokio::time::timeout(SHORT, opening).await else {
        return Err(Problem::new(Code::Timeout, "the sandbox did not answer in time").into());
    };
    let (first, rest) = opened.map_err(file_failed)?;
    let first = first.map(|chunk| chunk.data).unwrap_or_default();
    let mut answer = Body::from_stream(content(first, rest, None)).into_response();
    bytes_headers(&mut answer, "application/x-tar");
    Ok(answer)
}

/// Unpacks a tar stream into a folder. What an archive that breaks off has brought until then stays.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/archive", tag = "files",
    params(("id" = String, Path, description = "Id or name"), ("path" = String, Query), ("user" = Option<String>, Query),
        ("recursive" = Option<bool>, Query, description = "Make missing folders")),
    request_body(content = inline(Vec<u8>), content_type = "application/x-tar"),
    responses((status = 200, description = "What was unpacked", body = ArchiveResult), Problems))]
pub async fn write_archive(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Response, Failed> {
    let params = Params::parse(request.uri(), &["path", "user", "recursive"])?;
    let (path, user) = target(&params)?;
    let parents = params.flag("recursive")?;
    let row = usable(&app, &id).await?;
    let open = WriteFileOpen { path, user, mode: 0, size_hint: size_hint(request.headers()), parents };
    let broken = Arc::new(Broken::default());
    let (body, returned) = Returned::new(request.into_body());
    let chunks = upload(open, body, broken.clone());
    let answer = app.node.guest().write_archive(to_guest(&row.run_ref(), chunks, None)).await;
    if let Some(problem) = broken.take() {
        return Err(problem.into());
    }
    match answer {
        Ok(done) => {
            let done = done.into_inner();
            Ok(Json(ArchiveResult { entries: done.entries, bytes: done.bytes }).into_response())
        }
        Err(status) => Ok(refuse_upload(file_failed(status), returned).await),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(range: &str) -> Wanted {
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, range.parse().expect("a header"));
        wanted(&headers)
    }

    #[test]
    fn ranges_are_read_as_the_standard_has_them() {
        assert_eq!(of("bytes=2-4"), Wanted::Between(2, 4));
        assert_eq!(of("bytes=7-"), Wanted::From(7));
        assert_eq!(of("bytes=-3"), Wanted::Last(3));
        for ignored in ["bytes=4-2", "bytes=a-b", "lines=1-2", "bytes=0-1,3-4", "bytes=-", ""] {
            assert_eq!(of(ignored), Wanted::Whole, "{ignored}");
        }
        assert_eq!(resolve(Wanted::Between(2, 100), 10), Some((2, 8)));
        assert_eq!(resolve(Wanted::From(10), 10), None);
        assert_eq!(resolve(Wanted::Last(3), 10), Some((7, 3)));
        assert_eq!(resolve(Wanted::Last(30), 10), Some((0, 10)));
        assert_eq!(resolve(Wanted::Last(0), 10), None);
        assert_eq!(resolve(Wanted::Between(0, u64::MAX), 10), Some((0, 10)));
    }
}
