//! The guest's gRPC face: takes a message apart, calls one function of another module, and streams what comes back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use space_proto::GUEST_PROTOCOL;
use space_proto::guest::attach_input::Kind as In;
use space_proto::guest::attach_output::Kind as Out;
use space_proto::guest::guest_server::Guest;
use space_proto::guest::{
    AttachInput, AttachOpen, AttachOutput, AttachStarted, FileChunk, FileEvent, FileStat, GetProcessRequest, InfoReply,
    InfoRequest, ListDirReply, ListDirRequest, ListPortsReply, ListPortsRequest, ListProcessesReply,
    ListProcessesRequest, MakeDirRequest, OutputChunk, PathRequest, PortData, ProcessInfo, ProcessRef, QuiesceReply,
    QuiesceRequest, ReadFileRequest, RefreshReply, RefreshRequest, RemoveFileReply, RemoveFileRequest,
    RenameFileRequest, ReserveReply, ReserveRequest, SignalRequest, WatchFilesRequest, WriteArchiveReply,
    WriteFileChunk, WriteFileOpen,
};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::files::{self, Piece, as_user};
use crate::output::{Attachment, Found};
use crate::processes::{Input, Process};
use crate::users::User;
use crate::{Daemon, archive, cgroup, ports, refresh, spawn, watch};

const WAIT_MAX: Duration = Duration::from_secs(3600);
const CHUNKS_QUEUED: usize = 4;
const FROZEN_PATIENCE: Duration = Duration::from_secs(15);
const FROZEN_STEP: Duration = Duration::from_millis(10);
/// One that nobody reads, or nothing is sent to, holds its thread for as long as its stream is open.
static TRANSFERS: Semaphore = Semaphore::const_new(files::TRANSFERS_MAX);

pub struct Service(pub Arc<Daemon>);

type Answer<T> = Result<Response<T>, Status>;
type Stream<T> = ReceiverStream<Result<T, Status>>;

impl Service {
    fn user(&self, spec: &str) -> Result<User, Status> {
        spawn::user(spec, &self.0.identity.settings()).map_err(Status::not_found)
    }

    /// Waits while the programs are frozen: that is the length of a snapshot.
    async fn start_now(&self, process: &Arc<Process>) -> Result<(), Status> {
        let begun = Instant::now();
        while process.is_reserved() && !self.0.table.start(process, &self.0.identity.settings()) {
            if begun.elapsed() > FROZEN_PATIENCE {
                return Err(Status::unavailable("the sandbox stands still for a snapshot; try again in a moment"));
            }
            tokio::time::sleep(FROZEN_STEP).await;
        }
        Ok(())
    }
}

fn disk() -> (u64, u64) {
    nix::sys::statvfs::statvfs("/")
        .map_or((0, 0), |fs| (fs.blocks() * fs.fragment_size(), fs.blocks_available() * fs.fragment_size()))
}

/// The first message, which opens, and the rest as pieces.
async fn upload(mut messages: Streaming<WriteFileChunk>) -> Result<(WriteFileOpen, mpsc::Receiver<Piece>), Status> {
    let first = messages.message().await?.ok_or_else(|| Status::invalid_argument("an empty stream"))?;
    let open = first.open.ok_or_else(|| Status::invalid_argument("the first message must open the file"))?;
    let (sender, pieces) = mpsc::channel(CHUNKS_QUEUED);
    tokio::spawn(async move {
        let mut next = Some(WriteFileChunk { open: None, data: first.data, end: first.end });
        while let Some(chunk) = next.take() {
            if !chunk.data.is_empty() && sender.send(Piece::Data(chunk.data)).await.is_err() {
                return;
            }
            if chunk.end {
                let _ = sender.send(Piece::End).await;
                return;
            }
            // An error or an end without `end`: the sender is dropped, and the file with it.
            next = messages.message().await.ok().flatten();
        }
    });
    Ok((open, pieces))
}

/// Runs a blocking producer of chunks as the user; its error is the stream's last message.
fn download(
    user: User,
    produce: impl FnOnce(&User, &files::Chunks) -> Result<(), Status> + Send + 'static,
) -> Stream<FileChunk> {
    let (chunks, receiver) = mpsc::channel(CHUNKS_QUEUED);
    tokio::spawn(async move {
        let to = chunks.clone();
        let _turn = TRANSFERS.acquire().await;
        if let Err(status) = as_user(user, move |user| produce(user, &to)).await {
            let _ = chunks.send(Err(status)).await;
        }
    });
    ReceiverStream::new(receiver)
}

