//! The output of a process that is held now, as plain bytes. Following it is what attach is for.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::StreamExt as _;
use http::{HeaderValue, Uri, header};
use space_api::Problem;
use space_api::problem::Code;
use space_proto::guest::{AttachInput, AttachOpen, AttachOutput, OutputChunk, Stream, attach_input, attach_output};
use tonic::Streaming;

use super::commands::command_id;
use super::error::{Failed, Problems};
use super::extract::{Params, Path};
use super::sandboxes::usable;
use crate::app::App;
use crate::node::{SHORT, guest_problem, to_guest};
use crate::validate::invalid;

/// The bytes of output that are held, from an offset. Both streams in the order they came, or one of them.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes/{command}/output", tag = "processes",
    params(("id" = String, Path, description = "Id or name"), ("command" = String, Path),
        ("offset" = Option<u64>, Query, description = "Counts the bytes of both streams; 0 when absent"),
        ("stream" = Option<String>, Query, description = "`stdout` or `stderr`; both when absent")),
    responses((status = 200, description = "Bytes", content_type = "application/octet-stream", body = inline(Vec<u8>),
        headers(("space-output-start" = u64, description = "The offset of the first byte that was held"),
            ("space-output-end" = u64, description = "The offset after the last byte: where to go on"),
            ("space-output-dropped" = bool, description = "Whether bytes after the asked offset are gone"))), Problems))]
pub async fn output(
    State(app): State<Arc<App>>,
    Path((id, command)): Path<(String, String)>,
    uri: Uri,
) -> Result<Response, Failed> {
    let params = Params::parse(&uri, &["offset", "stream"])?;
    let offset = params.number("offset", u64::MAX)?.unwrap_or(0);
    let only = match params.text("stream") {
        None => None,
        Some("stdout") => Some(Stream::Stdout),
        Some("stderr") => Some(Stream::Stderr),
        Some(_) => return Err(invalid("stream", "stream is stdout or stderr").into()),
    };
    let row = usable(&app, &id).await?;
    let open = AttachOpen { process_id: command_id(&command)?.to_string(), offset, read_only: true, no_follow: true };
    let open = AttachInput { kind: Some(attach_input::Kind::Open(open)) };
    // The input stays open until the output has ended: a guest may take its end for ours.
    let input = tokio_stream::once(open).chain(futures::stream::pending());
    let failed = |status: tonic::Status| Failed::from(guest_problem(&status, false));
    let opening = async {
        let mut frames = app.node.guest().attach(to_guest(&row.run_ref(), input, None)).await?.into_inner();
        let first = frames.message().await?;
        Ok::<_, tonic::Status>((frames, first))
    };
    let Ok(opened) = tokio::time::timeout(SHORT, opening).await else {
        return Err(Problem::new(Code::Timeout, "the sandbox did not answer in time").into());
    };
    let (frames, first) = opened.map_err(failed)?;
    let started = match first.and_then(|frame| frame.kind) {
        Some(attach_output::Kind::Started(started)) => started.process.unwrap_or_default(),
        _ => return Err(Problem::new(Code::Internal, "the sandbox answered out of turn").into()),
    };
    let begin = offset.max(started.output_start);
    let mut answer = Body::from_stream(bytes_of(frames, only)).into_response();
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert("space-output-start", begin.into());
    headers.insert("space-output-end", started.output_end.into());
    let dropped = if started.output_start > offset { "true" } else { "false" };
    headers.insert("space-output-dropped", HeaderValue::from_static(dropped));
    Ok(answer)
}

fn bytes_of(
    frames: Streaming<AttachOutput>,
    only: Option<Stream>,
) -> impl futures::Stream<Item = Result<Bytes, tonic::Status>> {
    frames.filter_map(move |frame| {
        let wanted = |chunk: &OutputChunk| only.is_none_or(|s| chunk.stream() == s);
        std::future::ready(match frame {
            Ok(AttachOutput { kind: Some(attach_output::Kind::Output(chunk)) }) if wanted(&chunk) => {
                Some(Ok(chunk.data))
            }
            Ok(_) => None,
            Err(status) => Some(Err(status)),
        })
    })
}
