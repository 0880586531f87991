//! Firecracker's HTTP interface over its Unix socket, as far as it is used here: typed requests, bounded answers.
//!
//! Firecracker may be in the hands of a guest that broke out into it: an answer is bounded in length and time, and a
//! connection that misbehaved is thrown away. One request at a time, as Firecracker itself works.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;

use super::API_SOCKET;
use crate::{VmDir, VmmError};

/// The longest answer read; an instance's description has a few hundred bytes.
pub const ANSWER_MAX_BYTES: usize = 64 << 10;
pub const FAULT_MAX_CHARS: usize = 1000;

/// A bucket of `size` tokens (bytes or operations) that is full again after `refill_time` milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenBucket {
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_time_burst: Option<u64>,
    pub refill_time: u64,
}

/// What a device may do per time; `None`: without limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimiter {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<TokenBucket>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops: Option<TokenBucket>,
}

#[derive(Serialize)]
pub(super) struct MachineConfig {
    pub vcpu_count: u8,
    pub mem_size_mib: u32,
    pub track_dirty_pages: bool,
}

#[derive(Serialize)]
pub(super) struct BootSource<'a> {
    pub kernel_image_path: &'a str,
    pub initrd_path: &'a str,
    pub boot_args: &'a str,
}

#[derive(Serialize)]
pub(super) struct Drive<'a> {
    pub drive_id: &'a str,
    pub path_on_host: &'a str,
    pub is_root_device: bool,
    pub is_read_only: bool,
    /// `Writeback`: the guest's flushes are obeyed; Firecracker's default ignores them.
    pub cache_type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_limiter: Option<RateLimiter>,
}

#[derive(Serialize)]
pub(super) struct Vsock<'a> {
    pub guest_cid: u32,
    pub uds_path: &'a str,
}

#[derive(Serialize)]
pub(super) struct Entropy {
    pub rate_limiter: RateLimiter,
}

#[derive(Serialize)]
pub(super) struct Serial<'a> {
    pub serial_out_path: &'a str,
    pub rate_limiter: TokenBucket,
}

#[derive(Serialize)]
pub(super) struct Action {
    pub action_type: &'static str,
}

#[derive(Serialize)]
pub(super) struct VmState {
    pub state: &'static str,
}

#[derive(Serialize)]
pub(super) struct CreateSnapshot<'a> {
    pub snapshot_type: &'static str,
    pub snapshot_path: &'a str,
    pub mem_file_path: &'a str,
}

#[derive(Serialize)]
pub(super) struct MemoryBackend<'a> {
    pub backend_type: &'static str,
    pub backend_path: &'a str,
}

#[derive(Serialize)]
pub(super) struct LoadSnapshot<'a> {
    pub snapshot_path: &'a str,
    pub mem_backend: MemoryBackend<'a>,
    pub track_dirty_pages: bool,
    pub resume_vm: bool,
}

#[derive(Deserialize)]
struct Instance {
    state: String,
}

#[derive(Deserialize)]
struct Fault {
    fault_message: String,
}

/// The connection to one Firecracker, made when first needed and again after a failure.
pub(super) struct Api {
    /// For anything but a snapshot.
    pub patience: Duration,
    connection: Mutex<Option<SendRequest<Full<Bytes>>>>,
}

impl Api {
    pub fn new(patience: Duration) -> Api {
        Api { patience, connection: Mutex::default() }
    }

    /// Asks for the state: `Not started`, `Running` or `Paused`.
    pub async fn state(&self, dir: &VmDir) -> Result<String, VmmError> {
        let body = self.call(dir, "the state", Method::GET, "/", None, self.patience).await?;
        state_of(&body)
    }

    pub async fn put(
        &self,
        dir: &VmDir,
        what: &'static str,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(), VmmError> {
        self.put_within(self.patience, dir, what, path, body).await
    }

    pub async fn put_within(
        &self,
        limit: Duration,
        dir: &VmDir,
        what: &'static str,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(), VmmError> {
        self.call(dir, what, Method::PUT, path, Some(json(body)), limit).await.map(drop)
    }

    pub async fn patch(
        &self,
        dir: &VmDir,
        what: &'static str,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(), VmmError> {
        self.call(dir, what, Method::PATCH, path, Some(json(body)), self.patience).await.map(drop)
    }

