//! Sandboxes, operations and commands over HTTP.

use serde_json::json;

use crate::support::Cloud;

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_lives_and_goes() {
    let cloud = Cloud::start().await;
    let made = cloud
        .call("POST", "/v1/sandboxes?wait=30", Some(json!({"template": "seed", "name": "one", "env": {"A": "b"}})))
        .await;
    assert_eq!((made.status, made.text("state").as_str()), (200, "succeeded"), "{made:?}");
    assert_eq!(made.body["sandbox"]["state"], "running");
    let by_name = cloud.get("/v1/sandboxes/one").await;
    assert_eq!(by_name.body["id"], made.body["sandbox_id"]);
    assert_eq!(by_name.body["memory_mib"], 256);
    assert_eq!(by_name.body["run"], 1);
    let taken = cloud.call("POST", "/v1/sandboxes", Some(json!({"template": "seed", "name": "one"}))).await;
    assert_eq!((taken.status, taken.code()), (409, "name_taken"));
    let console = cloud.request("GET", "/v1/sandboxes/one/console").send().await.expect("sent").text().await;
    assert_eq!(console.expect("text"), "one login:\n");
    cloud.delete("one").await;
    assert!(cloud.node.run_ids().is_empty());
    assert_eq!(cloud.get("/v1/sandboxes/one").await.status, 404);
    let id = made.text("sandbox_id");
    assert_eq!(cloud.state(&id).await, "deleted");
    // Again: the same operation, no other.
    cloud.delete(&id).await;
    let operations = cloud.get(&format!("/v1/operations?sandbox={id}")).await;
    assert_eq!(operations.body["operations"].as_array().map(Vec::len), Some(2), "{operations:?}");
    let late = cloud.call("POST", &format!("/v1/sandboxes/{id}/commands"), Some(json!({"argv": ["true"]}))).await;
    assert_eq!((late.status, late.code()), (410, "gone"));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_wait_the_answer_comes_at_once() {
    let cloud = Cloud::start().await;
    *cloud.node.faults.start_delay.lock().expect("lock") = std::time::Duration::from_millis(300);
    let made = cloud.call("POST", "/v1/sandboxes", Some(json!({"template": "seed"}))).await;
    assert_eq!((made.status, made.text("state").as_str()), (202, "pending"), "{made:?}");
    let id = made.text("id");
    let ended = cloud.get(&format!("/v1/operations/{id}?wait=20")).await;
    assert_eq!((ended.status, ended.text("state").as_str()), (200, "succeeded"), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_input_is_refused_with_its_field() {
    let cloud = Cloud::start().await;
    let big: std::collections::BTreeMap<String, String> = (0..65).map(|n| (format!("k{n}"), "v".into())).collect();
    for (body, status, field) in [
        (json!({"template": "nowhere"}), 404, ""),
        (json!({"template": "../etc"}), 400, "template"),
        (json!({"template": "seed", "memory_mib": 4_000_000}), 400, "memory_mib"),
        (json!({"template": "seed", "memory_mib": 512}), 400, "memory_mib"),
        (json!({"template": "seed", "vcpus": 1000}), 400, "vcpus"),
        (json!({"template": "seed", "nmae": "typo"}), 400, "nmae"),
        (json!({"template": "seed", "name": "UPPER"}), 400, "name"),
        (json!({"template": "seed", "env": {"A=B": "x"}}), 400, "env"),
        (json!({"template": "seed", "env": {"A": "x\u{0}y"}}), 400, "env"),
        (json!({"template": "seed", "env": {"A": 1}}), 400, "env.A"),
        (json!({"template": "seed", "metadata": {"k": "v".repeat(5000)}}), 400, "metadata.k"),
        (json!({"template": "seed", "metadata": big}), 400, "metadata"),
        (json!({"template": "seed", "ttl_seconds": 0}), 400, "ttl_seconds"),
        (json!({}), 400, ""),
        (json!("text"), 400, ""),
    ] {
        let answer = cloud.call("POST", "/v1/sandboxes", Some(body.clone())).await;
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        assert_eq!(answer.text("field"), field, "{body}: {answer:?}");
        assert_eq!(answer.headers["content-type"], "application/problem+json");
    }
    let list = cloud.get("/v1/sandboxes?state=creating,running,failed,deleted").await;
    assert_eq!(list.body["sandboxes"], json!([]), "something was made");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_is_a_problem() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({})).await;
    for (method, path, status, code) in [
        ("GET", "/nothing".to_owned(), 404, "not_found"),
        ("PUT", "/v1/sandboxes".to_owned(), 405, "method_not_allowed"),
        ("GET", "/v1/sandboxes/..%2f..%2fetc".to_owned(), 404, "not_found"),
        ("GET", "/v1/sandboxes/%ff".to_owned(), 400, ""),
        ("GET", "/v1/operations/op-1".to_owned(), 404, "not_found"),
        ("GET", "/v1/sandboxes?cursor=%00".to_owned(), 400, "invalid_request"),
        ("GET", "/v1/sandboxes?limit=100000".to_owned(), 400, "invalid_request"),
        ("GET", "/v1/sandboxes?state=flying".to_owned(), 400, "invalid_request"),
        ("GET", "/v1/sandboxes?colour=red".to_owned(), 400, "invalid_request"),
        ("GET", format!("/v1/sandboxes/{id}/processes/nothing"), 404, "not_found"),
        ("POST", format!("/v1/sandboxes/{id}/commands"), 415, "unsupported_media_type"),
    ] {
        let answer = cloud.call(method, &path, None).await;
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        assert_eq!(answer.headers["content-type"], "application/problem+json", "{method} {path}: {answer:?}");
        if !code.is_empty() {
            assert_eq!(answer.code(), code, "{method} {path}: {answer:?}");
        }
    }
    let huge = cloud.request("POST", "/v1/sandboxes").header("Content-Type", "application/json");
    let huge = cloud.send(huge.body(vec![b' '; 2 * 1024 * 1024])).await;
    assert_eq!((huge.status, huge.code()), (413, "too_large"));
    let deep = cloud.request("POST", "/v1/sandboxes").header("Content-Type", "application/json");
    let deep = cloud.send(deep.body("[".repeat(100_000))).await;
    assert_eq!((deep.status, deep.code()), (400, "invalid_request"));
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_filtered_and_paged() {
    let cloud = Cloud::start().await;
    let mut ids = Vec::new();
    for n in 0..5 {
        ids.push(cloud.sandbox(json!({"metadata": {"mark": "x", "n": n.to_string()}})).await);
    }
    cloud.sandbox(json!({"metadata": {"mark": "y"}})).await;
    cloud.delete(&ids[0]).await;
    ids.remove(0);
    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = cloud.get(&format!("/v1/sandboxes?metadata.mark=x&limit=2&state=running{cursor}")).await;
        seen.extend(
            page.body["sandboxes"].as_array().expect("a list").iter().map(|s| s["id"].as_str().expect("id").to_owned()),
        );
        let Some(next) = page.body["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    ids.reverse();
    assert_eq!(seen, ids);
    let count = async |query: &str| {
        cloud.get(&format!("/v1/sandboxes?{query}")).await.body["sandboxes"].as_array().expect("a list").len()
    };
    assert_eq!(count("").await, 5);
    assert_eq!(count("state=deleted").await, 1);
    assert_eq!(count("metadata.mark=x&metadata.n=3").await, 1);
    assert_eq!(count("metadata.mark=x&metadata.n=9").await, 0);
    assert_eq!(count("template=seed").await, 5);
    assert_eq!(count("template=other").await, 0);
    assert_eq!(count(&format!("template={}", crate::sim_node::SEED)).await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_patch_changes_what_it_names() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({"metadata": {"a": "1", "b": "2"}, "ttl_seconds": 3600})).await;
    let path = format!("/v1/sandboxes/{id}");
    let patched = cloud.call("PATCH", &path, Some(json!({"name": "new", "metadata": {"a": null, "c": "3"}}))).await;
    assert_eq!(patched.body["metadata"], json!({"b": "2", "c": "3"}), "{patched:?}");
    assert_eq!(patched.body["name"], "new");
    assert!(patched.body["expires_at_ms"].is_i64());
    let forever = cloud.call("PATCH", &path, Some(json!({"ttl_seconds": null}))).await;
    assert!(forever.body["expires_at_ms"].is_null(), "{forever:?}");
    assert_eq!(forever.body["metadata"], json!({"b": "2", "c": "3"}));
    let other = cloud.sandbox(json!({"name": "other"})).await;
    let taken = cloud.call("PATCH", &format!("/v1/sandboxes/{other}"), Some(json!({"name": "new"}))).await;
    assert_eq!((taken.status, taken.code()), (409, "name_taken"));
    let found = cloud.get("/v1/sandboxes?metadata.c=3").await;
    assert_eq!(found.body["sandboxes"][0]["id"], id.as_str());
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_are_reserved_started_and_read() {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({})).await;
    let path = |rest: &str| format!("/v1/sandboxes/{id}{rest}");
    let session = cloud.call("POST", &path("/commands"), Some(json!({"argv": ["echo", "hi"]}))).await;
    assert_eq!(session.status, 201, "{session:?}");
    assert_eq!(session.text("url"), "ws://127.0.0.1:7071/v1/attach");
    let verifier = space_control::token_verifier(&cloud.data_dir()).expect("a seed");
    let claims = verifier.verify(&session.text("token"), 0).expect("our token");
    assert_eq!((claims.sandbox.as_str(), claims.run.0), (id.as_str(), 1));
    assert_eq!(claims.command.as_str(), session.text("id"));
    let command = session.text("id");
    let process = cloud.get(&path(&format!("/processes/{command}"))).await;
    assert_eq!(process.text("state"), "reserved", "{process:?}");

    let started = cloud.call("POST", &path("/commands"), Some(json!({"argv": ["echo", "now"], "start": true}))).await;
    let started = started.text("id");
    let process = cloud.get(&path(&format!("/processes/{started}?wait=5"))).await;
    assert_eq!(process.body["exit"], json!({"reason": "exited", "code": 0}), "{process:?}");
    let output =
        cloud.request("GET", &path(&format!("/processes/{started}/output?offset=5"))).send().await.expect("sent");
    assert_eq!(output.headers()["space-output-end"], "8");
    assert_eq!(output.text().await.expect("text"), "now");
    let list = cloud.get(&path("/processes")).await;
    assert_eq!(list.body["processes"].as_array().map(Vec::len), Some(2));

    let again = cloud.call("POST", &path(&format!("/commands/{started}/attach")), None).await;
    assert_eq!(again.status, 200, "{again:?}");
    let unknown = space_core::CommandId::new();
    let unknown = cloud.call("POST", &path(&format!("/commands/{unknown}/attach")), None).await;
    assert_eq!((unknown.status, unknown.code()), (404, "not_found"));
    let signal = path(&format!("/processes/{started}/signal"));
    assert_eq!(cloud.call("POST", &signal, Some(json!({"signal": "TERM"}))).await.status, 200);
    assert_eq!(cloud.call("POST", &signal, Some(json!({"signal": "NOPE"}))).await.status, 400);
    for bad in [
        json!({"argv": []}),
        json!({"argv": ["a\u{0}"]}),
        json!({"argv": ["a"], "terminal": {"cols": 0, "rows": 1}}),
        json!({"argv": ["a"], "workdir": ""}),
        json!({"argv": ["a"], "user": "a b"}),
        json!({"argv": ["x".repeat(200_000)]}),
    ] {
        let answer = cloud.call("POST", &path("/commands"), Some(bad.clone())).await;
        assert_eq!(answer.status, 400, "{answer:?}");
        assert!(!answer.text("field").is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn info_and_health() {
    let mut cloud = Cloud::start().await;
    let info = cloud.get("/v1/info").await;
    assert_eq!((info.status, info.text("driver").as_str()), (200, "simulated"));
    cloud.node_down();
    let info = cloud.get("/v1/info").await;
    assert_eq!((info.status, info.code()), (503, "unavailable"), "{info:?}");
    assert_eq!(info.headers["retry-after"], "1");
    let health = cloud.http.get(format!("{}/v1/health", cloud.url)).send().await.expect("sent");
    assert_eq!(health.status(), 200);
    assert!(cloud.stop().await < std::time::Duration::from_secs(2));
}
