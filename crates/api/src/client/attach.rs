//! One attached command: frames in and out, over as many connections as it takes.
//!
//! A reader task owns the receiving half and connects again by itself, with a new token and from the last offset, so output is
//! neither lost nor repeated. Input goes by a task of its own: a program that writes while it is written to must not be waited for
//! in both directions at once. Input that was on its way when a connection broke cannot be repeated safely, since nothing says
//! how much of it arrived; `AttachOptions::exact_input` chooses what happens then.
//!
//! Dropping an [`Attach`] ends the connection and never the process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use tokio::net::TcpStream;
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error as WsError, Message};

use super::{Client, ClientError, Result};
use crate::frame::{Frame, STDIN_MAX_BYTES};
use crate::problem::Code;
use crate::{CommandSession, Problem};

type Socket = WebSocketStream<TcpStream>;

/// Frames that may wait for the caller; the connection is not read beyond them.
const QUEUE: usize = 8;
const MESSAGE_MAX_BYTES: usize = 4 * 1024 * 1024;
/// The server pings every 15 s; a connection silent for longer than this is dead.
const SILENCE: Duration = Duration::from_secs(75);
/// Input sent less than this before a break may not have arrived.
const IN_FLIGHT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// Output before this offset is not sent.
    pub offset: u64,
    /// Neither sends input nor starts a reserved process.
    pub read_only: bool,
    /// Whether a connection that breaks with input on its way is an error (a pipe) or passed over (a terminal).
    pub exact_input: bool,
    /// How long a server that cannot be reached is tried again.
    pub reconnect_for: Duration,
}

impl Default for AttachOptions {
    fn default() -> Self {
        Self { offset: 0, read_only: false, exact_input: true, reconnect_for: Duration::from_secs(60) }
    }
}

/// A stream of frames that ends with `Exit` or an error.
pub struct Attach {
    frames: mpsc::Receiver<Result<Frame>>,
    input: AttachInput,
    reader: tokio::task::JoinHandle<()>,
}

impl Drop for Attach {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// The sending half; any number of clones.
#[derive(Clone)]
pub struct AttachInput {
    shared: Arc<Shared>,
}

struct Shared {
    sink: AsyncMutex<Option<SplitSink<Socket, Message>>>,
    /// Set when another connection is there, for those that wait to send.
    renewed: tokio::sync::Notify,
    last_input: Mutex<Option<Instant>>,
    /// Nothing can be sent any more.
    over: std::sync::atomic::AtomicBool,
    offset: AtomicU64,
}

impl AttachInput {
    /// Sends one frame; waits while the other side takes nothing or a broken connection is replaced. False when the stream has ended.
    pub async fn send(&self, frame: Frame) -> bool {
        let is_input = matches!(frame, Frame::Stdin(_) | Frame::CloseStdin);
        let message = Message::Binary(frame.encode());
        loop {
            // Registered before the look, so that a renewal in between is not missed.
            let renewed = self.shared.renewed.notified();
            if self.shared.over.load(Ordering::Acquire) {
                return false;
            }
            {
                let mut sink = self.shared.sink.lock().await;
                if let Some(open) = sink.as_mut() {
                    if is_input {
                        *self.shared.last_input.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
                            Some(Instant::now());
                    }
                    if open.send(message.clone()).await.is_ok() {
                        return true;
                    }
                    // The reader sees the same break and makes another connection.
                    *sink = None;
                    if is_input {
                        return true;
                    }
                }
            }
            let _ = tokio::time::timeout(Duration::from_millis(500), renewed).await;
        }
    }

    /// Input of any length, cut into frames.
    pub async fn write(&self, mut data: Bytes) -> bool {
        while !data.is_empty() {
            let piece = data.split_to(data.len().min(STDIN_MAX_BYTES / 4));
            if !self.send(Frame::Stdin(piece)).await {
                return false;
            }
        }
        true
    }
}

impl Attach {
    pub(super) async fn open(client: Client, session: CommandSession, options: AttachOptions) -> Result<Self> {
        let socket = connect(&client, &session, &options, options.offset).await?;
        let (sink, stream) = socket.split();
        let shared = Arc::new(Shared {
            sink: AsyncMutex::new(Some(sink)),
            renewed: tokio::sync::Notify::new(),
            last_input: Mutex::new(None),
            over: false.into(),
            offset: options.offset.into(),
        });
        let (to, frames) = mpsc::channel(QUEUE);
        let reader =
            Reader { client, sandbox: session.sandbox_id, command: session.id, options, shared: shared.clone(), to };
        Ok(Self { frames, input: AttachInput { shared }, reader: tokio::spawn(reader.run(stream)) })
    }

    /// The next frame. `None` after the last one, which is an `Exit`, an `Error` or an error of the client.
    pub async fn next(&mut self) -> Option<Result<Frame>> {
        self.frames.recv().await
    }

    pub fn input(&self) -> AttachInput {
        self.input.clone()
    }

