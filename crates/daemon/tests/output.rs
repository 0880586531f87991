//! Output: offsets, readers, back-pressure, and what is dropped when nobody reads.

mod common;

use std::time::Duration;

use common::*;
use sha2::{Digest, Sha256};
use space_proto::guest::*;

#[tokio::test]
async fn bytes_pass_unharmed_whatever_they_are() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let all: Vec<u8> = (0..=255u8).collect();
    let escaped: String = all.iter().map(|b| format!("\\{b:03o}")).collect();
    assert_eq!(run(&mut client, spec(&["printf", &escaped])).await.stdout, all);
    // Characters split over writes of one byte.
    let script = "for b in '\\360' '\\237' '\\246' '\\200' '\\346' '\\227' '\\245'; do printf $b; done";
    assert_eq!(run(&mut client, sh(script)).await.text(), "🦀日");
}

#[tokio::test]
async fn a_large_output_arrives_whole() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let id = reserve(&mut client, sh("seq 1 4000000")).await;
    let seen = Attached::to(&mut client, &id, 0).await.finish().await;
    let mut expected = Sha256::new();
    let mut length = 0;
    for n in 1..=4_000_000 {
        let line = format!("{n}\n");
        length += line.len();
        expected.update(line);
    }
    assert_eq!((seen.stdout.len(), seen.dropped), (length, None));
    assert_eq!(Sha256::digest(&seen.stdout), expected.finalize());
}

#[tokio::test]
async fn both_streams_keep_their_bytes_and_share_one_sequence() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let script = "i=0; while [ $i -lt 500 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done";
    let seen = run(&mut client, sh(script)).await;
    let lines = |c| (0..500).map(|n| format!("{c}{n}\n")).collect::<String>().into_bytes();
    assert!(seen.stdout == lines('o') && seen.stderr == lines('e'));
}

#[tokio::test]
async fn a_reader_comes_back_at_its_offset_and_misses_nothing() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let id =
        reserve(&mut client, sh("i=0; while [ $i -lt 300 ]; do echo line $i; i=$((i+1)); sleep 0.002; done")).await;
    let (mut text, mut offset) = (String::new(), 0);
    for _ in 0..10 {
        let mut attached = Attached::to(&mut client, &id, offset).await;
        for _ in 0..3 {
            attached.step().await;
        }
        text += &attached.seen.text();
        offset = attached.seen.offset;
    }
    text += &Attached::to(&mut client, &id, offset).await.finish().await.text();
    assert_eq!(text, (0..300).map(|n| format!("line {n}\n")).collect::<String>());
}

#[tokio::test]
async fn several_readers_each_get_everything() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let id = reserve(&mut client, sh("sleep 0.3; seq 1 200000; echo last >&2")).await;
    let readers: Vec<_> = (0..5)
        .map(|_| {
            let (mut client, id) = (client.clone(), id.clone());
            tokio::spawn(async move { Attached::to(&mut client, &id, 0).await.finish().await })
        })
        .collect();
    let expected: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    for reader in readers {
        let seen = reader.await.unwrap();
        assert!(seen.text() == expected && seen.stderr == b"last\n");
    }
}

#[tokio::test]
async fn without_a_reader_the_newest_is_kept_and_the_program_never_waits() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let id = reserve(&mut client, sh("head -c 20000000 /dev/zero; echo tail; echo error >&2")).await;
    client.start(ProcessRef { process_id: id.clone() }).await.unwrap();
    let ended = info(&mut client, &id, PATIENCE).await;
    assert_eq!((ended.state(), ended.output_end), (ProcessState::Exited, 20_000_011));
    let kept = ended.output_end - ended.output_start;
    assert!((500_000..=1_100_000).contains(&kept), "{kept} bytes were kept");
    let seen = Attached::to(&mut client, &id, 0).await.finish().await;
    assert_eq!(seen.dropped, Some(ended.output_start));
    assert!(seen.text().ends_with("tail\n") && seen.stderr == b"error\n");
}

#[tokio::test]
async fn single_bytes_to_both_streams_in_turn_cost_little_memory_and_time() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let script = "i=0; while [ $i -lt 200000 ]; do printf o; printf e >&2; i=$((i+1)); done";
    let id = reserve(&mut client, sh(script)).await;
    client.start(ProcessRef { process_id: id.clone() }).await.unwrap();
    let ended = info(&mut client, &id, PATIENCE).await;
    assert_eq!((ended.state(), ended.output_end), (ProcessState::Exited, 400_000));
    let resident = resident_kib(daemon.pid());
    assert!(resident < 24 * 1024, "{resident} KiB");
    let seen = Attached::to(&mut client, &id, 0).await.finish().await;
    assert_eq!((seen.offset, seen.dropped.unwrap_or(0)), (400_000, ended.output_start));
}

fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test]
async fn a_program_waits_for_a_reader_that_is_only_slow() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let marker = daemon.path("done");
    let id = reserve(&mut client, sh(&format!("head -c 30000000 /dev/zero; touch {marker}"))).await;
    let mut attached = Attached::to(&mut client, &id, 0).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!exists(&marker), "nothing holds the program back");
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        attached.step().await;
    }
    let seen = attached.finish().await;
    assert_eq!((seen.stdout.len(), seen.dropped, seen.code()), (30_000_000, None, 0));
}

#[tokio::test]
async fn a_quiet_time_costs_a_reader_nothing() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    // Longer than a stalled reader is waited for.
    let seen = run(&mut client, sh("sleep 11; head -c 30000000 /dev/zero")).await;
    assert_eq!((seen.stdout.len(), seen.dropped), (30_000_000, None));
}

#[tokio::test]
async fn a_reader_that_does_not_read_is_given_up_and_told() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let mut other = client.clone();
    let id = reserve(&mut client, sh("head -c 60000000 /dev/zero; echo last")).await;
    let attached = Attached::to(&mut client, &id, 0).await;
    let ended = info(&mut other, &id, Duration::from_secs(50)).await;
    assert_eq!(ended.state(), ProcessState::Exited, "the program waits for ever");
    let seen = attached.finish().await;
    assert!(seen.dropped.is_some() && seen.text().ends_with("last\n"));
}

#[tokio::test]
async fn the_slowest_exit_still_has_all_output() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    // The program ends at once; what it wrote is still in the pipe and the ring while the reader takes its time.
    let mut attached = Attached::run(&mut client, sh("head -c 1500000 /dev/zero; echo end")).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    attached.step().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let seen = attached.finish().await;
    assert_eq!((seen.stdout.len(), seen.dropped, seen.code()), (1_500_004, None, 0));
}

#[tokio::test]
async fn no_follow_gives_what_is_there() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let id = reserve(&mut client, sh("echo here; sleep 1000")).await;
    Attached::to(&mut client, &id, 0).await.until("here").await;
    let open = AttachOpen { process_id: id.clone(), no_follow: true, read_only: true, ..Default::default() };
    let seen = Attached::open(&mut client, open).await.finish().await;
    assert_eq!((seen.text().as_str(), seen.exit), ("here\n", None));
}

#[tokio::test]
async fn looking_on_starts_nothing() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let id = reserve(&mut client, sh("echo started")).await;
    let open = AttachOpen { process_id: id.clone(), read_only: true, ..Default::default() };
    let watching = Attached::open(&mut client, open).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(info(&mut client, &id, Duration::ZERO).await.state(), ProcessState::Reserved);
    client.start(ProcessRef { process_id: id.clone() }).await.unwrap();
    let seen = watching.finish().await;
    assert_eq!((seen.text().as_str(), seen.code()), ("started\n", 0));
}
