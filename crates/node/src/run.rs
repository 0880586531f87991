//! One VM of a sandbox, from the snapshot of a template to the last trace of it.
//!
//! ```text
//! snapshot ─▶ record ─▶ VMM restored ─▶ record with its pid ─▶ guest refreshed ─▶ record confirmed ─▶ Live
//! ```
//! Every step may be the last this process does: what is there then is found by name (the subvolume, the cgroup) at the
//! next start. `destroy` removes a VM in whatever step it is, and may be repeated.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use space_core::SandboxId;
use space_hostd::cgroup::{Limits, Weight};
use space_hostd::host::Group;
use space_hostd::points;
use space_hostd::pool::Area;
use space_hostd::uids::{Slot, Slots};
use space_proto::guest::RefreshRequest;
use space_vmm::{AfterRestore, Jail, Vm, VmDir, VmSpec};

use crate::NodeError;
use crate::capacity::{OVERHEAD_BYTES, Promise};
use crate::guest::Guest;
use crate::record::Record;
use crate::runs::Runs;
use crate::template::Template;

/// Tasks of a VMM: its own threads, not the guest's processes.
const VMM_TASKS: u32 = 128;

/// A VM process with its files, cgroup, user and memory promise. It belongs to a sandbox, or is parked for one.
pub struct Machine {
    pub area: Area,
    pub name: String,
    pub dir: PathBuf,
    pub vm: Arc<dyn Vm>,
    pub group: Group,
    pub slot: SlotGuard,
    /// Gives the memory back when the machine goes.
    pub promise: Promise,
}

/// A VM that a sandbox owns and that answers.
pub struct Live {
    pub record: Record,
    pub machine: Machine,
    pub guest: Guest,
}

impl Live {
    /// A VM whose guest has confirmed its identity. Only from here on the next start of the service would adopt it: one that
    /// has no clock, entropy and name of its own must never pass for a sandbox.
    pub async fn confirmed(
        runs: &Arc<Runs>,
        mut record: Record,
        machine: Machine,
        guest: Guest,
    ) -> Result<Self, NodeError> {
        record.confirmed = true;
        if let Err(error) = record.write(&machine.dir) {
            machine.destroy(runs).await?;
            return Err(error);
        }
        points::reach("run.confirmed");
        Ok(Self { record, machine, guest })
    }
}

/// A slot that goes back when the VMM is gone.
pub struct SlotGuard {
    slots: Arc<Slots>,
    pub slot: Slot,
}

impl SlotGuard {
    pub fn take(slots: &Arc<Slots>) -> Result<Self, NodeError> {
        let slot = slots.take();
        let slot = slot.ok_or_else(|| NodeError::NoCapacity("the node has no more room for sandboxes".to_owned()))?;
        Ok(Self { slots: slots.clone(), slot })
    }

    /// Of a VMM that runs already.
    pub fn claim(slots: &Arc<Slots>, slot: Slot) -> Option<Self> {
        slots.claim(slot).then(|| Self { slots: slots.clone(), slot })
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        self.slots.release(self.slot);
    }
}

pub fn unix_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

pub fn vm_spec(runs: &Runs, memory_mib: u32, vcpus: u32, slot: &SlotGuard, group: &str) -> VmSpec {
    VmSpec {
        memory_mib,
        vcpus: u8::try_from(vcpus).unwrap_or(u8::MAX),
        cmdline: runs.config.kernel_args.clone(),
        jail: Jail { slot: slot.slot, group: group.to_owned() },
    }
}

pub fn limits(memory_mib: u32, vcpus: u32, weight: Weight) -> Limits {
    Limits {
        memory_bytes: (u64::from(memory_mib) << 20) + OVERHEAD_BYTES,
        // One CPU more than the guest has: the VMM's own threads must not starve behind it.
        cpu_millis: (vcpus + 1) * 1000,
        pids: VMM_TASKS,
        weight,
    }
}

