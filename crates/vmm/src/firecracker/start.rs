//! Starting a Firecracker process, or taking hold of one that runs.
//!
//! Firecracker makes its sockets itself, in `run/`, which is the node's folder and open to the VMM for that only: with a folder
//! in which it may make files, a VMM that a guest has taken over could fill the pool. What a save writes, the node makes.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::time::Duration;

use nix::libc;
use nix::sys::stat::Mode;
use space_hostd::host::Host;
use space_hostd::jail;

use super::api::{self, Api, RateLimiter, TokenBucket};
use super::vm::{FirecrackerVm, exit_reason};
use super::{API_SOCKET, CONSOLE_PIPE, FirecrackerConfig, Transport, VSOCK_SOCKET, saved};
use crate::dir::{DEVICE_STATE, DISK, MEMORY, RUN};
use crate::started::{Program, Started, bad_state};
use crate::{AfterRestore, ProcessIdentity, VmDir, VmSpec, VmmError, within};

const OPEN_FILES: u64 = 1024;
const POLL: Duration = Duration::from_millis(1);
/// Of the guest; the host's side of the vsock is a Unix socket, so any number will do.
const GUEST_CID: u32 = 3;
/// What a guest may write to its serial port: a boot's messages at once, a few lines a second for ever.
const CONSOLE_LIMIT: TokenBucket = TokenBucket { size: 64 << 10, one_time_burst: Some(64 << 10), refill_time: 1000 };
/// Randomness is for seeding, not for filling disks.
const ENTROPY_LIMIT: TokenBucket = TokenBucket { size: 64 << 10, one_time_burst: None, refill_time: 1000 };

/// A Firecracker whose interface answers.
struct Ready {
    started: Started,
    api: Api,
    console: File,
}

impl Ready {
    fn into_vm(self, dir: &VmDir, reset_announced: bool) -> FirecrackerVm {
        FirecrackerVm::new(dir.clone(), self.started.process, self.api, self.console, reset_announced)
    }
}

/// Makes `run/` anew, with the pipe of the console in it.
fn make_run_folder(dir: &VmDir) -> Result<File, VmmError> {
    dir.remove_folder(RUN)?;
    std::fs::create_dir(dir.file(RUN)).map_err(dir.error("create", RUN))?;
    nix::unistd::mkfifo(&dir.file(CONSOLE_PIPE), Mode::S_IRUSR | Mode::S_IWUSR)
        .map_err(|errno| dir.error("create", CONSOLE_PIPE)(errno.into()))?;
    open_console(dir)
}

/// The reading end. Firecracker has the pipe open for both, so it neither waits for a reader nor fails without one: what
/// nobody fetches stays in the kernel's 64 KiB, and the rest is dropped.
fn open_console(dir: &VmDir) -> Result<File, VmmError> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let pipe = OpenOptions::new().read(true).custom_flags(flags).open(dir.file(CONSOLE_PIPE));
    let pipe = pipe.map_err(dir.error("open", CONSOLE_PIPE))?;
    if !pipe.metadata().is_ok_and(|meta| meta.file_type().is_fifo()) {
        return Err(dir.error("open", CONSOLE_PIPE)(std::io::Error::other("it is no pipe")));
    }
    Ok(pipe)
}

/// Starts Firecracker and waits until its interface answers. `state` is the device state that it is to load.
async fn start(
    (config, host): (&FirecrackerConfig, &Host),
    spec: &VmSpec,
    dir: &VmDir,
    state: Option<&str>,
) -> Result<Ready, VmmError> {
    let console = make_run_folder(dir)?;
    let mut args: Vec<String> = ["--api-sock", API_SOCKET, "--id", "vm", "--level", "Warn"].map(str::to_owned).to_vec();
    if config.transport == Transport::Pci {
        args.push("--enable-pci".to_owned());
    }
    let program = Program {
        driver: super::NAME,
        args,
        boot: state.is_none(),
        given: [MEMORY, DISK, RUN].into_iter().chain(state).collect(),
        open_files: OPEN_FILES,
        inherited: Vec::new(),
        exit_reason,
    };
    let started = Started::new(host, spec, dir, program)?;
    started.or_kill(async { within("its start", config.patience, listening(dir)).await? }).await?;
    Ok(Ready { started, api: Api::new(config.patience), console })
}

