//! The HTTP API over real sandboxes: wrong input, twice at once, lists, keys.

use anyhow::Result;
use serde_json::json;
use space_tests::shared_or_skip;

#[tokio::test]
async fn wrong_input_is_refused_and_changes_nothing() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let tries = [
        (json!({"template": "nowhere"}), 404, "not_found"),
        (json!({"template": "../etc"}), 400, "invalid_request"),
        (json!({"template": "seed", "memory_mib": 4_000_000}), 400, "invalid_request"),
        (json!({"template": "seed", "vcpus": 1000}), 400, "invalid_request"),
        (json!({"template": "seed", "nmae": "typo"}), 400, "invalid_request"),
        (json!({"template": "seed", "name": "UPPER"}), 400, "invalid_request"),
        (json!({"template": "seed", "name": "a".repeat(10_000)}), 400, "invalid_request"),
        (json!({"template": "seed", "env": {"A=B": "x"}}), 400, "invalid_request"),
        (json!({"template": "seed", "env": {"A": "x\u{0}y"}}), 400, "invalid_request"),
        (json!({"template": "seed", "metadata": {"k": "v".repeat(5000)}}), 400, "invalid_request"),
        (json!({"template": "seed", "ttl_seconds": 0}), 400, "invalid_request"),
        (json!("text"), 400, "invalid_request"),
    ];
    for (body, status, code) in tries {
        let answer = api.call("POST", "/v1/sandboxes?wait=60", Some(body.clone())).await?;
        assert_eq!((answer.status, answer.code()), (status, code), "{body}: {answer:?}");
        assert!(answer.body["detail"].as_str().is_some_and(|d| d.len() > 10), "{answer:?}");
    }
    for (method, path, status) in [
        ("GET", "/v1/sandboxes/sbx-00000000000000000000000000", 404),
        ("GET", "/v1/sandboxes/..%2f..%2fetc", 404),
        ("GET", "/v1/operations/op-1", 404),
        ("GET", "/v1/nothing", 404),
        ("PUT", "/v1/sandboxes", 405),
        ("GET", "/v1/sandboxes?cursor=%00", 400),
        ("GET", "/v1/sandboxes?limit=100000", 400),
        ("GET", "/v1/sandboxes?state=flying", 400),
    ] {
        let answer = api.call(method, path, None).await?;
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        assert!(!answer.code().is_empty(), "{method} {path}: {answer:?}");
    }
    Ok(())
}

#[tokio::test]
async fn no_key_no_answer() -> Result<()> {
    let server = shared_or_skip!();
    let mut api = server.api()?;
    api.key = "sk-wrong".into();
    let answer = api.call("GET", "/v1/sandboxes", None).await?;
    assert_eq!((answer.status, answer.code()), (401, "unauthenticated"));
    Ok(())
}

#[tokio::test]
async fn one_idempotency_key_makes_one_sandbox() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let key = format!("once-{}", std::process::id());
    let create = || {
        let request = api.request("POST", "/v1/sandboxes?wait=120").header("Idempotency-Key", &key);
        api.send(request.json(&json!({"template": "seed"})))
    };
    let (a, b) = tokio::join!(create(), create());
    let (a, b) = (a?, b?);
    let c = create().await?;
    let id = a.body["sandbox_id"].as_str().unwrap_or("").to_owned();
    let _guard = space_tests::Sandbox { id: id.clone(), api: api.clone() };
    assert!(id.starts_with("sbx-"), "{a:?}");
    assert_eq!(b.body["sandbox_id"], a.body["sandbox_id"], "{b:?}");
    assert_eq!(c.body["sandbox_id"], a.body["sandbox_id"], "{c:?}");
    let request = api.request("POST", "/v1/sandboxes").header("Idempotency-Key", &key);
    let other = api.send(request.json(&json!({"template": "seed", "name": "other"}))).await?;
    assert_eq!((other.status, other.code()), (409, "idempotency_mismatch"));
    Ok(())
}

