//! How a run begins: a template's snapshot or a parked VM, a checkpoint that goes on, or a stopped disk that boots.
//!
//! Nothing is `Running` before its guest has confirmed what only the host knows. A start that fails leaves nothing of its
//! own, and never harms what it started from.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use space_core::RunRef;
use space_hostd::cgroup::Weight;
use space_hostd::points;
use space_hostd::pool::Area;
use space_proto::guest::{Hook, RefreshRequest};
use space_proto::node::start_run_request::Source;
use space_proto::node::{RunStatus, StartRunRequest};
use space_vmm::{Vm, VmDir};

use crate::build::{self, BOOT_PATIENCE};
use crate::capacity;
use crate::checkpoint::{self, Facts};
use crate::fence::{Fence, Verdict};
use crate::guest::Guest;
use crate::record::{GuestDefaults, Marks, Record, Rolling};
use crate::run::{self, Live, Machine, Saved, SlotGuard, unix_ms};
use crate::runs::{Entry, Phase, Runs};
use crate::template::Template;
use crate::{NodeError, rolling, verbs};

/// A restored guest answers in a fraction of a second; fifty at once on two cores need longer.
const GUEST_PATIENCE: Duration = Duration::from_secs(60);

impl Runs {
    /// Starts a run, or answers with it when it was started before.
    pub async fn start(self: &Arc<Self>, run: RunRef, request: StartRunRequest) -> Result<RunStatus, NodeError> {
        let runs = self.clone();
        let task = tokio::spawn(async move {
            let entry = runs.entry(&run.sandbox);
            let _work = entry.work().await;
            runs.start_locked(&entry, run, request).await?;
            entry.status().ok_or_else(|| NodeError::Stale("the sandbox was deleted".to_owned()))
        });
        task.await.map_err(|_| NodeError::Cancelled)?
    }

    async fn start_locked(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        run: RunRef,
        request: StartRunRequest,
    ) -> Result<(), NodeError> {
        let (fence, phase) = entry.known();
        let verdict = Fence::judge(fence, &run);
        if verdict == Verdict::Same && matches!(phase, Phase::Running(_)) {
            return Ok(());
        }
        may_start(verdict, &phase, &run, matches!(request.source, Some(Source::Disk(_))))?;
        let life = self.life(&phase, &run, &request).await?;
        capacity::check_pool(&self.config.host, self.config.pool_reserve_bytes)?;
        self.change(entry, |held| {
            held.fence = Some(Fence::merged(held.fence, &run));
            held.phase = Phase::Starting;
            held.template = life.template().to_owned();
            held.still = None;
            held.adopted = false;
            held.reason.clear();
        });
        self.awaited.fetch_add(1, Ordering::Relaxed);
        let brought = match life {
            Life::Template(template) => self.bring_up(&run, &request, template).await,
            Life::Checkpoint(facts) => self.bring_back(&run, &request, *facts).await,
            Life::Disk(stopped) => self.boot(&run, &request, &stopped).await,
        };
        self.awaited.fetch_sub(1, Ordering::Relaxed);
        match brought {
            Ok(live) => {
                self.run_on(entry, live);
                Ok(())
            }
            Err(error) => {
                // What failed has left nothing, but for a disk that was there before.
                let back = if matches!(phase, Phase::Stopped(_)) { phase } else { Phase::Absent };
                self.change(entry, |held| held.phase = back);
                Err(error)
            }
        }
    }

    /// From here on it is watched.
    pub(crate) fn run_on(self: &Arc<Self>, entry: &Arc<Entry>, live: Live) {
        let live = Arc::new(live);
        self.change(entry, |held| held.phase = Phase::Running(live.clone()));
        rolling::start(self, entry, &live);
        self.guard(entry.clone(), live);
    }

