//! Reads OCI image layouts: picks the image for this platform, checks every digest, applies the
//! layers in order. A layout is as hostile as the image in it: its files are opened inside its
//! directory only.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::config::{ImageConfig, OciRunConfig};
use crate::error::{ImageError, IoContext, Result, show};
use crate::extract::Extractor;
use crate::progress::{self, Progress};
use crate::reference::is_sha256;
use crate::rootfs::RootDir;
use crate::{decompress, reference};

/// Larger manifests, indexes and configurations are refused.
pub(crate) const MAX_JSON_BYTES: u64 = 4 << 20;
pub const MAX_LAYERS: usize = 512;
const MAX_MANIFESTS: usize = 1024;
const MAX_INDEX_DEPTH: usize = 3;
const REF_NAME: &str = "org.opencontainers.image.ref.name";
const PLATFORM: &str = "linux/amd64";

/// Kinds of documents asked for and understood.
pub(crate) const MANIFEST_TYPES: [&str; 4] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];

/// What points to a piece of content.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default)]
    pub media_type: String,
    pub digest: String,
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Platform {
    pub architecture: String,
    pub os: String,
}

/// A manifest or an index: told apart by what they have.
#[derive(Debug, Deserialize)]
pub struct Document {
    pub config: Option<Descriptor>,
    pub layers: Option<Vec<Descriptor>>,
    pub manifests: Option<Vec<Descriptor>>,
}

/// What is used of an image configuration.
#[derive(Debug, Deserialize)]
pub struct ConfigFile {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    config: Option<OciRunConfig>,
    rootfs: Option<RootFs>,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

/// One image, chosen: what to apply and how to run it.
#[derive(Debug)]
pub struct Image {
    /// Digest of the manifest, where there is one.
    pub digest: Option<String>,
    /// Layer files inside the layout: path, expected digest of the file where known.
    pub layers: Vec<(String, Option<String>)>,
    /// Digests of the uncompressed layers; empty where the image does not say.
    pub diff_ids: Vec<String>,
    pub config: ImageConfig,
}

/// An opened layout directory.
pub struct Layout {
    root: RootDir,
}

pub fn blob_path(digest: &str) -> String {
    format!("blobs/sha256/{}", digest.trim_start_matches("sha256:"))
}

pub(crate) fn parse_json<T: serde::de::DeserializeOwned>(data: &[u8], what: &str) -> Result<T> {
    serde_json::from_slice(data).map_err(|e| ImageError::image(format!("its {what} cannot be understood: {e}")))
}

pub(crate) fn check_descriptor(d: &Descriptor) -> Result<()> {
    if !is_sha256(&d.digest) {
        return Err(ImageError::image(format!(
            "only sha256 digests are supported, not `{}`",
            show(d.digest.as_bytes())
        )));
    }
    Ok(())
}

impl Document {
    /// The manifest parts, checked for counts and digests.
    pub fn into_manifest(self) -> Result<(Descriptor, Vec<Descriptor>)> {
        let (Some(config), Some(layers)) = (self.config, self.layers) else {
            return Err(ImageError::image("its manifest names no config or layers"));
        };
        if layers.len() > MAX_LAYERS {
            return Err(ImageError::LimitExceeded { what: "the number of layers", limit: MAX_LAYERS as u64 });
        }
        let kind = config.media_type.as_str();
        if !kind.is_empty() && !kind.contains("image") {
            return Err(ImageError::image(format!("it is not a container image but `{}`", show(kind.as_bytes()))));
        }
        for d in layers.iter().chain([&config]) {
            check_descriptor(d)?;
        }
        if let Some(l) = layers.iter().find(|l| l.media_type.contains("encrypted")) {
            return Err(ImageError::image(format!("its layer {} is encrypted", l.digest)));
        }
        Ok((config, layers))
    }

