//! Installs Firecracker into the data folder: the pinned release, or what the operator names, an archive or a program of his own.
//!
//! An archive counts only when its checksum does, and nothing is run before that. What is already there stays until the new one has
//! said a version that may be driven. Nothing is ever looked for on the way: one URL, one checksum, one file in the archive.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use sha2::{Digest as _, Sha256};
use space_vmm::firecracker;

use crate::config::ServerConfig;
use crate::failure::Failure;

const RELEASES: &str = "https://github.com/firecracker-microvm/firecracker/releases/download";
/// Of `firecracker-v1.16.1-x86_64.tgz`, as its publisher's checksum file has it.
const RELEASE_SHA256: &str = "382a02a869e4d6d5cb14c40577f9545e8458021ea8b0b2d3fc10ec14d9c242e6";
/// The archive is about 10 MB, the program in it 3 MB; with debugging information more.
const ARCHIVE_MAX_BYTES: u64 = 256 << 20;
const PROGRAM_MAX_BYTES: u64 = 128 << 20;
const ENTRIES_MAX: usize = 1000;
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Without any byte.
const STALLED: std::time::Duration = std::time::Duration::from_secs(30);

/// Where it is installed to, and the first place it is looked for.
pub fn place(config: &ServerConfig) -> PathBuf {
    config.data_dir.join("vmm/firecracker")
}

/// What the operator asked for: nothing more than the release, an address, or a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    Release,
    Url(String),
    File(PathBuf),
}

impl Source {
    pub fn parse(text: &str) -> Source {
        match text {
            "" => Source::Release,
            url if url.starts_with("https://") || url.starts_with("http://") => Source::Url(url.to_owned()),
            path => Source::File(path.into()),
        }
    }
}

fn failed<'a>(action: &'a str, path: &'a Path) -> impl Fn(io::Error) -> Failure + 'a {
    move |e| Failure::new(format!("cannot {action} {}: {e}", path.display()))
}

/// The checksum an archive must have: a given one, or the pinned release's.
fn expected(given: Option<&str>) -> Result<String, Failure> {
    let text = given.unwrap_or(RELEASE_SHA256).to_ascii_lowercase();
    if text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(text);
    }
    Err(Failure::usage("--firecracker-sha256: expected 64 hexadecimal digits"))
}

/// Puts the program into its place. `false`: the pinned release is there already.
pub async fn install(
    config: &ServerConfig,
    source: &Source,
    sha256: Option<&str>,
    progress: impl Fn(u64, u64),
) -> Result<bool, Failure> {
    let expected = expected(sha256)?;
    let place = place(config);
    if *source == Source::Release && firecracker::check(&place).await.is_ok_and(|v| v == firecracker::PINNED) {
        return Ok(false);
    }
    let folder = place.parent().unwrap_or(Path::new("/")).to_owned();
    fs::create_dir_all(&folder).map_err(failed("create", &folder))?;
    // Everything is made beside its place, and goes with this on any way out.
    let work =
        tempfile::Builder::new().prefix(".new-").tempdir_in(&folder).map_err(failed("make a folder in", &folder))?;
    let archive = match source {
        Source::File(path) => path.clone(),
        Source::Url(url) => download(url, work.path(), &progress).await?,
        Source::Release => {
            let version = firecracker::PINNED;
            let url = format!("{RELEASES}/v{version}/firecracker-v{version}-x86_64.tgz");
            download(&url, work.path(), &progress).await?
        }
    };
    let own = matches!(source, Source::File(_)) && !is_gzip(&archive)?;
    let new = work.path().join("firecracker");
    let (from, to) = (archive.clone(), new.clone());
    tokio::task::spawn_blocking(move || if own { copy(&from, &to) } else { unpack(&from, &expected, &to) })
        .await
        .map_err(|e| Failure::new(format!("a step of set-up broke off: {e}")))??;
    firecracker::check(&new)
        .await
        .map_err(|e| Failure::new(format!("{}: {e}; nothing was changed", archive.display())))?;
    fs::rename(&new, &place).map_err(failed("install", &place))?;
    File::open(&folder).and_then(|folder| folder.sync_all()).map_err(failed("sync", &folder))?;
    Ok(true)
}

