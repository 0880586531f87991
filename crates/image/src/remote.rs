//! A build in a process of its own: what it is told and what it answers, over one stream.
//!
//! The builder handles what others made, with some of root's rights; whoever asked trusts only the size of its answers. It ends
//! when the stream does: nobody waits for what it makes any more.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{ImageError, IoContext, Result};
use crate::source::Source;
use crate::{BuildRequest, DiskOptions, ImageConfig, Progress, RegistryOptions};

/// The longest line of either side; an image's settings have at most half of it.
const LINE_MAX_BYTES: u64 = 2 << 20;
const POLL: Duration = Duration::from_millis(100);

/// What is to be built.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    /// As [`crate::source::parse`] reads it. The path of a local one is the builder's to know.
    pub source: String,
    pub disk_bytes: u64,
    /// Of the file system.
    pub id: Uuid,
    /// See [`RegistryOptions::plain_http`].
    pub plain_http: bool,
}

/// Where the builder finds things.
#[derive(Debug, Clone)]
pub struct Places {
    pub work: PathBuf,
    pub disk: PathBuf,
    /// Local sources: a file, a folder.
    pub file: PathBuf,
    pub folder: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
enum Event {
    Step(String),
    Bytes(u64, Option<u64>),
    Done(Box<ImageConfig>),
    Failed { code: String, text: String },
}

fn write(stream: &mut UnixStream, message: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

struct Told(Mutex<UnixStream>);

impl Told {
    fn tell(&self, event: &Event) {
        // Nobody there: the thread that listens ends this process.
        let _ = write(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner), event);
    }
}

impl Progress for Told {
    fn step(&self, text: &str) {
        self.tell(&Event::Step(text.to_owned()));
    }

    fn bytes(&self, done: u64, total: Option<u64>) {
        self.tell(&Event::Bytes(done, total));
    }
}

/// The builder: reads the order from the stream, works, answers. Ends the process when the other side goes away.
pub fn serve(stream: UnixStream, places: &Places) -> Result<()> {
    let what = || "talk to the node".to_owned();
    let mut reader = BufReader::new(stream.try_clone().ctx(what)?);
    let mut line = String::new();
    reader.by_ref().take(LINE_MAX_BYTES).read_line(&mut line).ctx(what)?;
    let order: Order = serde_json::from_str(&line).map_err(std::io::Error::from).ctx(what)?;
    std::thread::spawn(move || {
        // There is nothing more to read but the end.
        let _ = reader.read(&mut [0]);
        std::process::exit(1);
    });
    let told = Told(Mutex::new(stream));
    let event = match build(order, places, &told) {
        Ok(config) => Event::Done(Box::new(config)),
        Err(error) => Event::Failed { code: error.code().to_owned(), text: chain(&error) },
    };
    told.tell(&event);
    Ok(())
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let next = cause.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = cause.source();
    }
    text
}

fn build(order: Order, places: &Places, progress: &dyn Progress) -> Result<ImageConfig> {
    let mut source = crate::source::parse(&order.source)?;
    match &mut source {
        Source::RootfsTar(path) | Source::OciArchive { path, .. } => path.clone_from(&places.file),
        Source::RootfsDir(path) | Source::OciLayoutDir { path, .. } => path.clone_from(&places.folder),
        Source::Debian(_) | Source::Registry(_) => {}
    }
    let request = BuildRequest {
        source,
        work_dir: places.work.clone(),
        disk_path: places.disk.clone(),
        disk: DiskOptions::new(order.disk_bytes, order.id, order.id),
        registry: RegistryOptions { plain_http: order.plain_http, ..RegistryOptions::default() },
    };
    Ok(crate::build(&request, progress)?.config)
}

/// The other side: gives the order and follows the work to its end. Blocks.
pub fn follow(mut stream: UnixStream, order: &Order, progress: &dyn Progress) -> Result<ImageConfig> {
    let what = || "talk to the builder".to_owned();
    write(&mut stream, order).ctx(what)?;
    stream.set_read_timeout(Some(POLL)).ctx(what)?;
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        let room = LINE_MAX_BYTES.saturating_sub(line.len() as u64);
        match reader.by_ref().take(room).read_until(b'\n', &mut line) {
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(error) => return Err(error).ctx(what),
            Ok(_) if line.last() == Some(&b'\n') => {
                let event: Event = serde_json::from_slice(&line).map_err(std::io::Error::from).ctx(what)?;
                line.clear();
                match event {
                    Event::Step(text) => progress.step(&text),
                    Event::Bytes(done, total) => progress.bytes(done, total),
                    Event::Done(config) => return Ok(*config),
                    Event::Failed { code, text } => return Err(ImageError::Builder { code, text }),
                }
            }
            Ok(_) => {
                let text = "the builder ended without a word; it was killed, or the host ran out of memory".to_owned();
                return Err(ImageError::Builder { code: "image_failed".to_owned(), text });
            }
        }
        crate::progress::check(progress)?;
    }
}
