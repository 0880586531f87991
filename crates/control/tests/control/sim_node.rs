//! A node without VMs: it keeps runs as the real one does (idempotent, fenced by generation, with a stream of changes) and
//! can be told to be slow, full, or to lose things.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures::Stream;
use futures::StreamExt as _;
use space_proto::guest::Defaults;
use space_proto::guest::guest_server::GuestServer;
use space_proto::node::build_event::Kind;
use space_proto::node::node_server::{Node, NodeServer};
use space_proto::node::*;
use tokio::sync::broadcast;
use tokio_stream::wrappers::{BroadcastStream, UnixListenerStream};
use tonic::{Request, Response, Status};

use crate::sim_guest::Guest;

pub const SEED: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";

#[derive(Clone)]
pub struct Run {
    pub status: RunStatus,
    pub guest: Arc<Guest>,
    pub hostname: String,
}

/// What the simulated node is told to do wrong.
#[derive(Default)]
pub struct Faults {
    pub start_delay: Mutex<Duration>,
    /// The next starts fail with these.
    pub starts: Mutex<Vec<Status>>,
    /// So many deletes fail first.
    pub deletes: AtomicU32,
    /// Runs beyond this are refused.
    pub capacity: AtomicU32,
    pub builds: Mutex<Vec<BuildError>>,
}

pub struct State {
    pub runs: BTreeMap<(String, u32), Run>,
    /// The highest generation seen of each run, also of those that are gone.
    pub fences: BTreeMap<(String, u32), u64>,
    pub templates: BTreeMap<String, TemplateInfo>,
}

pub struct SimNode {
    pub state: Mutex<State>,
    pub faults: Faults,
    observation: AtomicU64,
    pub starts: AtomicU32,
    pub builds: AtomicU32,
    changes: broadcast::Sender<RunStatus>,
}

fn template(digest: &str) -> TemplateInfo {
    TemplateInfo {
        digest: digest.to_owned(),
        options: Some(TemplateOptions { memory_mib: 256, vcpus: 1, disk_bytes: 1 << 30, ..TemplateOptions::default() }),
        source: "seed".into(),
        created_unix_ms: 1_700_000_000_000,
        defaults: Some(Defaults { user: "user".into(), workdir: "/home/user".into(), ..Defaults::default() }),
        kernel: "6.1".into(),
        vmm: "simulated".into(),
        ..TemplateInfo::default()
    }
}

impl SimNode {
    pub fn new() -> Arc<Self> {
        let state = State {
            runs: BTreeMap::new(),
            fences: BTreeMap::new(),
            templates: BTreeMap::from([(SEED.to_owned(), template(SEED))]),
        };
        let node = Self {
            state: Mutex::new(state),
            faults: Faults::default(),
            observation: AtomicU64::new(1),
            starts: AtomicU32::new(0),
            builds: AtomicU32::new(0),
            changes: broadcast::channel(4096).0,
        };
        node.faults.capacity.store(10_000, Ordering::Relaxed);
        Arc::new(node)
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("not poisoned")
    }

    /// Serves on the socket, on a runtime of its own, so that its connections end with it as those of a process do.
    pub fn serve(self: &Arc<Self>, socket: &Path) -> tokio::runtime::Runtime {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let _ = std::fs::remove_file(socket);
        let listener = std::os::unix::net::UnixListener::bind(socket).expect("a socket");
        listener.set_nonblocking(true).expect("a socket");
        let node = NodeServer::from_arc(self.clone());
        let guest = GuestServer::new(crate::sim_guest::Passed(self.clone()));
        runtime.spawn(async move {
            let listener = tokio::net::UnixListener::from_std(listener).expect("a socket");
            let incoming = UnixListenerStream::new(listener);
            let server = tonic::transport::Server::builder().add_service(node).add_service(guest);
            server.serve_with_incoming(incoming).await.expect("served");
        });
        runtime
    }

    pub fn run_ids(&self) -> Vec<String> {
        self.lock().runs.keys().map(|(sandbox, _)| sandbox.clone()).collect()
    }

    fn change(&self, status: &mut RunStatus, state: RunState, reason: &str) {
        status.set_state(state);
        status.reason = reason.to_owned();
        status.observation = self.observation.fetch_add(1, Ordering::Relaxed);
        let _ = self.changes.send(status.clone());
    }

