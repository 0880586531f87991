//! A node with real VMs, in a process of its own so that it can die at any instant: this test program, started again. Its pool
//! is a folder on the file system of the test stage's, with the stage's template in it.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use space_core::SandboxId;
use space_core::token::TokenVerifier;
use space_hostd::cgroup::CgroupRoot;
use space_hostd::host::Host;
use space_hostd::pool::{Area, Pool, PoolSource};
use space_hostd::service::{Config, Service};
use space_node::{Node, NodeConfig, WarmSize};
use space_proto::guest::attach_input::Kind as In;
use space_proto::guest::attach_output::Kind as Out;
use space_proto::guest::guest_client::GuestClient;
use space_proto::guest::{AttachInput, AttachOpen, ProcessSpec, ReserveRequest};
use space_proto::node::node_client::NodeClient;
use space_proto::node::start_run_request::Source;
use space_proto::node::{
    CheckpointInfo, CheckpointRef, RunRef, RunState, RunStatus, StartRunRequest, TakeCheckpointRequest,
};
use space_proto::{META_GENERATION, META_RUN, META_SANDBOX};
use space_vmm::DriverConfig;
use space_vmm::firecracker::{self, FirecrackerConfig};
use space_vmm::guest_kernel::{self, GuestKernel};
use space_vmm::qemu::{Accel, QemuConfig};
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

/// Set for the node's own process: the data folder.
const AS_NODE: &str = "SPACE_LIVES_NODE";
const ANSWER: Duration = Duration::from_secs(120);

pub struct Bench {
    dir: tempfile::TempDir,
    pool: Pool,
    pub template: String,
    node: Option<Child>,
    pub client: NodeClient<Channel>,
    channel: Channel,
}

fn stage() -> Option<PathBuf> {
    std::env::var_os("SPACE_TEST_DATA_DIR").map(PathBuf::from)
}

/// The largest template: the seed, which has Python.
fn template(stage: &Path) -> Option<(String, serde_json::Value)> {
    let all = std::fs::read_dir(stage.join("pool/templates")).ok()?.flatten();
    let meta = |path: PathBuf| serde_json::from_slice(&std::fs::read(path.join("meta.json")).ok()?).ok();
    let all = all.filter_map(|entry| Some((entry.file_name().into_string().ok()?, meta(entry.path())?)));
    all.max_by_key(|(_, meta): &(String, serde_json::Value)| meta["disk_bytes_used"].as_u64())
}

fn owner(dir: &Path) -> String {
    space_node::owner(dir)
}

/// The one that made the template; its kernel's arguments are the stage's.
fn driver(meta: &serde_json::Value) -> DriverConfig {
    let made_by = |word: &str| meta["compatibility"].as_str().is_some_and(|text| text.contains(word));
    if made_by("firecracker=") {
        let named = std::env::var_os("SPACE_FIRECRACKER").map(PathBuf::from);
        let program = named.or_else(firecracker::find_program).expect("the stage's Firecracker");
        return DriverConfig::Firecracker(FirecrackerConfig::new(program));
    }
    let accel = if made_by("accel=kvm") { Accel::Kvm } else { QemuConfig::default().accel };
    DriverConfig::Qemu(QemuConfig { accel, ..QemuConfig::default() })
}

/// The stage's kernel, a prepared folder or one file.
fn kernel(stage: &Path) -> GuestKernel {
    let named = std::env::var_os("SPACE_FIRECRACKER_KERNEL").map(PathBuf::from);
    let kernel = guest_kernel::open(&stage.join("kernel")).ok();
    kernel.or_else(|| guest_kernel::open(&named?).ok()).expect("the stage's kernel")
}

