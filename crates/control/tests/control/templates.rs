//! Templates: builds with progress, tags, removal.

use serde_json::json;
use space_proto::node::BuildError;

use crate::sim_node::SEED;
use crate::support::Cloud;

#[tokio::test(flavor = "multi_thread")]
async fn a_build_makes_a_template_with_a_tag() {
    let cloud = Cloud::start().await;
    let body = json!({"tag": "mine:v1", "source": "debian:vim", "options": {"memory_mib": 256}});
    let built = cloud.call("POST", "/v1/templates?wait=20", Some(body)).await;
    assert_eq!((built.status, built.text("state").as_str()), (200, "succeeded"), "{built:?}");
    assert_eq!(built.body["template"]["tags"], json!(["mine:v1"]));
    assert_eq!(built.body["progress"]["step"], "unpacking");
    let digest = built.body["template"]["digest"].as_str().expect("a digest");
    let made = cloud.call("POST", "/v1/sandboxes?wait=20", Some(json!({"template": "mine:v1"}))).await;
    assert_eq!(made.body["sandbox"]["template_digest"], digest, "{made:?}");
    let list = cloud.get("/v1/templates").await;
    assert_eq!(list.body["templates"].as_array().map(Vec::len), Some(2));
    let one = cloud.get(&format!("/v1/templates/mine@{digest}")).await;
    assert_eq!(one.body["sandboxes"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_fails_says_why() {
    let cloud = Cloud::start().await;
    let error = BuildError { code: "ready_timeout".into(), message: "the ready command never succeeded".into() };
    cloud.node.faults.builds.lock().expect("lock").push(error);
    let built = cloud.call("POST", "/v1/templates?wait=20", Some(json!({"tag": "t", "source": "seed"}))).await;
    assert_eq!((built.status, built.text("state").as_str()), (200, "failed"), "{built:?}");
    assert_eq!(built.body["error"]["code"], "ready_timeout");
    for bad in [
        json!({"tag": "../x", "source": "seed"}),
        json!({"tag": "t", "source": "ftp://x"}),
        json!({"tag": "t", "source": ""}),
        json!({"tag": "t", "source": "seed", "options": {"memory_mib": 1}}),
        json!({"tag": "t", "source": "seed", "options": {"disk_bytes": 1}}),
        json!({"tag": "t", "source": "seed", "options": {"colour": 1}}),
        json!({"tag": SEED, "source": "seed"}),
    ] {
        let answer = cloud.call("POST", "/v1/templates", Some(bad)).await;
        assert_eq!((answer.status, answer.code()), (400, "invalid_request"), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn removal_is_refused_while_in_use() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({})).await;
    let refused = cloud.call("DELETE", "/v1/templates/seed", None).await;
    assert_eq!((refused.status, refused.code()), (409, "in_use"), "{refused:?}");
    let tag = cloud.call("PUT", "/v1/templates/seed/tags", Some(json!({"tag": "other:v2"}))).await;
    assert_eq!(tag.body["tags"], json!(["other:v2", "seed:latest"]));
    // Another tag points to it: only the tag goes.
    assert_eq!(cloud.call("DELETE", "/v1/templates/other:v2", None).await.status, 204);
    assert_eq!(cloud.get("/v1/templates/other:v2").await.status, 404);
    assert_eq!(cloud.get("/v1/templates/seed").await.status, 200);
    cloud.delete(&id).await;
    assert_eq!(cloud.call("DELETE", &format!("/v1/templates/{SEED}"), None).await.status, 204);
    assert!(cloud.node.lock().templates.is_empty());
    let late = cloud.call("POST", "/v1/sandboxes", Some(json!({"template": "seed"}))).await;
    assert_eq!((late.status, late.code()), (404, "not_found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_the_node_no_longer_has_is_not_offered_and_keeps_its_tag() {
    let cloud = Cloud::start().await;
    let kept = cloud.node.lock().templates.remove(SEED).expect("there");
    assert_eq!(cloud.get("/v1/templates").await.body["templates"], json!([]));
    assert_eq!(cloud.get("/v1/templates/seed").await.status, 404);
    cloud.node.lock().templates.insert(SEED.into(), kept);
    assert_eq!(cloud.get("/v1/templates/seed").await.status, 200);
}