/// Waits for the socket of the interface.
async fn listening(dir: &VmDir) -> Result<(), VmmError> {
    while let Err(error) = dir.connect_owned(API_SOCKET).await {
        let VmmError::File { source, .. } = &error else { return Err(error) };
        if !matches!(source.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused) {
            return Err(error);
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

async fn put_serial(ready: &Ready, dir: &VmDir) -> Result<(), VmmError> {
    let serial = api::Serial { serial_out_path: CONSOLE_PIPE, rate_limiter: CONSOLE_LIMIT };
    ready.api.put(dir, "the console", "/serial", &serial).await
}

fn kernel_cmdline(config: &FirecrackerConfig, spec: &VmSpec) -> String {
    // The guest's reset ends the VM, so a panic and a reboot do. Neither probes nor waits for what the machine lacks.
    let mut line = String::from(
        "console=ttyS0 quiet panic=-1 reboot=k random.trust_cpu=on cryptomgr.notests i8042.noaux i8042.nomux \
         i8042.dumbkbd",
    );
    if config.transport == Transport::Mmio {
        line.push_str(" pci=off");
    }
    if !spec.cmdline.is_empty() {
        line.push(' ');
        line.push_str(&spec.cmdline);
    }
    line
}

async fn configure(config: &FirecrackerConfig, spec: &VmSpec, dir: &VmDir, ready: &Ready) -> Result<(), VmmError> {
    let api = &ready.api;
    let machine = api::MachineConfig { vcpu_count: spec.vcpus, mem_size_mib: spec.memory_mib, track_dirty_pages: true };
    let args = kernel_cmdline(config, spec);
    let boot = api::BootSource { kernel_image_path: jail::KERNEL, initrd_path: jail::INITRAMFS, boot_args: &args };
    let drive = api::Drive {
        drive_id: "disk",
        path_on_host: DISK,
        is_root_device: false,
        is_read_only: false,
        cache_type: "Writeback",
        rate_limiter: config.disk_limit,
    };
    let vsock = api::Vsock { guest_cid: GUEST_CID, uds_path: VSOCK_SOCKET };
    let entropy = api::Entropy { rate_limiter: RateLimiter { bandwidth: Some(ENTROPY_LIMIT), ops: None } };
    put_serial(ready, dir).await?;
    api.put(dir, "the machine", "/machine-config", &machine).await?;
    api.put(dir, "the kernel", "/boot-source", &boot).await?;
    api.put(dir, "the disk", "/drives/disk", &drive).await?;
    api.put(dir, "the guest's channel", "/vsock", &vsock).await?;
    api.put(dir, "the entropy device", "/entropy", &entropy).await?;
    let action = api::Action { action_type: "InstanceStart" };
    api.put(dir, "the start of the guest", "/actions", &action).await
}

pub(super) async fn boot(
    config: (&FirecrackerConfig, &Host),
    spec: &VmSpec,
    dir: &VmDir,
) -> Result<FirecrackerVm, VmmError> {
    saved::recover_ended(dir)?;
    dir.create_memory(u64::from(spec.memory_mib) << 20)?;
    // Nothing of the guest is in that file yet.
    saved::mark_stale(dir)?;
    let ready = start(config, spec, dir, None).await?;
    let configured = async {
        configure(config.0, spec, dir, &ready).await?;
        dir.close_folder(RUN)
    };
    ready.started.or_kill(configured).await?;
    Ok(ready.into_vm(dir, false))
}

pub(super) async fn restore(
    config: (&FirecrackerConfig, &Host),
    spec: &VmSpec,
    dir: &VmDir,
    then: AfterRestore,
) -> Result<FirecrackerVm, VmmError> {
    saved::recover_ended(dir)?;
    std::fs::metadata(dir.file(DEVICE_STATE)).map_err(dir.error("inspect", DEVICE_STATE))?;
    let memory = std::fs::metadata(dir.file(MEMORY)).map_err(dir.error("inspect", MEMORY))?.len();
    if memory != u64::from(spec.memory_mib) << 20 {
        let message = format!("the memory has {memory} bytes, and the VM {} MiB", spec.memory_mib);
        return Err(VmmError::BadState { message });
    }
    let ready = start(config, spec, dir, Some(DEVICE_STATE)).await?;
    let load = api::LoadSnapshot {
        snapshot_path: DEVICE_STATE,
        mem_backend: api::MemoryBackend { backend_type: "File", backend_path: MEMORY },
        track_dirty_pages: true,
        resume_vm: then == AfterRestore::Run,
    };
    let loaded = ready.started.or_kill(async {
        put_serial(&ready, dir).await?;
        ready.api.put(dir, "the saved state", "/snapshot/load", &load).await?;
        dir.close_folder(RUN)
    });
    loaded.await.map_err(|error| match error {
        VmmError::Refused { command: "the saved state", message } => VmmError::BadState { message },
        other => bad_state(other),
    })?;
    Ok(ready.into_vm(dir, true))
}

pub(super) async fn adopt(
    (config, host): (&FirecrackerConfig, &Host),
    dir: &VmDir,
    identity: ProcessIdentity,
) -> Result<FirecrackerVm, VmmError> {
    let process = host.open(identity)?;
    let console = open_console(dir)?;
    let api = Api::new(config.patience);
    if !process.is_stopped() {
        api.state(dir).await?;
    }
    saved::recover(dir)?;
    Ok(FirecrackerVm::new(dir.clone(), process, api, console, false))
}
