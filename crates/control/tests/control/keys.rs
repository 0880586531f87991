//! API keys, scopes, and the files that hold secrets.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::json;

use crate::support::Cloud;

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_made_used_and_revoked() {
    let mut cloud = Cloud::start().await;
    let made = cloud.call("POST", "/v1/keys", Some(json!({"name": "ci", "scope": "read"}))).await;
    assert_eq!(made.status, 201, "{made:?}");
    let (admin, secret, id) = (cloud.key.clone(), made.text("secret"), made.text("id"));
    assert!(secret.starts_with("sk-") && secret.len() > 40);
    cloud.key.clone_from(&secret);
    assert_eq!(cloud.get("/v1/sandboxes").await.status, 200);
    let refused = cloud.call("POST", "/v1/sandboxes", Some(json!({"template": "seed"}))).await;
    assert_eq!((refused.status, refused.code()), (403, "forbidden"));
    assert_eq!(cloud.get("/v1/keys").await.status, 403);
    cloud.key.clone_from(&admin);
    let list = cloud.request("GET", "/v1/keys").send().await.expect("sent").text().await.expect("text");
    assert!(list.contains(&id) && !list.contains(&secret));
    assert_eq!(cloud.call("DELETE", &format!("/v1/keys/{id}"), None).await.status, 204);
    assert_eq!(cloud.call("DELETE", &format!("/v1/keys/{id}"), None).await.status, 404);
    cloud.key = secret;
    let revoked = cloud.get("/v1/sandboxes").await;
    assert_eq!((revoked.status, revoked.code()), (401, "unauthenticated"));
    assert_eq!(revoked.headers["www-authenticate"], "Bearer");
    cloud.key = admin;
    let keys = cloud.get("/v1/keys").await;
    let last = keys.body["keys"][0]["id"].as_str().expect("the admin key").to_owned();
    let refused = cloud.call("DELETE", &format!("/v1/keys/{last}"), None).await;
    assert_eq!((refused.status, refused.code()), (409, "conflict"));
    for bad in [json!({"name": "", "scope": "use"}), json!({"name": "x", "scope": "root"})] {
        assert_eq!(cloud.call("POST", "/v1/keys", Some(bad)).await.status, 400);
    }
    let by_header = cloud.http.get(format!("{}/v1/sandboxes", cloud.url)).header("X-API-Key", &cloud.key);
    assert_eq!(by_header.send().await.expect("sent").status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_files_of_their_owner_only_and_the_store_has_none() {
    let mut cloud = Cloud::start().await;
    let dir = cloud.data_dir();
    for name in ["admin.key", "token.seed", "control.db", "control.db-wal"] {
        let mode = std::fs::metadata(dir.join(name)).expect(name).permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let key = cloud.key.clone();
    for entry in std::fs::read_dir(&dir).expect("the folder").flatten() {
        if entry.file_name() == "admin.key" || !entry.file_type().expect("a type").is_file() {
            continue;
        }
        let bytes = std::fs::read(entry.path()).expect("a file");
        assert!(!bytes.windows(key.len()).any(|w| w == key.as_bytes()), "the key is in {entry:?}");
    }
    // The same key after a restart; another one when the file is gone.
    cloud.restart().await;
    assert_eq!(cloud.key, key);
    std::fs::remove_file(dir.join("admin.key")).expect("removed");
    cloud.restart().await;
    assert_ne!(cloud.key, key);
    assert_eq!(cloud.get("/v1/keys").await.body["keys"].as_array().map(Vec::len), Some(2));
    std::fs::write(dir.join("admin.key"), "garbage").expect("written");
    cloud.restart().await;
    assert_eq!(cloud.get("/v1/keys").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn host_paths_and_plain_registries_are_for_admins() {
    let mut cloud = Cloud::start().await;
    let made = cloud.call("POST", "/v1/keys", Some(json!({"name": "u", "scope": "use"}))).await;
    cloud.key = made.text("secret");
    for (source, insecure, status) in [
        ("dir:/etc", false, 403),
        ("oci:/srv/image", false, 403),
        ("docker://registry.example/x", true, 403),
        ("docker://registry.example/x", false, 202),
        ("seed", false, 202),
    ] {
        let body = json!({"tag": "t", "source": source, "insecure_registry": insecure});
        let answer = cloud.call("POST", "/v1/templates", Some(body)).await;
        let ok = answer.status == status || (status == 202 && answer.status == 200);
        assert!(ok, "{source}: {answer:?}");
    }
}
