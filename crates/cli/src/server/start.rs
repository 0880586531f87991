//! Starts the processes of a server, waits until they are ready, and starts one anew that dies.
//!
//! ```text
//! space up (root: holds the lock, the doors and the children, and serves nobody)
//!   ├─ space-hostd        root, cut down
//!   ├─ space role node    a user of its own, no rights
//!   └─ space role control a user of its own, no rights
//! ```
//! Sockets are opened here and inherited, so that a client of a process that is started anew waits instead of failing. The
//! children end with us, whatever ends us: each watches a pipe of ours.

use std::convert::Infallible;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use space_hostd::probe;
use space_hostd::service;
use space_vmm::guest_kernel;

use super::child::{Child, Kind, Plan};
use super::lock::Lock;
use super::role::{ControlRole, LogRole, NodeRole, Said};
use super::{folders, users};
use crate::config::ServerConfig;
use crate::failure::Failure;
use crate::host::{firecracker, pool, vmm};

/// Left to the host when the configuration does not say how much memory sandboxes may have.
const HOST_SHARE: u64 = 8;
/// Room of the pool that running guests may still need; of a small pool, a part of it.
const POOL_RESERVE_BYTES: u64 = 1 << 30;
const POOL_RESERVE_PART: u64 = 8;
/// Ends of children within a time; what is beyond some makes the next start wait.
const DEATHS_FREE: usize = 30;
const DEATHS_WITHIN: Duration = Duration::from_secs(60);
const PAUSE_STEP: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(15);
/// A node finishes the VM it is parking; the control plane its open requests.
const STOP_PATIENCE: Duration = Duration::from_secs(30);
/// Of builds, where the host needs one.
const PROXIES: [&str; 6] = ["http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"];

pub struct Running {
    pub url: String,
    pub admin_key: String,
    host: Child,
    node: Child,
    control: Child,
}

pub(super) fn failure(error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::from(anyhow::Error::from(error))
}

fn machine_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// `space-hostd`, beside this program unless it is named.
fn host_program() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe().map_err(failure)?;
    let beside = own.parent().unwrap_or(Path::new("/")).join("space-hostd");
    let program = crate::env::get(crate::env::HOSTD).map_or(beside, PathBuf::from);
    if space_hostd::process::is_program(&program) {
        return Ok(program);
    }
    let hint = "install it beside `space`, or name it in SPACE_HOSTD (an absolute path)";
    Err(Failure::new(format!("{} is missing: {hint}", program.display())))
}

struct Plans {
    host: Plan,
    node: Plan,
    control: Plan,
}

fn plans(config: &ServerConfig, lock: &OwnedFd) -> Result<Plans, Failure> {
    let facts = probe::host();
    if config.core_scheduling && space_hostd::process::core_scheduling() == Some(false) {
        let hint = "take a kernel with CONFIG_SCHED_CORE, turn hyper-threads off, or set it to off";
        return Err(Failure::new(format!("vmm.core_scheduling is on, and this kernel has no core scheduling: {hint}")));
    }
    let kernel = guest_kernel::open(&config.kernel_dir)
        .map_err(|e| Failure::new(format!("the guest kernel is not there ({e}): run `sudo space setup`")))?;
    let initramfs = config.initramfs();
    if !initramfs.exists() {
        return Err(Failure::new(format!("{} is not there: run `sudo space setup`", initramfs.display())));
    }
    let pool = pool::open(config)?;
    let total = pool.usage().map_err(failure)?.total;
    let users = users::of(&config.data_dir);
    folders::prepare(config, &users)?;
    let chosen = vmm::choose(config.driver, config.vmm_program.clone(), firecracker::place(config), &facts.kvm);
    let listen = |address: std::net::SocketAddr| {
        let hint = "is another server running, or is the address not this machine's?";
        TcpListener::bind(address).map_err(|e| Failure::new(format!("cannot listen on {address}: {e}; {hint}")))
    };
    let (api, data) = (listen(config.listen)?, listen(config.data_listen)?);
    let host_socket = folders::socket(config, "hostd.sock");
    let node_socket = folders::socket(config, "node.sock");
    let host_door = folders::listen_packets(&host_socket, users.node)?;
    let node_door = folders::listen(&node_socket, users.control)?;
    let tokens = space_control::token_verifier(&config.control_dir()).map_err(failure)?.to_bytes();
    folders::give(&config.control_dir(), users.control)?;
    let log = LogRole { filter: config.log.clone(), format: config.log_format };
    let own = std::env::current_exe().map_err(failure)?;
    let drill = crate::env::get(crate::env::DRILL).map(PathBuf::from);

    let host = service::Config {
        owner: users.owner.clone(),
        pool: pool.root().to_owned(),
        jails: config.data_dir.join("jails"),
        builds: config.data_dir.join("build"),
        builder: Some((own.clone(), vec!["role".to_owned(), "builder".to_owned()])),
        build_env: PROXIES.iter().filter_map(|name| Some(format!("{name}={}", crate::env::get(name)?))).collect(),
        node: (users.node, users.node),
        uids: users.vmms,
        vmms: [(chosen.driver.name().to_owned(), chosen.driver.host_program(kernel.image, initramfs))].into(),
        core_scheduling: config.core_scheduling && space_hostd::process::core_scheduling().is_some(),
        drill: drill.clone(),
    };
    let node = NodeRole {
        log: log.clone(),
        node_id: machine_name(),
        data_dir: config.data_dir.clone(),
        host_socket,
        pool: pool.root().to_owned(),
        vmm: chosen.driver,
        driver_label: chosen.label.to_owned(),
        driver_reason: chosen.reason,
        kernel_version: kernel.version,
        kernel_args: config.kernel_args.clone(),
        tokens,
        memory_budget_bytes: config.memory_bytes.unwrap_or(facts.memory_bytes - facts.memory_bytes / HOST_SHARE),
        memory_total_bytes: facts.memory_bytes,
        sandboxes_max: config.sandboxes,
        cpus: u32::try_from(facts.cpus).unwrap_or(1),
        pool_reserve_bytes: POOL_RESERVE_BYTES.min(total / POOL_RESERVE_PART),
        warm: config.warm,
        drill: drill.clone(),
    };
    let control = ControlRole { log, dir: config.control_dir(), node_socket, drill };
    let share = || lock.try_clone().map_err(failure);
    let role = |name: &str| vec!["role".to_owned(), name.to_owned()];
    Ok(Plans {
        host: Plan {
            kind: Kind::Host,
            program: host_program()?,
            args: Vec::new(),
            user: 0,
            line: line(&host)?,
            doors: vec![host_door, share()?],
        },
        node: Plan {
            kind: Kind::Role,
            program: own.clone(),
            args: role("node"),
            user: users.node,
            line: line(&node)?,
            doors: vec![share()?, data.into(), node_door],
        },
        control: Plan {
            kind: Kind::Role,
            program: own,
            args: role("control"),
            user: users.control,
            line: line(&control)?,
            doors: vec![share()?, api.into()],
        },
    })
}

