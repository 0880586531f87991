//! Sessions of the host: each `Hello` is checked and, when it carries a refresh, obeyed **before** it is answered. This is
//! on the path of every create in a guest whose code was never translated, so it does as little as it can.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use space_proto::GUEST_PROTOCOL;
use space_proto::guest::guest_server::GuestServer;
use space_proto::guest::{Hello, HelloAck};
use space_proto::link::{self, LinkStream, Listener};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::service::Service;
use crate::{Daemon, Mode, port, vsock};

/// One message: a chunk of a file or of output is 64 KiB.
const MESSAGE_MAX_BYTES: usize = 4 << 20;
/// What the kernel may take to find its devices.
const CHANNEL_PATIENCE: Duration = Duration::from_secs(30);

pub async fn serve(daemon: Arc<Daemon>) -> io::Result<()> {
    let (streams, accepted) = mpsc::channel(4);
    let service = GuestServer::new(Service(daemon.clone()))
        .max_decoding_message_size(MESSAGE_MAX_BYTES)
        .max_encoding_message_size(MESSAGE_MAX_BYTES);
    let server = link::server().add_service(service).serve_with_incoming(link::incoming(accepted));
    let server = tokio::spawn(server);
    match &daemon.mode {
        Mode::Guest => match find()? {
            Channel::Port(path) => {
                let (port, gone) = port::open(&path)?;
                accept(&daemon, Listener::with_reopened(port, gone), streams).await;
            }
            Channel::Vsock => serve_vsock(&daemon, streams).await?,
        },
        Mode::Host { socket: path, .. } => {
            let _ = std::fs::remove_file(path);
            let listener = UnixListener::bind(path)?;
            loop {
                let (stream, _) = listener.accept().await?;
                let (daemon, streams) = (daemon.clone(), streams.clone());
                tokio::spawn(async move { accept(&daemon, Listener::new(stream), streams).await });
            }
        }
    }
    server.abort();
    Err(io::Error::other("the channel to the host has ended"))
}

/// How the host reaches this machine.
enum Channel {
    Port(PathBuf),
    Vsock,
}

/// Waits until one of the two is there.
fn find() -> io::Result<Channel> {
    let begun = Instant::now();
    loop {
        if let Some(path) = port::find() {
            return Ok(Channel::Port(path));
        }
        if vsock::is_there() {
            return Ok(Channel::Vsock);
        }
        if begun.elapsed() > CHANNEL_PATIENCE {
            let why = "there is no virtio port for the host and no vsock device";
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Every connection is a channel of its own, and the newest one counts.
async fn serve_vsock(daemon: &Arc<Daemon>, streams: mpsc::Sender<LinkStream>) -> io::Result<()> {
    let door = vsock::Door::open()?;
    let mut current: Option<JoinHandle<()>> = None;
    loop {
        let stream = door.accept().await?;
        if let Some(old) = current.take() {
            old.abort();
        }
        let (daemon, streams) = (daemon.clone(), streams.clone());
        current = Some(tokio::spawn(async move { accept(&daemon, Listener::new(stream), streams).await }));
    }
}

async fn accept(daemon: &Arc<Daemon>, mut listener: Listener, streams: mpsc::Sender<LinkStream>) {
    while let Ok((hello, responder)) = listener.accept().await {
        match obey(daemon, hello).await {
            Ok(ack) => {
                if streams.send(responder.ack(ack)).await.is_err() {
                    return;
                }
            }
            Err(why) => responder.refuse(why),
        }
    }
}

async fn obey(daemon: &Arc<Daemon>, hello: Hello) -> Result<HelloAck, String> {
    let refresh = match hello.refresh {
        Some(request) => Some(daemon.refresh(request).await?),
        None => None,
    };
    Ok(HelloAck { protocol: GUEST_PROTOCOL, refresh, error: String::new() })
}
