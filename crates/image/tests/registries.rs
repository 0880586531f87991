//! Images out of registries: a real one on this machine, and one that misbehaves on purpose.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use space_image::registry::{Credentials, pull};
use space_image::{ImageError, NoProgress, RegistryOptions, RegistryReference, build, source};

const REGISTRY: &str = "/usr/bin/docker-registry";

fn image() -> TestImage {
    TestImage::new(
        &[
            archive(&[file("etc/passwd", b"app:x:5:6::/:/bin/sh\n"), file("a", &[1; 50_000])]),
            archive(&[file(".wh.a", b""), file("b", b"from the registry")]),
        ],
        serde_json::json!({"User": "app"}),
        "amd64",
    )
}

/// The real registry, stopped and removed when dropped.
struct Real {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn real() -> Option<Real> {
    if !Path::new(REGISTRY).exists() {
        println!("SKIP: {REGISTRY} is missing; install docker-registry");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = dir.path().join("config.yml");
    let data = dir.path().join("data");
    std::fs::write(
        &config,
        format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: 127.0.0.1:{port}}}\n",
            data.display()
        ),
    )
    .unwrap();
    let child = Command::new(REGISTRY)
        .arg("serve")
        .arg(&config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let real = Real { child, port, _dir: dir };
    let deadline = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < deadline, "the registry does not start");
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(real)
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// Pushes by the distribution API, as any builder does.
async fn push(port: u16, name: &str, image: &TestImage) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let base = format!("http://127.0.0.1:{port}/v2/{name}");
    for (digest, data) in &image.blobs {
        let start = http.post(format!("{base}/blobs/uploads/")).send().await.unwrap();
        assert_eq!(start.status(), 202);
        let mut to = reqwest::Url::parse(start.headers()["location"].to_str().unwrap()).unwrap();
        to.query_pairs_mut().append_pair("digest", digest);
        let put = http.put(to).body(data.clone()).send().await.unwrap();
        assert_eq!(put.status(), 201);
    }
    put_manifest(port, name, &image.manifest, "manifest", image.manifest_bytes.clone()).await;
}

async fn put_manifest(port: u16, name: &str, tag: &str, kind: &str, body: Vec<u8>) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let put = http
        .put(format!("http://127.0.0.1:{port}/v2/{name}/manifests/{tag}"))
        .header("content-type", format!("application/vnd.oci.image.{kind}.v1+json"))
        .body(body)
        .send()
        .await
        .unwrap();
    assert!(put.status().is_success(), "{:?}", put.text().await);
}

#[test]
fn real_registry() {
    let Some(registry) = real() else { return };
    let (ours, other) = (image(), TestImage::new(&[], serde_json::json!({}), "arm64"));
    run(async {
        push(registry.port, "team/app", &ours).await;
        push(registry.port, "team/app", &other).await;
        let entry = |i: &TestImage, arch: &str| {
            serde_json::json!({
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": i.manifest, "size": i.manifest_bytes.len(),
                "platform": {"os": "linux", "architecture": arch},
            })
        };
        let index = serde_json::json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [entry(&other, "arm64"), entry(&ours, "amd64")],
        });
        put_manifest(registry.port, "team/app", "multi", "index", index.to_string().into()).await;
    });
    let name = format!("docker://127.0.0.1:{}/team/app", registry.port);
    for reference in [format!("{name}:multi"), format!("{name}@{}", ours.manifest)] {
        let dir = tempfile::tempdir().unwrap();
        let source = source::parse(&reference).unwrap();
        let built = build(&request(source, dir.path()), &NoProgress).unwrap();
        assert_eq!(built.image_digest.as_deref(), Some(ours.manifest.as_str()));
        assert_eq!((built.user.uid, built.user.gid), (5, 6));
        let disk = dir.path().join("disk.img");
        check_disk(&disk);
        assert!(debugfs(&disk, "cat /b").starts_with("from the registry"));
        assert!(debugfs(&disk, "stat /a").contains("not found"));
    }
    let fails = |reference: &str| {
        let dir = tempfile::tempdir().unwrap();
        let source = source::parse(reference).unwrap();
        build(&request(source, dir.path()), &NoProgress).unwrap_err()
    };
    for missing in [format!("{name}:none"), name.replace("team", "nobody")] {
        let e = fails(&missing);
        assert!(matches!(e, ImageError::Registry { status: Some(404), .. }), "{e:?}");
    }
    let e = fails(&format!("{name}@{}", other.manifest));
    assert!(matches!(e, ImageError::NoPlatform { .. }), "{e:?}");
    let dead = free_port();
    let e = fails(&format!("docker://localhost:{dead}/x"));
    assert!(matches!(e, ImageError::Registry { status: None, .. }), "{e:?}");
}