#[tokio::test]
async fn lists_are_filtered_and_paged() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let mark = format!("m{}", std::process::id());
    let mut guards = Vec::new();
    for n in 0..3 {
        let body = json!({"template": "seed", "metadata": {"mark": mark, "n": n.to_string()}});
        guards.push(api.sandbox_with(body).await?);
    }
    let ids = |page: &serde_json::Value| -> Vec<String> {
        let list = page["sandboxes"].as_array().cloned().unwrap_or_default();
        list.iter().map(|s| s["id"].as_str().unwrap_or("").to_owned()).collect()
    };
    let page = api.get(&format!("/v1/sandboxes?metadata.mark={mark}&state=running&limit=2")).await?;
    let cursor = page["next_cursor"].as_str().unwrap_or("").to_owned();
    let rest = api.get(&format!("/v1/sandboxes?metadata.mark={mark}&state=running&limit=2&cursor={cursor}")).await?;
    let mut all = ids(&page);
    all.extend(ids(&rest));
    all.sort();
    let mut expected: Vec<String> = guards.iter().map(|g| g.id.clone()).collect();
    expected.sort();
    assert_eq!(all, expected);
    assert!(rest["next_cursor"].is_null());

    let one = &guards[0];
    api.good_patch(&one.path(""), json!({"metadata": {"n": null, "new": "yes"}})).await?;
    let metadata = one.get().await?["metadata"].clone();
    assert_eq!(metadata, json!({"mark": mark, "new": "yes"}));
    Ok(())
}

#[tokio::test]
async fn a_sandbox_ends_with_its_ttl() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let sandbox = api.sandbox_with(json!({"template": "seed", "ttl_seconds": 3})).await?;
    for _ in 0..300 {
        let answer = api.call("GET", &sandbox.path(""), None).await?;
        if answer.status == 404 || answer.body["state"] == "deleted" {
            return Ok(());
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    anyhow::bail!("still there after 30 s")
}

#[tokio::test]
async fn fifty_creates_at_once_all_end() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let api = api.clone();
        tasks.spawn(async move { api.call("POST", "/v1/sandboxes?wait=280", Some(json!({"template": "tiny"}))).await });
    }
    let mut guards = Vec::new();
    let mut running = 0;
    while let Some(answer) = tasks.join_next().await {
        let answer = answer??;
        let id = answer.body["sandbox_id"].as_str().unwrap_or("").to_owned();
        let state = answer.body["state"].as_str().unwrap_or("").to_owned();
        if !id.is_empty() {
            guards.push(space_tests::Sandbox { id, api: api.clone() });
        }
        match state.as_str() {
            "succeeded" => running += 1,
            // A node that is full says so.
            "failed" => assert_eq!(answer.body["error"]["code"], "no_capacity", "{answer:?}"),
            _ => assert_eq!(answer.status, 503, "{answer:?}"),
        }
    }
    assert!(running >= 10, "only {running} of 50 came up");
    assert!(api.healthy().await);
    Ok(())
}

#[tokio::test]
async fn deleting_while_creating_leaves_nothing() -> Result<()> {
    let server = shared_or_skip!();
    let api = server.api()?;
    for pause in [0u64, 5, 20, 60] {
        let made = api.call("POST", "/v1/sandboxes", Some(json!({"template": "tiny"}))).await?;
        let id = made.body["sandbox_id"].as_str().unwrap_or("").to_owned();
        tokio::time::sleep(std::time::Duration::from_millis(pause)).await;
        let gone = api.call("DELETE", &format!("/v1/sandboxes/{id}?wait=60"), None).await?;
        assert_eq!(gone.body["state"], "succeeded", "{gone:?}");
        assert!(!server.data_dir.join("pool/sandboxes").join(&id).exists());
        let again = api.call("DELETE", &format!("/v1/sandboxes/{id}?wait=60"), None).await?;
        assert!(matches!(again.status, 200 | 404 | 410), "{again:?}");
    }
    Ok(())
}
