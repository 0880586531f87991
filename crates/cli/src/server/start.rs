//! Starts both halves and waits until both are ready.

use std::path::PathBuf;
use std::sync::Arc;

use space_control::{ControlConfig, ControlError, NodeEndpoint};
use space_hostd::probe::{self, HostFacts};
use space_node::{Node, NodeConfig};
use space_vmm::guest_kernel;
use space_vmm::qemu::{Accel, Qemu, QemuConfig};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::config::{DriverChoice, ServerConfig};
use crate::failure::Failure;
use crate::host::pool;

/// Left to the host when the configuration does not say how much memory sandboxes may have.
const HOST_SHARE: u64 = 8;
/// Room of the pool that running guests may still need; of a small pool, a part of it.
const POOL_RESERVE_BYTES: u64 = 1 << 30;
const POOL_RESERVE_PART: u64 = 8;

pub struct Running {
    pub url: String,
    pub admin_key: String,
    control: Option<JoinHandle<Result<(), ControlError>>>,
    end: Option<oneshot::Sender<()>>,
    node: Node,
}

fn failure(error: impl std::error::Error + Send + Sync + 'static) -> Failure {
    Failure::from(anyhow::Error::from(error))
}

fn driver(config: &ServerConfig, facts: &HostFacts) -> (Qemu, String, String) {
    let defaults = QemuConfig::new(config.data_dir.join("jails"));
    let (accel, label) = match config.driver {
        DriverChoice::QemuKvm => (Accel::Kvm, "qemu-kvm"),
        DriverChoice::Auto if facts.kvm.is_usable() => (Accel::Kvm, "qemu-kvm"),
        DriverChoice::Auto | DriverChoice::QemuTcg => (defaults.accel, "qemu-tcg"),
    };
    let program = config.vmm_program.clone().unwrap_or_else(|| defaults.program.clone());
    (Qemu::new(QemuConfig { program, accel, ..defaults }), label.to_owned(), facts.kvm.sentence())
}

fn machine_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

fn node_config(config: &ServerConfig) -> Result<NodeConfig, Failure> {
    let facts = probe::host();
    let kernel = guest_kernel::open(&config.kernel_dir)
        .map_err(|e| Failure::new(format!("the guest kernel is not there ({e}): run `sudo space setup`")))?;
    let initramfs = config.initramfs();
    if !initramfs.exists() {
        return Err(Failure::new(format!("{} is not there: run `sudo space setup`", initramfs.display())));
    }
    let pool = pool::open(config)?;
    let total = pool.usage().map_err(failure)?.total;
    let (driver, driver_label, driver_reason) = driver(config, &facts);
    Ok(NodeConfig {
        node_id: machine_name(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        data_dir: config.data_dir.clone(),
        pool,
        driver: Arc::new(driver),
        driver_label,
        driver_reason,
        kernel: kernel.image,
        kernel_version: kernel.version,
        kernel_args: config.kernel_args.clone(),
        initramfs,
        data_listen: config.data_listen,
        grpc_socket: socket(config),
        tokens: space_control::token_verifier(&config.data_dir).map_err(failure)?,
        memory_budget_bytes: config.memory_bytes.unwrap_or(facts.memory_bytes - facts.memory_bytes / HOST_SHARE),
        memory_total_bytes: facts.memory_bytes,
        sandboxes_max: config.sandboxes,
        cpus: u32::try_from(facts.cpus).unwrap_or(1),
        pool_reserve_bytes: POOL_RESERVE_BYTES.min(total / POOL_RESERVE_PART),
        warm: config.warm,
    })
}

fn socket(config: &ServerConfig) -> PathBuf {
    config.run_dir().join("node.sock")
}

/// The node first: the control plane looks at what it holds.
pub async fn start(config: &ServerConfig) -> Result<Running, Failure> {
    let prepared = config.clone();
    let node = tokio::task::spawn_blocking(move || node_config(&prepared)).await.map_err(failure)??;
    let node = Node::start(node).await.map_err(failure)?;
    let control = ControlConfig::new(config.listen, config.data_dir.clone(), NodeEndpoint::Unix(socket(config)));
    let (ready_sender, ready) = oneshot::channel();
    let (end, ended) = oneshot::channel::<()>();
    let control = tokio::spawn(space_control::serve(control, ready_sender, async {
        let _ = ended.await;
    }));
    // The sender goes with the task: one that fails leaves nobody waiting.
    if let Ok(ready) = ready.await {
        let (url, admin_key) = (format!("http://{}", ready.addr), ready.admin_key.secret.clone());
        return Ok(Running { url, admin_key, control: Some(control), end: Some(end), node });
    }
    let said = control.await;
    node.stop().await;
    match said {
        Ok(Err(error)) => Err(failure(error)),
        _ => Err(Failure::new("the control plane ended before it was ready")),
    }
}

impl Running {
    /// Ready when the control plane ended by itself.
    pub async fn failed(&mut self) -> Failure {
        let Some(control) = &mut self.control else { return std::future::pending().await };
        let ended = control.await;
        self.control = None;
        match ended {
            Ok(Err(error)) => failure(error),
            _ => Failure::new("the control plane ended unexpectedly"),
        }
    }

    /// Ends both halves; sandboxes go on.
    pub async fn stop(mut self) {
        if let Some(end) = self.end.take() {
            let _ = end.send(());
        }
        if let Some(control) = self.control.take() {
            let _ = control.await;
        }
        self.node.stop().await;
    }
}
