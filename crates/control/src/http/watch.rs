//! What changes in a folder of a sandbox, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::{Stream, StreamExt as _};
use http::Uri;
use space_api::problem::Code;
use space_api::{FileEvent, Problem};
use space_proto::guest::{self, FileChange, WatchFilesRequest};

use super::error::{Failed, Problems};
use super::extract::{Params, Path};
use super::files::{file_failed, target};
use super::sandboxes::usable;
use crate::app::App;
use crate::node::{SHORT, guest_problem, passed_on, to_guest};
use crate::validate::invalid;

/// Comments in between, so that whatever is on the way keeps the connection.
const ALIVE_EVERY: Duration = Duration::from_secs(15);

/// Tells what changes in a folder from now on. The first event is `ready`; the stream ends when the folder is gone or the
/// sandbox stops, with an `error` event if that was not in order.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/watch", tag = "files",
    params(("id" = String, Path, description = "Id or name"), ("path" = String, Query), ("user" = Option<String>, Query),
        ("recursive" = Option<bool>, Query, description = "Also the folders below")),
    responses((status = 200, description = "Server-sent events: the name is `change`, the data a FileEvent",
        content_type = "text/event-stream", body = FileEvent), Problems))]
pub async fn watch(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Failed> {
    let params = Params::parse(&uri, &["path", "user", "recursive"])?;
    let (path, user) = target(&params)?;
    let recursive = match params.text("recursive") {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(invalid("recursive", "recursive is true or false").into()),
    };
    let row = usable(&app, &id).await?;
    let request = to_guest(&row.run_ref(), WatchFilesRequest { path, user, recursive }, None);
    let mut guest = app.node.guest();
    let opening = tokio::time::timeout(SHORT, guest.watch_files(request)).await;
    let late = |_| Problem::new(Code::Timeout, "the sandbox did not answer in time");
    let events = opening.map_err(late)?.map_err(|status| match status.code() {
        tonic::Code::ResourceExhausted => Problem::new(Code::GuestLimit, passed_on(status.message())).into(),
        _ => file_failed(status),
    })?;
    let stopping = app.stopping.clone();
    let events = events.into_inner().map(|event| Ok(told(event))).take_until(stopping.cancelled_owned());
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE_EVERY)))
}

fn told(event: Result<guest::FileEvent, tonic::Status>) -> Event {
    let (name, data) = match event {
        Ok(event) => {
            let change = name_of(event.change());
            let event = FileEvent {
                change: change.to_owned(),
                path: passed_on(&event.path),
                directory: event.directory,
                cookie: (event.cookie != 0).then_some(event.cookie),
            };
            (change, serde_json::to_string(&event))
        }
        Err(status) => ("error", serde_json::to_string(&guest_problem(&status, true))),
    };
    // Strings and numbers always make JSON, and JSON has no line break.
    Event::default().event(name).data(data.unwrap_or_default())
}

fn name_of(change: FileChange) -> &'static str {
    match change {
        FileChange::Ready => "ready",
        FileChange::Created => "created",
        FileChange::Modified => "modified",
        FileChange::Attributes => "attributes",
        FileChange::Removed => "removed",
        FileChange::MovedAway => "moved_away",
        FileChange::MovedHere => "moved_here",
        FileChange::Missed | FileChange::Unspecified => "missed",
    }
}