    /// What a run is to start from, if it can.
    async fn life(&self, phase: &Phase, run: &RunRef, request: &StartRunRequest) -> Result<Life, NodeError> {
        match (&request.source, phase) {
            (Some(Source::Disk(_)), Phase::Stopped(stopped)) => Ok(Life::Disk(stopped.clone())),
            (Some(Source::Disk(_)), _) => Err(NodeError::NotFound(format!(
                "this node has no stopped disk of {}; start it from a checkpoint or a template",
                run.sandbox
            ))),
            (Some(Source::Checkpoint(from)), _) => {
                let facts = checkpoint::find(&self.config.host, &checkpoint::Name::of(from)?)?;
                let now = self.config.driver.compatibility().await?;
                let differs = space_vmm::differences(&facts.compatibility, &now);
                if differs.is_empty() {
                    Ok(Life::Checkpoint(Box::new(facts)))
                } else {
                    Err(NodeError::OtherVmm(differs))
                }
            }
            (None, _) => Ok(Life::Template(self.usable_template(request).await?)),
        }
    }

    async fn usable_template(&self, request: &StartRunRequest) -> Result<Arc<Template>, NodeError> {
        let template = self.templates.get(&request.template)?;
        let meta = &template.meta;
        for (asked, frozen, what) in
            [(request.memory_mib, meta.memory_mib, "MiB of memory"), (request.vcpus, meta.vcpus, "virtual CPUs")]
        {
            if asked != 0 && asked != frozen {
                return Err(NodeError::Invalid(format!(
                    "the template is frozen with {frozen} {what} and {asked} were asked for; leave it out, or build a \
                     template with that size"
                )));
            }
        }
        let now = self.config.driver.compatibility().await?;
        if now != meta.compatibility {
            return Err(NodeError::Incompatible(space_vmm::differences(&meta.compatibility, &now)));
        }
        if meta.guest_protocol > space_proto::GUEST_PROTOCOL {
            return Err(NodeError::Incompatible(format!(
                "its daemon speaks protocol {} and this node {}",
                meta.guest_protocol,
                space_proto::GUEST_PROTOCOL
            )));
        }
        Ok(template)
    }

    /// Whether sandboxes that somebody waits for have work for every core.
    pub fn is_busy(&self) -> bool {
        self.awaited.load(Ordering::Relaxed) >= usize::try_from(self.config.cpus).unwrap_or(usize::MAX).max(1)
    }

    async fn bring_up(
        self: &Arc<Self>,
        run: &RunRef,
        request: &StartRunRequest,
        template: Arc<Template>,
    ) -> Result<Live, NodeError> {
        let refresh = run::refresh(&request.hostname, request.env.clone(), &template)?;
        let mut record = Record {
            template: template.digest.clone(),
            memory_mib: template.meta.memory_mib,
            vcpus: template.meta.vcpus,
            machine_id: refresh.machine_id.clone(),
            defaults: template.meta.defaults().into(),
            ..begun(run, request)
        };
        self.warm.wanted(&template);
        let mut promise = Some(self.promise(template.meta.memory_mib).await?);
        if let Some((mut machine, guest)) = self.warm.take(&template) {
            // Until now it was promised only what a paused VM holds.
            machine.promise = promise.take().ok_or(NodeError::Cancelled)?;
            match self.claim(machine, guest, &mut record, refresh.clone()).await {
                Ok(live) => return Ok(live),
                // Only slower: the cold path is still there.
                Err(error) => tracing::warn!(sandbox = %run.sandbox, error = error.text(), "a parked VM was of no use"),
            }
            record.cgroup = run.sandbox.to_string();
        }
        let promise = match promise {
            Some(promise) => promise,
            None => self.promise(template.meta.memory_mib).await?,
        };
        let _turn = self.starts.acquire().await.map_err(|_| NodeError::Cancelled)?;
        let name = run.sandbox.to_string();
        let machine = run::restore(self, template.saved(), Area::Sandboxes, &name, Some(&record), promise).await?;
        let refresh = RefreshRequest { realtime_ns: run::now_ns(), ..refresh };
        let vm = machine.vm.clone();
        match Guest::refreshed(vm, Some(&run.sandbox), run.run.0, refresh, GUEST_PATIENCE).await {
            Ok(guest) => {
                points::reach("run.refreshed");
                record.slot = machine.slot.slot;
                record.vmm = Some(machine.vm.identity());
                Live::confirmed(self, record, machine, guest).await
            }
            Err(error) => {
                machine.destroy(self).await?;
                Err(error)
            }
        }
    }