/// The node's process: never returns.
pub async fn be_the_node() {
    let Some(dir) = std::env::var_os(AS_NODE).map(PathBuf::from) else { return };
    let stage = stage().expect("the stage");
    let (_, meta) = template(&stage).expect("a template");
    let driver = driver(&meta);
    space_hostd::points::obey(dir.join("drill"));
    let (owner, driver_name) = (owner(&dir), driver.name());
    let kernel = kernel(&stage);
    let program = driver.host_program(kernel.image, stage.join("initramfs.img"));
    let service = Service::open(Config {
        drill: None,
        core_scheduling: false,
        pool: dir.join("pool"),
        jails: dir.join("jails"),
        builds: dir.join("builds"),
        builder: None,
        build_env: Vec::new(),
        node: (0, 0),
        uids: (space_node::first_uid(&owner), 32),
        vmms: [(driver.name().to_owned(), program)].into(),
        owner,
    });
    let host = Host::here(service.expect("the root process's part"));
    let socket = dir.join("node.sock");
    let _ = std::fs::remove_file(&socket);
    let _node = Node::start(NodeConfig {
        node_id: "test".to_owned(),
        version: "0".to_owned(),
        driver: driver.driver(host.clone()),
        host,
        driver_label: driver_name.to_owned(),
        driver_reason: String::new(),
        kernel_version: kernel.version,
        kernel_args: std::env::var("SPACE_FIRECRACKER_KERNEL_ARGS").unwrap_or_default(),
        data: std::net::TcpListener::bind("127.0.0.1:0").expect("a door"),
        grpc: std::os::unix::net::UnixListener::bind(&socket).expect("a door"),
        tokens: TokenVerifier::from_bytes(&space_core::token::TokenSigner::from_seed(&[7; 32]).verifier().to_bytes())
            .expect("a key"),
        memory_budget_bytes: 16 << 30,
        memory_total_bytes: 16 << 30,
        cpus: 2,
        sandboxes_max: 32,
        pool_reserve_bytes: 64 << 20,
        warm: WarmSize::Fixed(0),
        data_dir: dir,
    })
    .await
    .expect("a node");
    std::future::pending().await
}

pub fn run(sandbox: &SandboxId, run: u32, generation: u64) -> RunRef {
    RunRef { sandbox: sandbox.to_string(), run, generation }
}