/// What a child is told.
fn line(role: &impl serde::Serialize) -> Result<Vec<u8>, Failure> {
    let mut line = serde_json::to_vec(role).map_err(failure)?;
    line.push(b'\n');
    Ok(line)
}

/// The root process first, then the node: the control plane looks at what it holds.
pub async fn start(config: &ServerConfig, lock: &Lock) -> Result<Running, Failure> {
    let (prepared, shared) = (config.clone(), lock.share().map_err(failure)?);
    let plans = tokio::task::spawn_blocking(move || plans(&prepared, &shared)).await.map_err(failure)??;
    let host = Child::start(plans.host)?;
    let mut node = Child::start(plans.node)?;
    node.said().await?;
    let mut control = Child::start(plans.control)?;
    match control.said().await? {
        Said::Serving { address, admin_key } => {
            Ok(Running { url: format!("http://{address}"), admin_key, host, node, control })
        }
        _ => Err(Failure::new("the control plane said something else than that it serves")),
    }
}

impl Running {
    /// Starts anew what dies, as often as it does: sandboxes run on, and only a server can reach them.
    pub async fn keep(&mut self) -> Infallible {
        // Each on its own: one that cannot start may be waiting for another.
        tokio::join!(keep(&mut self.host), keep(&mut self.node), keep(&mut self.control)).0
    }

    /// Ends all three; sandboxes go on.
    pub async fn stop(mut self) {
        for child in [&mut self.control, &mut self.node] {
            child.stop(STOP_PATIENCE).await;
        }
        // It has nothing to finish: what it does may be repeated.
        self.host.stop(Duration::ZERO).await;
    }
}

/// Starts a child anew whenever it ends. Each death soon after others makes it wait longer.
async fn keep(child: &mut Child) -> Infallible {
    let mut deaths: Vec<Instant> = Vec::new();
    loop {
        let exit = child.process.wait().await;
        tracing::warn!(process = child.name(), ?exit, "a process of the server ended; starting it anew");
        loop {
            let now = Instant::now();
            deaths.retain(|death| now.duration_since(*death) < DEATHS_WITHIN);
            deaths.push(now);
            let many = u32::try_from(deaths.len().saturating_sub(DEATHS_FREE)).unwrap_or(u32::MAX);
            if many > 0 {
                tokio::time::sleep(PAUSE_STEP.saturating_mul(many).min(PAUSE_MAX)).await;
            }
            match child.restart().await {
                Ok(()) => break,
                Err(error) => {
                    tracing::error!(process = child.name(), error = error.message, "it could not be started anew");
                }
            }
        }
    }
}

/// Descriptors of a plan, for one more child.
pub(super) fn copies(fds: &[OwnedFd]) -> Result<Vec<OwnedFd>, Failure> {
    fds.iter().map(|fd| fd.try_clone().map_err(failure)).collect()
}