async fn download(url: &str, folder: &Path, progress: &impl Fn(u64, u64)) -> Result<PathBuf, Failure> {
    let broken = |e: reqwest::Error| {
        let hint = "download it elsewhere and name the file: --firecracker=PATH";
        Failure::new(format!("cannot download {url}: {e}; {hint}"))
    };
    let client = reqwest::Client::builder().connect_timeout(STALLED).read_timeout(STALLED).build().map_err(broken)?;
    let mut answer = client.get(url).send().await.and_then(reqwest::Response::error_for_status).map_err(broken)?;
    let total = answer.content_length().unwrap_or(0);
    let path = folder.join("archive");
    let mut file = File::create(&path).map_err(failed("create", &path))?;
    let mut done = 0;
    while let Some(part) = answer.chunk().await.map_err(broken)? {
        done += part.len() as u64;
        if done > ARCHIVE_MAX_BYTES {
            return Err(Failure::new(format!("{url} is larger than {} MiB: no release is", ARCHIVE_MAX_BYTES >> 20)));
        }
        file.write_all(&part).map_err(failed("write", &path))?;
        progress(done, total);
    }
    Ok(path)
}

fn is_gzip(path: &Path) -> Result<bool, Failure> {
    let mut head = [0; 2];
    let mut file = File::open(path).map_err(failed("open", path))?;
    let read = file.read(&mut head).map_err(failed("read", path))?;
    Ok(head[..read] == GZIP)
}

/// Of an archive, which must have the checksum, the program.
fn unpack(archive: &Path, expected: &str, to: &Path) -> Result<(), Failure> {
    let open = || File::open(archive).map_err(failed("open", archive));
    let mut hash = Sha256::new();
    io::copy(&mut open()?.take(ARCHIVE_MAX_BYTES), &mut hash).map_err(failed("read", archive))?;
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if found != expected {
        return Err(Failure::new(format!(
            "{} has the SHA-256 {found}, expected is {expected}: it is damaged or another one; nothing was changed. Another \
             archive that you trust: --firecracker-sha256",
            archive.display()
        )));
    }
    let mut tar = tar::Archive::new(GzDecoder::new(open()?));
    for entry in tar.entries().map_err(failed("read", archive))?.take(ENTRIES_MAX) {
        let mut entry = entry.map_err(failed("read", archive))?;
        if entry.header().entry_type().is_file() && is_program(&entry.path().map_err(failed("read", archive))?) {
            return write(&mut entry, to);
        }
    }
    Err(Failure::new(format!("{} has no program firecracker-v…", archive.display())))
}

/// `release-v1.16.1-x86_64/firecracker-v1.16.1-x86_64`
fn is_program(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
    name.starts_with("firecracker-v") && !name.ends_with(".debug")
}

fn copy(program: &Path, to: &Path) -> Result<(), Failure> {
    write(&mut File::open(program).map_err(failed("open", program))?, to)
}

