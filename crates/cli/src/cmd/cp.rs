//! `space cp`: files and folders, both ways, in constant memory.
//!
//! What comes out of a sandbox is hostile: only regular files, folders and links are made here, never outside the
//! destination (`archive`), without owner and without set-uid.

mod archive;
mod pipe;

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use space_api::client::{Client, ClientError, FileTarget};
use space_api::problem::Code;

use crate::args::Global;
use crate::connect;
use crate::failure::Failure;
use crate::output;
use crate::progress::Progress;

const AFTER_HELP: &str = "\
A path in a sandbox is NAME:PATH; relative ones start at the user's home. A folder is copied with all it holds; when the destination is
an existing folder, it goes into it. `-` is standard input or output, for one file. A local name with a colon is written ./a:b.

Examples:
  space cp report.csv box:/home/user/
  space cp ./src box:src
  space cp box:/var/log ./logs
  space cp box:out.json - | jq .";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Cp {
    /// Whose rights are used in the sandbox, and who owns what is made [default: the template's user]
    #[arg(short, long)]
    user: Option<String>,
    /// FILE, FOLDER, NAME:PATH or -
    #[arg(value_name = "FROM")]
    from: String,
    /// FILE, FOLDER, NAME:PATH or -
    #[arg(value_name = "TO")]
    to: String,
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    Stream,
    Local(PathBuf),
    Sandbox { name: String, path: String },
}

impl Place {
    fn parse(text: &str) -> Self {
        if text == "-" {
            return Self::Stream;
        }
        match text.split_once(':') {
            Some((name, path)) if !name.is_empty() && !name.contains('/') => {
                let path = if path.is_empty() { "." } else { path };
                Self::Sandbox { name: name.to_owned(), path: path.to_owned() }
            }
            _ => Self::Local(text.into()),
        }
    }
}

/// The sandbox's side of a copy.
struct Remote<'a> {
    client: &'a Client,
    sandbox: &'a str,
    target: FileTarget,
}

