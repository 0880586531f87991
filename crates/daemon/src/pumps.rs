//! Bytes between a program's pipes or terminal and its log and queue of input.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use space_proto::guest::Stream;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use crate::output::Log;
use crate::processes::Input;

const READ_BYTES: usize = 32 * 1024;

pub async fn pump(log: Arc<Log>, mut pipe: pipe::Receiver, stream: Stream) {
    use tokio::io::AsyncReadExt as _;
    let mut buffer = vec![0u8; READ_BYTES];
    while let Ok(len @ 1..) = pipe.read(&mut buffer).await {
        log.append(stream, &buffer[..len]).await;
    }
    log.pump_ends();
}

pub async fn pump_terminal(log: Arc<Log>, terminal: Arc<AsyncFd<OwnedFd>>) {
    let mut buffer = vec![0u8; READ_BYTES];
    loop {
        let read = terminal.async_io(tokio::io::Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut buffer)?)).await;
        match read {
            // EIO: the last process that had the terminal open is gone.
            Ok(0) | Err(_) => break,
            Ok(len) => log.append(Stream::Stdout, &buffer[..len]).await,
        }
    }
    log.pump_ends();
}

pub async fn feed(mut pipe: pipe::Sender, mut input: mpsc::Receiver<Input>) {
    use tokio::io::AsyncWriteExt as _;
    while let Some(Input::Data(data)) = input.recv().await {
        if pipe.write_all(&data).await.is_err() {
            // The program reads no more. Its queue is emptied, so that nobody waits for it.
            while input.recv().await.is_some() {}
            return;
        }
    }
}

pub async fn feed_terminal(terminal: Arc<AsyncFd<OwnedFd>>, mut input: mpsc::Receiver<Input>) {
    while let Some(item) = input.recv().await {
        let mut data = match item {
            Input::Data(data) => data,
            // End of file, as a terminal knows it.
            Input::Close => Bytes::from_static(b"\x04"),
        };
        while !data.is_empty() {
            let wrote = terminal.async_io(tokio::io::Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, &data)?)).await;
            match wrote {
                Ok(len) => drop(data.split_to(len)),
                Err(_) => return,
            }
        }
    }
}