    /// The entry of an index for this platform. `None`: an entry without a platform is the only
    /// one and must be looked into.
    pub fn choose(&self) -> Result<Descriptor> {
        let all = self.manifests.as_deref().unwrap_or_default();
        if all.len() > MAX_MANIFESTS {
            return Err(ImageError::LimitExceeded {
                what: "the number of images in an index",
                limit: MAX_MANIFESTS as u64,
            });
        }
        let ours = all.iter().find(|d| platform_of(d).as_deref() == Some(PLATFORM));
        let chosen = ours.or_else(|| {
            let mut unnamed = all.iter().filter(|d| d.platform.is_none());
            unnamed.next().filter(|_| unnamed.next().is_none())
        });
        let chosen = chosen
            .cloned()
            .ok_or_else(|| ImageError::NoPlatform { wanted: PLATFORM.to_owned(), found: describe(all) })?;
        check_descriptor(&chosen)?;
        Ok(chosen)
    }
}

fn platform_of(d: &Descriptor) -> Option<String> {
    d.platform.as_ref().map(|p| format!("{}/{}", p.os, p.architecture))
}

fn describe(all: &[Descriptor]) -> String {
    let mut names: Vec<String> = all
        .iter()
        .map(|d| {
            let tag = d.annotations.as_ref().and_then(|a| a.get(REF_NAME));
            let platform = platform_of(d).unwrap_or_else(|| "unnamed platform".to_owned());
            show(
                match tag {
                    Some(tag) => format!("{tag} ({platform})"),
                    None => platform,
                }
                .as_bytes(),
            )
        })
        .take(20)
        .collect();
    names.dedup();
    if names.is_empty() {
        return "no image at all".to_owned();
    }
    names.join(", ")
}

impl ConfigFile {
    pub fn into_parts(self) -> Result<(ImageConfig, Vec<String>)> {
        let found = format!("{}/{}", self.os, self.architecture);
        if found != "/" && found != PLATFORM {
            return Err(ImageError::NoPlatform { wanted: PLATFORM.to_owned(), found: show(found.as_bytes()) });
        }
        let config = ImageConfig::from_oci(self.config.unwrap_or_default())?;
        Ok((config, self.rootfs.map(|r| r.diff_ids).unwrap_or_default()))
    }
}

impl Layout {
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { root: RootDir::open(path)? })
    }

    pub(crate) fn root(&self) -> &RootDir {
        &self.root
    }

    /// Finds the image of this platform, and of this tag where one is given.
    pub fn image(&self, tag: Option<&str>) -> Result<Image> {
        let Some(index) = self.root.read_file("index.json", MAX_JSON_BYTES)? else {
            return Err(ImageError::image("there is no index.json: this is not an OCI image layout"));
        };
        let mut document: Document = parse_json(&index, "index")?;
        if let Some(tag) = tag {
            let all = document.manifests.take().unwrap_or_default();
            let found = describe(&all);
            let tagged: Vec<_> = all.into_iter().filter(|d| has_tag(d, tag)).collect();
            if tagged.is_empty() {
                return Err(ImageError::image(format!(
                    "no image in the layout has the tag `{}`; there are: {found}",
                    show(tag.as_bytes())
                )));
            }
            document.manifests = Some(tagged);
        }
        let mut digest = None;
        for _ in 0..=MAX_INDEX_DEPTH {
            if document.manifests.is_none() {
                return self.manifest(document, digest);
            }
            let next = document.choose()?;
            document = parse_json(&self.json_blob(&next.digest)?, "manifest")?;
            digest = Some(next.digest);
        }
        Err(ImageError::image("its indexes are nested too deeply"))
    }

    fn manifest(&self, document: Document, digest: Option<String>) -> Result<Image> {
        let (config, layers) = document.into_manifest()?;
        let file: ConfigFile = parse_json(&self.json_blob(&config.digest)?, "configuration")?;
        let (config, diff_ids) = file.into_parts()?;
        Ok(Image {
            digest,
            layers: layers.into_iter().map(|l| (blob_path(&l.digest), Some(l.digest))).collect(),
            diff_ids,
            config,
        })
    }

    fn json_blob(&self, digest: &str) -> Result<Vec<u8>> {
        let data = self
            .root
            .read_file(&blob_path(digest), MAX_JSON_BYTES)?
            .ok_or_else(|| ImageError::image(format!("its blob {digest} is missing")))?;
        verify(digest, &Sha256::digest(&data), "a document of the image")?;
        Ok(data)
    }

    /// Applies all layers, checking the digest of each file and of what it unpacks to.
    pub fn apply(&self, image: &Image, to: &mut Extractor<'_>, progress: &dyn Progress) -> Result<()> {
        if !image.diff_ids.is_empty() && image.diff_ids.len() != image.layers.len() {
            return Err(ImageError::image(format!(
                "its manifest has {} layers, its configuration {}",
                image.layers.len(),
                image.diff_ids.len()
            )));
        }
        let count = image.layers.len();
        for (i, (path, digest)) in image.layers.iter().enumerate() {
            progress::check(progress)?;
            progress.step(&format!("unpacking layer {} of {count}", i + 1));
            let file = self
                .root
                .open_file(path)?
                .ok_or_else(|| ImageError::image(format!("its layer `{}` is missing", show(path.as_bytes()))))?;
            let diff_id = image.diff_ids.get(i).map(String::as_str);
            apply_layer(file, digest.as_deref(), diff_id, to, progress)?;
        }
        Ok(())
    }
}

