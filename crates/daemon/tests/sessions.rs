//! Host connections that come, vanish and come again, while processes run on.

mod common;

use std::time::Duration;

use common::*;
use space_proto::guest::guest_client::GuestClient;
use space_proto::guest::*;
use space_proto::link::{Carrier, connect, guest_channel};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::time::Instant;

#[tokio::test]
async fn a_process_runs_on_over_abrupt_disconnects_and_its_output_resumes() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let id =
        reserve(&mut client, sh("i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; exit 8"))
            .await;
    let mut attached = Attached::to(&mut client, &id, 0).await;
    attached.until("line 5\n").await;
    let (mut text, mut offset) = (attached.seen.text(), attached.seen.offset);
    for _ in 0..5 {
        // The new session ends the older one, however that one was left.
        client = daemon.client().await;
        let mut attached = Attached::to(&mut client, &id, offset).await;
        attached.step().await;
        text += &attached.seen.text();
        offset = attached.seen.offset;
    }
    let seen = Attached::to(&mut client, &id, offset).await.finish().await;
    text += &seen.text();
    assert_eq!(text, (0..200).map(|n| format!("line {n}\n")).collect::<String>());
    assert_eq!(seen.code(), 8);
}

#[tokio::test]
async fn a_connection_cut_in_the_middle_of_anything_does_no_harm() {
    let daemon = Daemon::start();
    for cut in [0, 1, 19, 20, 21, 100, 5000] {
        let mut raw = UnixStream::connect(&daemon.socket).await.unwrap();
        raw.write_all(&vec![b'S'; cut]).await.unwrap();
        drop(raw);
        let mut client = daemon.client().await;
        assert_eq!(run(&mut client, sh("echo fine")).await.text(), "fine\n");
    }
}

#[tokio::test]
async fn connecting_without_refresh_keeps_the_environment() {
    let daemon = Daemon::start();
    let refresh = RefreshRequest { env: [("KEPT".into(), "yes".into())].into(), ..Default::default() };
    let mut client = daemon.client_with(refresh).await;
    assert_eq!(run(&mut client, sh("echo $KEPT")).await.text(), "yes\n");
    let io = UnixStream::connect(&daemon.socket).await.unwrap();
    let hello = Hello { protocol: 1, ..Default::default() };
    let (stream, ack) = connect(io, Carrier::Connection, hello, Instant::now() + PATIENCE).await.unwrap();
    assert!(ack.refresh.is_none());
    let mut client = GuestClient::new(guest_channel(stream));
    assert_eq!(run(&mut client, sh("echo $KEPT")).await.text(), "yes\n");
    // And a refresh replaces it as a whole.
    client.refresh(RefreshRequest { env: [("NEW".into(), "1".into())].into(), ..Default::default() }).await.unwrap();
    assert_eq!(run(&mut client, sh("echo $KEPT$NEW")).await.text(), "1\n");
}

#[tokio::test]
async fn the_machine_it_runs_on_is_left_alone() {
    let daemon = Daemon::start();
    let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let refresh = RefreshRequest {
        realtime_ns: 1_000_000_000,
        entropy: vec![1; 64].into(),
        hostname: "changed-by-a-test".into(),
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        ..Default::default()
    };
    let mut client = daemon.client_with(refresh).await;
    assert_eq!(std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap(), hostname);
    assert!(std::time::SystemTime::now() > std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
    let info = client.info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!(info.protocol, 1);
    assert!(info.mem_total_bytes > 0 && info.disk_total_bytes > 0 && !info.kernel.is_empty());
}
