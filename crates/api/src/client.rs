//! The Rust client: one method per call of the API, typed, on one kept connection.
//!
//! It must stay thin: it decides nothing a server decides, keeps no cache, and reads no file or environment variable. What it adds is
//! the wait for operations, attach that survives broken connections (`attach`), and files in constant memory (`files`).

mod attach;
mod error;
mod files;

use std::time::Duration;

use reqwest::{Method, RequestBuilder, Response, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use attach::{Attach, AttachInput, AttachOptions};
pub use error::ClientError;
pub use files::{Download, FileTarget};

use crate::{
    ApiKey, ApiKeyList, BuildTemplate, CommandSession, CreateCommand, CreateKey, CreateSandbox, ListSandboxesQuery,
    NewApiKey, Operation, OperationState, PatchSandbox, Problem, Process, ProcessList, Sandbox, SandboxPage,
    SendSignal, ServerInfo, TagTemplate, Template, TemplateList,
};

pub type Result<T, E = ClientError> = std::result::Result<T, E>;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For an answer that is not held back on purpose; waits add theirs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest single wait asked of the server; a longer one is asked for again.
const WAIT_STEP: Duration = Duration::from_secs(60);
/// A JSON answer beyond this is not one of ours.
const JSON_ANSWER_MAX_BYTES: usize = 64 * 1024 * 1024;

/// A server and the right to use it. Cheap to clone; clones share the connection.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    key: Option<http::HeaderValue>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("url", &self.base.as_str()).finish_non_exhaustive()
    }
}

/// A key for a request that must be carried out once, however often it is sent.
pub fn idempotency_key() -> String {
    space_core::id::OperationId::new().as_str().replace("op-", "idem-")
}

fn is_loopback(url: &Url) -> bool {
    match url.host_str() {
        Some("localhost") => true,
        Some(host) => host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback()),
        None => false,
    }
}

