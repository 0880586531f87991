//! The guest of a simulated run: files in a map, processes that print their arguments and end.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use space_proto::guest::*;
use space_proto::node::RunState;
use tonic::{Request, Response, Status, Streaming};

use crate::sim_node::SimNode;

pub struct Guest {
    files: Mutex<BTreeMap<String, Bytes>>,
    processes: Mutex<BTreeMap<String, (ProcessInfo, Vec<u8>)>>,
    disk_bytes: u64,
}

impl Guest {
    pub fn new(disk_bytes: u64) -> Self {
        let files = BTreeMap::from([("/etc/hostname".to_owned(), Bytes::from_static(b"sim\n"))]);
        Self { files: Mutex::new(files), processes: Mutex::default(), disk_bytes }
    }

    pub fn file_names(&self) -> Vec<String> {
        self.files.lock().expect("not poisoned").keys().cloned().collect()
    }

    fn stat(&self, path: &str) -> Result<FileStat, Status> {
        let path = absolute(path);
        let files = self.files.lock().expect("not poisoned");
        if let Some(data) = files.get(&path) {
            let kind = FileKind::File.into();
            return Ok(FileStat { path, kind, size: data.len() as u64, mode: 0o644, ..FileStat::default() });
        }
        let inside = format!("{}/", path.trim_end_matches('/'));
        if path == "/" || files.keys().any(|f| f.starts_with(&inside)) {
            return Ok(FileStat { path, kind: FileKind::Directory.into(), mode: 0o755, ..FileStat::default() });
        }
        Err(Status::not_found(format!("{path}: no such file")))
    }

    fn process(&self, id: &str) -> Result<ProcessInfo, Status> {
        let processes = self.processes.lock().expect("not poisoned");
        processes.get(id).map(|p| p.0.clone()).ok_or_else(|| Status::not_found("no such process"))
    }

    fn start(&self, id: &str) -> Result<ProcessInfo, Status> {
        let mut processes = self.processes.lock().expect("not poisoned");
        let (info, output) = processes.get_mut(id).ok_or_else(|| Status::not_found("no such process"))?;
        if info.state() == ProcessState::Reserved {
            *output = info.spec.as_ref().map(|s| s.argv.join(" ")).unwrap_or_default().into_bytes();
            info.output_end = output.len() as u64;
            info.set_state(ProcessState::Exited);
            info.exit = Some(Exit { reason: ExitReason::ExitedNormally.into(), ..Exit::default() });
        }
        Ok(info.clone())
    }
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/home/user/{path}") }
}

/// The pass-through of the node: it looks for the run in the metadata.
pub struct Passed(pub Arc<SimNode>);

type Chunks<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Passed {
    fn guest<T>(&self, request: &Request<T>) -> Result<Arc<Guest>, Status> {
        let meta = |key| request.metadata().get(key).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let run = meta(space_proto::META_RUN).parse().unwrap_or(0);
        let state = self.0.lock();
        let run = state.runs.get(&(meta(space_proto::META_SANDBOX).to_owned(), run));
        match run {
            Some(run) if run.status.state() == RunState::Running => Ok(run.guest.clone()),
            _ => Err(Status::failed_precondition("misdirected: this node does not hold that run")),
        }
    }
}

async fn collect(guest: &Guest, mut chunks: Streaming<WriteFileChunk>) -> Result<(WriteFileOpen, Bytes), Status> {
    let first = chunks.message().await?.ok_or_else(|| Status::invalid_argument("empty"))?;
    let open = first.open.ok_or_else(|| Status::invalid_argument("no open"))?;
    if open.size_hint > guest.disk_bytes {
        return Err(Status::resource_exhausted(format!("{} bytes do not fit", open.size_hint)));
    }
    let (mut data, mut end) = (Vec::new(), first.end);
    while let Some(chunk) = chunks.message().await? {
        assert!(chunk.data.len() <= 64 * 1024, "a chunk of {} bytes", chunk.data.len());
        data.extend_from_slice(&chunk.data);
        end |= chunk.end;
    }
    if end { Ok((open, data.into())) } else { Err(Status::aborted("the stream broke off")) }
}

#[tonic::async_trait]
impl guest_server::Guest for Passed {
    async fn info(&self, request: Request<InfoRequest>) -> Result<Response<InfoReply>, Status> {
        self.guest(&request)?;
        Ok(Response::new(InfoReply::default()))
    }

    type OpenPortStream = Pin<Box<dyn futures::Stream<Item = Result<PortData, Status>> + Send>>;

