//! Fetches one image out of a registry into an OCI layout directory. Each answer is bounded in
//! size and time, each blob is checked against its digest while it arrives. Plain HTTP is spoken
//! to registries on this machine only, unless the caller asks for it. Must never send a
//! credential over plain HTTP to another machine.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine};
use futures::{StreamExt, TryStreamExt};
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, RANGE, WWW_AUTHENTICATE};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;

use crate::error::{ImageError, IoContext, Result, show};
use crate::oci::{self, ConfigFile, Descriptor, Document, MANIFEST_TYPES, MAX_JSON_BYTES};
use crate::progress::{self, Progress};
use crate::reference::RegistryReference;
use crate::token::{self, Challenge};

pub use crate::token::Credentials;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest silence of a registry that is sending.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_ERROR_BYTES: u64 = 16 << 10;
const MAX_TOKEN_BYTES: u64 = 256 << 10;
const PARALLEL_BLOBS: usize = 3;
const ATTEMPTS: u32 = 4;
/// Certificate authorities the host trusts, in addition to the built-in ones.
const HOST_CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// How to talk to a registry.
#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// Allow plain HTTP to registries on other machines. They are then trusted with the network
    /// in between; digests are checked all the same.
    pub plain_http: bool,
    pub credentials: Option<Credentials>,
    /// For the whole image.
    pub timeout: Duration,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        Self { plain_http: false, credentials: None, timeout: Duration::from_secs(2 * 3600) }
    }
}

/// Fetches the image for this platform into `into` (an existing directory), as a layout with this
/// one image. Blobs that are there already, complete, are not fetched again. `max_bytes` bounds
/// all layers together, compressed. Returns the digest of the manifest.
///
/// Blocks; must not be called from an asynchronous task.
pub fn pull(
    reference: &RegistryReference,
    options: &RegistryOptions,
    into: &Path,
    max_bytes: u64,
    progress: &dyn Progress,
) -> Result<String> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().ctx(|| "start the network client".into())?;
    runtime.block_on(async {
        let session = Session::new(reference, options)?;
        let work = session.pull(into, max_bytes, progress);
        let cancel = async {
            while !progress.cancelled() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::select! {
            result = tokio::time::timeout(options.timeout, work) => result.unwrap_or_else(|_| {
                Err(session.error(None, format!("not done after {} s", options.timeout.as_secs())))
            }),
            () = cancel => Err(ImageError::Cancelled),
        }
    })
}

struct Session<'a> {
    reference: &'a RegistryReference,
    options: &'a RegistryOptions,
    client: Client,
    base: Url,
    authorization: Mutex<Option<String>>,
}

#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
}

impl<'a> Session<'a> {
    fn new(reference: &'a RegistryReference, options: &'a RegistryOptions) -> Result<Self> {
        let local = reference.is_loopback();
        let plain = local || options.plain_http;
        let error = |why: String| ImageError::Registry { registry: reference.registry.clone(), status: None, why };
        let scheme = if plain { "http" } else { "https" };
        let base = Url::parse(&format!("{scheme}://{}/", reference.registry))
            .map_err(|e| error(format!("not a usable address: {e}")))?;
        let mut builder = Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .https_only(!plain)
            .user_agent(concat!("space/", env!("CARGO_PKG_VERSION")));
        if local {
            builder = builder.no_proxy();
        } else if let Ok(pem) = std::fs::read(HOST_CERTIFICATES) {
            for cert in reqwest::Certificate::from_pem_bundle(&pem).unwrap_or_default() {
                builder = builder.add_root_certificate(cert);
            }
        }
        let client = builder.build().map_err(|e| error(format!("no network client: {e}")))?;
        Ok(Self { reference, options, client, base, authorization: Mutex::new(None) })
    }

    fn error(&self, status: Option<StatusCode>, why: String) -> ImageError {
        ImageError::Registry { registry: self.reference.registry.clone(), status: status.map(|s| s.as_u16()), why }
    }

    fn network(&self, e: &reqwest::Error) -> ImageError {
        let mut why = e.to_string();
        let mut source = std::error::Error::source(e);
        while let Some(cause) = source {
            why = format!("{why}: {cause}");
            source = cause.source();
        }
        self.error(e.status(), why)
    }