/// One request: path, headers in lower case.
struct Request {
    path: String,
    headers: HashMap<String, String>,
}

type Handler = dyn Fn(&Request, &mut TcpStream) + Send + Sync;

/// A server with one connection per request, which says whatever the test wants.
fn fake(handler: impl Fn(&Request, &mut TcpStream) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let handler: Arc<Handler> = Arc::new(handler);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let handler = Arc::clone(&handler);
            std::thread::spawn(move || serve(stream, &*handler));
        }
    });
    port
}

fn serve(mut stream: TcpStream, handler: &Handler) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let headers = lines
        .take_while(|l| !l.is_empty())
        .filter_map(|l| l.split_once(": ").map(|(k, v)| (k.to_lowercase(), v.to_owned())))
        .collect();
    let path = first.split(' ').nth(1).unwrap_or("").to_owned();
    handler(&Request { path, headers }, &mut stream);
}

fn answer(to: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n", body.len());
    let _ = to.write_all(head.as_bytes()).and_then(|()| to.write_all(body));
}

/// Serves the image, as a proper registry would.
fn plain(image: &TestImage, r: &Request, to: &mut TcpStream) {
    let name = r.path.rsplit('/').next().unwrap_or("");
    let blob = image.blobs.iter().find(|(d, _)| d == name);
    match blob {
        Some((_, data)) if r.path.contains("/blobs/") => answer(to, "200 OK", "", data),
        _ if r.path.contains("/manifests/") => answer(to, "200 OK", "", &image.manifest_bytes),
        _ => answer(to, "404 Not Found", "", b"nothing here"),
    }
}

fn try_pull(port: u16, options: &RegistryOptions) -> space_image::Result<String> {
    let dir = tempfile::tempdir().unwrap();
    let reference = RegistryReference::parse(&format!("127.0.0.1:{port}/x:v1")).unwrap();
    pull(&reference, options, dir.path(), 10 << 20, &NoProgress)
}

#[test]
fn tokens_and_passwords() {
    let image = image();
    let digest = image.manifest.clone();
    let port = fake(move |r, to| {
        let host = &r.headers["host"];
        let auth = r.headers.get("authorization").map_or("", String::as_str);
        if r.path.starts_with("/token") {
            // Basic dTpw is u:p.
            let good = auth == "Basic dTpw" && r.path.contains("scope=repository%3Ax%3Apull");
            match good {
                true => answer(to, "200 OK", "", br#"{"access_token":"tok-1"}"#),
                false => answer(to, "401 Unauthorized", "", b"no"),
            }
        } else if auth == "Bearer tok-1" {
            plain(&image, r, to);
        } else {
            let wants = format!(
                "www-authenticate: Bearer realm=\"http://{host}/token\",service=\"s,t\",scope=\"repository:x:pull\"\r\n"
            );
            answer(to, "401 Unauthorized", &wants, b"");
        }
    });
    let options = RegistryOptions {
        credentials: Some(Credentials { user: "u".into(), password: "p".into() }),
        ..RegistryOptions::default()
    };
    assert_eq!(try_pull(port, &options).unwrap(), digest);
    let e = try_pull(port, &RegistryOptions::default()).unwrap_err();
    assert!(matches!(e, ImageError::Registry { status: Some(401), .. }), "{e:?}");
    assert!(!format!("{options:?}").contains("\"p\""));
}

#[test]
fn broken_connections_go_on_where_they_stopped() {
    let image = image();
    let digest = image.manifest.clone();
    let ranges = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&ranges);
    let layer = image.blobs[0].0.clone();
    let port = fake(move |r, to| {
        if !r.path.ends_with(&layer) {
            return plain(&image, r, to);
        }
        let data = &image.blobs[0].1;
        let range = r.headers.get("range").cloned();
        seen.lock().unwrap().push(range.clone());
        let from: usize = range.map_or(0, |r| r[6..].trim_end_matches('-').parse().unwrap());
        // Half of the rest, then the connection breaks; the third time all of it.
        let left = &data[from..];
        let give = if seen.lock().unwrap().len() < 3 { &left[..left.len() / 2] } else { left };
        let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", left.len());
        let _ = to.write_all(head.as_bytes()).and_then(|()| to.write_all(give));
    });
    assert_eq!(try_pull(port, &RegistryOptions::default()).unwrap(), digest);
    let ranges = ranges.lock().unwrap();
    assert_eq!(ranges.len(), 3, "{ranges:?}");
    assert!(ranges[0].is_none() && ranges[1].is_some() && ranges[2] > ranges[1]);
}