/// Output to one reader, from its offset to the exit.
async fn output(
    process: Arc<Process>,
    reader: Attachment,
    open: AttachOpen,
    to: mpsc::Sender<Result<AttachOutput, Status>>,
) {
    let until = if open.no_follow { Some(process.log.range().1) } else { None };
    let mut next = open.offset;
    let send = |kind| to.send(Ok(AttachOutput { kind: Some(kind) }));
    if send(Out::Started(AttachStarted { process: Some(process.info()) })).await.is_err() {
        return;
    }
    loop {
        if until.is_some_and(|until| next >= until) && process.log.exit().is_none() {
            return;
        }
        let found = tokio::select! {
            found = reader.next_or_wait() => found,
            // The reader is gone: nobody waits for it any longer.
            () = to.closed() => return,
        };
        let kind = match found {
            Found::Data { stream, offset, data } => {
                next = offset + data.len() as u64;
                Out::Output(OutputChunk { stream: stream.into(), offset, data })
            }
            Found::Dropped(until) => Out::DroppedUntil(until),
            Found::End(exit) => {
                let _ = send(Out::Exit(exit)).await;
                return;
            }
            Found::Nothing => continue,
        };
        if send(kind).await.is_err() {
            return;
        }
    }
}

/// Input of one client. Its end is not the command's: another may attach.
async fn input(process: Arc<Process>, mut messages: Streaming<AttachInput>) {
    while let Ok(Some(message)) = messages.message().await {
        let item = match message.kind {
            Some(In::Stdin(data)) => Input::Data(data),
            Some(In::CloseStdin(_)) => Input::Close,
            Some(In::Resize(size)) => {
                process.resize(size);
                continue;
            }
            Some(In::Signal(number)) => {
                let _ = process.signal(number, false);
                continue;
            }
            Some(In::Open(_)) | None => continue,
        };
        if let Some(stdin) = process.stdin() {
            let close = matches!(item, Input::Close) && !process.has_terminal();
            let _ = stdin.send(item).await;
            if close {
                process.close_stdin();
            }
        }
    }
}