/// What only the host knows, for a guest that was frozen.
pub fn refresh(hostname: &str, env: HashMap<String, String>, template: &Template) -> Result<RefreshRequest, NodeError> {
    let mut random = [0u8; 80];
    getrandom::fill(&mut random).map_err(|e| NodeError::Guest(format!("the host has no entropy: {e}")))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(RefreshRequest {
        realtime_ns: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
        entropy: bytes::Bytes::copy_from_slice(&random[..64]),
        hostname: hostname.to_owned(),
        machine_id: random[64..].iter().map(|b| format!("{b:02x}")).collect(),
        env,
        defaults: Some(template.meta.defaults()),
        thaw: true,
        forget_ended: true,
        ..RefreshRequest::default()
    })
}

/// A new VM from a template, under a name of its own. On failure nothing is left. Without a record it is nobody's, and
/// gives way to those that are somebody's.
pub async fn restore(
    runs: &Arc<Runs>,
    template: Arc<Template>,
    area: Area,
    name: &str,
    record: Option<&Record>,
    promise: Promise,
) -> Result<Machine, NodeError> {
    let begun = Instant::now();
    let meta = &template.meta;
    let slot = SlotGuard::take(&runs.slots)?;
    let (from, to) = (template.name.clone(), name.to_owned());
    let made = runs.blocking({
        let weight = if record.is_some() { Weight::Normal } else { Weight::Background };
        let memory = limits(meta.memory_mib, meta.vcpus, weight);
        move |runs| {
            let dir = runs.config.host.snapshot((Area::Templates, &from), (area, &to), false)?;
            Ok((dir, runs.config.host.create_group(&to, memory)?))
        }
    });
    let (dir, group) = match made.await {
        Ok(made) => made,
        Err(error) => {
            destroy(runs, area, name, name, None).await?;
            return Err(error);
        }
    };
    let snapshot = begun.elapsed();
    let spec = vm_spec(runs, meta.memory_mib, meta.vcpus, &slot, group.name());
    let started = async {
        if let Some(record) = record {
            Record { slot: slot.slot, ..record.clone() }.write(&dir)?;
            points::reach("run.recorded");
        }
        let vm: Arc<dyn Vm> = Arc::from(runs.config.driver.restore(&spec, &VmDir::new(&dir), AfterRestore::Run).await?);
        if let Some(record) = record {
            points::reach("run.started");
            Record { slot: slot.slot, vmm: Some(vm.identity()), ..record.clone() }.write(&dir)?;
            points::reach("run.named");
        }
        Ok(vm)
    };
    match started.await {
        Ok(vm) => {
            let (snapshot_us, all_us) = (snapshot.as_micros(), begun.elapsed().as_micros());
            tracing::debug!(name, snapshot_us, all_us, "restored");
            Ok(Machine { area, name: name.to_owned(), dir, vm, group, slot, promise })
        }
        Err(error) => {
            destroy(runs, area, name, name, None).await?;
            Err(error)
        }
    }
}

/// Ends whatever there is of a VM and removes its files. Nothing there is no error.
pub async fn destroy(
    runs: &Arc<Runs>,
    area: Area,
    name: &str,
    group: &str,
    vm: Option<&Arc<dyn Vm>>,
) -> Result<(), NodeError> {
    if let Some(vm) = vm {
        vm.kill().await?;
        // The end of the process frees its files; a second is long for that.
        let _ = tokio::time::timeout(Duration::from_secs(10), vm.wait()).await;
        points::reach("delete.killed");
    }
    let (name, group) = (name.to_owned(), group.to_owned());
    runs.blocking(move |runs| {
        runs.config.host.group(&group).end()?;
        runs.config.host.delete(area, &name)?;
        points::reach("delete.removed");
        Ok(())
    })
    .await
}

impl Machine {
    pub async fn destroy(self, runs: &Arc<Runs>) -> Result<(), NodeError> {
        destroy(runs, self.area, &self.name, self.group.name(), Some(&self.vm)).await
    }

    /// Gives a parked VM's folder to a sandbox.
    pub fn move_to(&mut self, runs: &Runs, sandbox: &SandboxId) -> Result<(), NodeError> {
        let host = &runs.config.host;
        self.dir = host.rename((self.area, &self.name), (Area::Sandboxes, sandbox.as_str()))?;
        self.area = Area::Sandboxes;
        self.name = sandbox.to_string();
        self.vm.moved(&VmDir::new(&self.dir));
        Ok(())
    }
}