    async fn open_port(&self, _: Request<Streaming<PortData>>) -> Result<Response<Self::OpenPortStream>, Status> {
        Err(Status::unimplemented("open_port"))
    }

    async fn list_ports(&self, _: Request<ListPortsRequest>) -> Result<Response<ListPortsReply>, Status> {
        Err(Status::unimplemented("list_ports"))
    }

    async fn refresh(&self, _: Request<RefreshRequest>) -> Result<Response<RefreshReply>, Status> {
        Err(Status::permission_denied("not for tenants"))
    }

    async fn quiesce(&self, _: Request<QuiesceRequest>) -> Result<Response<QuiesceReply>, Status> {
        Err(Status::permission_denied("not for tenants"))
    }

    async fn reserve(&self, request: Request<ReserveRequest>) -> Result<Response<ReserveReply>, Status> {
        let guest = self.guest(&request)?;
        let request = request.into_inner();
        let mut info = ProcessInfo { process_id: request.process_id, spec: request.spec, ..ProcessInfo::default() };
        info.set_state(ProcessState::Reserved);
        let mut processes = guest.processes.lock().expect("not poisoned");
        processes.entry(info.process_id.clone()).or_insert((info, Vec::new()));
        Ok(Response::new(ReserveReply {}))
    }

    async fn start(&self, request: Request<ProcessRef>) -> Result<Response<ProcessInfo>, Status> {
        let guest = self.guest(&request)?;
        Ok(Response::new(guest.start(&request.into_inner().process_id)?))
    }

    type AttachStream = Chunks<AttachOutput>;

    async fn attach(&self, request: Request<Streaming<AttachInput>>) -> Result<Response<Self::AttachStream>, Status> {
        let guest = self.guest(&request)?;
        let first = request.into_inner().message().await?;
        let Some(attach_input::Kind::Open(open)) = first.and_then(|f| f.kind) else {
            return Err(Status::invalid_argument("no open"));
        };
        let info = guest.process(&open.process_id)?;
        let output = guest.processes.lock().expect("not poisoned")[&open.process_id].1.clone();
        let from = (open.offset as usize).min(output.len());
        let frame = |kind| Ok(AttachOutput { kind: Some(kind) });
        let mut frames = vec![frame(attach_output::Kind::Started(AttachStarted { process: Some(info.clone()) }))];
        if from < output.len() {
            let data = Bytes::from(output[from..].to_vec());
            let chunk = OutputChunk { stream: space_proto::guest::Stream::Stdout.into(), offset: from as u64, data };
            frames.push(frame(attach_output::Kind::Output(chunk)));
        }
        if let Some(exit) = info.exit {
            frames.push(frame(attach_output::Kind::Exit(exit)));
        }
        Ok(Response::new(Box::pin(futures::stream::iter(frames))))
    }

    async fn list_processes(
        &self,
        request: Request<ListProcessesRequest>,
    ) -> Result<Response<ListProcessesReply>, Status> {
        let guest = self.guest(&request)?;
        let processes = guest.processes.lock().expect("not poisoned").values().map(|p| p.0.clone()).collect();
        Ok(Response::new(ListProcessesReply { processes }))
    }

