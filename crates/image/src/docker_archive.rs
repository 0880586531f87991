//! Archives of images: a tar of an OCI layout, or what `docker save` writes (`manifest.json`).
//! The archive is unpacked into a private directory with the same care as a layer.

use std::fs::File;
use std::path::Path;

use serde::Deserialize;

use crate::decompress;
use crate::error::{ImageError, IoContext, Result, show};
use crate::extract::{Extractor, Limits};
use crate::oci::{self, ConfigFile, Image, Layout, MAX_JSON_BYTES, MAX_LAYERS};
use crate::progress::Progress;
use crate::rootfs::RootDir;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Unpacks the archive into the empty directory `into` and finds the image in it.
pub fn open(
    path: &Path,
    tag: Option<&str>,
    into: &Path,
    limits: Limits,
    progress: &dyn Progress,
) -> Result<(Layout, Image)> {
    progress.step("reading the image archive");
    let file = File::open(path).ctx(|| format!("open {}", path.display()))?;
    let stream = decompress::file(file)?;
    Extractor::new(RootDir::open(into)?, limits, progress).apply(stream, false)?;
    let layout = Layout::open(into)?;
    // New `docker save` writes both; the OCI side has digests for everything.
    let has_index = layout.root().open_file("index.json")?.is_some();
    let image = match has_index {
        true => match (layout.image(tag), tag) {
            // A tag with its repository name is only in manifest.json.
            (Err(ImageError::BadImage { .. }), Some(_)) => saved(&layout, tag)?,
            (other, _) => other?,
        },
        false => saved(&layout, tag)?,
    };
    Ok((layout, image))
}

fn saved(layout: &Layout, tag: Option<&str>) -> Result<Image> {
    let data = layout
        .root()
        .read_file("manifest.json", MAX_JSON_BYTES)?
        .ok_or_else(|| ImageError::image("the archive has neither index.json nor manifest.json"))?;
    let all: Vec<Saved> = oci::parse_json(&data, "manifest.json")?;
    let names = |s: &Saved| s.repo_tags.clone().unwrap_or_default();
    let found: Vec<String> = all.iter().flat_map(names).take(20).collect();
    let mut matching = all.into_iter().filter(|s| match tag {
        Some(tag) => names(s).iter().any(|n| n == tag || n.rsplit_once(':').is_some_and(|(_, t)| t == tag)),
        None => true,
    });
    let (Some(one), None) = (matching.next(), matching.next()) else {
        return Err(ImageError::image(format!(
            "the archive must have exactly one image of the wanted tag; it has: {}",
            show(found.join(", ").as_bytes())
        )));
    };
    if one.layers.len() > MAX_LAYERS {
        return Err(ImageError::LimitExceeded { what: "the number of layers", limit: MAX_LAYERS as u64 });
    }
    let config = layout
        .root()
        .read_file(&one.config, MAX_JSON_BYTES)?
        .ok_or_else(|| ImageError::image("the configuration is missing in the archive"))?;
    let file: ConfigFile = oci::parse_json(&config, "configuration")?;
    let (config, diff_ids) = file.into_parts()?;
    if diff_ids.is_empty() && !one.layers.is_empty() {
        return Err(ImageError::image("its configuration lists no layer digests"));
    }
    Ok(Image { digest: None, layers: one.layers.into_iter().map(|l| (l, None)).collect(), diff_ids, config })
}
