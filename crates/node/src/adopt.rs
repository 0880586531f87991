//! The start of a service on a pool that an earlier one left: alive VMs are taken over, dead ones reported, and what was
//! half made is removed. It must never end a VM that a record vouches for.

use std::sync::Arc;

use space_hostd::cgroup::Weight;
use space_hostd::pool::Area;
use space_vmm::{Vm, VmDir};

use crate::NodeError;
use crate::checkpoint;
use crate::fence::Fence;
use crate::guest::Guest;
use crate::record::Record;
use crate::run::{self, Live, Machine, SlotGuard};
use crate::runs::{Phase, Runs, Still};

impl Runs {
    /// The VMs of an earlier service: alive ones are taken over, dead ones reported, half-made ones removed.
    pub(crate) async fn adopt_all(self: &Arc<Self>) -> Result<(), NodeError> {
        self.blocking(|runs| Ok(runs.config.host.begin()?)).await?;
        let mut kept = std::collections::BTreeSet::new();
        for name in self.config.host.list(Area::Sandboxes)? {
            let dir = self.config.host.path(Area::Sandboxes, &name)?;
            let record = Record::read(&dir).filter(|record| record.sandbox.as_str() == name);
            let group = record.as_ref().map_or_else(|| name.clone(), |record| record.cgroup.clone());
            if let Some(record) = record.as_ref().and_then(Record::stopped) {
                self.adopt_stopped(record).await?;
                continue;
            }
            let Some(record) = record.filter(|record| record.vmm.is_some() && record.confirmed) else {
                tracing::info!(name, "removing a sandbox that was half made");
                run::destroy(self, Area::Sandboxes, &name, &group, None).await?;
                continue;
            };
            kept.insert(record.cgroup.clone());
            self.adopt(record).await?;
        }
        for name in self.config.host.groups()? {
            if !kept.contains(&name) {
                self.blocking(move |runs| Ok(runs.config.host.group(&name).end()?)).await?;
            }
        }
        self.blocking(|runs| checkpoint::sweep(&runs.config.host)).await?;
        // Parked VMs and builds, whose processes have just ended.
        for name in self.config.host.list(Area::Tmp)? {
            self.blocking(move |runs| Ok(runs.config.host.delete(Area::Tmp, &name)?)).await?;
        }
        Ok(())
    }

    /// A disk without a VM: one that was stopped, or that was to boot when the service ended.
    async fn adopt_stopped(self: &Arc<Self>, record: Record) -> Result<(), NodeError> {
        let entry = self.entry(&record.sandbox);
        let record = Arc::new(record);
        self.settle_stopped(&record).await?;
        self.change(&entry, |held| {
            held.fence = Some(Fence::of(&record.run_ref()));
            held.template.clone_from(&record.template);
            held.adopted = true;
            held.phase = Phase::Stopped(record);
        });
        Ok(())
    }

    async fn adopt(self: &Arc<Self>, record: Record) -> Result<(), NodeError> {
        let entry = self.entry(&record.sandbox);
        let run = record.run_ref();
        let found = self.take_over(&record).await;
        self.change(&entry, |held| {
            held.fence = Some(Fence::of(&run));
            held.template.clone_from(&record.template);
            held.adopted = true;
        });
        match found {
            Ok(live) => {
                let still = live.marks().paused.then_some(Still::Asked);
                self.run_on(&entry, live);
                if still.is_some() {
                    self.set_still(&entry, still);
                }
            }
            Err(error) => {
                tracing::info!(sandbox = %entry.id, error = error.text(), "a VM ended while no service ran");
                let name = record.cgroup.clone();
                self.blocking(move |runs| Ok(runs.config.host.group(&name).end()?)).await?;
                self.change(&entry, |held| {
                    held.phase = Phase::Gone;
                    held.reason = "vm_exited: the VM ended while the server was down".to_owned();
                });
            }
        }
        Ok(())
    }

    async fn take_over(self: &Arc<Self>, record: &Record) -> Result<Live, NodeError> {
        let identity = record.vmm.ok_or(NodeError::Cancelled)?;
        let dir = self.config.host.path(Area::Sandboxes, record.sandbox.as_str())?;
        let vm: Arc<dyn Vm> = Arc::from(self.config.driver.adopt(&VmDir::new(&dir), identity).await?);
        if record.marks.paused {
            // The old service may have ended between noting that and doing it.
            vm.pause().await?;
        } else {
            // A VM stopped in the middle of something by the old service's end goes on.
            vm.resume().await?;
        }
        let slot = SlotGuard::claim(&self.slots, record.slot);
        let slot = slot.ok_or_else(|| NodeError::Guest("another VM has its user".to_owned()))?;
        let group = self.config.host.group(&record.cgroup);
        // The old service may have ended between taking a parked VM and giving it its share.
        group.set_weight(Weight::Normal)?;
        let machine = Machine {
            area: Area::Sandboxes,
            name: record.sandbox.to_string(),
            dir,
            group,
            slot,
            promise: self.memory.must(record.memory_mib),
            vm: vm.clone(),
        };
        let live = Live::new(record.clone(), machine, Guest::adopted(vm));
        if record.marks.quiet && !record.marks.paused {
            // Told to stand still by the old service, and never told to go on. A VM that lives is not ended for it.
            if let Err(error) = self.go_on(&live, false).await {
                tracing::warn!(sandbox = %record.sandbox, error = error.text(), "an adopted guest may stand still");
            }
        }
        Ok(live)
    }
}
