//! A command in a sandbox with our own standard streams: output as it comes and as fast as it is taken, input, signals, exit status.
//!
//! Output is written by a thread of its own, so that a reader that does not read holds back the program in the sandbox and still
//! leaves us able to hear a Ctrl-C. A closed standard output ends us with 141 and sends the program nothing: it loses its reader, as any
//! command whose client went away.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};

use bytes::Bytes;
use clap::Args;
use space_api::client::{AttachInput, AttachOptions, Client};
use space_api::frame::Frame;
use space_api::{CommandSession, CreateCommand, Exit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use crate::args::{duration, env_pair};
use crate::env;
use crate::failure::Failure;
use crate::output::{self, note};
use crate::term;

const INT: u8 = 2;
const QUIT: u8 = 3;
const CHUNK: usize = 64 * 1024;

/// What `run` and `exec` have in common.
#[derive(Args, Clone, Default)]
pub struct ProcessArgs {
    /// Pass our standard input on
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the program a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// User in the sandbox: a name or UID[:GID] [default: the template's]
    #[arg(short, long)]
    pub user: Option<String>,
    /// Working folder [default: the template's]
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Environment variable; a bare KEY takes our own value; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = env_pair)]
    pub env: Vec<(String, String)>,
    /// Kill the program and all it started after this time, as 30s or 10m
    #[arg(long, value_parser = duration)]
    pub timeout: Option<u64>,
}

impl ProcessArgs {
    pub fn request(&self, argv: Vec<String>, start: bool) -> CreateCommand {
        let mut env: BTreeMap<String, String> = self.env.iter().cloned().collect();
        if self.tty
            && let Some(kind) = env::get(env::TERM)
        {
            env.entry(env::TERM.to_owned()).or_insert(kind);
        }
        CreateCommand {
            argv,
            env,
            workdir: self.workdir.clone(),
            user: self.user.clone(),
            terminal: self.tty.then(term::size),
            stdin: self.interactive,
            timeout_seconds: self.timeout,
            start,
        }
    }
}

/// What our own process is told.
pub enum Told {
    Interrupt,
    Quit,
    /// Terminate or hang up: the number.
    Leave(i32),
    Resize,
}

/// The signals we listen for. From its creation on, none of them ends us by itself.
pub struct Signals {
    int: Signal,
    quit: Signal,
    term: Signal,
    hup: Signal,
    winch: Signal,
}

impl Signals {
    pub fn listen() -> Result<Self, Failure> {
        let on = |kind| signal(kind).map_err(|e| Failure::new(format!("cannot listen for signals: {e}")));
        Ok(Self {
            int: on(SignalKind::interrupt())?,
            quit: on(SignalKind::quit())?,
            term: on(SignalKind::terminate())?,
            hup: on(SignalKind::hangup())?,
            winch: on(SignalKind::window_change())?,
        })
    }

    pub async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.int.recv() => Told::Interrupt,
            _ = self.quit.recv() => Told::Quit,
            _ = self.term.recv() => Told::Leave(15),
            _ = self.hup.recv() => Told::Leave(1),
            _ = self.winch.recv() => Told::Resize,
        }
    }

    /// The next one that ends us: its number.
    pub async fn fatal(&mut self) -> i32 {
        loop {
            match self.next().await {
                Told::Interrupt => return i32::from(INT),
                Told::Quit => return i32::from(QUIT),
                Told::Leave(number) => return number,
                Told::Resize => {}
            }
        }
    }
}

/// How following a command ended.
#[derive(Debug)]
pub enum Ended {
    Exit(Exit),
    /// Nobody reads our output any more.
    BrokenPipe,
    /// A signal told us to leave; the command may still run.
    Signal(i32),
}

impl Ended {
    pub fn status(&self) -> i32 {
        match self {
            Self::Exit(exit) => exit.code,
            Self::BrokenPipe => output::BROKEN_PIPE_STATUS,
            Self::Signal(number) => 128 + number,
        }
    }
}

#[derive(Clone, Copy)]
pub struct Style {
    pub interactive: bool,
    pub tty: bool,
    pub json: bool,
    /// Only look: neither input nor signals are passed on.
    pub read_only: bool,
}

/// Attaches and follows the command to its end.
pub async fn follow(
    client: &Client,
    session: CommandSession,
    offset: u64,
    style: Style,
    signals: &mut Signals,
) -> Result<Ended, Failure> {
    // Input that arrived half is wrong for a pipe; at a terminal a person sees what happened.
    let options =
        AttachOptions { offset, read_only: style.read_only, exact_input: !style.tty, ..AttachOptions::default() };
    let mut attach = client.attach(session, options).await?;
    let raw = if style.tty { term::Raw::enter() } else { None };
    if style.interactive {
        let input = attach.input();
        tokio::spawn(pump_input(input));
    }
    let (to, done) = start_writer(style.json);
    let ended = follow_frames(&mut attach, to, done, style, signals).await;
    drop(raw);
    ended
}

type Writer = mpsc::Sender<Frame>;
type Done = oneshot::Receiver<std::io::Result<()>>;

