//! Attach over connections that break: a small server that speaks the real frames and cuts the line on purpose.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use space_api::client::{AttachOptions, Client, ClientError};
use space_api::frame::Frame;
use space_api::problem::{Code, Problem};
use space_api::{CommandSession, Exit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

const PIECE: usize = 1000;

/// What the server does.
#[derive(Clone)]
struct Script {
    output: Bytes,
    /// A connection is cut after this many bytes of output; the `cuts` first ones.
    cut_after: usize,
    cuts: usize,
    /// Reattach is refused with this.
    refuse: Option<Code>,
    /// Echo input as output instead of sending `output`.
    echo: bool,
}

struct Server {
    address: String,
    connections: Arc<AtomicUsize>,
}

impl Server {
    async fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let connections = Arc::new(AtomicUsize::new(0));
        let (count, own) = (connections.clone(), address.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, script.clone(), count.clone(), own.clone()));
            }
        });
        Self { address, connections }
    }

    fn client(&self) -> Client {
        Client::new(&format!("http://{}", self.address), Some("sk-test")).expect("an address")
    }

    fn session(&self) -> CommandSession {
        session(&self.address)
    }
}

fn session(address: &str) -> CommandSession {
    CommandSession {
        id: "cmd-1".into(),
        sandbox_id: "sbx-1".into(),
        url: format!("ws://{address}/v1/attach"),
        token: "st1.x.y".into(),
        token_expires_at_ms: 0,
    }
}

async fn serve(stream: TcpStream, script: Script, count: Arc<AtomicUsize>, address: String) {
    let mut head = [0; 4];
    while stream.peek(&mut head).await.is_ok_and(|n| n < 4 && n > 0) {}
    if &head == b"POST" {
        answer(stream, &script, &address).await;
    } else {
        attach(stream, script, count.fetch_add(1, Ordering::SeqCst)).await;
    }
}

/// `POST …/attach`: a new token, or the refusal.
async fn answer(mut stream: TcpStream, script: &Script, address: &str) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => request.push(byte),
            Err(_) => return,
        }
    }
    let (status, body) = match script.refuse {
        Some(code) => (code.status(), serde_json::to_string(&Problem::new(code, "refused")).expect("plain")),
        None => (200, serde_json::to_string(&session(address)).expect("plain")),
    };
    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    let _ = stream.write_all((head + &body).as_bytes()).await;
}

async fn attach(stream: TcpStream, script: Script, number: usize) {
    let mut offset = 0usize;
    #[expect(clippy::result_large_err, reason = "the library's own callback type")]
    let callback = |request: &Request, answer: Response| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        offset = query.split('&').find_map(|pair| pair.strip_prefix("offset=")?.parse().ok()).unwrap_or(0);
        Ok(answer)
    };
    let Ok(socket) = tokio_tungstenite::accept_hdr_async(stream, callback).await else { return };
    let (mut sink, mut source) = socket.split();
    let cut = number < script.cuts;
    let mut sent = 0;
    if script.echo {
        while let Some(Ok(Message::Binary(data))) = source.next().await {
            match Frame::decode(data) {
                Ok(Frame::Stdin(_)) if cut => return,
                Ok(Frame::Stdin(data)) => {
                    let frame = Frame::Stdout { offset: offset as u64, data: data.clone() };
                    offset += data.len();
                    if sink.send(Message::Binary(frame.encode())).await.is_err() {
                        return;
                    }
                }
                _ => break,
            }
        }
    }
    while !script.echo && offset < script.output.len() {
        if cut && sent >= script.cut_after {
            return;
        }
        let data = script.output.slice(offset..(offset + PIECE).min(script.output.len()));
        let frame = Frame::Stdout { offset: offset as u64, data: data.clone() };
        if sink.send(Message::Binary(frame.encode())).await.is_err() {
            return;
        }
        offset += data.len();
        sent += data.len();
    }
    let exit = Exit { reason: "exited".into(), code: 7, signal: None, message: None };
    let _ = sink.send(Message::Binary(Frame::Exit(exit).encode())).await;
    let _ = sink.close().await;
}

