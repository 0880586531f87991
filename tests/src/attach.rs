//! The attach WebSocket, frame by frame.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use serde_json::Value;
use space_api::frame::Frame;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest as _};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

pub struct Attached {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// Smallest offset not yet received.
    pub offset: u64,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub dropped_until: u64,
}

/// How a command ended, with what it wrote.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub reason: String,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub dropped_until: u64,
}

impl Ended {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }

    /// The output of a command that must have succeeded.
    pub fn ok(self) -> Result<String> {
        if self.code != 0 {
            bail!("exit {} ({}): {}", self.code, self.reason, String::from_utf8_lossy(&self.stderr));
        }
        Ok(self.text())
    }
}

impl Attached {
    pub async fn open(session: &Value, offset: u64) -> Result<Self> {
        let url = session["url"].as_str().context("no url")?;
        let mut request = format!("{url}?offset={offset}").into_client_request()?;
        let token = session["token"].as_str().context("no token")?;
        request.headers_mut().insert("authorization", format!("Bearer {token}").parse()?);
        let (socket, _) = tokio_tungstenite::connect_async(request).await.context("attach")?;
        Ok(Self { socket, offset, stdout: vec![], stderr: vec![], dropped_until: 0 })
    }

    pub async fn send(&mut self, frame: Frame) -> Result<()> {
        Ok(self.socket.send(Message::Binary(frame.encode())).await?)
    }

    pub async fn input(&mut self, data: &[u8]) -> Result<()> {
        self.send(Frame::Stdin(Bytes::copy_from_slice(data))).await
    }

    /// The next frame, at most `seconds` away.
    pub async fn next(&mut self, seconds: u64) -> Result<Frame> {
        loop {
            let message = tokio::time::timeout(Duration::from_secs(seconds), self.socket.next())
                .await
                .with_context(|| format!("nothing came for {seconds} s"))?
                .context("the connection ended without an exit")??;
            let Message::Binary(data) = message else {
                if matches!(message, Message::Close(_)) {
                    bail!("closed without an exit: {message:?}");
                }
                continue;
            };
            let frame = Frame::decode(data)?;
            match &frame {
                Frame::Stdout { offset, data } | Frame::Stderr { offset, data } => {
                    if *offset != self.offset {
                        bail!("a gap or a repetition: expected offset {}, got {offset}", self.offset);
                    }
                    self.offset += data.len() as u64;
                }
                Frame::Dropped { until } => {
                    self.offset = *until;
                    self.dropped_until = *until;
                }
                _ => {}
            }
            match &frame {
                Frame::Stdout { data, .. } => self.stdout.extend_from_slice(data),
                Frame::Stderr { data, .. } => self.stderr.extend_from_slice(data),
                _ => {}
            }
            return Ok(frame);
        }
    }

    /// Reads until the standard output holds the text.
    pub async fn until(&mut self, text: &str, seconds: u64) -> Result<()> {
        let found = |out: &[u8]| String::from_utf8_lossy(out).contains(text);
        while !found(&self.stdout) {
            if let Frame::Exit(exit) = self.next(seconds).await? {
                bail!("ended ({exit:?}) before it said {text:?}: {:?}", String::from_utf8_lossy(&self.stdout));
            }
        }
        Ok(())
    }

    pub async fn finish(self) -> Result<Ended> {
        self.finish_within(120).await
    }

    /// Reads to the end; `seconds` without a frame is a failure.
    pub async fn finish_within(mut self, seconds: u64) -> Result<Ended> {
        loop {
            match self.next(seconds).await? {
                Frame::Exit(exit) => {
                    return Ok(Ended {
                        code: exit.code,
                        reason: exit.reason,
                        stdout: self.stdout,
                        stderr: self.stderr,
                        dropped_until: self.dropped_until,
                    });
                }
                Frame::Error(problem) => bail!("{problem}"),
                _ => {}
            }
        }
    }
}
