//! Documents of an image: index, manifest, configuration, and the users its own files name.

use serde_json::json;
use space_image::config::MAX_CONFIG_BYTES;
use space_image::oci::{ConfigFile, Document, MAX_LAYERS, blob_path};
use space_image::rootfs::RootDir;
use space_image::users::resolve_in;
use space_image::{ImageConfig, ImageError};

use crate::{Seed, seed};

pub(crate) fn check_config(config: &ImageConfig) {
    let pairs = config.env.iter().chain(&config.labels).flat_map(|(key, value)| [key, value]);
    let lists = config.entrypoint.iter().chain(&config.cmd).chain(&config.exposed_ports);
    let single = [&config.workdir, &config.user].into_iter().chain(&config.stop_signal);
    let all: Vec<&String> = pairs.chain(lists).chain(single).collect();
    assert!(all.iter().map(|text| text.len()).sum::<usize>() <= MAX_CONFIG_BYTES, "an unbounded configuration");
    assert!(all.iter().all(|text| !text.contains('\0')), "a NUL byte passed");
    assert!(config.workdir.starts_with('/') && !config.user.is_empty() && config.env.contains_key("PATH"));
    let own = serde_json::to_vec(config).expect("plain data");
    assert_eq!(&serde_json::from_slice::<ImageConfig>(&own).expect("its own encoding"), config);
}

fn check_path(digest: &str) {
    let name = blob_path(digest);
    let hex = name.strip_prefix("blobs/sha256/").expect("a blob lies among the blobs");
    assert!(hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()), "{name}");
}

/// Only digests become names of files; what is taken over of a configuration is bounded and whole.
pub fn oci(data: &[u8]) {
    if let Ok(document) = serde_json::from_slice::<Document>(data) {
        if let Ok(chosen) = document.choose() {
            check_path(&chosen.digest);
        }
        if let Ok((config, layers)) = document.into_manifest() {
            assert!(layers.len() <= MAX_LAYERS);
            layers.iter().chain([&config]).for_each(|descriptor| check_path(&descriptor.digest));
        }
    }
    if let Ok(file) = serde_json::from_slice::<ConfigFile>(data)
        && let Ok((config, _)) = file.into_parts()
    {
        check_config(&config);
    }
}

pub fn oci_seeds() -> Vec<Seed> {
    let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
    let kind = |name: &str| format!("application/vnd.oci.image.{name}");
    let platform = json!({"architecture": "amd64", "os": "linux"});
    let index = json!({"schemaVersion": 2, "manifests": [
        {"mediaType": kind("manifest.v1+json"), "digest": digest, "size": 7, "platform": platform,
         "annotations": {"org.opencontainers.image.ref.name": "r.example/a:v1"}},
        {"mediaType": kind("manifest.v1+json"), "digest": digest, "size": 8},
    ]});
    let manifest = json!({"schemaVersion": 2, "config": {"mediaType": kind("config.v1+json"), "digest": digest, "size": 2},
        "layers": [{"mediaType": kind("layer.v1.tar+gzip"), "digest": digest, "size": 3}]});
    let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [digest]},
        "config": {"User": "app:staff", "Env": ["A=b=c", "PATH=/x"], "Entrypoint": ["/e"], "Cmd": null, "WorkingDir": "srv",
            "ExposedPorts": {"80/tcp": {}}, "Labels": {"a": "b"}, "StopSignal": "SIGTERM"}});
    let bad_signal = json!({"config": {"StopSignal": "SIG\0TERM"}});
    let traversal = json!({"config": {"digest": "sha256:../../x", "size": 1}, "layers": []});
    [
        ("index", index),
        ("manifest", manifest),
        ("config", config),
        ("bad_signal", bad_signal),
        ("traversal", traversal),
        ("empty", json!({})),
    ]
    .map(|(name, document)| seed(name, document.to_string()))
    .into()
}

/// A user is found in the image's files or refused; never one that means "leave as it is" to the kernel.
pub fn users(data: &[u8]) {
    let mut parts = data.splitn(3, |byte| *byte == 0xff);
    let mut next = || parts.next().unwrap_or_default();
    let (spec, passwd, group) = (next(), next(), next());
    let folder = tempfile::tempdir().expect("a folder");
    let etc = folder.path().join("etc");
    std::fs::create_dir(&etc).expect("a folder");
    std::fs::write(etc.join("passwd"), passwd).expect("a file");
    std::fs::write(etc.join("group"), group).expect("a file");
    let root = RootDir::open(folder.path()).expect("a root");
    match resolve_in(&root, &String::from_utf8_lossy(spec)) {
        Ok(user) => {
            assert!(user.uid != u32::MAX && user.gid != u32::MAX);
            assert!(user.groups.len() <= 1024 && user.groups.is_sorted() && !user.groups.contains(&user.gid));
            assert!(!user.groups.contains(&u32::MAX) && !user.home.is_empty() && !user.shell.is_empty());
        }
        Err(ImageError::UnknownUser { user }) => {
            assert!(user.chars().count() <= 201 && !user.contains(char::is_control))
        }
        Err(error) => panic!("{error}"),
    }
}

pub fn user_seeds() -> Vec<Seed> {
    let passwd = "root:x:0:0:root:/root:/bin/bash\nbroken\napp:x:42:43::/srv:\n1000:x:7:7::/seven:/bin/sh\n";
    let group = "root:x:0:\nstaff:x:50:app\nextra:x:51:root,app\napp:x:43:app\n";
    ["app", "42", "app:staff", "1000", "5000:6000", "", "4294967295", "nobody"]
        .map(|spec| {
            let content = [spec.as_bytes(), &[0xff], passwd.as_bytes(), &[0xff], group.as_bytes()].concat();
            seed(&format!("user_{}", spec.replace(':', "_")), content)
        })
        .into()
}
