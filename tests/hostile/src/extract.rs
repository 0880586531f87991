//! Layers laid over a root folder: whatever their names and links say, nothing outside it changes, and the bounds hold.
//!
//! The bytes choose entries out of a small alphabet of names, so that they meet each other: links through links, files in the
//! place of folders, whiteouts of what was just made. A free choice of names would hardly ever hit anything.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use space_image::extract::Extractor;
use space_image::rootfs::RootDir;
use space_image::{Limits, NoProgress};
use tar::EntryType;

use crate::tarball::{end, member};
use crate::{Seed, seed};

const NAMES: [&str; 16] = [
    "a",
    "b",
    "c",
    "d",
    "..",
    ".",
    "",
    "outside",
    "secret",
    ".wh.a",
    ".wh.b",
    ".wh..wh..opq",
    ".wh...",
    "root",
    "etc",
    "/",
];
const KINDS: [EntryType; 8] = [
    EntryType::Regular,
    EntryType::Directory,
    EntryType::Symlink,
    EntryType::Symlink,
    EntryType::Link,
    EntryType::Fifo,
    EntryType::Char,
    EntryType::Regular,
];
/// In place of a name: the absolute path of what must not be reached.
const ABSOLUTE: u8 = 0xff;
const ENTRIES_MAX: usize = 40;
const LIMITS: Limits = Limits { entries: 32, data_bytes: 32 << 10, stream_bytes: 256 << 10, name_bytes: 4 << 10 };

/// A private folder with a root in it, and beside it what a hostile archive would like to reach.
pub(crate) struct Place {
    dir: tempfile::TempDir,
    before: (i64, i64, u32, u64),
}

const SECRET: &str = r#"{"config":{"User":"the-secret"}}"#;

impl Place {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        fs::create_dir(dir.path().join("root")).expect("a folder");
        fs::create_dir(dir.path().join("outside")).expect("a folder");
        fs::write(dir.path().join("outside/secret"), SECRET).expect("a file");
        let before = Self::state(&dir.path().join("outside/secret"));
        Self { dir, before }
    }

    fn state(path: &Path) -> (i64, i64, u32, u64) {
        let meta = fs::symlink_metadata(path).expect("the secret is still there");
        (meta.mtime(), meta.mtime_nsec(), meta.mode() ^ meta.uid(), meta.nlink())
    }

    pub(crate) fn outside(&self) -> std::path::PathBuf {
        self.dir.path().join("outside")
    }

    pub(crate) fn root(&self) -> std::path::PathBuf {
        self.dir.path().join("root")
    }

    fn names(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    pub(crate) fn assert_untouched(&self) {
        assert_eq!(Self::names(self.dir.path()), ["outside", "root"], "something appeared beside the root");
        assert_eq!(Self::names(&self.outside()), ["secret"], "something appeared outside");
        let secret = self.outside().join("secret");
        assert_eq!(fs::read_to_string(&secret).expect("readable"), SECRET);
        assert_eq!(Self::state(&secret), self.before, "the file outside was changed, or linked to");
        assert!(fs::symlink_metadata(self.root()).expect("the root").is_dir());
    }
}

/// Bytes of content and number of files below a folder, links not followed.
fn measure(folder: &Path) -> (u64, u64) {
    let (mut bytes, mut count) = (0, 0);
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        let meta = fs::symlink_metadata(entry.path()).expect("an entry");
        count += 1;
        if meta.is_dir() {
            let (more_bytes, more) = measure(&entry.path());
            (bytes, count) = (bytes + more_bytes, count + more);
        } else if meta.is_file() {
            bytes += meta.blocks() * 512 / meta.nlink();
        }
    }
    (bytes, count)
}

struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Up to four names; two bits of `shape` say how many.
    fn path(&mut self, shape: u8, outside: &Path) -> Option<Vec<u8>> {
        let mut parts = Vec::new();
        for _ in 0..=shape % 4 {
            match self.next()? {
                ABSOLUTE => parts.push(outside.to_string_lossy().into_owned()),
                byte => parts.push(NAMES[usize::from(byte) % NAMES.len()].to_owned()),
            }
        }
        Some(parts.join("/").into_bytes())
    }

    fn entry(&mut self, outside: &Path) -> Option<Vec<u8>> {
        let shape = self.next()?;
        let kind = KINDS[usize::from(shape >> 5)];
        let name = self.path(shape, outside)?;
        let link = match kind {
            EntryType::Symlink | EntryType::Link => self.path(shape >> 2, outside)?,
            _ => Vec::new(),
        };
        let data = match kind {
            EntryType::Regular => vec![b'x'; usize::from(self.next()?) * 128],
            _ => Vec::new(),
        };
        Some(member(kind, &name, &link, &data))
    }
}

/// Nothing outside the root is changed, linked to or made, and no more is written than was allowed.
pub fn extract(data: &[u8]) {
    let place = Place::new();
    let outside = place.outside();
    let mut extractor = Extractor::new(RootDir::open(&place.root()).expect("a root"), LIMITS, &NoProgress);
    let mut choices = Choices(data);
    let mut failed = false;
    // Layers, each as long as its first byte says.
    while let (false, Some(len)) = (failed, choices.next()) {
        let mut archive = Vec::new();
        for _ in 0..(usize::from(len & 0x7f) % ENTRIES_MAX) + 1 {
            let Some(entry) = choices.entry(&outside) else { break };
            archive.extend_from_slice(&entry);
        }
        failed = extractor.apply(&end(archive)[..], len & 0x80 == 0).is_err();
        place.assert_untouched();
    }
    let (bytes, count) = measure(&place.root());
    // A piece is counted after it was written, and a file takes whole blocks.
    assert!(bytes <= LIMITS.data_bytes + (64 << 10) + LIMITS.entries * 4096, "{bytes} bytes were written");
    assert!(count <= LIMITS.entries * 8, "{count} files were made");
}

/// The bytes of one entry.
fn choice(kind: u8, name: &[u8], link: &[u8]) -> Vec<u8> {
    let shape = kind << 5 | (name.len() as u8 - 1) | (link.len().max(1) as u8 - 1) << 2;
    let data: &[u8] = if matches!(kind, 0 | 7) { &[3] } else { &[] };
    [&[shape], name, link, data].concat()
}

fn layer(whiteouts: bool, entries: &[Vec<u8>]) -> Vec<u8> {
    let len = (entries.len() - 1) as u8 | if whiteouts { 0 } else { 0x80 };
    [vec![len], entries.concat()].concat()
}

pub fn seeds() -> Vec<Seed> {
    let (file, folder, link, hard, fifo, device) = (0, 1, 2, 4, 5, 6);
    let [a, b, up, outside, secret, wh_a, opaque] = [0u8, 1, 4, 7, 8, 9, 11];
    let plain = layer(true, &[choice(folder, &[a], &[]), choice(file, &[a, b], &[]), choice(link, &[b], &[a, b])]);
    vec![
        seed("plain", plain.clone()),
        seed("up", layer(true, &[choice(file, &[up, outside, secret], &[])])),
        seed("through_a_link", layer(true, &[choice(link, &[a], &[up, outside]), choice(file, &[a, secret], &[])])),
        seed("absolute", layer(true, &[choice(link, &[a], &[ABSOLUTE]), choice(file, &[a, secret], &[])])),
        seed("hard", layer(true, &[choice(link, &[a], &[ABSOLUTE]), choice(hard, &[b], &[a, secret])])),
        seed("hard_up", layer(true, &[choice(hard, &[b], &[up, outside, secret])])),
        seed("whiteout", [plain.clone(), layer(true, &[choice(file, &[wh_a], &[])])].concat()),
        seed("opaque", [plain, layer(true, &[choice(file, &[a, opaque], &[])])].concat()),
        seed(
            "whiteout_through_a_link",
            layer(true, &[choice(link, &[a], &[ABSOLUTE]), choice(file, &[a, opaque], &[])]),
        ),
        seed("nodes", layer(false, &[choice(fifo, &[a], &[]), choice(device, &[b], &[]), choice(file, &[a, b], &[])])),
        seed("many", layer(false, &vec![[0, 0, 255].to_vec(); 40])),
    ]
}
