//! The HTTP/1.1 server that both doors use, the API and the data plane. It bounds what a client can hold: connections, the
//! time for a request's head, and its size. It must never close a connection whose request is being answered, except at
//! the end.

use std::future::Future;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Of one door. More wait in the kernel's queue until one ends.
const CONNECTIONS_MAX: usize = 4096;
/// For the head of a request, from the connection or the end of the last answer on: also how long an idle one is kept.
const HEAD_MAX: Duration = Duration::from_secs(30);
const HEAD_MAX_BYTES: usize = 64 * 1024;
/// After a failed accept: out of descriptors, mostly.
const PAUSE: Duration = Duration::from_millis(200);

/// Serves until `stop` is ready, then takes no new connection and returns when the open ones have answered. Dropped, it ends
/// nothing that is being answered.
pub async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()>) {
    let open = std::sync::Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let ending = CancellationToken::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = async {
            let place = open.clone().acquire_owned().await.ok()?;
            match listener.accept().await {
                Ok((stream, _)) => Some((stream, place)),
                Err(error) => {
                    tracing::debug!(%error, "a connection could not be accepted");
                    tokio::time::sleep(PAUSE).await;
                    None
                }
            }
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        if let Some((stream, place)) = accepted {
            let (router, ending) = (router.clone(), ending.clone());
            tokio::spawn(async move {
                answer(stream, router, ending).await;
                drop(place);
            });
        }
    }
    drop(listener);
    ending.cancel();
    let all = u32::try_from(CONNECTIONS_MAX).unwrap_or(u32::MAX);
    // Every place is free again when the last connection has ended.
    let _ = open.acquire_many(all).await;
}

/// Answers the requests of one connection. What it was upgraded to goes on without it.
async fn answer(stream: TcpStream, router: Router, ending: CancellationToken) {
    // Small answers go out at once.
    let _ = stream.set_nodelay(true);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_MAX).max_buf_size(HEAD_MAX_BYTES);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).with_upgrades();
    let mut connection = std::pin::pin!(connection);
    // A client that breaks off, or sends what is no request, is no concern of ours.
    tokio::select! {
        _ = &mut connection => return,
        () = ending.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_head_that_never_ends_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let router = Router::new().route("/", axum::routing::get(async || "ok"));
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let server = tokio::spawn(serve(listener, router, async move { drop(ended.await) }));
        let mut slow = TcpStream::connect(address).await.expect("connected");
        slow.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n").await.expect("sent");
        let mut answer = Vec::new();
        let closed = tokio::time::timeout(HEAD_MAX * 2, slow.read_to_end(&mut answer)).await;
        assert!(closed.is_ok(), "still open after {:?}", HEAD_MAX * 2);
        let mut whole = TcpStream::connect(address).await.expect("connected");
        whole.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.expect("sent");
        let mut answer = String::new();
        whole.read_to_string(&mut answer).await.expect("answered");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok"), "{answer}");
        drop(end);
        server.await.expect("it ends");
    }
}