impl Client {
    /// `url` as in `http://127.0.0.1:7070`. Connects at the first call.
    pub fn new(url: &str, key: Option<&str>) -> Result<Self> {
        let bad = |reason: String| ClientError::BadUrl { given: url.chars().take(200).collect(), reason };
        let base = Url::parse(url.trim_end_matches('/')).map_err(|e| bad(e.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") || base.host_str().is_none() {
            return Err(bad("it must start with http:// or https:// and name a host".into()));
        }
        let key = match key {
            None => None,
            Some(key) => {
                if !key.trim().bytes().all(|b| b.is_ascii_graphic()) {
                    return Err(ClientError::BadKey);
                }
                let mut value =
                    http::HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| ClientError::BadKey)?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let mut builder = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .pool_idle_timeout(Duration::from_secs(60))
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("space-client/", env!("CARGO_PKG_VERSION")));
        if is_loopback(&base) {
            builder = builder.no_proxy();
        }
        let http = builder.build().map_err(|e| bad(error::chain(&e)))?;
        Ok(Self { http, base, key })
    }

    /// The address it was made with.
    pub fn url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// `segments` are escaped, so a name with `/` in it cannot reach another path.
    fn address(&self, segments: &[&str], query: &[(&str, String)]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().push("v1").extend(segments);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        url
    }

    fn request(&self, method: Method, segments: &[&str], query: &[(&str, String)]) -> RequestBuilder {
        let request = self.http.request(method, self.address(segments, query));
        match &self.key {
            Some(key) => request.header(http::header::AUTHORIZATION, key.clone()),
            None => request,
        }
    }

    fn failed(&self, error: &reqwest::Error) -> ClientError {
        let (url, reason) = (self.url().to_owned(), error::chain(error));
        match error.is_connect() {
            true => ClientError::Connect { url, reason },
            false => ClientError::Broken { url, reason },
        }
    }

    /// Sends, and turns a refusal into its `Problem`.
    async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let answer = request.send().await.map_err(|e| self.failed(&e))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let body = self.body(answer).await?;
        match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => Err(ClientError::Problem(problem)),
            Err(_) => Err(ClientError::Protocol {
                url: self.url().to_owned(),
                reason: format!("it answered {status} without a problem document"),
            }),
        }
    }

    async fn body(&self, mut answer: Response) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(|e| self.failed(&e))? {
            if body.len() + chunk.len() > JSON_ANSWER_MAX_BYTES {
                return Err(ClientError::Protocol { url: self.url().to_owned(), reason: "endless answer".into() });
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    async fn json<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T> {
        let answer = self.send(request).await?;
        let body = self.body(answer).await?;
        serde_json::from_slice(&body).map_err(|e| ClientError::Protocol {
            url: self.url().to_owned(),
            reason: format!("unexpected answer: {e}"),
        })
    }

    async fn get<T: DeserializeOwned>(&self, segments: &[&str], query: &[(&str, String)]) -> Result<T> {
        self.json(self.request(Method::GET, segments, query).timeout(ANSWER_TIMEOUT)).await
    }

    async fn post<T: DeserializeOwned>(&self, segments: &[&str], body: &impl Serialize) -> Result<T> {
        self.json(self.request(Method::POST, segments, &[]).timeout(ANSWER_TIMEOUT).json(body)).await
    }

    /// Whether a server answers, without a key.
    pub async fn health(&self) -> Result<()> {
        self.send(self.request(Method::GET, &["health"], &[]).timeout(Duration::from_secs(5))).await.map(drop)
    }

    pub async fn info(&self) -> Result<ServerInfo> {
        self.get(&["info"], &[]).await
    }

    /// `wait`: how long the answer may be held until the sandbox runs. The same `idempotency_key` makes one sandbox however often it is sent.
    pub async fn create_sandbox(
        &self,
        body: &CreateSandbox,
        idempotency_key: &str,
        wait: Option<Duration>,
    ) -> Result<Operation> {
        let (query, timeout) = wait_query(wait);
        let request = self.request(Method::POST, &["sandboxes"], &query).timeout(timeout);
        self.json(request.header("idempotency-key", idempotency_key).json(body)).await
    }

    /// By id or name.
    pub async fn sandbox(&self, sandbox: &str) -> Result<Sandbox> {
        self.get(&["sandboxes", sandbox], &[]).await
    }

    /// One page. `metadata` pairs must all match.
    pub async fn sandboxes(&self, query: &ListSandboxesQuery, metadata: &[(String, String)]) -> Result<SandboxPage> {
        let mut pairs: Vec<(&str, String)> = Vec::new();
        let mut add = |name, value: &Option<String>| pairs.extend(value.clone().map(|v| (name, v)));
        add("state", &query.state);
        add("template", &query.template);
        add("cursor", &query.cursor);
        add("limit", &query.limit.map(|l| l.to_string()));
        let keys: Vec<String> = metadata.iter().map(|(key, _)| format!("metadata.{key}")).collect();
        pairs.extend(keys.iter().zip(metadata).map(|(key, (_, value))| (key.as_str(), value.clone())));
        self.get(&["sandboxes"], &pairs).await
    }

    /// Every page.
    pub async fn all_sandboxes(
        &self,
        query: &ListSandboxesQuery,
        metadata: &[(String, String)],
    ) -> Result<Vec<Sandbox>> {
        let mut query = ListSandboxesQuery { limit: Some(space_core::limits::PAGE_MAX), ..query.clone() };
        let mut all = Vec::new();
        loop {
            let page = self.sandboxes(&query, metadata).await?;
            all.extend(page.sandboxes);
            match page.next_cursor {
                Some(cursor) if query.cursor.as_ref() != Some(&cursor) => query.cursor = Some(cursor),
                _ => return Ok(all),
            }
        }
    }

    pub async fn patch_sandbox(&self, sandbox: &str, body: &PatchSandbox) -> Result<Sandbox> {
        self.json(self.request(Method::PATCH, &["sandboxes", sandbox], &[]).timeout(ANSWER_TIMEOUT).json(body)).await
    }

    pub async fn delete_sandbox(&self, sandbox: &str, wait: Option<Duration>) -> Result<Operation> {
        let (query, timeout) = wait_query(wait);
        self.json(self.request(Method::DELETE, &["sandboxes", sandbox], &query).timeout(timeout)).await
    }

    pub async fn operation(&self, id: &str, wait: Option<Duration>) -> Result<Operation> {
        let (query, timeout) = wait_query(wait);
        self.json(self.request(Method::GET, &["operations", id], &query).timeout(timeout)).await
    }

    /// Waits until the operation has ended, at most `limit`; a failed one is an error. Survives broken connections.
    pub async fn finish(&self, mut operation: Operation, limit: Duration) -> Result<Operation> {
        let started = std::time::Instant::now();
        loop {
            match operation.state {
                OperationState::Succeeded => return Ok(operation),
                OperationState::Failed => return Err(operation_error(operation)),
                _ => {}
            }
            let left = limit.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Err(ClientError::StillRunning { id: operation.id });
            }
            match self.operation(&operation.id, Some(left.min(WAIT_STEP))).await {
                Ok(now) => operation = now,
                Err(e) if e.is_transient() => tokio::time::sleep(Duration::from_millis(500)).await,
                Err(e) => return Err(e),
            }
        }
    }

    pub async fn create_command(&self, sandbox: &str, body: &CreateCommand) -> Result<CommandSession> {
        self.post(&["sandboxes", sandbox, "commands"], body).await
    }

    /// A new token for a command, whether it is reserved, runs or has ended.
    pub async fn reattach(&self, sandbox: &str, command: &str) -> Result<CommandSession> {
        let segments = ["sandboxes", sandbox, "commands", command, "attach"];
        self.json(self.request(Method::POST, &segments, &[]).timeout(ANSWER_TIMEOUT)).await
    }

    /// Opens the stream of a command; see [`Attach`].
    pub async fn attach(&self, session: CommandSession, options: AttachOptions) -> Result<Attach> {
        Attach::open(self.clone(), session, options).await
    }

    pub async fn processes(&self, sandbox: &str) -> Result<Vec<Process>> {
        Ok(self.get::<ProcessList>(&["sandboxes", sandbox, "processes"], &[]).await?.processes)
    }

    /// `wait`: how long the answer may be held until the process has ended.
    pub async fn process(&self, sandbox: &str, command: &str, wait: Option<Duration>) -> Result<Process> {
        let (query, timeout) = wait_query(wait);
        let segments = ["sandboxes", sandbox, "processes", command];
        self.json(self.request(Method::GET, &segments, &query).timeout(timeout)).await
    }

    pub async fn signal(&self, sandbox: &str, command: &str, body: &SendSignal) -> Result<()> {
        let segments = ["sandboxes", sandbox, "processes", command, "signal"];
        self.send(self.request(Method::POST, &segments, &[]).timeout(ANSWER_TIMEOUT).json(body)).await.map(drop)
    }

    pub async fn build_template(&self, body: &BuildTemplate, idempotency_key: &str) -> Result<Operation> {
        let request = self.request(Method::POST, &["templates"], &[]).timeout(ANSWER_TIMEOUT);
        self.json(request.header("idempotency-key", idempotency_key).json(body)).await
    }

    pub async fn templates(&self) -> Result<Vec<Template>> {
        Ok(self.get::<TemplateList>(&["templates"], &[]).await?.templates)
    }

    /// By tag or digest.
    pub async fn template(&self, template: &str) -> Result<Template> {
        self.get(&["templates", template], &[]).await
    }

    pub async fn delete_template(&self, template: &str) -> Result<()> {
        self.send(self.request(Method::DELETE, &["templates", template], &[]).timeout(ANSWER_TIMEOUT)).await.map(drop)
    }

    pub async fn tag_template(&self, template: &str, tag: &str) -> Result<()> {
        let request = self.request(Method::PUT, &["templates", template, "tags"], &[]).timeout(ANSWER_TIMEOUT);
        self.send(request.json(&TagTemplate { tag: tag.to_owned() })).await.map(drop)
    }

    pub async fn create_key(&self, body: &CreateKey) -> Result<NewApiKey> {
        self.post(&["keys"], body).await
    }

    pub async fn keys(&self) -> Result<Vec<ApiKey>> {
        Ok(self.get::<ApiKeyList>(&["keys"], &[]).await?.keys)
    }

    pub async fn revoke_key(&self, id: &str) -> Result<()> {
        self.send(self.request(Method::DELETE, &["keys", id], &[]).timeout(ANSWER_TIMEOUT)).await.map(drop)
    }
}