    async fn get_process(&self, request: Request<GetProcessRequest>) -> Result<Response<ProcessInfo>, Status> {
        let guest = self.guest(&request)?;
        Ok(Response::new(guest.process(&request.into_inner().process_id)?))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Result<Response<ProcessInfo>, Status> {
        let guest = self.guest(&request)?;
        Ok(Response::new(guest.process(&request.into_inner().process_id)?))
    }

    async fn stat_file(&self, request: Request<PathRequest>) -> Result<Response<FileStat>, Status> {
        let guest = self.guest(&request)?;
        Ok(Response::new(guest.stat(&request.into_inner().path)?))
    }

    async fn list_dir(&self, request: Request<ListDirRequest>) -> Result<Response<ListDirReply>, Status> {
        let guest = self.guest(&request)?;
        let request = request.into_inner();
        let inside = format!("{}/", absolute(&request.path).trim_end_matches('/'));
        let names = guest.file_names();
        let mut found: Vec<_> = names.iter().filter_map(|n| n.strip_prefix(&inside)).collect();
        found.retain(|n| !n.contains('/') && **n > *request.after);
        let more = found.len() > request.limit as usize;
        found.truncate(request.limit as usize);
        let entries = found.iter().map(|n| guest.stat(&format!("{inside}{n}"))).collect::<Result<_, _>>()?;
        Ok(Response::new(ListDirReply { entries, more }))
    }

    async fn make_dir(&self, request: Request<MakeDirRequest>) -> Result<Response<FileStat>, Status> {
        let guest = self.guest(&request)?;
        let request = request.into_inner();
        if guest.stat(&request.path).is_ok() && !request.parents {
            return Err(Status::already_exists("it is there"));
        }
        let keep = format!("{}/.keep", absolute(&request.path));
        guest.files.lock().expect("not poisoned").insert(keep, Bytes::new());
        Ok(Response::new(guest.stat(&request.path)?))
    }

    async fn remove_file(&self, request: Request<RemoveFileRequest>) -> Result<Response<RemoveFileReply>, Status> {
        let guest = self.guest(&request)?;
        let path = absolute(&request.into_inner().path);
        guest.stat(&path)?;
        guest.files.lock().expect("not poisoned").retain(|n, _| *n != path && !n.starts_with(&format!("{path}/")));
        Ok(Response::new(RemoveFileReply {}))
    }

    async fn rename_file(&self, request: Request<RenameFileRequest>) -> Result<Response<FileStat>, Status> {
        let guest = self.guest(&request)?;
        let request = request.into_inner();
        let moved = guest.files.lock().expect("not poisoned").remove(&absolute(&request.from));
        let data = moved.ok_or_else(|| Status::not_found("no such file"))?;
        guest.files.lock().expect("not poisoned").insert(absolute(&request.to), data);
        Ok(Response::new(guest.stat(&request.to)?))
    }

    type ReadFileStream = Chunks<FileChunk>;

    async fn read_file(&self, request: Request<ReadFileRequest>) -> Result<Response<Self::ReadFileStream>, Status> {
        let guest = self.guest(&request)?;
        let request = request.into_inner();
        let stat = guest.stat(&request.path)?;
        if stat.kind() != FileKind::File {
            return Err(Status::failed_precondition(format!("{} is a folder", stat.path)));
        }
        let data = guest.files.lock().expect("not poisoned")[&stat.path].clone();
        let from = (request.offset as usize).min(data.len());
        let length = if request.length == 0 { usize::MAX } else { request.length as usize };
        let part = data.slice(from..from + length.min(data.len() - from));
        let first = FileChunk { stat: Some(stat), data: Bytes::new() };
        let count = part.len().div_ceil(65536);
        let pieces = (0..count).map(move |n| part.slice(n * 65536..((n + 1) * 65536).min(part.len())));
        let chunks = std::iter::once(first).chain(pieces.map(|data| FileChunk { stat: None, data }));
        Ok(Response::new(Box::pin(futures::stream::iter(chunks.map(Ok)).boxed())))
    }

    async fn write_file(&self, request: Request<Streaming<WriteFileChunk>>) -> Result<Response<FileStat>, Status> {
        let guest = self.guest(&request)?;
        let (open, data) = collect(&guest, request.into_inner()).await?;
        guest.files.lock().expect("not poisoned").insert(absolute(&open.path), data);
        Ok(Response::new(guest.stat(&open.path)?))
    }

    type ReadArchiveStream = Chunks<FileChunk>;

    async fn read_archive(&self, request: Request<PathRequest>) -> Result<Response<Self::ReadArchiveStream>, Status> {
        let guest = self.guest(&request)?;
        guest.stat(&request.into_inner().path)?;
        let data = Bytes::from(vec![0u8; 1024]);
        Ok(Response::new(Box::pin(futures::stream::iter([Ok(FileChunk { stat: None, data })]))))
    }

    async fn write_archive(
        &self,
        request: Request<Streaming<WriteFileChunk>>,
    ) -> Result<Response<WriteArchiveReply>, Status> {
        let guest = self.guest(&request)?;
        let (_, data) = collect(&guest, request.into_inner()).await?;
        Ok(Response::new(WriteArchiveReply { entries: 1, bytes: data.len() as u64 }))
    }

    type WatchFilesStream = Chunks<FileEvent>;

    async fn watch_files(
        &self,
        request: Request<WatchFilesRequest>,
    ) -> Result<Response<Self::WatchFilesStream>, Status> {
        let guest = self.guest(&request)?;
        let path = request.into_inner().path;
        guest.stat(&path)?;
        let event = |change: FileChange| FileEvent { change: change.into(), path: path.clone(), ..Default::default() };
        let events = [FileChange::Ready, FileChange::Removed].map(|change| Ok(event(change)));
        Ok(Response::new(Box::pin(futures::stream::iter(events))))
    }
}