async fn follow_frames(
    attach: &mut space_api::client::Attach,
    to: Writer,
    mut done: Done,
    style: Style,
    signals: &mut Signals,
) -> Result<Ended, Failure> {
    let input = attach.input();
    let mut interrupts = 0;
    let exit = loop {
        tokio::select! {
            // Room first: what cannot be written is not read.
            frame = async {
                let room = to.reserve().await.ok()?;
                Some((attach.next().await, room))
            } => match frame {
                None => return Ok(Ended::BrokenPipe),
                Some((Some(Ok(Frame::Exit(exit))), room)) => {
                    room.send(Frame::Exit(exit.clone()));
                    break exit;
                }
                Some((Some(Ok(Frame::Error(problem))), _)) => {
                    return Err(space_api::client::ClientError::Problem(problem).into());
                }
                Some((Some(Ok(frame)), room)) => room.send(frame),
                Some((Some(Err(error)), _)) => return Err(error.into()),
                Some((None, _)) => return Err(Failure::new("the stream ended without an exit status; the command may still run")),
            },
            told = signals.next() => match told {
                Told::Resize if style.tty => forward(&input, Frame::Resize(term::size())),
                Told::Resize => {}
                Told::Leave(number) => return Ok(Ended::Signal(number)),
                _ if style.read_only => return Ok(Ended::Signal(i32::from(INT))),
                Told::Interrupt if interrupts == 0 => {
                    interrupts += 1;
                    forward(&input, Frame::Signal(INT));
                }
                Told::Interrupt => return Ok(Ended::Signal(i32::from(INT))),
                Told::Quit => forward(&input, Frame::Signal(QUIT)),
            },
        }
    };
    drop(to);
    tokio::select! {
        written = &mut done => match written {
            Ok(Err(e)) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(Ended::BrokenPipe),
            Ok(Err(e)) => Err(Failure::new(format!("cannot write the output: {e}"))),
            _ => Ok(Ended::Exit(exit)),
        },
        number = signals.fatal() => Ok(Ended::Signal(number)),
    }
}

/// Sent without waiting: a program that takes no input must not make us deaf.
fn forward(input: &AttachInput, frame: Frame) {
    let input = input.clone();
    tokio::spawn(async move { input.send(frame).await });
}

async fn pump_input(input: AttachInput) {
    let (to, mut from) = mpsc::channel::<Bytes>(2);
    // A read of standard input cannot be cancelled; the thread ends with the process.
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; CHUNK];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    if to.blocking_send(Bytes::copy_from_slice(&buffer[..n])).is_err() {
                        break;
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    });
    while let Some(data) = from.recv().await {
        if !input.write(data).await {
            return;
        }
    }
    input.send(Frame::CloseStdin).await;
}

fn start_writer(json: bool) -> (Writer, Done) {
    let (to, mut from) = mpsc::channel::<Frame>(4);
    let (tell, done) = oneshot::channel();
    std::thread::spawn(move || {
        let mut result = Ok(());
        while let Some(frame) = from.blocking_recv() {
            result = if json { write_json(&frame) } else { write_plain(&frame) };
            if result.is_err() {
                break;
            }
        }
        let _ = tell.send(result);
    });
    (to, done)
}

fn write_plain(frame: &Frame) -> std::io::Result<()> {
    match frame {
        Frame::Stdout { data, .. } => {
            let mut out = std::io::stdout().lock();
            out.write_all(data)?;
            out.flush()
        }
        Frame::Stderr { data, .. } => std::io::stderr().lock().write_all(data),
        Frame::Dropped { until } => {
            note(format!("[output up to byte {until} is no longer held]"));
            Ok(())
        }
        _ => Ok(()),
    }
}

fn write_json(frame: &Frame) -> std::io::Result<()> {
    use base64::Engine as _;
    let output = |event: &str, offset: u64, data: &[u8]| match std::str::from_utf8(data) {
        Ok(text) => serde_json::json!({"event": event, "offset": offset, "text": text}),
        Err(_) => {
            let encoded = base64::engine::general_purpose::STANDARD.encode(data);
            serde_json::json!({"event": event, "offset": offset, "base64": encoded})
        }
    };
    let value = match frame {
        Frame::Stdout { offset, data } => output("stdout", *offset, data),
        Frame::Stderr { offset, data } => output("stderr", *offset, data),
        Frame::Dropped { until } => serde_json::json!({"event": "dropped", "until": until}),
        Frame::Started(process) => serde_json::json!({"event": "started", "process": process}),
        Frame::Exit(exit) => serde_json::json!({"event": "exit", "exit": exit}),
        _ => return Ok(()),
    };
    let mut out = std::io::stdout().lock();
    out.write_all(value.to_string().as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Says what an exit status alone does not.
pub fn explain(exit: &Exit) {
    let text = match (exit.reason.as_str(), &exit.message) {
        ("exited", _) => return,
        ("signaled", _) => return,
        ("timeout", _) => "the time was over; the program and all it started were killed".to_owned(),
        ("oom_killed", _) => "the program was killed: the sandbox's memory was full".to_owned(),
        (_, Some(message)) => message.clone(),
        (reason, None) => format!("the program ended: {reason}"),
    };
    note(format!("space: {}", output::clean(&text)));
}
