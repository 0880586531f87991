//! Makes archives and images for the tests, hostile ones too: headers are written byte by byte,
//! because a proper writer refuses such names.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

pub const FILE: u8 = b'0';
pub const HARD: u8 = b'1';
pub const LINK: u8 = b'2';
pub const CHAR: u8 = b'3';
pub const BLOCK: u8 = b'4';
pub const DIR: u8 = b'5';
pub const FIFO: u8 = b'6';

/// One entry; the defaults are a file of root with mode 0644.
#[derive(Clone)]
pub struct E {
    pub kind: u8,
    pub name: Vec<u8>,
    pub link: Vec<u8>,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub mtime: u64,
    pub device: (u32, u32),
    pub data: Vec<u8>,
    pub pax: Vec<(String, Vec<u8>)>,
    /// Size to claim instead of the data's.
    pub claim: Option<u64>,
}

pub fn e(kind: u8, name: &str) -> E {
    E {
        kind,
        name: name.into(),
        link: Vec::new(),
        mode: if kind == DIR { 0o755 } else { 0o644 },
        uid: 0,
        gid: 0,
        mtime: 1_600_000_000,
        device: (0, 0),
        data: Vec::new(),
        pax: Vec::new(),
        claim: None,
    }
}

pub fn file(name: &str, data: &[u8]) -> E {
    E { data: data.into(), ..e(FILE, name) }
}

pub fn dir(name: &str) -> E {
    e(DIR, name)
}

pub fn link(name: &str, to: &str) -> E {
    e(LINK, name).to(to)
}

pub fn hard(name: &str, to: &str) -> E {
    e(HARD, name).to(to)
}

impl E {
    pub fn to(mut self, link: &str) -> Self {
        self.link = link.into();
        self
    }
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = mode;
        self
    }
    pub fn owner(mut self, uid: u64, gid: u64) -> Self {
        (self.uid, self.gid) = (uid, gid);
        self
    }
    pub fn dev(mut self, major: u32, minor: u32) -> Self {
        self.device = (major, minor);
        self
    }
    pub fn pax(mut self, key: &str, value: &[u8]) -> Self {
        self.pax.push((key.into(), value.into()));
        self
    }

    fn write(&self, out: &mut Vec<u8>) {
        if !self.pax.is_empty() {
            let mut data = Vec::new();
            for (key, value) in &self.pax {
                data.extend(pax_record(key, value));
            }
            let record = E { data, pax: Vec::new(), ..e(b'x', "pax") };
            record.write(out);
        }
        let mut header = tar::Header::new_ustar();
        for (long, name) in [(b'L', &self.name), (b'K', &self.link)] {
            if name.len() > 100 {
                let mut data = name.clone();
                data.push(0);
                E { data, ..e(long, "././@LongLink") }.write(out);
            }
        }
        let short = |n: &[u8]| n[..n.len().min(100)].to_vec();
        header.as_old_mut().name[..self.name.len().min(100)].copy_from_slice(&short(&self.name));
        header.as_old_mut().linkname[..self.link.len().min(100)].copy_from_slice(&short(&self.link));
        header.set_entry_type(tar::EntryType::new(self.kind));
        header.set_mode(self.mode);
        header.set_uid(self.uid);
        header.set_gid(self.gid);
        header.set_mtime(self.mtime);
        header.set_size(self.claim.unwrap_or(self.data.len() as u64));
        header.set_device_major(self.device.0).unwrap();
        header.set_device_minor(self.device.1).unwrap();
        header.set_cksum();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(&self.data);
        out.resize(out.len().next_multiple_of(512), 0);
    }
}

pub fn pax_record(key: &str, value: &[u8]) -> Vec<u8> {
    let body = key.len() + value.len() + 3;
    let mut len = body + 1;
    while format!("{len}").len() + body != len {
        len = format!("{len}").len() + body;
    }
    let mut out = format!("{len} {key}=").into_bytes();
    out.extend_from_slice(value);
    out.push(b'\n');
    out
}

pub fn archive(entries: &[E]) -> Vec<u8> {
    let mut out = Vec::new();
    for entry in entries {
        entry.write(&mut out);
    }
    out.resize(out.len() + 1024, 0);
    out
}

