//! Things that happen at once, or while something else is under way.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use tonic::Status;

use crate::support::Cloud;

fn delay(cloud: &Cloud, ms: u64) {
    *cloud.node.faults.start_delay.lock().expect("lock") = Duration::from_millis(ms);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_idempotency_key_makes_one_sandbox() {
    let cloud = Cloud::start().await;
    delay(&cloud, 100);
    let create = || {
        let request = cloud.request("POST", "/v1/sandboxes?wait=30").header("Idempotency-Key", "once");
        cloud.send(request.json(&json!({"template": "seed"})))
    };
    let answers = futures::future::join_all((0..10).map(|_| create())).await;
    for answer in &answers {
        assert_eq!((answer.status, answer.text("state").as_str()), (200, "succeeded"), "{answer:?}");
        assert_eq!(answer.body["id"], answers[0].body["id"]);
    }
    assert_eq!(cloud.node.starts.load(Ordering::Relaxed), 1);
    let other = cloud.request("POST", "/v1/sandboxes").header("Idempotency-Key", "once");
    let other = cloud.send(other.json(&json!({"template": "seed", "name": "b"}))).await;
    assert_eq!((other.status, other.code()), (409, "idempotency_mismatch"));
    let long = cloud.request("POST", "/v1/sandboxes").header("Idempotency-Key", "x".repeat(256));
    assert_eq!(cloud.send(long.json(&json!({"template": "seed"}))).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_posts_keep_their_keys_too() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({})).await;
    let post = |path: &str, key: &str, body: serde_json::Value| {
        cloud.send(cloud.request("POST", path).header("Idempotency-Key", key).json(&body))
    };
    let commands = format!("/v1/sandboxes/{id}/commands");
    let body = json!({"argv": ["echo"], "start": true});
    let (a, b) = tokio::join!(post(&commands, "c", body.clone()), post(&commands, "c", body));
    assert_eq!((a.status, b.status), (201, 201), "{a:?} {b:?}");
    assert_eq!(a.body["id"], b.body["id"]);
    assert_eq!(post(&commands, "c", json!({"argv": ["other"]})).await.code(), "idempotency_mismatch");

    let mkdir = format!("/v1/sandboxes/{id}/files/mkdir");
    let (a, b) = tokio::join!(post(&mkdir, "m", json!({"path": "d"})), post(&mkdir, "m", json!({"path": "d"})));
    assert_eq!((a.status, b.status), (200, 200), "{a:?} {b:?}");
    let again = post(&mkdir, "other", json!({"path": "d"})).await;
    assert_eq!((again.status, again.code()), (409, "file_exists"));
    // A refusal is not kept.
    let rename = format!("/v1/sandboxes/{id}/files/rename");
    assert_eq!(post(&rename, "r", json!({"from": "no", "to": "b"})).await.code(), "file_not_found");
    cloud.send(cloud.request("PUT", &format!("/v1/sandboxes/{id}/files?path=no")).body("x")).await;
    assert_eq!(post(&rename, "r", json!({"from": "no", "to": "b"})).await.status, 200);
    assert_eq!(post(&rename, "r", json!({"from": "no", "to": "b"})).await.status, 200);

    let key = json!({"name": "k", "scope": "use"});
    let (a, b) = (post("/v1/keys", "k", key.clone()).await, post("/v1/keys", "k", key).await);
    assert_eq!(a.status, 201, "{a:?}");
    assert_eq!(a.body, b.body);
    assert_eq!(post("/v1/keys", "k", json!({"name": "k", "scope": "admin"})).await.code(), "idempotency_mismatch");
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_creates_at_once_all_end() {
    let cloud = Cloud::start().await;
    delay(&cloud, 50);
    cloud.node.faults.capacity.store(30, Ordering::Relaxed);
    // The first thirty come in before any is counted, so give the node a count to refuse by.
    let create = || cloud.call("POST", "/v1/sandboxes?wait=60", Some(json!({"template": "seed"})));
    let first = futures::future::join_all((0..30).map(|_| create())).await;
    let rest = futures::future::join_all((0..20).map(|_| create())).await;
    assert!(first.iter().all(|a| a.text("state") == "succeeded"));
    for answer in rest {
        assert_eq!((answer.status, answer.text("state").as_str()), (200, "failed"), "{answer:?}");
        assert_eq!(answer.body["error"]["code"], "no_capacity");
        assert_eq!(answer.body["sandbox"]["state"], "failed");
        cloud.delete(&answer.text("sandbox_id")).await;
    }
    assert_eq!(cloud.node.run_ids().len(), 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_while_creating_leaves_nothing() {
    let cloud = Cloud::start().await;
    for (start_ms, pause_ms) in [(0, 0), (50, 0), (50, 20), (50, 60), (200, 100)] {
        delay(&cloud, start_ms);
        let made = cloud.call("POST", "/v1/sandboxes", Some(json!({"template": "seed"}))).await;
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        let id = made.text("sandbox_id");
        cloud.delete(&id).await;
        assert!(cloud.node.run_ids().is_empty());
        let create = cloud.get(&format!("/v1/operations/{}?wait=5", made.text("id"))).await;
        match create.text("state").as_str() {
            "failed" => assert_eq!(create.body["error"]["code"], "gone"),
            "succeeded" => {}
            other => panic!("the create is {other}: {create:?}"),
        }
        // A late start of the old run is refused by the node's fence.
        tokio::time::sleep(Duration::from_millis(start_ms)).await;
        assert!(cloud.node.run_ids().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_hangs_does_not_hold_a_delete_for_ever() {
    let cloud = Cloud::start().await;
    delay(&cloud, 3_600_000);
    let made = cloud.call("POST", "/v1/sandboxes", Some(json!({"template": "seed"}))).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    cloud.delete(&made.text("sandbox_id")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_abandons_nothing() {
    let cloud = Cloud::start().await;
    delay(&cloud, 200);
    let request = cloud.request("POST", "/v1/sandboxes?wait=30").json(&json!({"template": "seed", "name": "left"}));
    let _ = tokio::time::timeout(Duration::from_millis(100), request.send()).await;
    cloud.wait_state("left", "running").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn time_to_live_ends_a_sandbox() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({"ttl_seconds": 1})).await;
    cloud.wait_state(&id, "deleted").await;
    assert!(cloud.node.run_ids().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_ends_fails_its_sandbox() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({})).await;
    cloud.node.kill(&id, "vm_exited: the guest's kernel panicked");
    let failed = cloud.wait_state(&id, "failed").await;
    assert_eq!(failed.text("reason"), "vm_exited: the guest's kernel panicked");
    let late = cloud.call("POST", &format!("/v1/sandboxes/{id}/commands"), Some(json!({"argv": ["true"]}))).await;
    assert_eq!((late.status, late.code()), (409, "not_running"));
    assert!(late.text("detail").contains("panicked"), "{late:?}");
    cloud.delete(&id).await;
    assert!(cloud.node.run_ids().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_the_node_pauses_is_paused() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({})).await;
    cloud.node.pause(&id, true);
    let paused = cloud.wait_state(&id, "paused").await;
    assert_eq!(paused.text("reason"), "pool_full: no room");
    cloud.node.pause(&id, false);
    let running = cloud.wait_state(&id, "running").await;
    assert!(running.body["reason"].is_null());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_the_node_has_lost_is_noticed() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({})).await;
    cloud.node.forget(&id);
    let failed = cloud.wait_state(&id, "failed").await;
    assert!(failed.text("reason").starts_with("vm_lost"), "{failed:?}");
    cloud.delete(&id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_away_for_a_moment_is_waited_for() {
    let mut cloud = Cloud::start().await;
    let old = cloud.sandbox(json!({})).await;
    cloud.node_down();
    let made = cloud.call("POST", "/v1/sandboxes", Some(json!({"template": "seed"}))).await;
    assert_eq!(made.status, 202, "{made:?}");
    let gone = cloud.call("DELETE", &format!("/v1/sandboxes/{old}"), None).await;
    assert_eq!(gone.status, 202, "{gone:?}");
    tokio::time::sleep(Duration::from_millis(300)).await;
    cloud.node_up();
    for operation in [made, gone] {
        let ended = cloud.get(&format!("/v1/operations/{}?wait=20", operation.text("id"))).await;
        assert_eq!(ended.text("state"), "succeeded", "{ended:?}");
    }
    assert_eq!(cloud.node.run_ids().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_refused_leaves_a_reason_and_no_run() {
    let cloud = Cloud::start().await;
    let refuse = |status| cloud.node.faults.starts.lock().expect("lock").push(status);
    refuse(Status::internal("the VMM did not come up"));
    let failed = cloud.call("POST", "/v1/sandboxes?wait=20", Some(json!({"template": "seed"}))).await;
    assert_eq!((failed.status, failed.text("state").as_str()), (200, "failed"), "{failed:?}");
    assert_eq!(failed.body["error"]["code"], "internal");
    assert!(failed.body["sandbox"]["reason"].as_str().is_some_and(|r| r.contains("VMM")), "{failed:?}");
    cloud.node.faults.deletes.store(3, Ordering::Relaxed);
    cloud.delete(&failed.text("sandbox_id")).await;
    assert!(cloud.node.run_ids().is_empty());
}