    async fn pull(&self, into: &Path, max_bytes: u64, progress: &dyn Progress) -> Result<String> {
        progress.step(&format!("asking {} for the image", self.reference.registry));
        let blobs = into.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).ctx(|| format!("create {}", blobs.display()))?;

        let mut name = self.reference.manifest_name().to_owned();
        let mut depth = 0;
        let (body, document) = loop {
            let body = self.manifest(&name).await?;
            let document: Document = oci::parse_json(&body, "manifest")?;
            if document.manifests.is_none() {
                break (body, document);
            }
            depth += 1;
            if depth > 3 {
                return Err(ImageError::image("its indexes are nested too deeply"));
            }
            name = document.choose()?.digest;
        };
        let digest = format!("sha256:{}", oci::hex(&Sha256::digest(&body)));
        let (config, layers) = document.into_manifest()?;
        let total = layers.iter().fold(0u64, |n, l| n.saturating_add(l.size));
        if total > max_bytes {
            return Err(ImageError::LimitExceeded { what: "the size of all layers", limit: max_bytes });
        }
        if config.size > MAX_JSON_BYTES {
            return Err(ImageError::LimitExceeded {
                what: "the size of the image configuration",
                limit: MAX_JSON_BYTES,
            });
        }
        self.blobs(&blobs, &config, &layers, total, progress).await?;
        let file: ConfigFile =
            oci::parse_json(&read(&blobs.join(config.digest.trim_start_matches("sha256:")))?, "configuration")?;
        file.into_parts()?;
        write_layout(into, &body, &digest)?;
        Ok(digest)
    }

    async fn blobs(
        &self,
        dir: &Path,
        config: &Descriptor,
        layers: &[Descriptor],
        total: u64,
        progress: &dyn Progress,
    ) -> Result<()> {
        // The configuration first: it is small and may say that the image is of no use.
        let done = AtomicU64::new(0);
        self.blob(dir, config, &done, None, progress).await?;
        progress.step(&format!("fetching {} layers, {} MiB", layers.len(), total >> 20));
        let done = AtomicU64::new(0);
        // Empty layers appear several times: two tasks must not write one file.
        let mut unique: Vec<&Descriptor> = layers.iter().collect();
        unique.sort_by(|a, b| a.digest.cmp(&b.digest));
        unique.dedup_by(|a, b| a.digest == b.digest);
        let tasks: Vec<_> = unique.into_iter().map(|d| self.blob(dir, d, &done, Some(total), progress)).collect();
        futures::stream::iter(tasks).buffer_unordered(PARALLEL_BLOBS).try_collect::<Vec<()>>().await.map(|_| ())
    }

    async fn manifest(&self, name: &str) -> Result<Vec<u8>> {
        let url = self.url(&format!("manifests/{name}"))?;
        let mut headers = HeaderMap::new();
        for kind in MANIFEST_TYPES {
            headers.append(ACCEPT, kind.parse().expect("a constant without odd bytes"));
        }
        let response = self.get(&url, headers).await?;
        let header = response.headers().get("docker-content-digest");
        let header = header.and_then(|h| h.to_str().ok()).map(str::to_owned);
        let body = self.body(response, MAX_JSON_BYTES).await?;
        let hash = Sha256::digest(&body);
        if name.starts_with("sha256:") {
            oci::verify(name, &hash, "the manifest")?;
        }
        if let Some(header) = header.filter(|h| h.starts_with("sha256:")) {
            oci::verify(&header, &hash, "the manifest")?;
        }
        Ok(body)
    }

    fn url(&self, rest: &str) -> Result<Url> {
        self.base
            .join(&format!("v2/{}/{rest}", self.reference.repository))
            .map_err(|e| self.error(None, format!("not a usable address: {e}")))
    }

    /// A successful answer; asks for a token once if the registry wants one.
    async fn get(&self, url: &Url, headers: HeaderMap) -> Result<Response> {
        for attempt in 0..2 {
            let sent = self.authorization.lock().await.clone();
            let mut request = self.client.get(url.clone()).headers(headers.clone());
            if let Some(authorization) = &sent {
                request = request.header(AUTHORIZATION, authorization);
            }
            let response = request.send().await.map_err(|e| self.network(&e))?;
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            if status == StatusCode::UNAUTHORIZED && attempt == 0 {
                let challenges = response.headers().get_all(WWW_AUTHENTICATE);
                let challenge = challenges.iter().filter_map(|h| h.to_str().ok()).find_map(token::parse);
                if let Some(challenge) = challenge {
                    self.authorize(challenge, sent).await?;
                    continue;
                }
            }
            return Err(self.refused(response).await);
        }
        Err(self.error(Some(StatusCode::UNAUTHORIZED), "the image cannot be read with these credentials".into()))
    }

    async fn refused(&self, response: Response) -> ImageError {
        let status = response.status();
        let what = match status {
            StatusCode::NOT_FOUND => "there is no such image",
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "the image does not exist or needs credentials",
            StatusCode::TOO_MANY_REQUESTS => "too many requests; try again later",
            _ => "the request was refused",
        };
        let said = match self.body(response, MAX_ERROR_BYTES).await {
            Ok(body) if !body.is_empty() => format!(": {}", show(&body)),
            _ => String::new(),
        };
        self.error(Some(status), format!("{what} ({status}){said}"))
    }

    async fn authorize(&self, challenge: Challenge, sent: Option<String>) -> Result<()> {
        let mut slot = self.authorization.lock().await;
        if *slot != sent {
            return Ok(()); // Another blob has renewed it meanwhile.
        }
        let credentials = self.options.credentials.as_ref();
        let (realm, service, scope) = match challenge {
            Challenge::Basic => {
                let c = credentials.ok_or_else(|| {
                    self.error(Some(StatusCode::UNAUTHORIZED), "the registry wants a name and a password".into())
                })?;
                *slot = Some(basic(c));
                return Ok(());
            }
            Challenge::Bearer { realm, service, scope } => (realm, service, scope),
        };
        let mut url =
            Url::parse(&realm).map_err(|e| self.error(None, format!("its token address is not usable: {e}")))?;
        // `https_only` holds here too: a registry cannot lure a password into plain HTTP.
        {
            let mut query = url.query_pairs_mut();
            if let Some(service) = service {
                query.append_pair("service", &service);
            }
            let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", self.reference.repository));
            query.append_pair("scope", &scope);
        }
        let mut request = self.client.get(url);
        if let Some(c) = credentials {
            request = request.header(AUTHORIZATION, basic(c));
        }
        let response = request.send().await.map_err(|e| self.network(&e))?;
        if !response.status().is_success() {
            return Err(self.refused(response).await);
        }
        let body = self.body(response, MAX_TOKEN_BYTES).await?;
        // No excerpt in the error: the body may hold a token.
        let answer: TokenAnswer = serde_json::from_slice(&body)
            .map_err(|_| self.error(None, "its token answer cannot be understood".into()))?;
        let token = answer
            .token
            .or(answer.access_token)
            .ok_or_else(|| self.error(None, "its token answer holds no token".into()))?;
        *slot = Some(format!("Bearer {token}"));
        Ok(())
    }

    async fn body(&self, response: Response, max: u64) -> Result<Vec<u8>> {
        let mut stream = response.bytes_stream();
        let mut body = Vec::new();
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|e| self.network(&e))?;
            if (body.len() + piece.len()) as u64 > max {
                return Err(ImageError::LimitExceeded { what: "the size of an answer of the registry", limit: max });
            }
            body.extend_from_slice(&piece);
        }
        Ok(body)
    }

    /// Fetches one blob; goes on where a broken connection stopped.
    async fn blob(
        &self,
        dir: &Path,
        d: &Descriptor,
        done: &AtomicU64,
        total: Option<u64>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let path = dir.join(d.digest.trim_start_matches("sha256:"));
        if path.is_file() && hash_file(&path)?.1 == d.digest {
            done.fetch_add(d.size, Ordering::Relaxed);
            return Ok(());
        }
        let part = path.with_extension("part");
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&part)
            .ctx(|| format!("create {}", part.display()))?;
        let mut state = Partial::default();
        let mut attempt = 1;
        loop {
            let before = state.at;
            let result = self.blob_piece(&mut file, &mut state, d, done, total, progress).await;
            match result {
                Ok(()) => break,
                Err(e) if attempt < ATTEMPTS && worth_retrying(&e) => {
                    // As long as bytes arrive, the connection is only bad, not dead.
                    attempt = if state.at > before { 2 } else { attempt + 1 };
                    tokio::time::sleep(Duration::from_millis(200 << attempt)).await;
                }
                Err(e) => return Err(e),
            }
        }
        oci::verify(&d.digest, &state.hash.finalize(), "a blob of the registry")?;
        std::fs::rename(&part, &path).ctx(|| format!("keep {}", path.display()))
    }

    async fn blob_piece(
        &self,
        file: &mut File,
        state: &mut Partial,
        d: &Descriptor,
        done: &AtomicU64,
        total: Option<u64>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let url = self.url(&format!("blobs/{}", d.digest))?;
        let mut headers = HeaderMap::new();
        if state.at > 0 {
            let range = format!("bytes={}-", state.at);
            headers.insert(RANGE, range.parse().expect("digits are a header value"));
        }
        let response = self.get(&url, headers).await?;
        if state.at > 0 && response.status() != StatusCode::PARTIAL_CONTENT {
            done.fetch_sub(state.at, Ordering::Relaxed);
            *state = Partial::default();
        }
        file.seek(SeekFrom::Start(state.at)).ctx(|| "write a blob".into())?;
        let mut stream = response.bytes_stream();
        while let Some(piece) = stream.next().await {
            progress::check(progress)?;
            let piece = piece.map_err(|e| self.network(&e))?;
            if state.at + piece.len() as u64 > d.size {
                return Err(ImageError::DigestMismatch {
                    what: "a blob of the registry".into(),
                    expected: format!("{} with {} bytes", d.digest, d.size),
                    actual: "more bytes".into(),
                });
            }
            file.write_all(&piece).ctx(|| "write a blob".into())?;
            state.hash.update(&piece);
            state.at += piece.len() as u64;
            let now = done.fetch_add(piece.len() as u64, Ordering::Relaxed) + piece.len() as u64;
            progress.bytes(now, total);
        }
        if state.at < d.size {
            return Err(self.error(None, format!("the blob {} ended early", d.digest)));
        }
        Ok(())
    }
}

