//! One VM of a sandbox, from the snapshot of a template to the last trace of it.
//!
//! ```text
//! snapshot ─▶ record ─▶ VMM restored ─▶ record with its pid ─▶ guest refreshed ─▶ record confirmed ─▶ Live
//! ```
//! Every step may be the last this process does: what is there then is found by name (the subvolume, the cgroup) at the
//! next start. `destroy` removes a VM in whatever step it is, and may be repeated.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use space_core::SandboxId;
use space_hostd::cgroup::{Limits, Weight};
use space_hostd::host::Group;
use space_hostd::points;
use space_hostd::pool::Area;
use space_hostd::uids::{Slot, Slots};
use space_proto::guest::{Hook, RefreshRequest};
use space_vmm::{AfterRestore, Jail, Vm, VmDir, VmSpec};

use crate::NodeError;
use crate::capacity::{OVERHEAD_BYTES, Promise};
use crate::guest::Guest;
use crate::record::{Marks, Record};
use crate::runs::Runs;
use crate::template::{Meta, Template};

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
    /// As it was at the start; what changes is in the marks.
    pub record: Record,
    pub machine: Machine,
    pub guest: Guest,
    marks: Mutex<Marks>,
    /// Calls of tenants so far: they change what no CPU time of a program tells of.
    pub calls: AtomicU64,
    /// Somebody is removing it: its end is no news.
    pub ending: AtomicBool,
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
        Ok(Self::new(record, machine, guest))
    }

    pub fn new(record: Record, machine: Machine, guest: Guest) -> Self {
        let marks = Mutex::new(record.marks);
        Self { record, machine, guest, marks, calls: AtomicU64::new(0), ending: AtomicBool::new(false) }
    }

    pub fn marks(&self) -> Marks {
        *self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down what is meant to be.
    pub fn mark(&self, change: impl FnOnce(&mut Marks)) -> Result<(), NodeError> {
        let mut held = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut marks = *held;
        change(&mut marks);
        if marks != *held {
            Record { marks, ..self.record.clone() }.write(&self.machine.dir)?;
            *held = marks;
        }
        Ok(())
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

/// 32 hexadecimal digits that nobody else has.
pub fn new_machine_id() -> Result<String, NodeError> {
    Ok(random::<16>()?.iter().map(|b| format!("{b:02x}")).collect())
}

fn random<const N: usize>() -> Result<[u8; N], NodeError> {
    let mut random = [0u8; N];
    getrandom::fill(&mut random).map_err(|e| NodeError::Guest(format!("the host has no entropy: {e}")))?;
    Ok(random)
}

pub fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

/// What only the host knows, for a guest that was frozen in a template.
pub fn refresh(hostname: &str, env: HashMap<String, String>, template: &Template) -> Result<RefreshRequest, NodeError> {
    Ok(RefreshRequest {
        realtime_ns: now_ns(),
        entropy: bytes::Bytes::copy_from_slice(&random::<64>()?),
        hostname: hostname.to_owned(),
        machine_id: new_machine_id()?,
        env,
        defaults: Some(template.meta.defaults()),
        thaw: true,
        forget_ended: true,
        ..RefreshRequest::default()
    })
}

/// For a guest that goes on with its life: its processes, and what is known of those that ended, stay.
pub fn refresh_again(record: &Record, hook: Hook) -> Result<RefreshRequest, NodeError> {
    Ok(RefreshRequest {
        realtime_ns: now_ns(),
        entropy: bytes::Bytes::copy_from_slice(&random::<64>()?),
        hostname: record.hostname.clone(),
        machine_id: record.machine_id.clone(),
        env: record.env.clone(),
        thaw: true,
        hook: hook.into(),
        ..RefreshRequest::default()
    })
}

/// A subvolume with memory, disk and device state, and what VM they are of.
pub struct Saved<'a> {
    pub area: Area,
    pub name: &'a str,
    pub memory_mib: u32,
    pub vcpus: u32,
}

impl Template {
    pub fn saved(&self) -> Saved<'_> {
        let Meta { memory_mib, vcpus, .. } = self.meta;
        Saved { area: Area::Templates, name: &self.name, memory_mib, vcpus }
    }
}

/// A new VM from what was saved, under a name of its own. On failure nothing is left. Without a record it is nobody's, and
/// gives way to those that are somebody's.
pub async fn restore(
    runs: &Arc<Runs>,
    saved: Saved<'_>,
    area: Area,
    name: &str,
    record: Option<&Record>,
    promise: Promise,
) -> Result<Machine, NodeError> {
    let begun = Instant::now();
    let slot = SlotGuard::take(&runs.slots)?;
    let weight = if record.is_some() { Weight::Normal } else { Weight::Background };
    let memory = limits(saved.memory_mib, saved.vcpus, weight);
    let (from, to) = ((saved.area, saved.name.to_owned()), name.to_owned());
    let record = record.map(|record| Record { slot: slot.slot, ..record.clone() });
    let first = record.clone();
    let made = runs.blocking(move |runs| {
        let dir = match first {
            Some(record) if from.0 == Area::Checkpoints => unpack(runs, &from.1, (area, &to), &record)?,
            _ => runs.config.host.snapshot((from.0, &from.1), (area, &to), false)?,
        };
        Ok((dir, runs.config.host.create_group(&to, memory)?))
    });
    let (dir, group) = match made.await {
        Ok(made) => made,
        Err(error) => {
            destroy(runs, area, name, name, None).await?;
            return Err(error);
        }
    };
    let snapshot = begun.elapsed();
    let spec = vm_spec(runs, saved.memory_mib, saved.vcpus, &slot, group.name());
    let started = async {
        if let Some(record) = &record {
            record.write(&dir)?;
            points::reach("run.recorded");
        }
        let vm: Arc<dyn Vm> = Arc::from(runs.config.driver.restore(&spec, &VmDir::new(&dir), AfterRestore::Run).await?);
        if let Some(record) = &record {
            points::reach("run.started");
            Record { vmm: Some(vm.identity()), ..record.clone() }.write(&dir)?;
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

/// A checkpoint holds the record of the run it was taken of, which must never pass for one of this sandbox: it is replaced
/// before the folder has its name.
fn unpack(runs: &Runs, checkpoint: &str, to: (Area, &str), record: &Record) -> Result<PathBuf, NodeError> {
    let host = &runs.config.host;
    let passing = format!("unpack-{}", uuid::Uuid::new_v4().simple());
    let unpacked = (|| {
        let dir = host.snapshot((Area::Checkpoints, checkpoint), (Area::Tmp, &passing), false)?;
        VmDir::new(&dir).remove_traces()?;
        record.write(&dir)?;
        points::reach("unpack.recorded");
        Ok(host.rename((Area::Tmp, &passing), to)?)
    })();
    if unpacked.is_err() {
        host.delete(Area::Tmp, &passing)?;
    }
    unpacked
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
