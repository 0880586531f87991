//! A control plane of its own for each test, over a simulated node. Nothing is left when the test ends, also by a panic.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use space_control::{ControlConfig, NodeEndpoint, Points, serve};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::sim_node::{SEED, SimNode};

pub struct Cloud {
    pub node: Arc<SimNode>,
    pub url: String,
    pub key: String,
    pub http: reqwest::Client,
    server: JoinHandle<()>,
    node_runtime: Option<tokio::runtime::Runtime>,
    stop: Option<oneshot::Sender<()>>,
    dir: tempfile::TempDir,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
    pub headers: reqwest::header::HeaderMap,
}

impl Answer {
    pub fn code(&self) -> &str {
        self.body["code"].as_str().unwrap_or("")
    }

    pub fn text(&self, field: &str) -> String {
        self.body[field].as_str().unwrap_or("").to_owned()
    }
}

impl Cloud {
    pub async fn start() -> Self {
        let mut cloud = Self::start_with(Points::default()).await;
        cloud.tag_seed().await;
        cloud
    }

    pub async fn start_with(points: Points) -> Self {
        let dir = tempfile::Builder::new().prefix("control-").tempdir().expect("a folder");
        let node = SimNode::new();
        let node_runtime = Some(node.serve(&dir.path().join("node.sock")));
        let mut cloud = Self {
            node,
            url: String::new(),
            key: String::new(),
            http: reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(120)).build().expect("a client"),
            server: tokio::spawn(async {}),
            node_runtime,
            stop: None,
            dir,
        };
        cloud.start_server(points).await;
        cloud
    }

    async fn tag_seed(&mut self) {
        let answer = self.call("PUT", &format!("/v1/templates/{SEED}/tags"), Some(json!({"tag": "seed"}))).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().to_path_buf()
    }

    async fn start_server(&mut self, points: Points) {
        let socket = NodeEndpoint::Unix(self.dir.path().join("node.sock"));
        let mut config = ControlConfig::new("127.0.0.1:0".parse().expect("an address"), self.data_dir(), socket);
        config.points = points;
        let (ready, is_ready) = oneshot::channel();
        let (stop, stopped) = oneshot::channel();
        self.server = tokio::spawn(async move {
            let shutdown = async {
                let _ = stopped.await;
            };
            serve(config, ready, shutdown).await.expect("served");
        });
        let ready = is_ready.await.expect("the server starts");
        (self.url, self.key, self.stop) = (format!("http://{}", ready.addr), ready.admin_key.secret, Some(stop));
    }

    /// As `kill -9` would: nothing is finished.
    pub async fn crash(&mut self) {
        let server = std::mem::replace(&mut self.server, tokio::spawn(async {}));
        server.abort();
        let _ = server.await;
    }

    pub async fn restart(&mut self) {
        self.crash().await;
        self.start_server(Points::default()).await;
    }

    pub async fn stop(&mut self) -> Duration {
        let started = Instant::now();
        let _ = self.stop.take().expect("running").send(());
        (&mut self.server).await.expect("no panic");
        started.elapsed()
    }

    /// The node goes away, or comes back with the runs it had.
    pub fn node_down(&mut self) {
        if let Some(runtime) = self.node_runtime.take() {
            runtime.shutdown_background();
        }
    }

    pub fn node_up(&mut self) {
        self.node_runtime = Some(self.node.serve(&self.dir.path().join("node.sock")));
    }

    pub fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        self.http.request(method.parse().expect("a method"), format!("{}{path}", self.url)).bearer_auth(&self.key)
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        let answer = request.send().await.expect("an answer");
        let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
        let bytes = answer.bytes().await.expect("a body");
        Answer { status, headers, body: serde_json::from_slice(&bytes).unwrap_or(Value::Null) }
    }

    pub async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        let mut request = self.request(method, path);
        if let Some(body) = body {
            request = request.json(&body);
        }
        self.send(request).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None).await
    }

    /// A running sandbox's id.
    pub async fn sandbox(&self, mut body: Value) -> String {
        body["template"] = json!("seed");
        let answer = self.call("POST", "/v1/sandboxes?wait=30", Some(body)).await;
        assert_eq!((answer.status, answer.text("state").as_str()), (200, "succeeded"), "{answer:?}");
        answer.text("sandbox_id")
    }

    pub async fn delete(&self, id: &str) {
        let answer = self.call("DELETE", &format!("/v1/sandboxes/{id}?wait=30"), None).await;
        assert_eq!((answer.status, answer.text("state").as_str()), (200, "succeeded"), "{answer:?}");
    }

    pub async fn state(&self, id: &str) -> String {
        self.get(&format!("/v1/sandboxes/{id}")).await.text("state")
    }

    pub async fn wait_state(&self, id: &str, state: &str) -> Answer {
        let started = Instant::now();
        loop {
            let answer = self.get(&format!("/v1/sandboxes/{id}")).await;
            if answer.body["state"] == state {
                return answer;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "not {state}: {answer:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Cloud {
    fn drop(&mut self) {
        self.server.abort();
        self.node_down();
    }
}