#[tonic::async_trait]
impl Guest for Service {
    async fn info(&self, _: Request<InfoRequest>) -> Answer<InfoReply> {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
        let seconds: f64 = uptime.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
        let (disk_total_bytes, disk_free_bytes) = disk();
        let (foreground, foreground_cpu_us) = self.0.table.foreground();
        Ok(Response::new(InfoReply {
            protocol: GUEST_PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            boot_id: refresh::boot_id(),
            uptime_ms: Duration::try_from_secs_f64(seconds).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(0)),
            mem_total_bytes: cgroup::memory("MemTotal"),
            mem_available_bytes: cgroup::memory("MemAvailable"),
            disk_total_bytes,
            disk_free_bytes,
            processes: u32::try_from(self.0.table.running()).unwrap_or(u32::MAX),
            cpu_us: self.0.table.groups.cpu_us(),
            foreground,
            foreground_cpu_us,
        }))
    }

    type OpenPortStream = Stream<PortData>;

    async fn open_port(&self, request: Request<Streaming<PortData>>) -> Answer<Self::OpenPortStream> {
        Ok(Response::new(ReceiverStream::new(self.0.ports.open(request.into_inner()).await?)))
    }

    async fn list_ports(&self, _: Request<ListPortsRequest>) -> Answer<ListPortsReply> {
        Ok(Response::new(ListPortsReply { ports: ports::listening() }))
    }

    async fn refresh(&self, request: Request<RefreshRequest>) -> Answer<RefreshReply> {
        self.0.refresh(request.into_inner()).await.map(Response::new).map_err(Status::internal)
    }

    async fn quiesce(&self, request: Request<QuiesceRequest>) -> Answer<QuiesceReply> {
        self.0.stand_still(request.into_inner()).await.map(Response::new).map_err(Status::internal)
    }

    async fn reserve(&self, request: Request<ReserveRequest>) -> Answer<ReserveReply> {
        let request = request.into_inner();
        let spec = request.spec.ok_or_else(|| Status::invalid_argument("no command"))?;
        self.user(&spec.user).map_err(|status| Status::invalid_argument(status.message()))?;
        self.0.table.reserve(&request.process_id, spec, request.expires_ms)?;
        Ok(Response::new(ReserveReply {}))
    }

    async fn start(&self, request: Request<ProcessRef>) -> Answer<ProcessInfo> {
        let process = self.0.table.get(&request.into_inner().process_id)?;
        self.start_now(&process).await?;
        Ok(Response::new(process.info()))
    }

    type AttachStream = Stream<AttachOutput>;

    async fn attach(&self, request: Request<Streaming<AttachInput>>) -> Answer<Self::AttachStream> {
        let mut messages = request.into_inner();
        let first = messages.message().await?.and_then(|message| message.kind);
        let Some(In::Open(open)) = first else {
            return Err(Status::invalid_argument("the first message must say what to attach to"));
        };
        let process = self.0.table.get(&open.process_id)?;
        let (sender, receiver) = mpsc::channel(CHUNKS_QUEUED);
        // Before the start, so that not a byte of it is thrown away unread.
        let reader = process.log.attach(open.offset);
        if !open.read_only {
            self.start_now(&process).await?;
            tokio::spawn(input(process.clone(), messages));
        }
        tokio::spawn(output(process, reader, open, sender));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn list_processes(&self, _: Request<ListProcessesRequest>) -> Answer<ListProcessesReply> {
        Ok(Response::new(ListProcessesReply { processes: self.0.table.list() }))
    }

    async fn get_process(&self, request: Request<GetProcessRequest>) -> Answer<ProcessInfo> {
        let request = request.into_inner();
        let process = self.0.table.get(&request.process_id)?;
        if request.wait_ms > 0 && !process.is_reserved() {
            let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
            let _ = tokio::time::timeout(wait, process.log.finished()).await;
        }
        Ok(Response::new(process.info()))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Answer<ProcessInfo> {
        let request = request.into_inner();
        let process = self.0.table.get(&request.process_id)?;
        process.signal(request.signal, request.kill_tree)?;
        Ok(Response::new(process.info()))
    }

    async fn stat_file(&self, request: Request<PathRequest>) -> Answer<FileStat> {
        let request = request.into_inner();
        as_user(self.user(&request.user)?, move |user| files::stat(&request, user)).await.map(Response::new)
    }

    async fn list_dir(&self, request: Request<ListDirRequest>) -> Answer<ListDirReply> {
        let request = request.into_inner();
        as_user(self.user(&request.user)?, move |user| files::list(&request, user)).await.map(Response::new)
    }

    async fn make_dir(&self, request: Request<MakeDirRequest>) -> Answer<FileStat> {
        let request = request.into_inner();
        as_user(self.user(&request.user)?, move |user| files::make_dir(&request, user)).await.map(Response::new)
    }

    async fn remove_file(&self, request: Request<RemoveFileRequest>) -> Answer<RemoveFileReply> {
        let request = request.into_inner();
        as_user(self.user(&request.user)?, move |user| files::remove(&request, user)).await?;
        Ok(Response::new(RemoveFileReply {}))
    }

    async fn rename_file(&self, request: Request<RenameFileRequest>) -> Answer<FileStat> {
        let request = request.into_inner();
        as_user(self.user(&request.user)?, move |user| files::rename(&request, user)).await.map(Response::new)
    }

    type ReadFileStream = Stream<FileChunk>;

    async fn read_file(&self, request: Request<ReadFileRequest>) -> Answer<Self::ReadFileStream> {
        let request = request.into_inner();
        let user = self.user(&request.user)?;
        Ok(Response::new(download(user, move |user, chunks| files::read(&request, user, chunks))))
    }

    async fn write_file(&self, request: Request<Streaming<WriteFileChunk>>) -> Answer<FileStat> {
        let (open, mut pieces) = upload(request.into_inner()).await?;
        let user = self.user(&open.user)?;
        let _turn = TRANSFERS.acquire().await;
        as_user(user, move |user| files::write(&open, user, &mut pieces)).await.map(Response::new)
    }

    type ReadArchiveStream = Stream<FileChunk>;

    async fn read_archive(&self, request: Request<PathRequest>) -> Answer<Self::ReadArchiveStream> {
        let request = request.into_inner();
        let user = self.user(&request.user)?;
        Ok(Response::new(download(user, move |user, chunks| archive::read(&request, user, chunks))))
    }

    async fn write_archive(&self, request: Request<Streaming<WriteFileChunk>>) -> Answer<WriteArchiveReply> {
        let (open, mut pieces) = upload(request.into_inner()).await?;
        let user = self.user(&open.user)?;
        let _turn = TRANSFERS.acquire().await;
        as_user(user, move |user| archive::write(&open, user, &mut pieces)).await.map(Response::new)
    }

    type WatchFilesStream = Stream<FileEvent>;

    async fn watch_files(&self, request: Request<WatchFilesRequest>) -> Answer<Self::WatchFilesStream> {
        let request = request.into_inner();
        let user = self.user(&request.user)?;
        let (events, receiver) = mpsc::channel(CHUNKS_QUEUED);
        watch::start(request, user, events).await?;
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}
