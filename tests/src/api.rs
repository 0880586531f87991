//! Plain HTTP against the API, without the project's own client, so that the wire is what is tested.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::attach::{Attached, Ended};

#[derive(Clone)]
pub struct Api {
    pub url: String,
    pub key: String,
    http: reqwest::Client,
}

/// An answer: status, JSON body (null when there is none).
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
}

impl Answer {
    pub fn code(&self) -> &str {
        self.body["code"].as_str().unwrap_or("")
    }
}

impl Api {
    pub fn new(data_dir: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(data_dir.join("client.toml")).context("client.toml")?;
        let field = |name: &str| {
            text.lines()
                .find_map(|l| {
                    l.strip_prefix(name)?.trim().strip_prefix('=').map(|v| v.trim().trim_matches('"').to_owned())
                })
                .with_context(|| format!("no {name} in client.toml"))
        };
        Ok(Self {
            url: field("url")?,
            key: field("key")?,
            http: reqwest::Client::builder().timeout(Duration::from_secs(300)).no_proxy().build()?,
        })
    }

    pub fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        let method = method.parse().expect("a method");
        self.http.request(method, format!("{}{path}", self.url)).bearer_auth(&self.key)
    }

    pub async fn send(&self, request: reqwest::RequestBuilder) -> Result<Answer> {
        let answer = request.send().await?;
        let status = answer.status().as_u16();
        let bytes = answer.bytes().await?;
        Ok(Answer { status, body: serde_json::from_slice(&bytes).unwrap_or(Value::Null) })
    }

    pub async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Result<Answer> {
        let mut request = self.request(method, path);
        if let Some(body) = body {
            request = request.json(&body);
        }
        self.send(request).await
    }

    async fn good(&self, method: &str, path: &str, body: Option<Value>) -> Result<Value> {
        let answer = self.call(method, path, body).await?;
        if answer.status >= 300 {
            bail!("{method} {path}: {} {}", answer.status, answer.body);
        }
        Ok(answer.body)
    }

    pub async fn get(&self, path: &str) -> Result<Value> {
        self.good("GET", path, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Result<Value> {
        self.good("POST", path, Some(body)).await
    }

    pub async fn put_json(&self, path: &str, body: Value) -> Result<Value> {
        self.good("PUT", path, Some(body)).await
    }

    pub async fn good_patch(&self, path: &str, body: Value) -> Result<Value> {
        self.good("PATCH", path, Some(body)).await
    }

    pub async fn healthy(&self) -> bool {
        self.http.get(format!("{}/v1/health", self.url)).send().await.is_ok_and(|a| a.status().is_success())
    }

    /// A running sandbox of the template, deleted when the guard goes.
    pub async fn sandbox(&self, template: &str) -> Result<Sandbox> {
        self.sandbox_with(json!({"template": template})).await
    }

    pub async fn sandbox_with(&self, body: Value) -> Result<Sandbox> {
        let operation = self.post("/v1/sandboxes?wait=120", body).await?;
        let id = operation["sandbox_id"].as_str().context("no sandbox_id")?.to_owned();
        let guard = Sandbox { id, api: self.clone() };
        if operation["state"] != "succeeded" {
            bail!("create: {operation}");
        }
        Ok(guard)
    }
}

/// A sandbox of this test.
pub struct Sandbox {
    pub id: String,
    pub api: Api,
}

impl Sandbox {
    pub fn path(&self, rest: &str) -> String {
        format!("/v1/sandboxes/{}{rest}", self.id)
    }

    pub async fn get(&self) -> Result<Value> {
        self.api.get(&self.path("")).await
    }

    pub async fn state(&self) -> Result<String> {
        Ok(self.get().await?["state"].as_str().unwrap_or("").to_owned())
    }

    /// Reserves a command; `more` is merged into the request.
    pub async fn command(&self, argv: &[&str], more: Value) -> Result<Value> {
        let mut body = json!({"argv": argv});
        let fields = body.as_object_mut().expect("an object");
        fields.extend(more.as_object().cloned().unwrap_or_default());
        self.api.post(&self.path("/commands"), body).await
    }

    pub async fn attach(&self, argv: &[&str], more: Value) -> Result<Attached> {
        let session = self.command(argv, more).await?;
        Attached::open(&session, 0).await
    }

    /// Runs a program to its end.
    pub async fn run(&self, argv: &[&str]) -> Result<Ended> {
        self.attach(argv, json!({})).await?.finish().await
    }

    pub async fn sh(&self, script: &str) -> Result<Ended> {
        self.run(&["sh", "-c", script]).await
    }

    pub async fn root_sh(&self, script: &str) -> Result<Ended> {
        self.attach(&["sh", "-c", script], json!({"user": "root"})).await?.finish().await
    }

    /// Waits until the sandbox is in the state, at most `seconds`.
    pub async fn wait_state(&self, state: &str, seconds: u64) -> Result<Value> {
        let mut last = Value::Null;
        for _ in 0..seconds * 10 {
            last = self.get().await?;
            if last["state"] == state {
                return Ok(last);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("not {state} after {seconds} s: {last}")
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // A test may have failed on its own runtime, so this one is separate.
        let (api, path) = (self.api.clone(), self.path("?wait=60"));
        let _ = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            if let Ok(runtime) = runtime {
                let fresh = Api { http: reqwest::Client::new(), ..api };
                let _ = runtime.block_on(fresh.call("DELETE", &path, None));
            }
        })
        .join();
    }
}
