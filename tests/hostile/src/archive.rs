//! Archives of images: documents in a tar, which name each other and must name nothing else.

use std::io::Write as _;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use space_image::extract::Extractor;
use space_image::rootfs::RootDir;
use space_image::{ImageError, Limits, NoProgress, docker_archive};
use tar::EntryType;

use crate::extract::Place;
use crate::image::check_config;
use crate::tarball::{end, member, simple};
use crate::{Seed, seed};

const LIMITS: Limits = Limits { entries: 100, data_bytes: 1 << 20, stream_bytes: 4 << 20, name_bytes: 64 << 10 };
/// Stand in a document for the digest of another: a fuzzer makes up none.
const PLACES: [&str; 3] = ["@CONFIG@", "@LAYER@", "@MANIFEST@"];
const SECRET_USER: &str = "the-secret";

fn digest(data: &[u8]) -> String {
    let hash = Sha256::digest(data);
    hash.iter().fold("sha256:".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

fn fill(document: &[u8], digests: &[String]) -> Vec<u8> {
    let mut text = String::from_utf8_lossy(document).into_owned();
    for (place, digest) in PLACES.iter().zip(digests) {
        text = text.replace(place, digest);
    }
    text.into_bytes()
}

fn file(name: &str, data: &[u8]) -> Vec<u8> {
    member(EntryType::Regular, name.as_bytes(), b"", data)
}

fn blob(digest: &str, data: &[u8]) -> Vec<u8> {
    file(&format!("blobs/sha256/{}", digest.trim_start_matches("sha256:")), data)
}

/// The tar of the four documents, and two links that lead out of the folder.
fn tar_of(data: &[u8], outside: &std::path::Path) -> Vec<u8> {
    let mut parts = data.splitn(4, |byte| *byte == 0xff);
    let mut next = || parts.next().unwrap_or_default();
    let (config, manifest, index, saved) = (next(), next(), next(), next());
    let layer = simple();
    let config = fill(config, &[String::new(), digest(&layer)]);
    let mut digests = vec![digest(&config), digest(&layer)];
    let manifest = fill(manifest, &digests);
    digests.push(digest(&manifest));
    let mut members = vec![
        blob(&digests[0], &config),
        blob(&digests[1], &layer),
        blob(&digests[2], &manifest),
        file("config.json", &config),
        file("layer.tar", &layer),
        member(EntryType::Symlink, b"out", outside.to_string_lossy().as_bytes(), b""),
        member(EntryType::Symlink, b"up", b"../outside", b""),
    ];
    if !index.is_empty() {
        members.push(file("index.json", &fill(index, &digests)));
    }
    if !saved.is_empty() {
        members.push(file("manifest.json", &fill(saved, &digests)));
    }
    end(members.concat())
}

/// An archive gives an image out of itself, bounded, with every digest true, or an error; nothing outside is read or written.
pub fn archive(data: &[u8]) {
    let place = Place::new();
    let mut archive = tempfile::NamedTempFile::new().expect("a file");
    archive.write_all(&tar_of(data, &place.outside())).expect("written");
    let opened = docker_archive::open(archive.path(), None, &place.root(), LIMITS, &NoProgress);
    place.assert_untouched();
    let Ok((layout, image)) = opened else { return };
    check_config(&image.config);
    let secret = |text: &[u8]| text.windows(SECRET_USER.len()).any(|window| window == SECRET_USER.as_bytes());
    assert!(image.config.user != SECRET_USER || secret(data), "a file outside was read");

    let target = Place::new();
    let mut extractor = Extractor::new(RootDir::open(&target.root()).expect("a root"), LIMITS, &NoProgress);
    let applied = layout.apply(&image, &mut extractor, &NoProgress);
    target.assert_untouched();
    if let Err(ImageError::Io { what, source }) = applied {
        // What is no archive is no fault of the host.
        assert!(!what.contains("outside"), "{what}: {source}");
    }
}

pub fn seeds() -> Vec<Seed> {
    let config = json!({"architecture": "amd64", "os": "linux", "config": {"User": "app", "Cmd": ["sh"]},
        "rootfs": {"diff_ids": ["@LAYER@"]}});
    let manifest = json!({"config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "@CONFIG@", "size": 1},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": "@LAYER@", "size": 1}]});
    let index = json!({"manifests": [{"digest": "@MANIFEST@", "size": 1, "platform": {"os": "linux", "architecture": "amd64"}}]});
    let saved =
        |config: &str, layer: &str| json!([{"Config": config, "RepoTags": ["a:v1"], "Layers": [layer]}]).to_string();
    let of = |name: &str, index: &str, saved: &str| {
        let parts = [&config.to_string(), &manifest.to_string(), index, saved];
        seed(name, parts.map(str::as_bytes).join(&0xff))
    };
    vec![
        of("layout", &index.to_string(), ""),
        of("saved", "", &saved("config.json", "layer.tar")),
        of("both", &index.to_string(), &saved("config.json", "layer.tar")),
        of("config_through_a_link", "", &saved("out/secret", "layer.tar")),
        of("config_up", "", &saved("../outside/secret", "layer.tar")),
        of("layer_through_a_link", "", &saved("config.json", "up/secret")),
        of("nested", &index.to_string().replace("@MANIFEST@", "@LAYER@"), ""),
        of("no_documents", "", ""),
    ]
}
