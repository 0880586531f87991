//! The processes of a server: what each is told, and what it does with it. Their descriptors have fixed numbers.
//!
//! Each reads one line of JSON from its lifeline; when that ends, whoever started it is gone, and so is it, at once and as after
//! a crash. The node and the control plane have users of their own and no rights beyond those; the builder has some of root's, in
//! a workshop that the root process made for it.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use space_control::{ControlConfig, NodeEndpoint};
use space_core::token::TokenVerifier;
use space_hostd::build;
use space_hostd::host::Host;
use space_hostd::points;
use space_hostd::process::inherited;
use space_image::remote::{self, Places};
use space_node::{Node, NodeConfig, WarmSize};
use space_vmm::DriverConfig;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::config::LogFormat;
use crate::failure::Failure;

pub const LIFELINE: i32 = 3;
pub const LOCK: i32 = 4;
/// The node: its data plane and its door for the control plane. The control plane: its API.
pub const FIRST_DOOR: i32 = 5;
const LINE_MAX_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Name {
    Node,
    Control,
    Builder,
}

/// One of the processes that `space up` starts
#[derive(Args)]
pub struct Role {
    name: Name,
}

#[derive(Clone, Serialize, Deserialize)]
pub struct LogRole {
    pub filter: String,
    pub format: LogFormat,
}

#[derive(Clone, Serialize, Deserialize)]
pub struct NodeRole {
    pub log: LogRole,
    pub node_id: String,
    pub data_dir: PathBuf,
    pub host_socket: PathBuf,
    pub pool: PathBuf,
    pub vmm: DriverConfig,
    pub driver_label: String,
    pub driver_reason: String,
    pub kernel_version: String,
    pub kernel_args: String,
    /// The public key of attach tokens.
    pub tokens: [u8; 32],
    pub memory_budget_bytes: u64,
    pub memory_total_bytes: u64,
    pub cpus: u32,
    pub sandboxes_max: u32,
    pub pool_reserve_bytes: u64,
    pub warm: WarmSize,
    pub drill: Option<PathBuf>,
}

#[derive(Clone, Serialize, Deserialize)]
pub struct ControlRole {
    pub log: LogRole,
    /// Of its own.
    pub dir: PathBuf,
    pub node_socket: PathBuf,
    pub drill: Option<PathBuf>,
}

/// What a role says once, on the descriptor after its doors.
#[derive(Serialize, Deserialize)]
pub enum Said {
    Ready,
    Serving { address: SocketAddr, admin_key: String },
    Failed(String),
}

fn failure(error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::from(anyhow::Error::from(error))
}

fn taken(fd: i32) -> Result<OwnedFd, Failure> {
    inherited(fd).map_err(|e| Failure::new(format!("`space up` starts this, not people (descriptor {fd}: {e})")))
}

/// Reads what we are told, and ends this process with the one who told us.
fn told<T: DeserializeOwned>() -> Result<T, Failure> {
    let mut lifeline = BufReader::new(File::from(taken(LIFELINE)?));
    let mut line = String::new();
    lifeline.by_ref().take(LINE_MAX_BYTES).read_line(&mut line).map_err(failure)?;
    let role = serde_json::from_str(&line).map_err(failure)?;
    std::thread::spawn(move || {
        let _ = lifeline.read(&mut [0]);
        std::process::exit(1);
    });
    Ok(role)
}

fn say(fd: OwnedFd, said: &Said) -> Result<(), Failure> {
    let mut line = serde_json::to_vec(said).map_err(failure)?;
    line.push(b'\n');
    File::from(fd).write_all(&line).map_err(failure)
}

impl Role {
    pub fn execute(self) -> Result<i32, Failure> {
        // Nobody of the same user may look into it, and it leaves no core.
        nix::sys::prctl::set_dumpable(false).map_err(failure)?;
        match self.name {
            Name::Node => node(),
            Name::Control => control(),
            Name::Builder => builder(),
        }
    }
}

