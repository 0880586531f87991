//! The data plane: one WebSocket per reader of a command, straight to the node that holds the run.
//!
//! The token says which command of which run; a node that does not hold exactly that run answers 421 and never forwards.
//! Nothing is read from the guest before the socket has taken what came before: that is the back-pressure. A stream that
//! breaks ends with an error frame or with nothing, never with an exit status. A client that goes away ends no process.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Query, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use space_api::Problem;
use space_api::frame::{Frame, STDIN_MAX_BYTES};
use space_api::problem::{CONTENT_TYPE, Code};
use space_core::CommandId;
use space_core::token::TokenError;
use space_proto::guest::attach_input::Kind as In;
use space_proto::guest::attach_output::Kind as Out;
use space_proto::guest::{self as pb, AttachInput, AttachOpen};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::convert;
use crate::run::Live;
use crate::runs::Runs;

const PING_EVERY: Duration = Duration::from_secs(15);
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long a socket may take for one message.
const SEND_MAX: Duration = Duration::from_secs(60);
/// After the last frame, so that it is not lost to a reset; the client has what it came for.
const CLOSE_GRACE: Duration = Duration::from_millis(500);
const INPUT_QUEUED: usize = 4;

pub fn router(runs: Arc<Runs>) -> Router {
    Router::new()
        .route("/v1/attach", get(attach))
        .route("/v1/health", get(async || "ok"))
        .fallback(async || refuse(&Problem::new(Code::NotFound, "the data plane has /v1/attach only")))
        .with_state(runs)
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Wish {
    token: Option<String>,
    offset: u64,
    read_only: bool,
    no_follow: bool,
}

fn refuse(problem: &Problem) -> Response {
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body = serde_json::to_string(problem).unwrap_or_default();
    (status, [(header::CONTENT_TYPE, CONTENT_TYPE)], body).into_response()
}

fn admit(runs: &Runs, headers: &HeaderMap, wish: &Wish) -> Result<(Arc<Live>, CommandId), Problem> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()?.strip_prefix("Bearer "));
    let token = bearer.or(wish.token.as_deref());
    let token =
        token.ok_or_else(|| Problem::new(Code::Unauthenticated, "no token: it comes with the command session"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let claims = runs.config.tokens.verify(token, now).map_err(|error| {
        let code = if error == TokenError::Expired { Code::Unauthenticated } else { Code::Forbidden };
        Problem::new(code, error.to_string())
    })?;
    let live = runs.live(&claims.sandbox, claims.run.0).ok_or_else(|| {
        let text = format!("this node does not hold run {} of {}; ask for a new token", claims.run, claims.sandbox);
        Problem::new(Code::Misdirected, text)
    })?;
    if live.marks().paused {
        let text = format!("paused: {} stands still; resume it first", claims.sandbox);
        return Err(Problem::new(Code::NotRunning, text));
    }
    live.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    Ok((live, claims.command))
}

async fn attach(
    State(runs): State<Arc<Runs>>,
    headers: HeaderMap,
    wish: Result<Query<Wish>, axum::extract::rejection::QueryRejection>,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Response {
    let wish = match wish {
        Ok(Query(wish)) => wish,
        Err(error) => return refuse(&Problem::new(Code::InvalidRequest, error.body_text())),
    };
    let (live, command) = match admit(&runs, &headers, &wish) {
        Ok(admitted) => admitted,
        Err(problem) => return refuse(&problem),
    };
    let upgrade = match upgrade {
        Ok(upgrade) => upgrade,
        Err(_) => {
            return refuse(&Problem::new(Code::InvalidRequest, "this address is a WebSocket: connect with `Upgrade`"));
        }
    };
    let open = AttachOpen {
        process_id: command.to_string(),
        offset: wish.offset,
        read_only: wish.read_only,
        no_follow: wish.no_follow,
    };
    upgrade
        .max_message_size(STDIN_MAX_BYTES + 1)
        .max_frame_size(STDIN_MAX_BYTES + 1)
        .write_buffer_size(0)
        .on_upgrade(move |socket| serve(socket, live, open))
}

async fn serve(socket: WebSocket, live: Arc<Live>, open: AttachOpen) {
    let (mut sink, stream) = socket.split();
    let last = match begin(&live, open).await {
        Ok((input, output)) => {
            let heard = Arc::new(std::sync::Mutex::new(Instant::now()));
            let reading = tokio::spawn(forward_input(stream, input, heard.clone()));
            let last = forward_output(&mut sink, output, &live, &heard).await;
            reading.abort();
            last
        }
        Err(problem) => Some(Frame::Error(problem)),
    };
    let ending = async {
        if let Some(frame) = last {
            sink.send(Message::Binary(frame.encode())).await?;
        }
        sink.send(Message::Close(Some(CloseFrame { code: 1000, reason: "".into() }))).await
    };
    let _ = tokio::time::timeout(CLOSE_GRACE, ending).await;
}

type Streams = (mpsc::Sender<AttachInput>, Streaming<pb::AttachOutput>);

async fn begin(live: &Live, open: AttachOpen) -> Result<Streams, Problem> {
    let unreachable = |text: String| Problem::new(Code::GuestUnreachable, text);
    let (mut client, epoch) = live.guest.client().await.map_err(|error| unreachable(error.text()))?;
    let (input, messages) = mpsc::channel(INPUT_QUEUED);
    let first = AttachInput { kind: Some(In::Open(open)) };
    input.try_send(first).map_err(|_| unreachable("the queue is closed".to_owned()))?;
    match client.attach(ReceiverStream::new(messages)).await {
        Ok(output) => Ok((input, output.into_inner())),
        Err(status) => {
            if status.code() == tonic::Code::Unavailable || status.code() == tonic::Code::Unknown {
                live.guest.lost(epoch).await;
            }
            Err(problem(&status))
        }
    }
}

fn problem(status: &Status) -> Problem {
    let code = match status.code() {
        tonic::Code::NotFound => Code::NotFound,
        tonic::Code::InvalidArgument => Code::InvalidRequest,
        tonic::Code::FailedPrecondition => Code::Conflict,
        tonic::Code::ResourceExhausted => Code::GuestLimit,
        _ => Code::GuestUnreachable,
    };
    Problem::new(code, status.message().chars().take(1000).collect::<String>())
}

/// From the client to the guest, until either ends. Waits when the guest does not take more.
async fn forward_input(
    mut stream: SplitStream<WebSocket>,
    input: mpsc::Sender<AttachInput>,
    heard: Arc<std::sync::Mutex<Instant>>,
) {
    while let Some(Ok(message)) = stream.next().await {
        *heard.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Instant::now();
        let frame = match message {
            Message::Binary(data) => Frame::decode(data),
            Message::Close(_) => return,
            Message::Ping(_) | Message::Pong(_) => continue,
            Message::Text(_) => return,
        };
        let kind = match frame {
            Ok(Frame::Stdin(data)) => In::Stdin(data),
            Ok(Frame::CloseStdin) => In::CloseStdin(true),
            Ok(Frame::Resize(size)) => In::Resize(pb::PtySize { cols: size.cols.into(), rows: size.rows.into() }),
            Ok(Frame::Signal(number)) => In::Signal(number.into()),
            // A client that speaks nonsense is not listened to any more; it still gets its output.
            Ok(_) | Err(_) => return,
        };
        let mut message = Some(AttachInput { kind: Some(kind) });
        while let Some(waiting) = message.take() {
            // A program that does not read its input must not make the client look dead.
            match tokio::time::timeout(PING_EVERY, input.reserve()).await {
                Ok(Ok(place)) => place.send(waiting),
                Ok(Err(_)) => return,
                Err(_) => {
                    *heard.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Instant::now();
                    message = Some(waiting);
                }
            }
        }
    }
}

/// From the guest to the client. Returns the last frame to send, or nothing when the client is gone.
async fn forward_output(
    sink: &mut SplitSink<WebSocket, Message>,
    mut output: Streaming<pb::AttachOutput>,
    live: &Live,
    heard: &std::sync::Mutex<Instant>,
) -> Option<Frame> {
    let mut ping = tokio::time::interval_at(tokio::time::Instant::now() + PING_EVERY, PING_EVERY);
    let vm = live.machine.vm.clone();
    let mut ended = std::pin::pin!(async move { vm.wait().await });
    loop {
        let message = tokio::select! {
            biased;
            message = output.message() => message,
            exit = &mut ended => {
                let text = format!("the sandbox ended while the command ran: {exit}");
                return Some(Frame::Error(Problem::new(Code::Gone, text)));
            }
            _ = ping.tick() => {
                let silent = heard.lock().unwrap_or_else(std::sync::PoisonError::into_inner).elapsed();
                if silent > SILENCE_MAX || !send(sink, Message::Ping(bytes::Bytes::new())).await {
                    return None;
                }
                continue;
            }
        };
        let frame = match message {
            Ok(Some(pb::AttachOutput { kind: Some(kind) })) => match kind {
                Out::Exit(exit) => return Some(Frame::Exit(convert::exit(exit))),
                Out::Started(started) => {
                    Frame::Started(Box::new(convert::process(started.process.unwrap_or_default())))
                }
                Out::DroppedUntil(until) => Frame::Dropped { until },
                Out::Output(chunk) if chunk.stream == i32::from(pb::Stream::Stderr) => {
                    Frame::Stderr { offset: chunk.offset, data: chunk.data }
                }
                Out::Output(chunk) => Frame::Stdout { offset: chunk.offset, data: chunk.data },
            },
            Ok(Some(_)) => continue,
            // Only a reader that asked not to follow gets here without an exit.
            Ok(None) => return None,
            Err(status) => return Some(Frame::Error(problem(&status))),
        };
        if !send(sink, Message::Binary(frame.encode())).await {
            return None;
        }
    }
}

async fn send(sink: &mut SplitSink<WebSocket, Message>, message: Message) -> bool {
    matches!(tokio::time::timeout(SEND_MAX, sink.send(message)).await, Ok(Ok(())))
}