    /// The offset after the last byte of output that has been received.
    pub fn offset(&self) -> u64 {
        self.input.shared.offset.load(Ordering::Acquire)
    }
}

async fn connect(client: &Client, session: &CommandSession, options: &AttachOptions, offset: u64) -> Result<Socket> {
    let protocol = |reason: String| ClientError::Protocol { url: session.url.clone(), reason };
    let mut url = reqwest::Url::parse(&session.url).map_err(|e| protocol(format!("bad attach address: {e}")))?;
    if url.scheme() != "ws" {
        return Err(protocol(format!("attach by {}:// is not supported, only ws://", url.scheme())));
    }
    url.query_pairs_mut().append_pair("offset", &offset.to_string());
    if options.read_only {
        url.query_pairs_mut().append_pair("read_only", "true");
    }
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let port = url.port_or_known_default().unwrap_or(80);
    let unreachable = |reason: String| ClientError::Connect { url: session.url.clone(), reason };
    let stream = tokio::time::timeout(super::CONNECT_TIMEOUT, TcpStream::connect((host.as_str(), port)))
        .await
        .map_err(|_| unreachable("no answer".into()))?
        .map_err(|e| unreachable(e.to_string()))?;
    let _ = stream.set_nodelay(true);
    let mut request = url.as_str().into_client_request().map_err(|e| protocol(e.to_string()))?;
    let mut token = http::HeaderValue::try_from(format!("Bearer {}", session.token))
        .map_err(|_| protocol("the token is not a header value".into()))?;
    token.set_sensitive(true);
    request.headers_mut().insert(http::header::AUTHORIZATION, token);
    let config =
        WebSocketConfig::default().max_message_size(Some(MESSAGE_MAX_BYTES)).max_frame_size(Some(MESSAGE_MAX_BYTES));
    let handshake = tokio_tungstenite::client_async_with_config(request, stream, Some(config));
    match tokio::time::timeout(super::ANSWER_TIMEOUT, handshake).await {
        Err(_) => Err(unreachable("no answer to the WebSocket handshake".into())),
        Ok(Ok((socket, _))) => Ok(socket),
        Ok(Err(WsError::Http(answer))) => {
            let problem = answer.body().as_ref().and_then(|body| serde_json::from_slice::<Problem>(body).ok());
            Err(match problem {
                Some(problem) => ClientError::Problem(problem),
                None => protocol(format!("it answered {} to the WebSocket handshake", answer.status())),
            })
        }
        Ok(Err(e)) => Err(ClientError::Broken { url: client.url().to_owned(), reason: e.to_string() }),
    }
}

struct Reader {
    client: Client,
    sandbox: String,
    command: String,
    options: AttachOptions,
    shared: Arc<Shared>,
    to: mpsc::Sender<Result<Frame>>,
}

/// How one connection ended.
enum End {
    /// The last frame has been handed on, or nobody listens any more.
    Over,
    Broken(String),
    Refused(ClientError),
}

impl Reader {
    async fn run(self, mut stream: SplitStream<Socket>) {
        loop {
            let reason = match self.read(&mut stream).await {
                End::Over => break,
                End::Refused(error) => {
                    let _ = self.to.send(Err(error)).await;
                    break;
                }
                End::Broken(reason) => reason,
            };
            match self.again(reason).await {
                Ok(next) => stream = next,
                Err(error) => {
                    let _ = self.to.send(Err(error)).await;
                    break;
                }
            }
        }
        self.shared.over.store(true, Ordering::Release);
        self.shared.renewed.notify_waiters();
    }

    /// Hands frames on until the connection ends.
    async fn read(&self, stream: &mut SplitStream<Socket>) -> End {
        loop {
            let Ok(message) = tokio::time::timeout(SILENCE, stream.next()).await else {
                return End::Broken("nothing came for 75 s, not even a ping".into());
            };
            let data = match message {
                None => return End::Broken("it was closed without an exit".into()),
                Some(Err(e)) => return End::Broken(e.to_string()),
                Some(Ok(Message::Binary(data))) => data,
                Some(Ok(_)) => continue,
            };
            let frame = match Frame::decode(data) {
                Ok(frame) => frame,
                Err(e) => {
                    let url = self.client.url().to_owned();
                    return End::Refused(ClientError::Protocol { url, reason: e.to_string() });
                }
            };
            match &frame {
                Frame::Stdout { offset, data } | Frame::Stderr { offset, data } => {
                    self.shared.offset.store(offset + data.len() as u64, Ordering::Release);
                }
                Frame::Dropped { until } => self.shared.offset.store(*until, Ordering::Release),
                // The channel to the guest broke, not the process: worth another connection.
                Frame::Error(problem) if problem.is(Code::Unavailable) || problem.is(Code::GuestUnreachable) => {
                    return End::Broken(problem.detail.clone());
                }
                _ => {}
            }
            let last = matches!(frame, Frame::Exit(_) | Frame::Error(_));
            if self.to.send(Ok(frame)).await.is_err() || last {
                return End::Over;
            }
        }
    }

    /// Another connection to the same command, from where the last one stopped.
    async fn again(&self, reason: String) -> Result<SplitStream<Socket>> {
        *self.shared.sink.lock().await = None;
        let last_input = *self.shared.last_input.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.options.exact_input && last_input.is_some_and(|at| at.elapsed() < IN_FLIGHT) {
            return Err(ClientError::InputLost);
        }
        let started = Instant::now();
        let mut pause = Duration::from_millis(100);
        let mut refusals = 0;
        let mut error = ClientError::Broken { url: self.client.url().to_owned(), reason };
        while started.elapsed() < self.options.reconnect_for {
            let attempt = async {
                let session = self.client.reattach(&self.sandbox, &self.command).await?;
                let offset = self.shared.offset.load(Ordering::Acquire);
                connect(&self.client, &session, &self.options, offset).await
            };
            error = match attempt.await {
                Ok(socket) => {
                    let (sink, stream) = socket.split();
                    *self.shared.sink.lock().await = Some(sink);
                    self.shared.renewed.notify_waiters();
                    return Ok(stream);
                }
                // A run that has just moved, or a token that has just expired: the next one is fresh.
                Err(e) if (e.is(Code::Misdirected) || e.is(Code::Unauthenticated)) && refusals < 3 => {
                    refusals += 1;
                    e
                }
                Err(e) if e.is_transient() => e,
                Err(e) => return Err(e),
            };
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
        Err(error)
    }
}
