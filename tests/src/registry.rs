//! The registry of the distribution on a port of its own, removed with everything in it when dropped.

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

const PROGRAM: &str = "/usr/bin/docker-registry";
const PATIENCE: Duration = Duration::from_secs(20);

pub struct Registry {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Registry {
    /// `None`, with the reason printed, where the program is not installed.
    pub fn start() -> Result<Option<Self>> {
        if !Path::new(PROGRAM).exists() {
            println!("SKIP: {PROGRAM} is missing; install docker-registry");
            return Ok(None);
        }
        let dir = tempfile::tempdir()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let config = dir.path().join("config.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: 127.0.0.1:{port}}}\n",
            dir.path().join("data").display()
        );
        std::fs::write(&config, text)?;
        let null = Stdio::null;
        let child =
            Command::new(PROGRAM).arg("serve").arg(&config).stdin(null()).stdout(null()).stderr(null()).spawn()?;
        let registry = Self { child, port, _dir: dir };
        let until = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            ensure!(Instant::now() < until, "the registry does not start");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Some(registry))
    }

    /// How a template names what was pushed.
    pub fn source(&self, name: &str, tag: &str) -> String {
        format!("docker://127.0.0.1:{}/{name}:{tag}", self.port)
    }

    /// Pushes the first image of an OCI layout by the distribution API, as any builder does.
    pub async fn push(&self, layout: &Path, name: &str, tag: &str) -> Result<()> {
        let http = reqwest::Client::builder().no_proxy().build()?;
        let base = format!("http://127.0.0.1:{}/v2/{name}", self.port);
        let read = |digest: &str| -> Result<Vec<u8>> {
            let hex = digest.strip_prefix("sha256:").context("not a digest")?;
            Ok(std::fs::read(layout.join("blobs/sha256").join(hex))?)
        };
        let index: Value = serde_json::from_slice(&std::fs::read(layout.join("index.json"))?)?;
        let bytes = read(index["manifests"][0]["digest"].as_str().context("no manifest")?)?;
        let manifest: Value = serde_json::from_slice(&bytes)?;
        let layers = manifest["layers"].as_array().context("no layers")?;
        for part in layers.iter().chain([&manifest["config"]]) {
            let digest = part["digest"].as_str().context("no digest")?;
            let begun = http.post(format!("{base}/blobs/uploads/")).send().await?.error_for_status()?;
            let mut to = reqwest::Url::parse(begun.headers()["location"].to_str()?)?;
            to.query_pairs_mut().append_pair("digest", digest);
            http.put(to).body(read(digest)?).send().await?.error_for_status()?;
        }
        let kind = manifest["mediaType"].as_str().context("no media type")?.to_owned();
        let put = http.put(format!("{base}/manifests/{tag}")).header("content-type", kind).body(bytes);
        put.send().await?.error_for_status()?;
        Ok(())
    }
}
