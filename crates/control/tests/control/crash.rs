//! The server dies at each named point in turn. After its restart the work is finished and nothing is left over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use space_control::Points;

use crate::sim_node::SEED;
use crate::support::Cloud;

/// A server that dies at the point, and whether it has got there.
async fn dying_at(point: &'static str) -> (Cloud, Arc<AtomicBool>) {
    let reached = Arc::new(AtomicBool::new(false));
    let flag = reached.clone();
    let points = Points::new(move |at| at == point && !flag.swap(true, Ordering::SeqCst));
    let cloud = Cloud::start_with(points).await;
    let tagged = cloud.call("PUT", &format!("/v1/templates/{SEED}/tags"), Some(json!({"tag": "seed"}))).await;
    assert_eq!(tagged.status, 200, "{tagged:?}");
    (cloud, reached)
}

async fn until(reached: &AtomicBool, point: &str) {
    let started = Instant::now();
    while !reached.load(Ordering::SeqCst) {
        assert!(started.elapsed() < Duration::from_secs(10), "{point} is never reached");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Sends and leaves: the answer would never come.
async fn send(cloud: &Cloud, method: &str, path: &str, body: Option<Value>) {
    let mut request = cloud.request(method, path).timeout(Duration::from_secs(2)).header("Idempotency-Key", "k");
    if let Some(body) = body {
        request = request.json(&body);
    }
    drop(tokio::spawn(request.send()));
}

async fn settled(cloud: &Cloud) -> Vec<Value> {
    let started = Instant::now();
    loop {
        // Operations first: a list from before their end would be old.
        let open = cloud.get("/v1/operations").await.body["operations"].as_array().cloned().unwrap_or_default();
        let list = cloud.get("/v1/sandboxes").await.body["sandboxes"].as_array().cloned().unwrap_or_default();
        if open.iter().all(|o| o["state"] == "succeeded" || o["state"] == "failed") {
            return list;
        }
        assert!(started.elapsed() < Duration::from_secs(25), "not settled: {list:?} {open:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_survives_a_death_at_any_point() {
    for point in Points::ALL.iter().filter(|p| p.starts_with("create.")) {
        let (mut cloud, reached) = dying_at(point).await;
        send(&cloud, "POST", "/v1/sandboxes", Some(json!({"template": "seed"}))).await;
        until(&reached, point).await;
        cloud.restart().await;
        let list = settled(&cloud).await;
        assert_eq!(list.len(), 1, "{point}");
        assert_eq!(list[0]["state"], "running", "{point}");
        // The client asks again with its key and gets the sandbox that was made.
        let again = cloud.request("POST", "/v1/sandboxes?wait=10").header("Idempotency-Key", "k");
        let again = cloud.send(again.json(&json!({"template": "seed"}))).await;
        assert_eq!(again.body["sandbox_id"], list[0]["id"], "{point}: {again:?}");
        let id = again.text("sandbox_id");
        assert_eq!(cloud.node.run_ids(), [id.as_str()], "{point}");
        cloud.delete(&id).await;
        assert!(cloud.node.run_ids().is_empty(), "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_survives_a_death_at_any_point() {
    for point in Points::ALL.iter().filter(|p| p.starts_with("delete.")) {
        let (mut cloud, reached) = dying_at(point).await;
        let id = cloud.sandbox(json!({})).await;
        send(&cloud, "DELETE", &format!("/v1/sandboxes/{id}"), None).await;
        until(&reached, point).await;
        cloud.restart().await;
        assert!(settled(&cloud).await.is_empty(), "{point}");
        assert!(cloud.node.run_ids().is_empty(), "{point}");
        assert_eq!(cloud.state(&id).await, "deleted", "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_survives_a_death_at_any_point() {
    for point in Points::ALL.iter().filter(|p| p.starts_with("build.")) {
        let (mut cloud, reached) = dying_at(point).await;
        send(&cloud, "POST", "/v1/templates", Some(json!({"tag": "mine", "source": "debian:vim"}))).await;
        until(&reached, point).await;
        cloud.restart().await;
        settled(&cloud).await;
        let template = cloud.get("/v1/templates/mine").await;
        assert_eq!(template.status, 200, "{point}: {template:?}");
        assert_eq!(template.body["tags"], json!(["mine:latest"]), "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_of_a_template_survives_a_death_at_any_point() {
    for point in Points::ALL.iter().filter(|p| p.starts_with("template_delete.")) {
        let (mut cloud, reached) = dying_at(point).await;
        send(&cloud, "DELETE", "/v1/templates/seed", None).await;
        until(&reached, point).await;
        cloud.restart().await;
        let started = Instant::now();
        while !cloud.node.lock().templates.is_empty() || cloud.get("/v1/templates/seed").await.status != 404 {
            assert!(started.elapsed() < Duration::from_secs(20), "{point}: the template is still there");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_that_ended_while_nobody_looked_are_noticed() {
    let mut cloud = Cloud::start().await;
    let (dead, lost, alive) =
        (cloud.sandbox(json!({})).await, cloud.sandbox(json!({})).await, cloud.sandbox(json!({})).await);
    cloud.crash().await;
    cloud.node.kill(&dead, "vm_exited: killed");
    cloud.node.forget(&lost);
    cloud.restart().await;
    cloud.wait_state(&dead, "failed").await;
    cloud.wait_state(&lost, "failed").await;
    assert_eq!(cloud.state(&alive).await, "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_store_takes_the_sandboxes_back_from_the_node() {
    let mut cloud = Cloud::start().await;
    let (alive, dead) = (cloud.sandbox(json!({})).await, cloud.sandbox(json!({})).await);
    cloud.crash().await;
    cloud.node.kill(&dead, "vm_exited: killed");
    for name in ["control.db", "control.db-wal", "control.db-shm"] {
        let _ = std::fs::remove_file(cloud.data_dir().join(name));
    }
    cloud.restart().await;
    cloud.wait_state(&alive, "running").await;
    cloud.wait_state(&dead, "failed").await;
    assert!(cloud.node.run_ids().contains(&alive));
    let row = cloud.call("GET", &format!("/v1/sandboxes/{alive}"), None).await;
    assert!(row.body["name"].as_str().is_some_and(|name| name.starts_with("rescued-")), "{row:?}");
    // They are sandboxes like others: their runs still belong to them, and they can go.
    for id in [alive, dead] {
        let gone = cloud.call("DELETE", &format!("/v1/sandboxes/{id}?wait=20"), None).await;
        assert_eq!(gone.body["state"], "succeeded", "{gone:?}");
        assert!(!cloud.node.run_ids().contains(&id));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_death_in_a_storm_leaves_what_the_store_says() {
    let mut cloud = Cloud::start().await;
    *cloud.node.faults.start_delay.lock().expect("lock") = Duration::from_millis(15);
    for round in 0..4u64 {
        let requests = (0..20).map(|n| {
            let request = cloud.request("POST", "/v1/sandboxes?wait=5").timeout(Duration::from_secs(2));
            request.json(&json!({"template": "seed", "name": format!("r{round}-{n}")})).send()
        });
        let _ = tokio::time::timeout(Duration::from_millis(8 + 12 * round), futures::future::join_all(requests)).await;
        cloud.restart().await;
        let list = settled(&cloud).await;
        let mut ids: Vec<_> = list.iter().map(|s| s["id"].as_str().expect("id").to_owned()).collect();
        assert!(list.iter().all(|s| s["state"] == "running"), "{list:?}");
        ids.sort();
        assert_eq!(cloud.node.run_ids(), ids);
        for id in ids {
            cloud.delete(&id).await;
        }
    }
}