#[test]
fn a_misbehaving_registry_is_refused_in_time() {
    let options = RegistryOptions { timeout: Duration::from_secs(8), ..RegistryOptions::default() };
    let fails = |handler: Box<Handler>| {
        let start = Instant::now();
        let e = try_pull(fake(handler), &options).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(12));
        e
    };
    // A manifest without end.
    let e = fails(Box::new(|_, to| {
        let _ = to.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        while to.write_all(&[b' '; 65536]).is_ok() {}
    }));
    assert!(matches!(e, ImageError::LimitExceeded { .. }), "{e:?}");
    // A blob with other content, and one that does not end where it should.
    for extra in [false, true] {
        let image = image();
        let e = fails(Box::new(move |r, to| match r.path.contains("/blobs/") {
            true => {
                let name = r.path.rsplit('/').next().unwrap();
                let blob = image.blobs.iter().find(|(d, _)| d == name).unwrap();
                let mut data = blob.1.clone();
                match extra {
                    true => data.push(0),
                    false => data[0] ^= 1,
                }
                answer(to, "200 OK", "", &data);
            }
            false => plain(&image, r, to),
        }));
        assert!(matches!(e, ImageError::DigestMismatch { .. }), "{e:?}");
    }
    // The digest in the header is not the one of the document.
    let other = format!("docker-content-digest: sha256:{}\r\n", "0".repeat(64));
    let e = fails(Box::new(move |_, to| answer(to, "200 OK", &other, b"{}")));
    assert!(matches!(e, ImageError::DigestMismatch { .. }), "{e:?}");
    // Layers that are too large are not even asked for.
    let e = fails(Box::new(|r, to| {
        assert!(!r.path.contains("/blobs/"));
        let d = |size: u64| serde_json::json!({"digest": format!("sha256:{}", "a".repeat(64)), "size": size});
        let m = serde_json::json!({"config": d(10), "layers": [d(1 << 40), d(u64::MAX)]});
        answer(to, "200 OK", "", m.to_string().as_bytes());
    }));
    assert!(matches!(e, ImageError::LimitExceeded { .. }), "{e:?}");
    // It accepts and then says nothing.
    let e = fails(Box::new(|_, _| std::thread::sleep(Duration::from_secs(20))));
    assert!(e.to_string().contains("not done after 8 s"), "{e}");
    // It asks for tokens for ever, and sends in circles.
    let e = fails(Box::new(|r, to| {
        let host = &r.headers["host"];
        match r.path.starts_with("/token") {
            true => answer(to, "200 OK", "", br#"{"token":"t"}"#),
            false => {
                let wants = format!("www-authenticate: Bearer realm=\"http://{host}/token\"\r\n");
                answer(to, "401 Unauthorized", &wants, b"");
            }
        }
    }));
    assert!(matches!(e, ImageError::Registry { status: Some(401), .. }), "{e:?}");
    let e = fails(Box::new(|r, to| {
        answer(to, "307 Temporary Redirect", &format!("location: {}\r\n", r.path), b"");
    }));
    assert!(matches!(e, ImageError::Registry { .. }), "{e:?}");
}

#[test]
fn plain_http_stays_on_this_machine() {
    // An address kept free for documentation: nobody answers, and with TLS demanded nothing may
    // be sent in clear. The failure must come from the TLS side of the client or the time limit.
    let reference = RegistryReference::parse("192.0.2.1:80/x").unwrap();
    assert!(!reference.is_loopback());
    let options = RegistryOptions { timeout: Duration::from_secs(1), ..RegistryOptions::default() };
    let dir = tempfile::tempdir().unwrap();
    let e = pull(&reference, &options, dir.path(), 1 << 20, &NoProgress).unwrap_err();
    assert!(matches!(e, ImageError::Registry { .. }), "{e:?}");
}
