//! Calls of tenants to a guest, passed through as HTTP/2 streams: nothing is decoded and nothing is buffered here, so
//! back-pressure holds from end to end and a new method needs no code.
//!
//! What is checked: the method is one that tenants may call, and this node holds exactly the run that the call names.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{HeaderMap, Request, Response};
use space_proto::{META_GENERATION, META_RUN, META_SANDBOX};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::{Service, ServiceExt as _};

use crate::runs::Runs;

/// Everything but what only the node may ask of a guest.
const METHODS: &[&str] = &[
    "Info",
    "Reserve",
    "Start",
    "Attach",
    "ListProcesses",
    "GetProcess",
    "Signal",
    "StatFile",
    "ListDir",
    "MakeDir",
    "RemoveFile",
    "RenameFile",
    "ReadFile",
    "WriteFile",
    "ReadArchive",
    "WriteArchive",
    "WatchFiles",
    "OpenPort",
    "ListPorts",
];

#[derive(Clone)]
pub struct GuestProxy(pub Arc<Runs>);

impl NamedService for GuestProxy {
    const NAME: &'static str = "space.guest.v1.Guest";
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

async fn pass(runs: Arc<Runs>, mut request: Request<Body>) -> Result<Response<Body>, Status> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default();
    if !METHODS.contains(&method) {
        return Err(Status::permission_denied("this call is not for tenants"));
    }
    let headers = request.headers();
    let sandbox = header(headers, META_SANDBOX).and_then(|text| text.parse().ok());
    let run = header(headers, META_RUN).and_then(|text| text.parse().ok());
    let (Some(sandbox), Some(run)) = (sandbox, run) else {
        return Err(Status::invalid_argument("the call names no sandbox and run"));
    };
    let live = runs.live(&sandbox, run).ok_or_else(|| {
        Status::failed_precondition(format!("misdirected: this node does not hold run {run} of {sandbox}"))
    })?;
    if live.marks().paused {
        return Err(Status::failed_precondition(format!("paused: {sandbox} stands still; resume it first")));
    }
    live.calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    for name in [META_SANDBOX, META_RUN, META_GENERATION] {
        request.headers_mut().remove(name);
    }
    let (mut channel, epoch) = live
        .guest
        .channel()
        .await
        .map_err(|error| Status::unavailable(format!("the guest cannot be reached: {}", error.text())))?;
    let answer = async { channel.ready().await?.call(request).await };
    match answer.await {
        Ok(answer) => Ok(answer),
        Err(error) => {
            live.guest.lost(epoch).await;
            Err(Status::unavailable(format!("the connection to the guest broke: {error}")))
        }
    }
}

impl Service<Request<Body>> for GuestProxy {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let runs = self.0.clone();
        Box::pin(async move { Ok(pass(runs, request).await.unwrap_or_else(|status| status.into_http())) })
    }
}
