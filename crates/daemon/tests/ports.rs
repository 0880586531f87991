//! Ports of the guest: bytes both ways unharmed, half-closed connections, listeners on either loopback address, and limits.

mod common;

use common::*;
use space_proto::guest::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

struct Port {
    input: Option<mpsc::Sender<PortData>>,
    output: Streaming<PortData>,
}

impl Port {
    async fn open(client: &mut Client, port: u32) -> Result<Self, Status> {
        let (input, receiver) = mpsc::channel(4);
        input.send(PortData { port, ..Default::default() }).await.unwrap();
        let mut output = client.open_port(ReceiverStream::new(receiver)).await?.into_inner();
        let first = timeout(PATIENCE, output.message()).await.expect("no word of a connection")?;
        assert!(first.expect("it ended at once").data.is_empty());
        Ok(Self { input: Some(input), output })
    }

    async fn write(&self, data: impl Into<Vec<u8>>) {
        let message = PortData { port: 0, data: data.into().into() };
        timeout(PATIENCE, self.input.as_ref().unwrap().send(message)).await.expect("stuck").unwrap();
    }

    async fn read_all(mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(message) = timeout(PATIENCE, self.output.message()).await.expect("stuck").unwrap() {
            all.extend_from_slice(&message.data);
        }
        all
    }
}

/// Reads to the end, then answers with what it read.
async fn echo_after_the_end(address: &str) -> u32 {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut all = Vec::new();
                stream.read_to_end(&mut all).await.unwrap();
                stream.write_all(&all).await.unwrap();
            });
        }
    });
    port.into()
}

#[tokio::test]
async fn megabytes_go_both_ways_and_the_end_of_one_side_is_not_the_end_of_the_other() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    for address in ["127.0.0.1", "::1"] {
        let number = echo_after_the_end(address).await;
        let mut port = Port::open(&mut client, number).await.unwrap();
        let piece: Vec<u8> = (0..=255u8).cycle().take(50_000).collect();
        for _ in 0..60 {
            port.write(piece.clone()).await;
        }
        port.input = None;
        assert!(port.read_all().await == piece.repeat(60), "bytes were lost or changed on {address}");
    }
}

#[tokio::test]
async fn a_server_that_speaks_first_is_heard() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::open(&mut client, listener.local_addr().unwrap().port().into()).await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.write_all(b"220 hello").await.unwrap();
    drop(stream);
    assert_eq!(port.read_all().await, b"220 hello");
}

#[tokio::test]
async fn a_caller_that_goes_closes_the_connection() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = Port::open(&mut client, listener.local_addr().unwrap().port().into()).await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    drop(port);
    let mut buffer = [0u8; 10];
    let read = timeout(PATIENCE, stream.read(&mut buffer)).await.expect("the server never heard of it");
    assert!(matches!(read, Ok(0) | Err(_)));
}

#[tokio::test]
async fn what_is_no_port_or_has_no_listener_is_refused_with_the_reason() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    for number in [0, 65_536, u32::MAX] {
        let status = Port::open(&mut client, number).await.err().expect("refused");
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let status = Port::open(&mut client, free.into()).await.err().expect("refused");
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains(&format!("nothing answers on port {free}")), "{status}");
}

#[tokio::test]
async fn listeners_are_listed() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let number = listener.local_addr().unwrap().port();
    let connected = TcpStream::connect(("127.0.0.1", number)).await.unwrap();
    let ports = client.list_ports(ListPortsRequest {}).await.unwrap().into_inner().ports;
    assert!(ports.contains(&number.into()));
    let own = connected.local_addr().unwrap().port();
    assert!(!ports.contains(&own.into()), "a connection is no listener");
    assert!(ports.is_sorted());
}
