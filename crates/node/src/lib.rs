//! A node: the machine that runs sandboxes. It holds runs (VMs and their files), templates and the data plane.
//!
//! A node has no intent of its own: what should be is the control plane's, which names `(sandbox, run, generation)` in
//! every call. A node must never act on a run it does not hold, forward a call for another one, or end a VM because its
//! own service ends: VMs outlive it and are adopted at the next start.
//!
//! * `fence` – which calls are stale; pure
//! * `record` – what is on disk of a run, so that the next start finds it
//! * `run` / `runs` / `adopt` – one sandbox's VM; all of them and the list that is watched; those of an earlier service
//! * `start` / `verbs` – how a run begins; what is asked of one that is there
//! * `checkpoint` / `rolling` – an instant of a run kept; those that the node takes by itself
//! * `guest` – the channel into a guest
//! * `template` / `build` – templates on disk; making one
//! * `rpc` / `passthrough` – the gRPC face; calls that go on to a guest
//! * `attach` – the data plane: one WebSocket per reader of a command

mod adopt;
mod attach;
mod build;
mod capacity;
mod checkpoint;
mod convert;
mod demand;
mod error;
mod fence;
mod guest;
mod passthrough;
mod record;
mod rolling;
mod rpc;
mod run;
mod runs;
mod start;
mod template;
mod verbs;
mod warm;

use std::path::PathBuf;
use std::sync::Arc;

use space_core::token::TokenVerifier;
use space_hostd::host::Host;
use space_proto::node::node_server::NodeServer;
use space_vmm::Driver;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;

pub use error::NodeError;
pub use record::Record;
pub use template::Meta;

/// What a node is made of. Everything here is read once, at its start.
pub struct NodeConfig {
    pub node_id: String,
    pub version: String,
    pub data_dir: PathBuf,
    /// The root process, for what needs root's rights.
    pub host: Host,
    pub driver: Arc<dyn Driver>,
    /// As `qemu-tcg`; for people.
    pub driver_label: String,
    pub driver_reason: String,
    /// Of the kernel that a template is booted with.
    pub kernel_version: String,
    pub kernel_args: String,
    /// Of the data plane.
    pub data: std::net::TcpListener,
    /// The control plane's way in.
    pub grpc: std::os::unix::net::UnixListener,
    pub tokens: TokenVerifier,
    /// Guest memory and overhead of all runs together, in bytes.
    pub memory_budget_bytes: u64,
    pub memory_total_bytes: u64,
    pub cpus: u32,
    /// Sandboxes and parked VMs at the same time.
    pub sandboxes_max: u32,
    /// New sandboxes are refused when the pool has less than this free.
    pub pool_reserve_bytes: u64,
    pub warm: WarmSize,
}

/// How many restored, paused VMs are kept ready for each template that is in use, as far as memory allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum WarmSize {
    /// As many as were lately wanted within a minute, and a few at least.
    Learned,
    /// 0: none.
    Fixed(u16),
}

/// A node that answers.
pub struct Node {
    /// `ws://host:port` of the data plane.
    pub data_url: String,
    shared: Arc<runs::Runs>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    warm: tokio::task::JoinHandle<()>,
}

/// For the VM that is being parked when the node ends. Cut off, it would run on until the next start sweeps it.
const PARK_PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);

impl Node {
    /// Adopts what runs, sweeps what an earlier service left half done, and opens both doors.
    ///
    /// # Errors
    /// When a door cannot be opened, or the pool cannot be read.
    pub async fn start(config: NodeConfig) -> Result<Self, NodeError> {
        let opened = NodeError::io("open a door");
        let doors = open(config.data.try_clone(), config.grpc.try_clone()).map_err(opened)?;
        let (listener, grpc, address) = doors;
        let data_url = format!("ws://{address}");
        let shared = runs::Runs::open(config, data_url.clone()).await?;
        build::sweep(&shared).await?;

        let service = tonic::transport::Server::builder()
            .initial_stream_window_size(512 * 1024)
            .initial_connection_window_size(2 * 1024 * 1024)
            .add_service(NodeServer::new(rpc::Service(shared.clone())))
            .add_service(passthrough::GuestProxy(shared.clone()));
        let grpc = tokio::spawn(async move {
            if let Err(error) = service.serve_with_incoming(UnixListenerStream::new(grpc)).await {
                tracing::error!(%error, "the node's gRPC server ended");
            }
        });
        let router = attach::router(shared.clone());
        let data = tokio::spawn(async move {
            space_api::serve::serve(listener, router, std::future::pending()).await;
        });
        let warm = tokio::spawn(warm::keep(shared.clone()));
        Ok(Self { data_url, shared, tasks: vec![grpc, data], warm })
    }

    /// VMs that run now.
    pub fn running(&self) -> usize {
        self.shared.running()
    }

    /// Closes both doors. The sandboxes' VMs go on; only parked ones, which belong to nobody yet, are ended.
    pub async fn stop(self) {
        for task in &self.tasks {
            task.abort();
        }
        self.shared.warm.close();
        if tokio::time::timeout(PARK_PATIENCE, self.warm).await.is_err() {
            tracing::warn!("a VM that was being parked is left for the next start to sweep");
        }
        self.shared.warm.clear(&self.shared).await;
    }
}

/// Both doors, for the runtime.
fn open(
    data: std::io::Result<std::net::TcpListener>,
    grpc: std::io::Result<std::os::unix::net::UnixListener>,
) -> std::io::Result<(TcpListener, UnixListener, std::net::SocketAddr)> {
    let (data, grpc) = (data?, grpc?);
    data.set_nonblocking(true)?;
    grpc.set_nonblocking(true)?;
    let address = data.local_addr()?;
    Ok((TcpListener::from_std(data)?, UnixListener::from_std(grpc)?, address))
}

/// A name for the cgroups of this data folder: two servers on one host never touch each other's.
pub fn owner(data_dir: &std::path::Path) -> String {
    let path = data_dir.canonicalize().unwrap_or_else(|_| data_dir.to_owned());
    let id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_URL, path.as_os_str().as_encoded_bytes());
    id.simple().to_string()[..12].to_owned()
}

/// User ids of this data folder's VMMs: a range that another server on the host is unlikely to share.
pub fn first_uid(owner: &str) -> u32 {
    let number = u32::from_str_radix(&owner[..4], 16).unwrap_or(0);
    space_hostd::uids::DEFAULT_BASE
        + (number % 4096) * u32::try_from(space_core::limits::SANDBOXES_PER_NODE_MAX).unwrap_or(1000)
}
