//! Starting a QEMU process, or taking hold of one that runs.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;

use serde_json::{Value, json};
use space_hostd::host::Host;
use space_hostd::process::FIRST_INHERITED;

use super::QemuConfig;
use super::args::{self, Begin, Fds};
use super::qmp::Qmp;
use super::vm::{QemuVm, exit_reason};
use crate::dir::{AGENT_SOCKET, DEVICE_STATE, DISK, MEMORY, QMP_SOCKET};
use crate::started::{Program, Started, bad_state};
use crate::{AfterRestore, ProcessIdentity, VmDir, VmSpec, VmmError, within};

const OPEN_FILES: u64 = 512;
/// What QEMU inherits, in this order: the sockets it listens on, and the state it is to load.
const FDS: Fds = Fds { qmp: FIRST_INHERITED, agent: FIRST_INHERITED + 1 };
const STATE_FD: i32 = FIRST_INHERITED + 2;

/// Starts QEMU with its sockets inherited and the monitor connection open. `state` is the device state to load.
fn start(
    (config, host): (&QemuConfig, &Host),
    spec: &VmSpec,
    dir: &VmDir,
    begin: Begin,
    state: Option<OwnedFd>,
) -> Result<(Started, Qmp), VmmError> {
    let (qmp, agent) = (dir.listen(QMP_SOCKET)?, dir.listen(AGENT_SOCKET)?);
    let stream = dir.connect(QMP_SOCKET)?;
    let program = Program {
        driver: super::NAME,
        args: args::build(config, spec, &FDS, begin),
        boot: matches!(begin, Begin::Boot { .. }),
        given: vec![MEMORY, DISK],
        open_files: OPEN_FILES,
        inherited: [qmp, agent].into_iter().chain(state).collect(),
        exit_reason: |exit| exit_reason(exit, None),
    };
    Ok((Started::new(host, spec, dir, program)?, Qmp::new(stream, config.patience)))
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
    let (started, qmp) = start(config, spec, dir, Begin::Boot { tsc_khz }, None)?;
    let begun = async {
        for pending in negotiate(&qmp).await? {
            pending.answer().await?;
        }
        Ok(())
    };
    started.or_kill(begun).await?;
    Ok(QemuVm::new(dir.clone(), started.process, qmp))
}

pub(super) async fn restore(
    config: (&QemuConfig, &Host),
    spec: &VmSpec,
    dir: &VmDir,
    then: AfterRestore,
) -> Result<QemuVm, VmmError> {
    let state: OwnedFd = dir.open(DEVICE_STATE, OpenOptions::new().read(true))?.into();
    let uri = format!("fd:{STATE_FD}");
    let (started, qmp) = start(config, spec, dir, Begin::Incoming, Some(state))?;
    let loaded = started.or_kill(async {
        let mut pending = negotiate(&qmp).await?;
        pending.push(qmp.send("migrate-incoming", json!({"uri": uri}), None).await?);
        for pending in pending {
            pending.answer().await?;
        }
        if !qmp.migrated("migrate-incoming").await? {
            // It says why and then ends by itself.
            let end = within("the end", config.0.patience, started.process.wait()).await?;
            return Err(started.died(end).await);
        }
        if then == AfterRestore::Run {
            qmp.call("cont", Value::Null).await?;
        }
        Ok(())
    });
    loaded.await.map_err(bad_state)?;
    Ok(QemuVm::new(dir.clone(), started.process, qmp))
}

pub(super) async fn adopt(
    (config, host): (&QemuConfig, &Host),
    dir: &VmDir,
    identity: ProcessIdentity,
) -> Result<QemuVm, VmmError> {
    let process = host.open(identity)?;
    let qmp = Qmp::new(dir.connect(QMP_SOCKET)?, config.patience);
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
