//! The template `seed`, and whether it still fits the kernel and daemon that are there. `<data>/seed.json` says what it was built with.

use serde::{Deserialize, Serialize};
use space_api::client::{Client, ClientError, idempotency_key};
use space_api::problem::Code;
use space_api::{BuildTemplate, Operation, OperationState, TemplateOptions};

use super::initramfs::Made;
use super::{Finding, initramfs, write_whole};
use crate::config::ServerConfig;
use crate::failure::Failure;

pub const TAG: &str = "seed:latest";
const SOURCE: &str = "seed";

#[derive(Serialize, Deserialize)]
struct Record {
    digest: String,
    /// SHA-256 of the initramfs it was booted with.
    initramfs: String,
}

/// A build under way, which a server carries on with after an interruption: `<data>/seed-build.json`.
#[derive(Serialize, Deserialize)]
struct Begun {
    operation: String,
    initramfs: String,
}

fn note(config: &ServerConfig, name: &str, value: &impl Serialize) -> Result<(), Failure> {
    let path = config.data_dir.join(name);
    let text = serde_json::to_string(value).expect("plain data");
    write_whole(&path, &text).map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())))
}

fn record(config: &ServerConfig) -> Option<Record> {
    serde_json::from_str(&std::fs::read_to_string(config.data_dir.join("seed.json")).ok()?).ok()
}

/// Its digest on the server.
async fn current(client: &Client) -> Result<Option<String>, ClientError> {
    match client.template(TAG).await {
        Ok(template) => Ok(Some(template.digest)),
        Err(e) if e.is(Code::NotFound) => Ok(None),
        Err(e) => Err(e),
    }
}

pub async fn check(config: &ServerConfig, client: &Client) -> Finding {
    const NAME: &str = "template seed";
    match current(client).await {
        Err(e) => Finding::warn(NAME, format!("cannot be looked up: {e}"), "see the finding about the server"),
        Ok(None) => Finding::fail(NAME, "it is missing", "sudo space setup"),
        Ok(Some(digest)) if fits(config, &digest) => Finding::ok(NAME, digest),
        Ok(Some(digest)) => Finding::warn(
            NAME,
            format!("{digest} was built with another kernel or space-daemon; it works as it was"),
            "sudo space setup rebuilds it; build other templates again as well",
        ),
    }
}

fn fits(config: &ServerConfig, digest: &str) -> bool {
    match (record(config), initramfs::made(config)) {
        (Some(record), Some(made)) => record.digest == digest && record.initramfs == made.image,
        _ => false,
    }
}

/// The build that an interrupted set-up began, or a new one.
async fn begin(
    config: &ServerConfig,
    client: &Client,
    made: &Made,
    current: Option<&str>,
) -> Result<Operation, Failure> {
    let text = std::fs::read_to_string(config.data_dir.join("seed-build.json")).unwrap_or_default();
    if let Ok(begun) = serde_json::from_str::<Begun>(&text)
        && begun.initramfs == made.image
        && let Ok(operation) = client.operation(&begun.operation, None).await
    {
        let built = operation.template.as_ref().map(|template| template.digest.as_str());
        let there = operation.state == OperationState::Succeeded && built.is_some() && built == current;
        if there || !operation.state.ended() {
            return Ok(operation);
        }
    }
    let body = BuildTemplate {
        tag: TAG.to_owned(),
        source: SOURCE.to_owned(),
        options: TemplateOptions::default(),
        insecure_registry: false,
    };
    let operation = client.build_template(&body, &idempotency_key()).await?;
    note(config, "seed-build.json", &Begun { operation: operation.id.clone(), initramfs: made.image.clone() })?;
    Ok(operation)
}

/// Builds it when it is missing or was built with another kernel or daemon. True when it was built.
pub async fn ensure(config: &ServerConfig, client: &Client, silent: bool) -> Result<bool, Failure> {
    let before = current(client).await?;
    if before.as_ref().is_some_and(|digest| fits(config, digest)) {
        return Ok(false);
    }
    let made = initramfs::made(config).ok_or_else(|| Failure::new("there is no initramfs: run set-up again"))?;
    let operation = begin(config, client, &made, before.as_deref()).await?;
    crate::cmd::template::watch(client, operation, silent).await?;
    let digest = current(client).await?.ok_or_else(|| Failure::new("the template was built and is not there"))?;
    note(config, "seed.json", &Record { digest: digest.clone(), initramfs: made.image })?;
    let _ = std::fs::remove_file(config.data_dir.join("seed-build.json"));
    // The old one goes unless sandboxes use it or it has another tag.
    if let Some(old) = before.filter(|old| *old != digest)
        && client.template(&old).await.is_ok_and(|template| template.tags.is_empty())
    {
        let _ = client.delete_template(&old).await;
    }
    Ok(true)
}