    /// As if the VM had ended by itself.
    pub fn kill(&self, sandbox: &str, reason: &str) {
        let mut state = self.lock();
        let run = state.runs.values_mut().find(|r| r.status.run.as_ref().is_some_and(|r| r.sandbox == sandbox));
        self.change(&mut run.expect("a run").status, RunState::Gone, reason);
    }

    pub fn pause(&self, sandbox: &str, paused: bool) {
        let mut state = self.lock();
        let run = state.runs.values_mut().find(|r| r.status.run.as_ref().is_some_and(|r| r.sandbox == sandbox));
        let (to, reason) = if paused { (RunState::Paused, "pool_full: no room") } else { (RunState::Running, "") };
        self.change(&mut run.expect("a run").status, to, reason);
    }

    /// As if the node had lost its memory of the run.
    pub fn forget(&self, sandbox: &str) {
        self.lock().runs.retain(|(id, _), _| id != sandbox);
    }

    fn fence(state: &mut State, run: &RunRef) -> Result<(String, u32), Status> {
        let key = (run.sandbox.clone(), run.run);
        let seen = state.fences.entry(key.clone()).or_insert(0);
        if run.generation < *seen {
            return Err(Status::failed_precondition("an older generation than the node has seen"));
        }
        *seen = run.generation;
        Ok(key)
    }
}

fn named(run: Option<RunRef>) -> Result<RunRef, Status> {
    run.ok_or_else(|| Status::invalid_argument("no run"))
}

#[tonic::async_trait]
impl Node for SimNode {
    async fn get_info(&self, _: Request<GetInfoRequest>) -> Result<Response<NodeInfo>, Status> {
        Ok(Response::new(NodeInfo {
            node_id: "local".into(),
            version: "0".into(),
            driver: "simulated".into(),
            cpus: 2,
            data_url: "ws://127.0.0.1:7071".into(),
            runs: self.lock().runs.len() as u32,
            ..NodeInfo::default()
        }))
    }

    async fn start_run(&self, request: Request<StartRunRequest>) -> Result<Response<RunStatus>, Status> {
        let request = request.into_inner();
        let run = named(request.run)?;
        self.starts.fetch_add(1, Ordering::Relaxed);
        let key = {
            let mut state = self.lock();
            let key = Self::fence(&mut state, &run)?;
            if let Some(known) = state.runs.get(&key) {
                return Ok(Response::new(known.status.clone()));
            }
            if !state.templates.contains_key(&request.template) {
                return Err(Status::not_found("no such template on this node"));
            }
            if state.runs.len() as u32 >= self.faults.capacity.load(Ordering::Relaxed) {
                return Err(Status::resource_exhausted("the node has 0 MiB of 4096 MiB left, the sandbox needs 256"));
            }
            key
        };
        let delay = *self.faults.start_delay.lock().expect("not poisoned");
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        if let Some(status) = self.faults.starts.lock().expect("not poisoned").pop() {
            return Err(status);
        }
        let mut state = self.lock();
        Self::fence(&mut state, &run)?;
        let mut status = RunStatus { run: Some(run), template: request.template, ..RunStatus::default() };
        self.change(&mut status, RunState::Running, "");
        let made = Run { status: status.clone(), guest: Arc::new(Guest::new(1 << 30)), hostname: request.hostname };
        state.runs.entry(key).or_insert(made);
        Ok(Response::new(status))
    }

    async fn delete_run(&self, request: Request<RunRef>) -> Result<Response<DeleteRunReply>, Status> {
        let run = request.into_inner();
        if self.faults.deletes.load(Ordering::Relaxed) > 0 {
            self.faults.deletes.fetch_sub(1, Ordering::Relaxed);
            return Err(Status::unavailable("told to"));
        }
        let mut state = self.lock();
        let key = Self::fence(&mut state, &run)?;
        if let Some(mut gone) = state.runs.remove(&key) {
            self.change(&mut gone.status, RunState::Gone, "deleted");
        }
        Ok(Response::new(DeleteRunReply {}))
    }