impl Bench {
    /// `None`, with a word on the terminal, where no VM can run.
    pub async fn new() -> Option<Self> {
        let Some(stage) = stage() else {
            eprintln!("skipped: SPACE_TEST_DATA_DIR is not set");
            return None;
        };
        let Some((hex, _)) = template(&stage).filter(|_| nix::unistd::geteuid().is_root()) else {
            eprintln!("skipped: no template on the stage, or not root");
            return None;
        };
        let dir = tempfile::Builder::new().prefix("lives-").tempdir_in(stage.join("pool")).unwrap();
        let root = dir.path().join("pool");
        std::fs::create_dir(&root).unwrap();
        let pool = Pool::open(&root, PoolSource::Existing).unwrap();
        let mut copy = Command::new("/usr/bin/btrfs");
        copy.args(["-q", "subvolume", "snapshot", "-r"]).arg(stage.join("pool/templates").join(&hex));
        assert!(copy.arg(root.join("templates").join(&hex)).status().unwrap().success());
        let socket = dir.path().join("node.sock");
        let channel = Endpoint::from_static("http://node").connect_with_connector_lazy(tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
        }));
        let client = NodeClient::new(channel.clone());
        let mut bench = Self { dir, pool, template: format!("sha256:{hex}"), node: None, client, channel };
        bench.start().await;
        Some(bench)
    }

    pub async fn start(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let node = Command::new(std::env::current_exe().unwrap())
            .args(["the_nodes_process", "--exact", "--nocapture"])
            .env(AS_NODE, self.dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn();
        self.node = Some(node.unwrap());
        let begun = Instant::now();
        while self.client.list_runs(space_proto::node::ListRunsRequest {}).await.is_err() {
            assert!(begun.elapsed() < ANSWER, "the node does not come up: {}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// As a crash would.
    pub fn kill(&mut self) {
        if let Some(mut node) = self.node.take() {
            node.kill().unwrap();
            node.wait().unwrap();
        }
    }

    /// The node dies when it gets there.
    pub fn drill(&self, point: &str) {
        std::fs::write(self.dir.path().join("drill"), point).unwrap();
    }

    pub fn drilled(&self) -> bool {
        !self.dir.path().join("drill").exists()
    }

    pub fn folder(&self, area: Area, name: &str) -> PathBuf {
        self.pool.path(area, name).unwrap()
    }

    pub fn checkpoints(&self) -> Vec<String> {
        self.pool.list(Area::Checkpoints).unwrap()
    }

    pub fn everything(&self) -> Vec<String> {
        [Area::Sandboxes, Area::Checkpoints, Area::Tmp].iter().flat_map(|area| self.pool.list(*area).unwrap()).collect()
    }

    pub fn vmm(&self, sandbox: &SandboxId) -> Option<i32> {
        let identity = |path: &Path| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
        let wanted = identity(&self.folder(Area::Sandboxes, sandbox.as_str()))?;
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).find(|pid| {
            let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            (comm.starts_with("qemu-system") || comm.starts_with("firecracker"))
                && identity(Path::new(&format!("/proc/{pid}/cwd"))) == Some(wanted)
        })
    }

    pub fn request(&self, run: RunRef, source: Option<Source>) -> StartRunRequest {
        StartRunRequest {
            run: Some(run),
            template: self.template.clone(),
            hostname: "lives".to_owned(),
            env: HashMap::from([("MARK".to_owned(), "kept".to_owned())]),
            source,
            ..StartRunRequest::default()
        }
    }

    pub async fn begin(&mut self, run: RunRef, source: Option<Source>, fork: bool) -> Result<RunStatus, Status> {
        let request = StartRunRequest { fork, ..self.request(run, source) };
        Ok(self.client.start_run(request).await?.into_inner())
    }

    /// A new sandbox of the template.
    pub async fn sandbox(&mut self) -> SandboxId {
        let id = SandboxId::new();
        let status = self.begin(run(&id, 1, 1), None, false).await.unwrap_or_else(|e| panic!("{e}: {}", self.log()));
        assert_eq!(status.state(), RunState::Running);
        id
    }

    pub async fn checkpoint(&mut self, run: RunRef, id: &str, keep_paused: bool) -> Result<CheckpointInfo, Status> {
        let request = TakeCheckpointRequest { run: Some(run), checkpoint: id.to_owned(), keep_paused };
        Ok(self.client.take_checkpoint(request).await?.into_inner())
    }

    pub async fn state(&mut self, sandbox: &SandboxId) -> Option<RunState> {
        let runs = self.client.list_runs(space_proto::node::ListRunsRequest {}).await.unwrap().into_inner().runs;
        runs.iter().find(|s| s.run.as_ref().is_some_and(|r| r.sandbox == sandbox.as_str())).map(RunStatus::state)
    }

    fn addressed<T>(&self, run: &RunRef, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let number = |n: u64| MetadataValue::try_from(n.to_string()).unwrap();
        let map = request.metadata_mut();
        map.insert(META_SANDBOX, MetadataValue::try_from(run.sandbox.as_str()).unwrap());
        map.insert(META_RUN, number(run.run.into()));
        map.insert(META_GENERATION, number(run.generation));
        request
    }

    /// The output of a script that root runs in the guest.
    pub async fn sh(&self, run: &RunRef, script: &str) -> Result<String, Status> {
        let mut guest = GuestClient::new(self.channel.clone());
        let spec = ProcessSpec {
            argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
            user: "root".to_owned(),
            foreground: true,
            ..ProcessSpec::default()
        };
        let process_id = space_core::CommandId::new().to_string();
        let reserve = ReserveRequest { process_id: process_id.clone(), spec: Some(spec), expires_ms: 0 };
        let open = AttachInput { kind: Some(In::Open(AttachOpen { process_id, ..AttachOpen::default() })) };
        let work = async {
            guest.reserve(self.addressed(run, reserve)).await?;
            let mut stream = guest.attach(self.addressed(run, tokio_stream::once(open))).await?.into_inner();
            let mut text = Vec::new();
            while let Some(message) = stream.message().await? {
                match message.kind {
                    Some(Out::Output(chunk)) => text.extend_from_slice(&chunk.data),
                    Some(Out::Exit(exit)) if exit.code != 0 => {
                        let text = String::from_utf8_lossy(&text).into_owned();
                        return Err(Status::aborted(format!("{script}: status {}: {text}", exit.code)));
                    }
                    _ => {}
                }
            }
            Ok(String::from_utf8_lossy(&text).trim().to_owned())
        };
        tokio::time::timeout(ANSWER, work).await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer")))
    }
}

pub fn from_checkpoint(sandbox: &SandboxId, checkpoint: &str) -> Option<Source> {
    Some(Source::Checkpoint(CheckpointRef { sandbox: sandbox.to_string(), checkpoint: checkpoint.to_owned() }))
}

impl Drop for Bench {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("---- the node said ----\n{}", self.log());
        }
        self.kill();
        if let Ok(groups) = CgroupRoot::new(&owner(self.dir.path())) {
            for name in groups.list().unwrap_or_default() {
                let _ = groups.open(&name).and_then(|group| {
                    group.kill()?;
                    group.remove()
                });
            }
            groups.remove_if_empty();
        }
        for area in [Area::Sandboxes, Area::Checkpoints, Area::Tmp, Area::Templates] {
            for name in self.pool.list(area).unwrap_or_default() {
                let _ = self.pool.delete(area, &name);
            }
        }
    }
}
