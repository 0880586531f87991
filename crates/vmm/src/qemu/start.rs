//! Starting a QEMU process, or taking hold of one that runs.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;

use serde_json::{Value, json};
use space_hostd::host::Host;
use space_hostd::pool::Area;
use space_hostd::process::{self, FIRST_INHERITED, VmmProcess};
use space_hostd::protocol::Start;

use super::PATIENCE;
use super::QemuConfig;
use super::args::{self, Begin, Fds};
use super::qmp::Qmp;
use super::vm::{QemuVm, exit_reason};
use crate::dir::{AGENT_SOCKET, DEVICE_STATE, DISK, MEMORY, QMP_SOCKET};
use crate::said::Said;
use crate::{AfterRestore, ProcessIdentity, VmDir, VmSpec, VmmError, within};

const OPEN_FILES: u64 = 512;
/// What QEMU inherits, in this order: the sockets it listens on, and the state it is to load.
const FDS: Fds = Fds { qmp: FIRST_INHERITED, agent: FIRST_INHERITED + 1 };
const STATE_FD: i32 = FIRST_INHERITED + 2;

struct Started {
    process: VmmProcess,
    qmp: Qmp,
    said: Said,
}

/// Starts QEMU with its sockets inherited and the monitor connection open. `state` is the device state to load.
async fn start(
    (config, host): (&QemuConfig, &Host),
    spec: &VmSpec,
    dir: &VmDir,
    begin: Begin,
    state: Option<OwnedFd>,
) -> Result<Started, VmmError> {
    let (qmp, agent) = (dir.listen(QMP_SOCKET)?, dir.listen(AGENT_SOCKET)?);
    let stream = dir.connect(QMP_SOCKET)?;
    let args = args::build(config, spec, &FDS, begin);
    let disk_bytes = std::fs::metadata(dir.file(DISK)).map_err(dir.error("inspect", DISK))?.len();
    let (said, stderr) = Said::listen(dir)?;
    let start = Start {
        driver: super::NAME.to_owned(),
        args,
        // Found by the folder.
        area: Area::Sandboxes,
        name: String::new(),
        slot: spec.jail.slot,
        group: spec.jail.group.clone(),
        boot: matches!(begin, Begin::Boot { .. }),
        given: [MEMORY, DISK].map(str::to_owned).to_vec(),
        open_files: OPEN_FILES,
        // No file of it may outgrow what it was given, whatever becomes of QEMU.
        file_size_bytes: disk_bytes.max(u64::from(spec.memory_mib) << 20),
    };
    let fds: Vec<OwnedFd> = [Some(stderr), Some(qmp), Some(agent), state].into_iter().flatten().collect();
    let process = host.start(dir.path(), start, &fds)?;
    Ok(Started { process, qmp: Qmp::new(stream), said })
}

/// Waits for `act`, and kills a QEMU for which it fails: nothing half-started is left.
async fn or_kill<T>(started: &Started, act: impl Future<Output = Result<T, VmmError>>) -> Result<T, VmmError> {
    let result = tokio::select! {
        result = act => result,
        exit = started.process.wait() => Err(died(started, exit).await),
    };
    match result {
        Err(VmmError::Disconnected { .. }) => {
            started.process.kill()?;
            Err(died(started, started.process.wait().await).await)
        }
        Err(error) => {
            started.process.kill()?;
            started.process.wait().await;
            Err(error)
        }
        fine => fine,
    }
}

async fn died(started: &Started, exit: process::Exit) -> VmmError {
    VmmError::Died { reason: exit_reason(exit, None), said: started.said.last_words().await }
}

/// What every connection begins with. The capability serves both saving and loading; unlike that of events it cannot be
/// given on the command line, which is faster: QEMU reads its monitor one byte at a time.
async fn negotiate(qmp: &Qmp) -> Result<Vec<super::qmp::Pending>, VmmError> {
    let capabilities = json!({"capabilities": [{"capability": "x-ignore-shared", "state": true}]});
    Ok(vec![
        qmp.send("qmp_capabilities", Value::Null, None).await?,
        qmp.send("migrate-set-capabilities", capabilities, None).await?,
    ])
}

pub(super) async fn boot(
    config: (&QemuConfig, &Host),
    spec: &VmSpec,
    dir: &VmDir,
    tsc_khz: Option<u64>,
) -> Result<QemuVm, VmmError> {
    dir.create_memory(u64::from(spec.memory_mib) << 20)?;
    let started = start(config, spec, dir, Begin::Boot { tsc_khz }, None).await?;
    or_kill(&started, async {
        for pending in negotiate(&started.qmp).await? {
            pending.answer().await?;
        }
        Ok(())
    })
    .await?;
    Ok(QemuVm::new(dir.clone(), started.process, started.qmp))
}

pub(super) async fn restore(
    config: (&QemuConfig, &Host),
    spec: &VmSpec,
    dir: &VmDir,
    then: AfterRestore,
) -> Result<QemuVm, VmmError> {
    let state: OwnedFd = dir.open(DEVICE_STATE, OpenOptions::new().read(true))?.into();
    let uri = format!("fd:{STATE_FD}");
    let started = start(config, spec, dir, Begin::Incoming, Some(state)).await?;
    let loaded = or_kill(&started, async {
        let mut pending = negotiate(&started.qmp).await?;
        pending.push(started.qmp.send("migrate-incoming", json!({"uri": uri}), None).await?);
        for pending in pending {
            pending.answer().await?;
        }
        if !started.qmp.migrated("migrate-incoming").await? {
            // It says why and then ends by itself.
            let end = within("the end", PATIENCE, started.process.wait()).await?;
            return Err(died(&started, end).await);
        }
        if then == AfterRestore::Run {
            started.qmp.call("cont", Value::Null).await?;
        }
        Ok(())
    });
    match loaded.await {
        // QEMU ends by itself when a state does not fit.
        Err(VmmError::Died { reason: crate::ExitReason::Failed { .. }, said }) => {
            Err(VmmError::BadState { message: said })
        }
        other => other,
    }?;
    Ok(QemuVm::new(dir.clone(), started.process, started.qmp))
}

pub(super) async fn adopt(host: &Host, dir: &VmDir, identity: ProcessIdentity) -> Result<QemuVm, VmmError> {
    let process = host.open(identity)?;
    let qmp = Qmp::new(dir.connect(QMP_SOCKET)?);
    for pending in negotiate(&qmp).await? {
        pending.answer().await?;
    }
    let status = qmp.call("query-status", Value::Null).await?;
    let vm = QemuVm::new(dir.clone(), process, qmp);
    if status["status"] == "shutdown" {
        vm.note_shutdown();
    }
    Ok(vm)
}
