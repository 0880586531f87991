//! A real daemon in a normal process, and the real client to it.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use space_proto::guest::attach_input::Kind as In;
use space_proto::guest::attach_output::Kind as Out;
use space_proto::guest::guest_client::GuestClient;
use space_proto::guest::*;
use space_proto::link::{Carrier, connect, guest_channel};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

pub type Client = GuestClient<Channel>;
/// Generous: many tests share two processors.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The daemon with everything that it started; all of it ends with the value.
pub struct Daemon {
    child: Child,
    pub dir: tempfile::TempDir,
    pub socket: PathBuf,
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let program = env!("CARGO_BIN_EXE_space-daemon");
        let mut command = Command::new(program);
        let child = command.arg("--socket").arg(&socket).args(arguments).stderr(Stdio::null()).spawn().unwrap();
        let daemon = Self { child, dir, socket };
        let start = std::time::Instant::now();
        // The file is there from `bind` on; only after `listen` does it take connections.
        while std::os::unix::net::UnixStream::connect(&daemon.socket).is_err() {
            assert!(start.elapsed() < PATIENCE, "the daemon does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        daemon
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub async fn client(&self) -> Client {
        self.client_with(RefreshRequest::default()).await
    }

    pub async fn client_with(&self, refresh: RefreshRequest) -> Client {
        let hello = Hello { protocol: 1, sandbox: "test".into(), run: 1, refresh: Some(refresh) };
        let io = UnixStream::connect(&self.socket).await.unwrap();
        let (stream, ack) = connect(io, Carrier::Channel, hello, Instant::now() + PATIENCE).await.unwrap();
        assert_eq!(ack.protocol, 1);
        GuestClient::new(guest_channel(stream))
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }
}

/// Every process below this one, the deepest last.
pub fn descendants(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while next < found.len() {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", found[next])).into_iter().flatten().flatten();
        for task in tasks {
            let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(text.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        next += 1;
    }
    found.split_off(1)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let kill = |pid| {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL);
        };
        // Descendants come back to the daemon when their parents end, so look until there are none.
        for _ in 0..100 {
            let found = descendants(self.pid());
            found.iter().copied().for_each(kill);
            if found.is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn new_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("p{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

pub fn spec(argv: &[&str]) -> ProcessSpec {
    ProcessSpec { argv: argv.iter().map(|a| (*a).to_owned()).collect(), ..Default::default() }
}

pub fn sh(script: &str) -> ProcessSpec {
    spec(&["sh", "-c", script])
}

pub async fn reserve(client: &mut Client, spec: ProcessSpec) -> String {
    let id = new_id();
    let request = ReserveRequest { process_id: id.clone(), spec: Some(spec), expires_ms: 0 };
    client.reserve(request).await.unwrap();
    id
}

/// What a reader has seen.
#[derive(Debug, Default, PartialEq)]
pub struct Seen {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// The next offset.
    pub offset: u64,
    pub dropped: Option<u64>,
    pub exit: Option<Exit>,
}

impl Seen {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn code(&self) -> i32 {
        self.exit.as_ref().expect("no exit was seen").code
    }

    pub fn reason(&self) -> ExitReason {
        self.exit.as_ref().expect("no exit was seen").reason()
    }
}

pub struct Attached {
    pub input: mpsc::Sender<AttachInput>,
    pub output: Streaming<AttachOutput>,
    pub seen: Seen,
}

impl Attached {
    pub async fn open(client: &mut Client, open: AttachOpen) -> Self {
        let (input, receiver) = mpsc::channel(4);
        let offset = open.offset;
        input.send(AttachInput { kind: Some(In::Open(open)) }).await.unwrap();
        let output = client.attach(ReceiverStream::new(receiver)).await.unwrap().into_inner();
        let mut attached = Self { input, output, seen: Seen { offset, ..Seen::default() } };
        let first = attached.message().await.expect("no first message");
        assert!(matches!(first, Out::Started(_)), "{first:?} came first");
        attached
    }

    pub async fn to(client: &mut Client, id: &str, offset: u64) -> Self {
        Self::open(client, AttachOpen { process_id: id.into(), offset, ..Default::default() }).await
    }

    pub async fn run(client: &mut Client, spec: ProcessSpec) -> Self {
        let id = reserve(client, spec).await;
        Self::to(client, &id, 0).await
    }

    async fn message(&mut self) -> Option<Out> {
        let message = timeout(PATIENCE, self.output.message()).await.expect("nothing came").unwrap();
        message.map(|m| m.kind.expect("an empty message"))
    }

    /// One more message; `false` at the end.
    pub async fn step(&mut self) -> bool {
        match self.message().await {
            Some(Out::Output(chunk)) => {
                assert_eq!(chunk.offset, self.seen.offset, "a gap or a repetition");
                self.seen.offset += chunk.data.len() as u64;
                match chunk.stream() {
                    Stream::Stderr => self.seen.stderr.extend_from_slice(&chunk.data),
                    _ => self.seen.stdout.extend_from_slice(&chunk.data),
                }
                true
            }
            Some(Out::DroppedUntil(until)) => {
                assert!(until > self.seen.offset);
                (self.seen.dropped, self.seen.offset) = (Some(until), until);
                true
            }
            Some(Out::Exit(exit)) => {
                self.seen.exit = Some(exit);
                true
            }
            Some(Out::Started(_)) => panic!("started twice"),
            None => false,
        }
    }

    pub async fn finish(mut self) -> Seen {
        while self.step().await {}
        self.seen
    }

    /// Until this stands in the standard output.
    pub async fn until(&mut self, text: &str) {
        while !self.seen.text().contains(text) {
            assert!(self.step().await, "it ended without {text:?}: {:?}", self.seen.text());
        }
    }

    pub async fn send(&self, kind: In) {
        timeout(PATIENCE, self.input.send(AttachInput { kind: Some(kind) })).await.expect("input is stuck").unwrap();
    }

    pub async fn write(&self, data: impl Into<Vec<u8>>) {
        self.send(In::Stdin(data.into().into())).await;
    }
}

pub async fn run(client: &mut Client, spec: ProcessSpec) -> Seen {
    Attached::run(client, spec).await.finish().await
}

pub async fn info(client: &mut Client, id: &str, wait: Duration) -> ProcessInfo {
    let request = GetProcessRequest { process_id: id.into(), wait_ms: wait.as_millis() as u64 };
    client.get_process(request).await.unwrap().into_inner()
}

pub fn is_alive(pid: u32) -> bool {
    // A zombie is not.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub fn exists(path: impl AsRef<Path>) -> bool {
    path.as_ref().exists()
}