fn script() -> Script {
    let output = (0..100_000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>().into();
    Script { output, cut_after: 30_000, cuts: 4, refuse: None, echo: false }
}

async fn read_all(attach: &mut space_api::client::Attach) -> Result<(Vec<u8>, i32), ClientError> {
    let mut all = Vec::new();
    loop {
        match attach.next().await.expect("an end is said")? {
            Frame::Stdout { offset, data } => {
                assert_eq!(offset, all.len() as u64, "a gap or a repetition");
                all.extend_from_slice(&data);
            }
            Frame::Exit(exit) => return Ok((all, exit.code)),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn broken_connections_lose_nothing_and_repeat_nothing() {
    let script = script();
    let server = Server::start(script.clone()).await;
    let mut attach = server.client().attach(server.session(), AttachOptions::default()).await.expect("attached");
    let (all, code) = read_all(&mut attach).await.expect("to the end");
    assert_eq!((all.len(), code), (script.output.len(), 7));
    assert!(all == script.output);
    assert_eq!(server.connections.load(Ordering::SeqCst), 5);
    assert!(attach.next().await.is_none(), "nothing follows the exit");
}

#[tokio::test]
async fn an_offset_is_where_it_starts() {
    let script = Script { cuts: 0, ..script() };
    let server = Server::start(script.clone()).await;
    let options = AttachOptions { offset: script.output.len() as u64, ..AttachOptions::default() };
    let mut attach = server.client().attach(server.session(), options).await.expect("attached");
    assert!(matches!(attach.next().await, Some(Ok(Frame::Exit(_)))));
}

#[tokio::test]
async fn a_command_that_is_gone_ends_the_tries_at_once() {
    let server = Server::start(Script { refuse: Some(Code::NotRunning), ..script() }).await;
    let mut attach = server.client().attach(server.session(), AttachOptions::default()).await.expect("attached");
    let error = tokio::time::timeout(Duration::from_secs(5), read_all(&mut attach)).await.expect("at once");
    assert!(error.expect_err("no exit was seen").is(Code::NotRunning));
}

#[tokio::test]
async fn a_server_that_stays_away_is_given_up() {
    let server = Server::start(Script { refuse: Some(Code::Unavailable), ..script() }).await;
    let options = AttachOptions { reconnect_for: Duration::from_millis(500), ..AttachOptions::default() };
    let mut attach = server.client().attach(server.session(), options).await.expect("attached");
    let error = tokio::time::timeout(Duration::from_secs(10), read_all(&mut attach)).await.expect("bounded");
    assert!(error.expect_err("no exit was seen").is(Code::Unavailable));
}

#[tokio::test]
async fn input_on_its_way_when_a_connection_breaks_is_an_error_for_a_pipe() {
    let server = Server::start(Script { echo: true, cuts: 1, ..script() }).await;
    let mut attach = server.client().attach(server.session(), AttachOptions::default()).await.expect("attached");
    assert!(attach.input().write(Bytes::from_static(b"lost?")).await);
    assert!(matches!(attach.next().await, Some(Err(ClientError::InputLost))));
    assert!(!attach.input().write(Bytes::from_static(b"more")).await, "the end is known to those who send");
}

#[tokio::test]
async fn a_terminal_goes_on_after_a_break() {
    let server = Server::start(Script { echo: true, cuts: 1, ..script() }).await;
    let options = AttachOptions { exact_input: false, ..AttachOptions::default() };
    let mut attach = server.client().attach(server.session(), options).await.expect("attached");
    let input = attach.input();
    assert!(input.write(Bytes::from_static(b"x")).await);
    let mut echoed = None;
    for _ in 0..50 {
        assert!(input.write(Bytes::from_static(b"again")).await);
        match tokio::time::timeout(Duration::from_millis(200), attach.next()).await {
            Ok(Some(Ok(Frame::Stdout { data, .. }))) => {
                echoed = Some(data);
                break;
            }
            Ok(other) => panic!("{other:?}"),
            Err(_) => {}
        }
    }
    assert_eq!(echoed.as_deref(), Some(&b"again"[..]));
}

#[tokio::test]
async fn input_and_output_at_once_do_not_wait_for_each_other() {
    let server = Server::start(Script { echo: true, cuts: 0, ..script() }).await;
    let mut attach = server.client().attach(server.session(), AttachOptions::default()).await.expect("attached");
    let input = attach.input();
    let total = 32 << 20;
    let sender = tokio::spawn(async move {
        assert!(input.write(Bytes::from(vec![7; total])).await);
        assert!(input.send(Frame::CloseStdin).await);
    });
    let (all, _) = tokio::time::timeout(Duration::from_secs(60), read_all(&mut attach))
        .await
        .expect("no deadlock")
        .expect("to the end");
    assert_eq!(all.len(), total);
    sender.await.expect("sent");
}