    async fn call(
        &self,
        dir: &VmDir,
        what: &'static str,
        method: Method,
        path: &str,
        body: Option<Bytes>,
        limit: Duration,
    ) -> Result<Bytes, VmmError> {
        let exchange = async {
            let mut held = self.connection.lock().await;
            // Taken out: a caller that is cancelled or fails half-way leaves no connection in the midst of an answer.
            let mut sender = match held.take().filter(|sender| !sender.is_closed()) {
                Some(sender) => sender,
                None => handshake(dir.connect_owned(API_SOCKET).await?, what).await?,
            };
            let answer = exchange(&mut sender, what, method, path, body).await?;
            *held = Some(sender);
            success(what, answer)
        };
        tokio::time::timeout(limit, exchange).await.map_err(|_| VmmError::Timeout { what, limit })?
    }
}

/// JSON of plain data, which cannot fail.
fn json(body: &impl Serialize) -> Bytes {
    Bytes::from(serde_json::to_vec(body).expect("plain data"))
}

fn nonsense(command: &'static str, error: &dyn std::fmt::Display) -> VmmError {
    // The error quotes what it did not expect.
    VmmError::Refused { command, message: legible(&format!("its answer makes no sense: {error}")) }
}

async fn handshake<I>(stream: I, command: &'static str) -> Result<SendRequest<Full<Bytes>>, VmmError>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let made = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (sender, connection) = made.map_err(|_| VmmError::Disconnected { command })?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to a Firecracker ended");
        }
    });
    Ok(sender)
}

async fn exchange(
    sender: &mut SendRequest<Full<Bytes>>,
    command: &'static str,
    method: Method,
    path: &str,
    body: Option<Bytes>,
) -> Result<(StatusCode, Bytes), VmmError> {
    let request = Request::builder().method(method).uri(path).header(HOST, "localhost");
    let request = request.header(CONTENT_TYPE, "application/json").body(Full::new(body.unwrap_or_default()));
    let request = request.expect("a request of constants");
    sender.ready().await.map_err(|_| VmmError::Disconnected { command })?;
    let answer = sender.send_request(request).await.map_err(|_| VmmError::Disconnected { command })?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), ANSWER_MAX_BYTES).collect().await;
    Ok((status, body.map_err(|error| nonsense(command, &error))?.to_bytes()))
}

/// One question over a fresh connection. Waits for as long as the other side is silent.
///
/// # Errors
/// `Refused` with Firecracker's own message, also when its answer makes no sense; `Disconnected` when there is none.
pub async fn ask<I>(stream: I, command: &'static str, path: &str) -> Result<Bytes, VmmError>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut sender = handshake(stream, command).await?;
    success(command, exchange(&mut sender, command, Method::GET, path, None).await?)
}

fn success(command: &'static str, (status, answer): (StatusCode, Bytes)) -> Result<Bytes, VmmError> {
    if status.is_success() {
        return Ok(answer);
    }
    Err(VmmError::Refused { command, message: fault(status, &answer) })
}

/// The state in an instance's description.
///
/// # Errors
/// `Refused` when it is no description.
pub fn state_of(description: &[u8]) -> Result<String, VmmError> {
    let instance: Result<Instance, _> = serde_json::from_slice(description);
    instance.map(|instance| instance.state).map_err(|error| nonsense("the state", &error))
}

/// Firecracker's own words, or what came instead of them.
fn fault(status: StatusCode, answer: &[u8]) -> String {
    let words = match serde_json::from_slice::<Fault>(answer) {
        Ok(fault) => fault.fault_message,
        Err(_) => format!("status {status}: {}", String::from_utf8_lossy(answer)),
    };
    legible(&words)
}

/// Fit for a message: bounded, on one line.
fn legible(words: &str) -> String {
    words.chars().map(|c| if c.is_control() { ' ' } else { c }).take(FAULT_MAX_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_firecrackers_own_message_and_bounded() {
        let text = fault(StatusCode::BAD_REQUEST, br#"{"fault_message":"The microVM\nis running."}"#);
        assert_eq!(text, "The microVM is running.");
        let text = fault(StatusCode::BAD_GATEWAY, b"<html>");
        assert!(text.contains("502") && text.contains("<html>"), "{text}");
        let long = format!(r#"{{"fault_message":"{}"}}"#, "x".repeat(20_000));
        assert_eq!(fault(StatusCode::BAD_REQUEST, long.as_bytes()).len(), FAULT_MAX_CHARS);
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_not_quoted_at_length() {
        let text = format!("\"{}\"", "x".repeat(20_000));
        let Err(VmmError::Refused { message, .. }) = state_of(text.as_bytes()) else { panic!("no state") };
        assert_eq!(message.len(), FAULT_MAX_CHARS);
    }
}