    async fn pause_run(&self, _: Request<RunRef>) -> Result<Response<RunStatus>, Status> {
        Err(Status::unimplemented("pause_run"))
    }

    async fn resume_run(&self, _: Request<RunRef>) -> Result<Response<RunStatus>, Status> {
        Err(Status::unimplemented("resume_run"))
    }

    async fn stop_run(&self, _: Request<RunRef>) -> Result<Response<RunStatus>, Status> {
        Err(Status::unimplemented("stop_run"))
    }

    async fn end_run(&self, _: Request<RunRef>) -> Result<Response<EndRunReply>, Status> {
        Err(Status::unimplemented("end_run"))
    }

    async fn take_checkpoint(&self, _: Request<TakeCheckpointRequest>) -> Result<Response<CheckpointInfo>, Status> {
        Err(Status::unimplemented("take_checkpoint"))
    }

    async fn list_checkpoints(
        &self,
        _: Request<ListCheckpointsRequest>,
    ) -> Result<Response<ListCheckpointsReply>, Status> {
        Err(Status::unimplemented("list_checkpoints"))
    }

    async fn delete_checkpoint(&self, _: Request<CheckpointRef>) -> Result<Response<DeleteCheckpointReply>, Status> {
        Err(Status::unimplemented("delete_checkpoint"))
    }

    async fn list_runs(&self, _: Request<ListRunsRequest>) -> Result<Response<ListRunsReply>, Status> {
        let runs = self.lock().runs.values().map(|r| r.status.clone()).collect();
        Ok(Response::new(ListRunsReply { runs }))
    }

    type WatchRunsStream = Pin<Box<dyn Stream<Item = Result<RunStatus, Status>> + Send>>;

    async fn watch_runs(&self, _: Request<WatchRunsRequest>) -> Result<Response<Self::WatchRunsStream>, Status> {
        let changes = BroadcastStream::new(self.changes.subscribe());
        let now: Vec<_> = self.lock().runs.values().map(|r| Ok(r.status.clone())).collect();
        let changes = changes.map(|c| c.map_err(|_| Status::data_loss("too slow")));
        Ok(Response::new(Box::pin(futures::stream::iter(now).chain(changes))))
    }

    async fn read_console(&self, request: Request<RunRef>) -> Result<Response<ConsoleReply>, Status> {
        let run = request.into_inner();
        let state = self.lock();
        let run = state.runs.get(&(run.sandbox, run.run)).ok_or_else(|| Status::not_found("no such run"))?;
        Ok(Response::new(ConsoleReply { text: format!("{} login:\n", run.hostname).into(), truncated: false }))
    }

    type BuildTemplateStream = Pin<Box<dyn Stream<Item = Result<BuildEvent, Status>> + Send>>;

    async fn build_template(
        &self,
        request: Request<BuildTemplateRequest>,
    ) -> Result<Response<Self::BuildTemplateStream>, Status> {
        let request = request.into_inner();
        let number = self.builds.fetch_add(1, Ordering::Relaxed);
        let event = |kind| Ok(BuildEvent { kind: Some(kind) });
        let progress = event(Kind::Progress(BuildProgress { step: "unpacking".into(), done: 1, total: 2 }));
        let failure = self.faults.builds.lock().expect("not poisoned").pop();
        let end = match failure {
            Some(error) => event(Kind::Error(error)),
            None => {
                let digest = format!("sha256:{number:064x}");
                let mut info = template(&digest);
                info.source = request.source;
                self.lock().templates.insert(digest, info.clone());
                event(Kind::Result(info))
            }
        };
        Ok(Response::new(Box::pin(futures::stream::iter([progress, end]))))
    }

    async fn list_templates(&self, _: Request<ListTemplatesRequest>) -> Result<Response<ListTemplatesReply>, Status> {
        Ok(Response::new(ListTemplatesReply { templates: self.lock().templates.values().cloned().collect() }))
    }

    async fn delete_template(
        &self,
        request: Request<DeleteTemplateRequest>,
    ) -> Result<Response<DeleteTemplateReply>, Status> {
        let digest = request.into_inner().digest;
        self.lock().templates.remove(&digest).ok_or_else(|| Status::not_found("no such template"))?;
        Ok(Response::new(DeleteTemplateReply {}))
    }
}
