//! Where log lines go: standard error, or a file that is changed for a new one before it grows too large.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, Read as _, Write};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;
use crate::failure::Failure;

const FILE_MAX_BYTES: u64 = 16 << 20;
const LINE_MAX_BYTES: u64 = 64 << 10;

/// A log file and one older one beside it.
struct Rotating {
    path: PathBuf,
    file: File,
    bytes: u64,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

impl Rotating {
    fn new(path: &Path) -> io::Result<Self> {
        let file = open(path)?;
        Ok(Self { path: path.to_owned(), bytes: file.metadata()?.len(), file })
    }
}

impl Write for Rotating {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.bytes > FILE_MAX_BYTES {
            std::fs::rename(&self.path, self.path.with_extension("log.1"))?;
            *self = Self::new(&self.path)?;
        }
        let written = self.file.write(data)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A lock that a panicking thread does not make useless.
#[derive(Clone)]
struct Shared(Arc<Mutex<Rotating>>);

struct Line<'a>(std::sync::MutexGuard<'a, Rotating>);

impl Write for Line<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl<'a> tracing_subscriber::fmt::MakeWriter<'a> for Shared {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The file that the lines of our children go to as well, when there is one.
static FILE: OnceLock<Shared> = OnceLock::new();

/// Called once. `file`: instead of standard error.
pub fn start(filter: &str, format: LogFormat, file: Option<&Path>) -> Result<(), Failure> {
    use std::io::IsTerminal as _;
    let parsed = EnvFilter::try_new(filter)
        .map_err(|e| Failure::usage(format!("log = {filter:?}: {e}; write info, or space_node=debug,info")))?;
    let builder = tracing_subscriber::fmt().with_env_filter(parsed);
    match (file, format) {
        (Some(path), format) => {
            let failed = |e| Failure::new(format!("cannot write {}: {e}", path.display()));
            let writer = Shared(Arc::new(Mutex::new(Rotating::new(path).map_err(failed)?)));
            let writer = FILE.get_or_init(|| writer).clone();
            let builder = builder.with_writer(writer).with_ansi(false);
            if format == LogFormat::Json { builder.json().init() } else { builder.init() }
        }
        (None, LogFormat::Json) => builder.with_writer(io::stderr).json().init(),
        (None, LogFormat::Text) => {
            builder.with_writer(io::stderr).with_ansi(io::stderr().is_terminal()).init();
        }
    }
    Ok(())
}

/// Where a child is to write its log: our own standard error, or a pipe whose lines we put into the log file.
pub fn for_child() -> io::Result<OwnedFd> {
    let Some(file) = FILE.get() else { return io::stderr().as_fd().try_clone_to_owned() };
    let (read, write) = io::pipe()?;
    let file = file.clone();
    std::thread::Builder::new().name("log".into()).spawn(move || {
        let mut lines = io::BufReader::new(read);
        let mut line = Vec::new();
        while let Ok(1..) = lines.by_ref().take(LINE_MAX_BYTES).read_until(b'\n', &mut line) {
            // A full disk costs log lines, nothing else.
            let _ = file.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line);
            line.clear();
        }
    })?;
    Ok(write.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_never_takes_more_than_two_files() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("server.log");
        let mut log = Rotating::new(&path).expect("a file");
        let line = vec![b'x'; 1 << 20];
        for _ in 0..60 {
            log.write_all(&line).expect("written");
        }
        let total: u64 =
            std::fs::read_dir(dir.path()).expect("a folder").flatten().map(|e| e.metadata().unwrap().len()).sum();
        assert!(total <= 2 * (FILE_MAX_BYTES + (2 << 20)), "{total}");
    }
}