fn write(from: &mut impl Read, to: &Path) -> Result<(), Failure> {
    let mut file = File::create(to).map_err(failed("create", to))?;
    let length = io::copy(&mut from.take(PROGRAM_MAX_BYTES + 1), &mut file).map_err(failed("write", to))?;
    if length > PROGRAM_MAX_BYTES {
        return Err(Failure::new(format!("the program is larger than {} MiB", PROGRAM_MAX_BYTES >> 20)));
    }
    file.set_permissions(Permissions::from_mode(0o755)).and_then(|()| file.sync_all()).map_err(failed("write", to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for() {
        assert_eq!(Source::parse(""), Source::Release);
        assert_eq!(Source::parse("http://x/y.tgz"), Source::Url("http://x/y.tgz".to_owned()));
        assert_eq!(Source::parse("./fc"), Source::File("./fc".into()));
        assert_eq!(expected(None).ok().as_deref(), Some(RELEASE_SHA256));
        assert!(expected(Some("12")).is_err() && expected(Some(&"g".repeat(64))).is_err());
        assert!(is_program(Path::new("release-v1.16.1-x86_64/firecracker-v1.16.1-x86_64")));
        assert!(!is_program(Path::new("r/firecracker-v1.16.1-x86_64.debug")) && !is_program(Path::new("r/jailer-v1")));
    }
    /// A program that says that it is a version, in an archive laid out as a release.
    fn release(version: &str) -> Vec<u8> {
        let script = format!("#!/bin/sh\necho Firecracker v{version}\n");
        let mut tar = tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
        for (name, content) in
            [("jailer-v1-x86_64", "no"), ("firecracker-v1-x86_64.debug", "no"), ("firecracker-v1-x86_64", &script)]
        {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o755);
            tar.append_data(&mut header, format!("release-v1-x86_64/{name}"), content.as_bytes()).expect("an entry");
        }
        tar.into_inner().expect("a tar").finish().expect("an archive")
    }

    fn sha256(bytes: &[u8]) -> String {
        Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Answers every request with these bytes, the last `missing` of which never come.
    fn serve(bytes: Vec<u8>, missing: usize) -> String {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/release.tgz", listener.local_addr().expect("an address"));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a client");
                let _ = stream.read(&mut [0; 4096]);
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", bytes.len());
                let _ = stream.write_all(head.as_bytes());
                let _ = stream.write_all(&bytes[..bytes.len() - missing]);
            }
        });
        url
    }

    async fn try_it(config: &ServerConfig, source: &Source, sha256: Option<&str>) -> Result<bool, String> {
        install(config, source, sha256, |_, _| {}).await.map_err(|failure| failure.message)
    }

    #[tokio::test]
    async fn only_what_is_right_is_installed() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = crate::config::tests::config_in(folder.path());
        let place = place(&config);
        let good = release("1.16.1");
        let sum = sha256(&good);
        let url = Source::Url(serve(good.clone(), 0));
        // Not the release's checksum, cut short, a version that is known to be bad, and no archive at all: nothing is there.
        let refused = try_it(&config, &url, None).await.expect_err("another checksum");
        assert!(refused.contains(RELEASE_SHA256) && refused.contains(&sum), "{refused}");
        let cut = try_it(&config, &Source::Url(serve(good.clone(), 10)), Some(&sum)).await.expect_err("cut short");
        assert!(cut.contains("--firecracker=PATH"), "{cut}");
        let bad = release("1.16.0");
        let bad =
            try_it(&config, &Source::Url(serve(bad.clone(), 0)), Some(&sha256(&bad))).await.expect_err("known bad");
        assert!(bad.contains("known to be bad"), "{bad}");
        assert!(try_it(&config, &Source::Url("http://127.0.0.1:1/x".into()), None).await.is_err());
        assert!(!place.exists() && fs::read_dir(place.parent().expect("a folder")).expect("a list").count() == 0);
        // The right one, then a file, then a program of one's own; each replaces the last.
        assert_eq!(try_it(&config, &url, Some(&sum)).await, Ok(true));
        assert_eq!(firecracker::check(&place).await.expect("it runs"), firecracker::PINNED);
        assert_eq!(try_it(&config, &Source::Release, None).await, Ok(false), "it is there");
        let file = folder.path().join("other.tgz");
        let other = release("1.16.2");
        fs::write(&file, &other).expect("written");
        assert_eq!(try_it(&config, &Source::File(file.clone()), Some(&sha256(&other))).await, Ok(true));
        fs::copy("/bin/true", &file).expect("a program");
        assert!(try_it(&config, &Source::File(file.clone()), None).await.is_err(), "it says no version");
        assert_eq!(firecracker::check(&place).await.expect("it is still there").to_string(), "1.16.2");
        assert!(try_it(&config, &Source::File("/nowhere".into()), None).await.is_err());
        assert_eq!(
            fs::read_dir(place.parent().expect("a folder")).expect("a list").count(),
            1,
            "no rest of an attempt"
        );
    }
}