    /// A parked VM becomes a sandbox's: its folder moves, it runs again, and only then it gets its identity.
    async fn claim(
        self: &Arc<Self>,
        mut machine: Machine,
        guest: Guest,
        record: &mut Record,
        refresh: RefreshRequest,
    ) -> Result<Live, NodeError> {
        record.cgroup = machine.group.name().to_owned();
        record.slot = machine.slot.slot;
        record.vmm = Some(machine.vm.identity());
        let claimed = async {
            record.write(&machine.dir)?;
            points::reach("claim.recorded");
            machine.move_to(self, &record.sandbox)?;
            points::reach("claim.moved");
            machine.group.set_weight(Weight::Normal)?;
            machine.vm.resume().await?;
            points::reach("claim.resumed");
            let (mut client, _) = guest.client().await?;
            let mut refresh = tonic::Request::new(RefreshRequest { realtime_ns: run::now_ns(), ..refresh });
            refresh.set_timeout(GUEST_PATIENCE);
            client.refresh(refresh).await.map_err(|status| NodeError::Guest(status.message().to_owned()))
        };
        match claimed.await {
            Ok(_) => {
                points::reach("claim.refreshed");
                Live::confirmed(self, record.clone(), machine, guest).await
            }
            Err(error) => {
                machine.destroy(self).await?;
                Err(error)
            }
        }
    }

    /// The memory, disk and device state of a checkpoint go on: as the sandbox they are of, or as another.
    async fn bring_back(
        self: &Arc<Self>,
        run: &RunRef,
        request: &StartRunRequest,
        facts: Facts,
    ) -> Result<Live, NodeError> {
        let own = !request.fork && !facts.machine_id.is_empty();
        let machine_id = if own { facts.machine_id.clone() } else { run::new_machine_id()? };
        let mut record = Record {
            template: facts.template.clone(),
            memory_mib: facts.memory_mib,
            vcpus: facts.vcpus,
            machine_id,
            defaults: facts.defaults.clone(),
            ..begun(run, request)
        };
        let hook = if request.fork { Hook::AfterFork } else { Hook::AfterRestore };
        let promise = self.promise(facts.memory_mib).await?;
        let _turn = self.starts.acquire().await.map_err(|_| NodeError::Cancelled)?;
        let from = facts.name().to_string();
        let saved = Saved { area: Area::Checkpoints, name: &from, memory_mib: facts.memory_mib, vcpus: facts.vcpus };
        let to = run.sandbox.to_string();
        let machine = run::restore(self, saved, Area::Sandboxes, &to, Some(&record), promise).await?;
        let guest = Guest::adopted(machine.vm.clone());
        let told = guest.go_on(&record, hook, GUEST_PATIENCE).await;
        if let Err(error) = told {
            machine.destroy(self).await?;
            return Err(error);
        }
        points::reach("run.refreshed");
        record.slot = machine.slot.slot;
        record.vmm = Some(machine.vm.identity());
        Live::confirmed(self, record, machine, guest).await
    }