impl Remote<'_> {
    /// `Some(true)`: a folder; `None`: nothing there.
    async fn is_folder(&self) -> Result<Option<bool>, ClientError> {
        match self.client.file_info(self.sandbox, &self.target).await {
            Ok(info) => Ok(Some(info.kind == "directory")),
            Err(e) if e.is(Code::FileNotFound) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Where something of this name ends up: into an existing folder, or as the path itself.
    async fn settle(&mut self, name: Option<&str>) -> Result<(), Failure> {
        let found = self.is_folder().await?;
        let wants_folder = self.target.path.ends_with('/');
        let Some(name) = name else { return Ok(()) };
        if found == Some(true) || (found.is_none() && wants_folder) {
            self.target.path = format!("{}/{name}", self.target.path.trim_end_matches('/'));
        }
        Ok(())
    }
}

fn base_name(path: &Path) -> Option<String> {
    path.file_name().map(|name| name.to_string_lossy().into_owned())
}

/// Shows what has passed until the copy ends.
async fn watched<T>(
    quiet: bool,
    what: &str,
    passed: &AtomicU64,
    total: u64,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut progress = Progress::copy(quiet, what);
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    tokio::pin!(work);
    loop {
        tokio::select! {
            result = &mut work => return result,
            _ = tick.tick() => progress.bytes(passed.load(Ordering::Relaxed), total),
        }
    }
}

async fn upload_file(remote: &Remote<'_>, from: &Path, quiet: bool) -> Result<u64, Failure> {
    let file = std::fs::File::open(from).with_context(|| format!("cannot open {}", from.display()))?;
    let meta = file.metadata().with_context(|| format!("cannot inspect {}", from.display()))?;
    if !meta.is_file() {
        return Err(Failure::new(format!("{} is neither a file nor a folder", from.display())));
    }
    let passed = Arc::new(AtomicU64::new(0));
    let size = meta.len();
    // What is appended while it is copied does not belong to the promised size.
    let stream = pipe::stream_of(file.take(size), passed.clone());
    let mode = Some(meta.permissions().mode() & 0o777);
    let work = async { Ok(remote.client.write_file(remote.sandbox, &remote.target, mode, Some(size), stream).await?) };
    watched(quiet, &format!("copying {}", from.display()), &passed, size, work).await?;
    Ok(passed.load(Ordering::Relaxed))
}

async fn upload_folder(remote: &Remote<'_>, from: &Path, quiet: bool) -> Result<u64, Failure> {
    let passed = Arc::new(AtomicU64::new(0));
    let (stream, packed) = archive::pack(from.to_owned(), passed.clone());
    let sent = remote.client.write_archive(remote.sandbox, &remote.target, stream);
    let work = async { Ok(sent.await?) };
    let result = watched(quiet, &format!("copying {}", from.display()), &passed, 0, work).await;
    // Why our side stopped says more than that the body was cut short.
    packed.await.map_err(|_| Failure::new("reading the folder was cut short"))??;
    Ok(result?.bytes)
}

async fn download_file(remote: &Remote<'_>, to: &Path, mode: u32, quiet: bool) -> Result<u64, Failure> {
    let mut download = remote.client.read_file(remote.sandbox, &remote.target, 0).await?;
    let folder = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let fail = || format!("cannot write {}", to.display());
    // Whole or not at all, as the other way.
    let mut file = tempfile::Builder::new().prefix(".space-cp-").tempfile_in(folder).with_context(fail)?;
    let passed = AtomicU64::new(0);
    let total = download.size.unwrap_or(0);
    let work = async {
        while let Some(chunk) = download.chunk().await? {
            file.write_all(&chunk).with_context(fail)?;
            passed.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    };
    watched(quiet, &format!("copying {}", remote.target.path), &passed, total, work).await?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(mode & 0o777)).with_context(fail)?;
    file.persist(to).map_err(|e| e.error).with_context(fail)?;
    Ok(passed.load(Ordering::Relaxed))
}

async fn download_folder(remote: &Remote<'_>, to: &Path, quiet: bool) -> Result<u64, Failure> {
    let mut download = remote.client.read_archive(remote.sandbox, &remote.target).await?;
    let passed = AtomicU64::new(0);
    let (feed, unpacked) = archive::unpack(to.to_owned());
    let work = async {
        while let Some(chunk) = download.chunk().await? {
            passed.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            if feed.send(Ok(chunk)).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    let result = watched(quiet, &format!("copying {}", remote.target.path), &passed, 0, work).await;
    if result.is_err() {
        let _ = feed.send(Err(std::io::Error::other("the archive was cut short"))).await;
    }
    drop(feed);
    let outcome = unpacked.await.map_err(|_| Failure::new("unpacking was cut short"))?;
    result?;
    outcome
}

impl Cp {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let quiet = global.json;
        let bytes = match (Place::parse(&self.from), Place::parse(&self.to)) {
            (from @ (Place::Local(_) | Place::Stream), Place::Sandbox { name, path }) => {
                let target = FileTarget { path, user: self.user };
                upload(Remote { client: &client, sandbox: &name, target }, from, quiet).await?
            }
            (Place::Sandbox { name, path }, to @ (Place::Local(_) | Place::Stream)) => {
                let target = FileTarget { path, user: self.user };
                download(Remote { client: &client, sandbox: &name, target }, to, quiet).await?
            }
            (Place::Sandbox { .. }, Place::Sandbox { .. }) => {
                return Err(Failure::usage("both places are in sandboxes; copy to this machine first"));
            }
            _ => return Err(Failure::usage("neither place is in a sandbox; write that one as NAME:PATH")),
        };
        if global.json {
            output::json(&serde_json::json!({"bytes": bytes}));
        }
        Ok(0)
    }
}

async fn upload(mut remote: Remote<'_>, from: Place, quiet: bool) -> Result<u64, Failure> {
    let Place::Local(path) = from else {
        let passed = Arc::new(AtomicU64::new(0));
        let stream = pipe::stream_of(std::io::stdin(), passed.clone());
        remote.client.write_file(remote.sandbox, &remote.target, None, None, stream).await?;
        return Ok(passed.load(Ordering::Relaxed));
    };
    let meta = std::fs::metadata(&path).with_context(|| format!("cannot read {}", path.display()))?;
    // `folder/.` means what is in it.
    let contents_only = path.as_os_str().to_string_lossy().ends_with("/.") || path == Path::new(".");
    let name = if contents_only { None } else { base_name(&path) };
    remote.settle(name.as_deref()).await?;
    if meta.is_dir() { upload_folder(&remote, &path, quiet).await } else { upload_file(&remote, &path, quiet).await }
}

async fn download(remote: Remote<'_>, to: Place, quiet: bool) -> Result<u64, Failure> {
    let info = remote.client.file_info(remote.sandbox, &remote.target).await?;
    let Place::Local(mut path) = to else {
        let mut download = remote.client.read_file(remote.sandbox, &remote.target, 0).await?;
        let mut bytes = 0;
        while let Some(chunk) = download.chunk().await? {
            let mut out = std::io::stdout().lock();
            if out.write_all(&chunk).and_then(|()| out.flush()).is_err() {
                std::process::exit(output::BROKEN_PIPE_STATUS);
            }
            bytes += chunk.len() as u64;
        }
        return Ok(bytes);
    };
    let contents_only = remote.target.path.ends_with("/.");
    if path.is_dir()
        && !contents_only
        && let Some(name) = base_name(Path::new(&info.path))
    {
        path.push(name);
    }
    match info.kind.as_str() {
        "directory" => download_folder(&remote, &path, quiet).await,
        "file" | "symlink" => {
            let mode = u32::from_str_radix(&info.mode, 8).unwrap_or(0o644);
            download_file(&remote, &path, mode, quiet).await
        }
        _ => Err(Failure::new(format!("{} is neither a file nor a folder", remote.target.path))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        let sandbox = |name: &str, path: &str| Place::Sandbox { name: name.into(), path: path.into() };
        assert_eq!(Place::parse("box:/a:b"), sandbox("box", "/a:b"));
        assert_eq!(Place::parse("box:"), sandbox("box", "."));
        assert_eq!(Place::parse("./a:b"), Place::Local("./a:b".into()));
        assert_eq!(Place::parse("/x"), Place::Local("/x".into()));
        assert_eq!(Place::parse("-"), Place::Stream);
    }
}