#[derive(Default)]
struct Partial {
    at: u64,
    hash: Sha256,
}

/// Broken connections and the registry's own troubles; not what it decided.
fn worth_retrying(e: &ImageError) -> bool {
    matches!(e, ImageError::Registry { status, .. } if status.is_none_or(|s| s >= 500 || s == 429))
}

fn basic(c: &Credentials) -> String {
    let plain = format!("{}:{}", c.user, c.password);
    format!("Basic {}", BASE64_STANDARD.encode(plain))
}

fn read(path: &PathBuf) -> Result<Vec<u8>> {
    std::fs::read(path).ctx(|| format!("read {}", path.display()))
}

fn hash_file(path: &Path) -> Result<(u64, String)> {
    let what = || format!("read {}", path.display());
    let mut file = File::open(path).ctx(what)?;
    let mut hash = Sha256::new();
    let mut buf = vec![0u8; 128 << 10];
    let mut size = 0;
    loop {
        let n = file.read(&mut buf).ctx(what)?;
        if n == 0 {
            return Ok((size, format!("sha256:{}", oci::hex(&hash.finalize()))));
        }
        size += n as u64;
        hash.update(&buf[..n]);
    }
}

fn write_layout(into: &Path, manifest: &[u8], digest: &str) -> Result<()> {
    let index = serde_json::json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": MANIFEST_TYPES[0],
            "digest": digest,
            "size": manifest.len(),
        }],
    });
    let files = [
        (oci::blob_path(digest), manifest.to_vec()),
        ("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
        ("index.json".to_owned(), index.to_string().into_bytes()),
    ];
    for (name, data) in files {
        let path = into.join(name);
        std::fs::write(&path, data).ctx(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