fn wait_query(wait: Option<Duration>) -> (Vec<(&'static str, String)>, Duration) {
    match wait {
        None => (Vec::new(), ANSWER_TIMEOUT),
        Some(wait) => {
            let seconds = wait.as_secs().clamp(1, space_core::limits::WAIT_MAX_SECONDS);
            (vec![("wait", seconds.to_string())], ANSWER_TIMEOUT + Duration::from_secs(seconds))
        }
    }
}

fn operation_error(operation: Operation) -> ClientError {
    ClientError::Operation(operation.error.unwrap_or_else(|| crate::OperationError {
        code: "internal".into(),
        message: format!("the operation {} failed without a reason", operation.id),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped() {
        let client = Client::new("http://127.0.0.1:7070/", None).expect("an address");
        let url = client.address(&["templates", "../keys?x=1"], &[("path", "/a b&c".into())]);
        assert_eq!(url.as_str(), "http://127.0.0.1:7070/v1/templates/..%2Fkeys%3Fx=1?path=%2Fa+b%26c");
        assert_eq!(client.url(), "http://127.0.0.1:7070");
        let seed = client.address(&["templates", "seed@sha256:00"], &[]);
        assert_eq!(seed.path(), "/v1/templates/seed@sha256:00");
    }

    #[test]
    fn bad_addresses_say_what_one_looks_like() {
        for bad in ["", "127.0.0.1:7070", "ftp://x", "http://"] {
            let text = Client::new(bad, None).expect_err(bad).to_string();
            assert!(text.contains("http://127.0.0.1:7070"), "{text}");
        }
        assert!(matches!(Client::new("http://a", Some("\n\u{e9}")), Err(ClientError::BadKey)));
    }

    #[tokio::test]
    async fn nobody_there_names_the_way_out() {
        let client = Client::new("http://127.0.0.1:1", Some("sk-x")).expect("an address");
        let text = client.info().await.expect_err("nobody listens on port 1").to_string();
        assert!(text.contains("space up") && text.contains("http://127.0.0.1:1"), "{text}");
        assert!(!format!("{client:?}").contains("sk-x"));
    }
}