    /// The disk of a stopped run boots, with new memory. Until it is up the disk is the stopped run's.
    async fn boot(
        self: &Arc<Self>,
        run: &RunRef,
        request: &StartRunRequest,
        stopped: &Record,
    ) -> Result<Live, NodeError> {
        let chosen = |asked: u32, before: u32| if asked == 0 { before } else { asked };
        let mut record = Record {
            template: stopped.template.clone(),
            memory_mib: chosen(request.memory_mib, stopped.memory_mib),
            vcpus: chosen(request.vcpus, stopped.vcpus.max(1)),
            machine_id: stopped.machine_id.clone(),
            defaults: stopped.defaults.clone(),
            boots_from: Some(stopped.run),
            ..begun(run, request)
        };
        let promise = self.promise(record.memory_mib).await?;
        let _turn = self.starts.acquire().await.map_err(|_| NodeError::Cancelled)?;
        let dir = self.config.host.path(Area::Sandboxes, run.sandbox.as_str())?;
        let slot = SlotGuard::take(&self.slots)?;
        record.slot = slot.slot;
        let (memory, name) = (run::limits(record.memory_mib, record.vcpus, Weight::Normal), record.cgroup.clone());
        let folder = dir.clone();
        let group = self.blocking(move |runs| {
            VmDir::new(&folder).remove_traces()?;
            Ok(runs.config.host.create_group(&name, memory)?)
        });
        let group = group.await?;
        let spec = run::vm_spec(self, record.memory_mib, record.vcpus, &slot, group.name());
        let booted = async {
            record.write(&dir)?;
            points::reach("run.recorded");
            let vm: Arc<dyn Vm> = Arc::from(self.config.driver.boot(&spec, &VmDir::new(&dir)).await?);
            record.vmm = Some(vm.identity());
            record.write(&dir)?;
            points::reach("run.named");
            let guest = Guest::adopted(vm.clone());
            guest.boot_up(&record, BOOT_PATIENCE).await.map_err(|error| build::with_console(error, &dir))?;
            record.confirmed = true;
            record.boots_from = None;
            record.write(&dir)?;
            points::reach("run.confirmed");
            Ok((vm, guest))
        };
        match booted.await {
            Ok((vm, guest)) => {
                let name = run.sandbox.to_string();
                let machine = Machine { area: Area::Sandboxes, name, dir, vm, group, slot, promise };
                Ok(Live::new(record, machine, guest))
            }
            Err(error) => {
                let left = Record { boots_from: None, ..stopped.clone() };
                self.blocking(move |_| {
                    group.end()?;
                    verbs::drop_memory(&dir)?;
                    left.write(&dir)
                })
                .await?;
                Err(error)
            }
        }
    }
}

/// What every start knows of its run.
fn begun(run: &RunRef, request: &StartRunRequest) -> Record {
    let rolling = request.rolling.as_ref().map(|rolling| Rolling {
        every_s: rolling.every_s.max(1),
        keep: rolling.keep.iter().map(|tier| (tier.every_s, tier.within_s)).collect(),
    });
    Record {
        sandbox: run.sandbox.clone(),
        run: run.run,
        generation: run.generation,
        template: String::new(),
        memory_mib: 0,
        slot: space_hostd::uids::Slot(0),
        cgroup: run.sandbox.to_string(),
        started_unix_ms: unix_ms(),
        vmm: None,
        confirmed: false,
        vcpus: 0,
        hostname: request.hostname.clone(),
        env: request.env.clone(),
        machine_id: String::new(),
        defaults: GuestDefaults::default(),
        rolling,
        marks: Marks::default(),
        boots_from: None,
    }
}

/// Whether a run may begin where another may have been.
fn may_start(verdict: Verdict, phase: &Phase, run: &RunRef, of_disk: bool) -> Result<(), NodeError> {
    let stale = |text: String| Err(NodeError::Stale(text));
    match (verdict, phase) {
        (Verdict::Stale, _) => stale(format!("run {} of {} was overtaken by a newer one", run.run, run.sandbox)),
        (Verdict::Same, Phase::Gone | Phase::Ended) => stale(format!("run {} of {} has ended", run.run, run.sandbox)),
        // A start from this disk that failed may be tried again; the run that was stopped may not.
        (_, Phase::Stopped(stopped)) if stopped.run >= run.run => {
            stale(format!("run {} of {} was stopped", run.run, run.sandbox))
        }
        (_, Phase::Stopped(_)) if of_disk => Ok(()),
        (_, Phase::Stopped(_)) => {
            stale(format!("{} is stopped and its disk is kept; start from the disk, or end the run", run.sandbox))
        }
        (_, Phase::Running(_) | Phase::Gone) => {
            stale(format!("an older run of {} is still here; end or delete it first", run.sandbox))
        }
        (_, Phase::Absent | Phase::Ended | Phase::Starting) => Ok(()),
    }
}

/// What a run starts from.
enum Life {
    Template(Arc<Template>),
    Checkpoint(Box<Facts>),
    Disk(Arc<Record>),
}

impl Life {
    fn template(&self) -> &str {
        match self {
            Self::Template(template) => &template.digest,
            Self::Checkpoint(facts) => &facts.template,
            Self::Disk(stopped) => &stopped.template,
        }
    }
}
