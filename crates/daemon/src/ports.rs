//! TCP ports of the guest for the host: a connection to the guest's own loopback, so that a server that listens on localhost only
//! is reached too. Never a connection to anywhere else.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use space_proto::guest::PortData;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::{Status, Streaming};

pub const CONNECTIONS_MAX: usize = 1024;
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
const READ_BYTES: usize = 32 * 1024;
const QUEUED: usize = 4;
/// Of `/proc/net/tcp*`, of which the guest's programs decide the length.
const LISTENERS_READ_MAX_BYTES: u64 = 4 << 20;

pub struct Ports(Arc<Semaphore>);

impl Default for Ports {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(CONNECTIONS_MAX)))
    }
}

impl Ports {
    /// Connects, and from then on carries bytes both ways. An end of one direction is passed on and leaves the other open.
    pub async fn open(
        &self,
        mut input: Streaming<PortData>,
    ) -> Result<mpsc::Receiver<Result<PortData, Status>>, Status> {
        let full = || Status::resource_exhausted(format!("{CONNECTIONS_MAX} connections are open already"));
        let permit = self.0.clone().try_acquire_owned().map_err(|_| full())?;
        let first = input.message().await?.ok_or_else(|| Status::invalid_argument("the stream named no port"))?;
        let port = u16::try_from(first.port).ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| Status::invalid_argument(format!("{} is no port: 1 to 65535", first.port)))?;
        let stream = connect(port).await?;
        let _ = stream.set_nodelay(true);
        let (read, write) = stream.into_split();
        let (output, answers) = mpsc::channel(QUEUED);
        // "Connected", before the first byte of a server that waits for its client to speak.
        let _ = output.try_send(Ok(PortData::default()));
        let permit = Arc::new(permit);
        tokio::spawn(outward(read, output, permit.clone()));
        tokio::spawn(inward(first.data, input, write, permit));
        Ok(answers)
    }
}

async fn connect(port: u16) -> Result<TcpStream, Status> {
    let mut why = String::new();
    for address in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        match tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect((address, port))).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => why = error.to_string(),
            Err(_) => why = format!("no answer within {} s", CONNECT_LIMIT.as_secs()),
        }
    }
    Err(Status::unavailable(format!("nothing answers on port {port} of the sandbox: {why}")))
}

async fn outward(
    mut read: OwnedReadHalf,
    output: mpsc::Sender<Result<PortData, Status>>,
    _permit: Arc<OwnedSemaphorePermit>,
) {
    let mut buffer = vec![0u8; READ_BYTES];
    loop {
        let len = tokio::select! {
            read = read.read(&mut buffer) => read,
            // The host has gone: nobody would read what comes.
            () = output.closed() => return,
        };
        let message = match len {
            Ok(0) => return,
            Ok(len) => Ok(PortData { port: 0, data: Bytes::copy_from_slice(&buffer[..len]) }),
            Err(error) => Err(Status::aborted(format!("the connection broke: {error}"))),
        };
        let broken = message.is_err();
        if output.send(message).await.is_err() || broken {
            return;
        }
    }
}

async fn inward(
    first: Bytes,
    mut input: Streaming<PortData>,
    mut write: OwnedWriteHalf,
    _permit: Arc<OwnedSemaphorePermit>,
) {
    let mut data = first;
    loop {
        if write.write_all(&data).await.is_err() {
            return;
        }
        match input.message().await {
            Ok(Some(message)) => data = message.data,
            Ok(None) => {
                let _ = write.shutdown().await;
                return;
            }
            // The caller broke off: the server must see no clean end of what it was being told.
            Err(_) => {
                let _ = write.as_ref().set_zero_linger();
                return;
            }
        }
    }
}

/// Ports that somebody listens on, sorted.
pub fn listening() -> Vec<u32> {
    use std::io::Read as _;
    let mut ports = BTreeSet::new();
    for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let Ok(file) = std::fs::File::open(file) else { continue };
        let mut text = String::new();
        let _ = file.take(LISTENERS_READ_MAX_BYTES).read_to_string(&mut text);
        ports.extend(text.lines().skip(1).filter_map(listener));
    }
    ports.into_iter().collect()
}

/// The port of a line of `/proc/net/tcp`, if it is of a listener.
fn listener(line: &str) -> Option<u32> {
    const LISTEN: &str = "0A";
    let mut fields = line.split_whitespace().skip(1);
    let (local, _remote, state) = (fields.next()?, fields.next()?, fields.next()?);
    let port = local.rsplit(':').next().filter(|_| state == LISTEN)?;
    u32::from_str_radix(port, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::listener;

    #[test]
    fn only_listeners_count() {
        let of =
            |state: &str| format!("   0: 0100007F:1F90 00000000:0000 {state} 00000000:00000000 00:00000000 00000000");
        assert_eq!(listener(&of("0A")), Some(8080));
        assert_eq!(listener(&of("01")), None);
        assert_eq!(listener(""), None);
        assert_eq!(listener("x y z 0A"), None);
    }
}