pub fn gzip(data: &[u8]) -> Vec<u8> {
    let mut w = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    w.write_all(data).unwrap();
    w.finish().unwrap()
}

pub fn sha(data: &[u8]) -> String {
    let hex: String = Sha256::digest(data).iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

/// An image in memory: every blob with its digest, and the digest of the manifest.
pub struct TestImage {
    pub blobs: Vec<(String, Vec<u8>)>,
    pub manifest: String,
    pub manifest_bytes: Vec<u8>,
    pub config_bytes: Vec<u8>,
    pub layers: Vec<Vec<u8>>,
}

impl TestImage {
    /// `layers` are uncompressed; the first goes out as gzip, the second as zstd, others plain.
    pub fn new(layers: &[Vec<u8>], run: serde_json::Value, arch: &str) -> Self {
        let mut blobs = Vec::new();
        let mut descriptors = Vec::new();
        let kind = "application/vnd.oci.image.layer.v1.tar";
        for (i, layer) in layers.iter().enumerate() {
            let (packed, kind) = match i {
                0 => (gzip(layer), format!("{kind}+gzip")),
                1 => (zstd::encode_all(&layer[..], 1).unwrap(), format!("{kind}+zstd")),
                _ => (layer.clone(), kind.to_owned()),
            };
            descriptors.push(serde_json::json!({
                "mediaType": kind, "digest": sha(&packed), "size": packed.len(),
            }));
            blobs.push((sha(&packed), packed));
        }
        let diff_ids: Vec<String> = layers.iter().map(|l| sha(l)).collect();
        let config = serde_json::json!({
            "architecture": arch, "os": "linux", "config": run,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = config.to_string().into_bytes();
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": sha(&config), "size": config.len(),
            },
            "layers": descriptors,
        });
        let manifest = manifest.to_string().into_bytes();
        blobs.push((sha(&config), config.clone()));
        Self {
            blobs,
            manifest: sha(&manifest),
            manifest_bytes: manifest,
            config_bytes: config,
            layers: layers.to_vec(),
        }
    }

    fn write_blobs(&self, to: &Path) {
        let blobs = to.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        let manifest = (self.manifest.clone(), self.manifest_bytes.clone());
        for (digest, data) in self.blobs.iter().chain([&manifest]) {
            std::fs::write(blobs.join(&digest[7..]), data).unwrap();
        }
    }
}

/// An OCI layout with these images: (image, platform, tag).
pub fn write_layout(to: &Path, images: &[(&TestImage, Option<&str>, Option<&str>)]) {
    let mut manifests = Vec::new();
    for (image, arch, tag) in images {
        image.write_blobs(to);
        let mut d = serde_json::json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": image.manifest, "size": image.manifest_bytes.len(),
        });
        if let Some(arch) = arch {
            d["platform"] = serde_json::json!({"os": "linux", "architecture": arch});
        }
        if let Some(tag) = tag {
            d["annotations"] = serde_json::json!({"org.opencontainers.image.ref.name": tag});
        }
        manifests.push(d);
    }
    let index = serde_json::json!({"schemaVersion": 2, "manifests": manifests});
    std::fs::write(to.join("index.json"), index.to_string()).unwrap();
    std::fs::write(to.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

/// What `debugfs` says about a disk.
pub fn debugfs(disk: &Path, command: &str) -> String {
    let out = std::process::Command::new("/usr/sbin/debugfs").args(["-R", command]).arg(disk).output().unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

/// `e2fsck -fn` finds nothing.
pub fn check_disk(disk: &Path) {
    let out = std::process::Command::new("/usr/sbin/e2fsck").arg("-fn").arg(disk).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
}

pub fn request(source: space_image::Source, dir: &Path) -> space_image::BuildRequest {
    space_image::BuildRequest {
        source,
        work_dir: dir.join("work"),
        disk_path: dir.join("disk.img"),
        disk: space_image::DiskOptions::new(128 << 20, uuid::Uuid::from_u128(0x11), uuid::Uuid::from_u128(0x22)),
        registry: space_image::RegistryOptions::default(),
    }
}
