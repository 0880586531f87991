//! Files over HTTP: streamed, ranged, refused early, never half there.

use bytes::Bytes;
use serde_json::json;

use crate::support::Cloud;

async fn cloud() -> (Cloud, String) {
    let cloud = Cloud::start().await;
    let id = cloud.sandbox(json!({})).await;
    let path = format!("/v1/sandboxes/{id}");
    (cloud, path)
}

#[tokio::test(flavor = "multi_thread")]
async fn content_goes_both_ways() {
    let (cloud, path) = cloud().await;
    let data: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let parts: Vec<_> = data.chunks(100_000).map(|c| Ok::<_, std::io::Error>(Bytes::copy_from_slice(c))).collect();
    let body = reqwest::Body::wrap_stream(futures::stream::iter(parts));
    let put = cloud.send(cloud.request("PUT", &format!("{path}/files?path=big&mode=600")).body(body)).await;
    assert_eq!((put.status, put.body["size"].as_u64()), (200, Some(3_000_000)), "{put:?}");
    let get = cloud.request("GET", &format!("{path}/files?path=big")).send().await.expect("sent");
    assert_eq!(get.headers()["content-length"], "3000000");
    assert_eq!(get.headers()["x-content-type-options"], "nosniff");
    assert!(get.bytes().await.expect("bytes") == data);
    let empty = cloud.send(cloud.request("PUT", &format!("{path}/files?path=empty")).body("")).await;
    assert_eq!((empty.status, empty.body["size"].as_u64()), (200, Some(0)), "{empty:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges() {
    let (cloud, path) = cloud().await;
    cloud.send(cloud.request("PUT", &format!("{path}/files?path=f")).body("0123456789")).await;
    for (range, status, text, content_range) in [
        ("bytes=2-4", 206, "234", "bytes 2-4/10"),
        ("bytes=7-", 206, "789", "bytes 7-9/10"),
        ("bytes=-2", 206, "89", "bytes 8-9/10"),
        ("bytes=5-500", 206, "56789", "bytes 5-9/10"),
        ("bytes=0-0", 206, "0", "bytes 0-0/10"),
        ("bytes=20-", 416, "", "bytes */10"),
        ("lines=1-2", 200, "0123456789", ""),
    ] {
        let answer =
            cloud.request("GET", &format!("{path}/files?path=f")).header("Range", range).send().await.expect("sent");
        assert_eq!(answer.status(), status, "{range}");
        let header = answer.headers().get("content-range").map_or("", |v| v.to_str().expect("text")).to_owned();
        assert_eq!(header, content_range, "{range}");
        let body = answer.text().await.expect("text");
        if status != 416 {
            assert_eq!(body, text, "{range}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused() {
    let (cloud, path) = cloud().await;
    let long = "a/".repeat(5000);
    let wide = "b".repeat(300);
    for (target, status) in [
        ("", 400),
        ("/tmp/%00x", 400),
        ("/tmp/%ff", 400),
        (long.as_str(), 400),
        (wide.as_str(), 400),
        ("/nowhere", 404),
        ("/etc", 409),
        ("/etc/hostname", 200),
    ] {
        let answer = cloud.get(&format!("{path}/files?path={target}")).await;
        assert_eq!(answer.status, status, "{target:.40}: {answer:?}");
    }
    assert_eq!(cloud.get(&format!("{path}/files")).await.text("field"), "path");
    assert_eq!(cloud.get(&format!("{path}/files?path=/x&path=/y")).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_cannot_fit_or_breaks_leaves_nothing() {
    let (cloud, path) = cloud().await;
    let endless = futures::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from_static(&[0; 65536])));
    let request = cloud.request("PUT", &format!("{path}/files?path=huge")).header("Content-Length", 2u64 << 30);
    // The client is still sending when the answer comes, and gets it all the same.
    let answer = request.body(reqwest::Body::wrap_stream(endless)).send().await.expect("an answer");
    assert_eq!(answer.status(), 507);
    let body: serde_json::Value = answer.json().await.expect("json");
    assert_eq!(body["code"], "guest_disk_full");
    let broken = futures::stream::iter([Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("gone"))]);
    let request = cloud.request("PUT", &format!("{path}/files?path=half"));
    assert!(request.body(reqwest::Body::wrap_stream(broken)).send().await.is_err());
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    let list = cloud.get(&format!("{path}/files/list?path=/home/user")).await;
    assert_eq!(list.body["entries"], json!([]), "{list:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn folders() {
    let (cloud, path) = cloud().await;
    for name in ["a", "b", "c"] {
        cloud.send(cloud.request("PUT", &format!("{path}/files?path=/data/{name}")).body(name)).await;
    }
    let page = cloud.get(&format!("{path}/files/list?path=/data&limit=2")).await;
    assert_eq!(page.body["entries"].as_array().map(Vec::len), Some(2));
    assert_eq!(page.text("next_after"), "b");
    let rest = cloud.get(&format!("{path}/files/list?path=/data&limit=2&after=b")).await;
    assert_eq!(rest.body["entries"][0]["path"], "/data/c");
    assert!(rest.body["next_after"].is_null());
    let info = cloud.get(&format!("{path}/files/info?path=/data/a")).await;
    assert_eq!((info.text("kind").as_str(), info.text("mode").as_str()), ("file", "0644"));
    let made = cloud.call("POST", &format!("{path}/files/mkdir"), Some(json!({"path": "/new"}))).await;
    assert_eq!((made.status, made.text("kind").as_str()), (200, "directory"), "{made:?}");
    let renamed =
        cloud.call("POST", &format!("{path}/files/rename"), Some(json!({"from": "/data/a", "to": "/data/z"}))).await;
    assert_eq!(renamed.text("path"), "/data/z");
    assert_eq!(cloud.call("DELETE", &format!("{path}/files?path=/data&recursive=true"), None).await.status, 204);
    assert_eq!(cloud.get(&format!("{path}/files/info?path=/data/z")).await.code(), "file_not_found");
    let tar = cloud.request("GET", &format!("{path}/archive?path=/etc")).send().await.expect("sent");
    assert_eq!(tar.headers()["content-type"], "application/x-tar");
    assert_eq!(tar.bytes().await.expect("bytes").len(), 1024);
    let tar = cloud.send(cloud.request("PUT", &format!("{path}/archive?path=/etc")).body(vec![0u8; 2048])).await;
    assert_eq!(tar.body, json!({"entries": 1, "bytes": 2048}));
}
