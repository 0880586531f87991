//! Watching a folder: nothing is missed in silence, nobody sees more than they may, and all of it is bounded.

mod common;

use std::time::Duration;

use common::*;
use space_proto::guest::*;
use tonic::{Code, Status, Streaming};

async fn watch(client: &mut Client, path: &str, recursive: bool, user: &str) -> Result<Streaming<FileEvent>, Status> {
    let request = WatchFilesRequest { path: path.into(), user: user.into(), recursive };
    let mut events = client.watch_files(request).await?.into_inner();
    let first = events.message().await?.expect("an event");
    assert_eq!(first.change(), FileChange::Ready);
    Ok(events)
}

/// Events until one of this change and end of path.
async fn until(events: &mut Streaming<FileEvent>, change: FileChange, end: &str) -> Vec<FileEvent> {
    let mut seen = Vec::new();
    loop {
        let next = tokio::time::timeout(Duration::from_secs(20), events.message()).await;
        let Ok(Ok(Some(event))) = next else { panic!("no {change:?} of {end}: {next:?} after {seen:?}") };
        let found = event.change() == change && event.path.ends_with(end);
        seen.push(event);
        if found {
            return seen;
        }
    }
}

#[tokio::test]
async fn changes_are_told_with_both_halves_of_a_move() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let folder = daemon.path("watched");
    std::fs::create_dir_all(format!("{folder}/sub")).unwrap();
    let mut flat = watch(&mut client, &folder, false, "").await.unwrap();
    let mut deep = watch(&mut client, &folder, true, "").await.unwrap();
    std::fs::write(format!("{folder}/a"), "1").unwrap();
    std::fs::rename(format!("{folder}/a"), format!("{folder}/sub/b")).unwrap();
    until(&mut flat, FileChange::Modified, "/a").await;
    until(&mut flat, FileChange::MovedAway, "/a").await;
    let seen = until(&mut deep, FileChange::MovedHere, "/sub/b").await;
    let away = seen.iter().find(|e| e.change() == FileChange::MovedAway).expect("the other half");
    assert_eq!(Some(away.cookie), seen.last().map(|e| e.cookie));
    // What is made together with a new folder is told as well.
    std::fs::create_dir_all(format!("{folder}/x/y/z")).unwrap();
    std::fs::write(format!("{folder}/x/y/z/file"), "").unwrap();
    until(&mut deep, FileChange::Created, "/x/y/z/file").await;
    std::fs::remove_dir_all(&folder).unwrap();
    until(&mut deep, FileChange::Removed, "/watched").await;
    assert!(deep.message().await.unwrap().is_none(), "the stream ends with the folder");
}

#[tokio::test]
async fn a_slow_watcher_is_told_that_it_missed_something() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let folder = daemon.path("busy");
    std::fs::create_dir(&folder).unwrap();
    let mut events = watch(&mut client, &folder, false, "").await.unwrap();
    for n in 0..40_000 {
        std::fs::write(format!("{folder}/{n}"), "").unwrap();
    }
    until(&mut events, FileChange::Missed, "/busy").await;
}

#[tokio::test]
async fn a_user_watches_only_what_it_may_read_and_watchers_are_counted() {
    let daemon = Daemon::start();
    let mut client = daemon.client().await;
    let folder = daemon.path("secret");
    std::fs::create_dir(&folder).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(&folder, mode).unwrap();
    if nix::unistd::geteuid().is_root() {
        let refused = watch(&mut client, &folder, false, "65534:65534").await.expect_err("not for this user");
        assert_eq!(refused.code(), Code::PermissionDenied);
    } else {
        println!("SKIP: only root can act as another user");
    }
    let missing = watch(&mut client, &daemon.path("none"), false, "").await.expect_err("not there");
    assert_eq!(missing.code(), Code::NotFound);
    let mut held = Vec::new();
    let full = loop {
        match watch(&mut client, &folder, false, "").await {
            Ok(events) => held.push(events),
            Err(status) => break status,
        }
        assert!(held.len() < 100, "nobody counts");
    };
    assert_eq!((held.len(), full.code()), (16, Code::ResourceExhausted));
    held.clear();
    for attempt in 0.. {
        match watch(&mut client, &folder, false, "").await {
            Ok(_) => break,
            Err(status) => assert!(attempt < 200, "places do not come back: {status}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