/// Runs a server to its end; what keeps it from starting is said to whoever started it.
fn serve(answer: OwnedFd, work: impl Future<Output = Result<i32, Failure>>) -> Result<i32, Failure> {
    let done = crate::on_many_threads(work);
    if let Err(error) = &done {
        let _ = say(answer, &Said::Failed(error.message.clone()));
    }
    done
}

fn copy(fd: &OwnedFd) -> Result<OwnedFd, Failure> {
    fd.try_clone().map_err(failure)
}

fn node() -> Result<i32, Failure> {
    let role: NodeRole = told()?;
    let lock = taken(LOCK)?;
    role.drill.clone().into_iter().for_each(points::obey);
    let (data, grpc, answer) = (taken(FIRST_DOOR)?, taken(FIRST_DOOR + 1)?, taken(FIRST_DOOR + 2)?);
    super::log::start(&role.log.filter, role.log.format, None)?;
    let ready = copy(&answer)?;
    let done = serve(answer, async move {
        let host = Host::at(&role.host_socket, &role.pool);
        let tokens = TokenVerifier::from_bytes(&role.tokens).ok_or_else(|| Failure::new("no key for tokens"))?;
        let config = NodeConfig {
            node_id: role.node_id,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            data_dir: role.data_dir,
            driver: role.vmm.driver(host.clone()),
            host,
            driver_label: role.driver_label,
            driver_reason: role.driver_reason,
            kernel_version: role.kernel_version,
            kernel_args: role.kernel_args,
            data: data.into(),
            grpc: grpc.into(),
            tokens,
            memory_budget_bytes: role.memory_budget_bytes,
            memory_total_bytes: role.memory_total_bytes,
            cpus: role.cpus,
            sandboxes_max: role.sandboxes_max,
            pool_reserve_bytes: role.pool_reserve_bytes,
            warm: role.warm,
        };
        // A VMM that is missing or must not be used is found now, not by the first sandbox.
        config.driver.version().await.map_err(failure)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(failure)?;
        let node = Node::start(config).await.map_err(failure)?;
        say(ready, &Said::Ready)?;
        terminate.recv().await;
        node.stop().await;
        Ok(0)
    });
    drop(lock);
    done
}

fn control() -> Result<i32, Failure> {
    let role: ControlRole = told()?;
    let lock = taken(LOCK)?;
    let (api, answer) = (taken(FIRST_DOOR)?, taken(FIRST_DOOR + 1)?);
    super::log::start(&role.log.filter, role.log.format, None)?;
    let ready = copy(&answer)?;
    let done = serve(answer, async move {
        let listener = std::net::TcpListener::from(api);
        let address = listener.local_addr().map_err(failure)?;
        let mut config = ControlConfig::new(address, role.dir, NodeEndpoint::Unix(role.node_socket));
        config.listener = Some(Arc::new(listener));
        if let Some(file) = role.drill {
            points::obey(file);
            config.points = space_control::Points::new(|point| {
                points::reach(point);
                false
            });
        }
        let mut terminate = signal(SignalKind::terminate()).map_err(failure)?;
        let (sender, started) = oneshot::channel();
        let serving = space_control::serve(config, sender, async move {
            terminate.recv().await;
        });
        tokio::pin!(serving);
        tokio::select! {
            ended = &mut serving => return ended.map(|()| 0).map_err(failure),
            started = started => {
                let started = started.map_err(failure)?;
                say(ready, &Said::Serving { address: started.addr, admin_key: started.admin_key.secret })?;
            }
        }
        serving.await.map(|()| 0).map_err(failure)
    });
    drop(lock);
    done
}

/// In a workshop: everything has its fixed place.
fn builder() -> Result<i32, Failure> {
    let stream = std::os::unix::net::UnixStream::from(taken(LIFELINE)?);
    let places = Places {
        work: build::WORK.into(),
        disk: PathBuf::from(build::OUT).join(space_vmm::dir::DISK),
        file: build::SOURCE_FILE.into(),
        folder: build::SOURCE_FOLDER.into(),
    };
    remote::serve(stream, &places).map_err(failure)?;
    Ok(0)
}