fn has_tag(d: &Descriptor, tag: &str) -> bool {
    let name = d.annotations.as_ref().and_then(|a| a.get(REF_NAME));
    name.is_some_and(|name| {
        // Some tools write the whole reference, some only the tag.
        name == tag || (reference::is_tag(tag) && name.rsplit_once(':').is_some_and(|(_, t)| t == tag))
    }) || d.digest == tag
}

fn apply_layer(
    file: File,
    digest: Option<&str>,
    diff_id: Option<&str>,
    to: &mut Extractor<'_>,
    progress: &dyn Progress,
) -> Result<()> {
    let total = file.metadata().map(|m| m.len()).ok();
    let mut packed = Hashing::new(file, Some((progress, total)));
    {
        let mut unpacked = Hashing::new(decompress::stream(&mut packed)?, None);
        to.apply(&mut unpacked, true)?;
        if let Some(expected) = diff_id {
            verify(expected, &unpacked.finish(), "an unpacked layer")?;
        }
    }
    // What a decompressor leaves behind its last frame belongs to the digest too.
    std::io::copy(&mut packed, &mut std::io::sink()).ctx(|| "read a layer".into())?;
    match digest {
        Some(expected) => verify(expected, &packed.finish(), "a layer"),
        None => Ok(()),
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut out, b| {
        let _ = write!(out, "{b:02x}");
        out
    })
}

pub(crate) fn verify(expected: &str, actual: &[u8], what: &str) -> Result<()> {
    let actual = format!("sha256:{}", hex(actual));
    if expected == actual {
        return Ok(());
    }
    Err(ImageError::DigestMismatch { what: what.to_owned(), expected: show(expected.as_bytes()), actual })
}

/// Hashes and reports what passes through.
struct Hashing<'p, R> {
    inner: R,
    hash: Sha256,
    done: u64,
    progress: Option<(&'p dyn Progress, Option<u64>)>,
}

impl<'p, R: Read> Hashing<'p, R> {
    fn new(inner: R, progress: Option<(&'p dyn Progress, Option<u64>)>) -> Self {
        Self { inner, hash: Sha256::new(), done: 0, progress }
    }

    fn finish(&mut self) -> Vec<u8> {
        self.hash.finalize_reset().to_vec()
    }
}

impl<R: Read> Read for Hashing<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.hash.update(&buf[..n]);
        self.done += n as u64;
        if let Some((progress, total)) = self.progress {
            progress.bytes(self.done, total);
        }
        Ok(n)
    }
}
