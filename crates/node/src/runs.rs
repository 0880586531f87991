//! All sandboxes of a node: what is held, adoption at start, and the list that the control plane watches.
//!
//! Each sandbox has one entry and one lock: whoever starts or deletes it holds the lock from the first step to the last,
//! in a task of its own, so that a caller that goes away abandons nothing half-way.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use space_core::{RunRef, SandboxId, limits};
use space_hostd::cgroup::Weight;
use space_hostd::points;
use space_hostd::pool::Area;
use space_hostd::uids::Slots;
use space_proto::guest::RefreshRequest;
use space_proto::node::{RunState, RunStatus, StartRunRequest};
use space_vmm::VmStatus;
use tokio::sync::{Semaphore, broadcast};

use crate::capacity::{self, Memory};
use crate::fence::{Fence, Verdict};
use crate::guest::Guest;
use crate::record::Record;
use crate::run::{self, Live, Machine, unix_ms};
use crate::template::{Template, Templates};
use crate::warm::Warm;
use crate::{NodeConfig, NodeError};

/// A restored guest answers in a fraction of a second; fifty at once on two cores need longer.
const GUEST_PATIENCE: Duration = Duration::from_secs(60);
const CHANGES_QUEUED: usize = 1024;
/// Fences of deleted sandboxes that are remembered.
const TOMBSTONES_MAX: usize = 4096;
const WATCH_EVERY: Duration = Duration::from_secs(2);

/// What a node knows of one sandbox.
#[derive(Clone)]
pub enum Phase {
    Absent,
    Starting,
    Running(Arc<Live>),
    /// The VM has ended; its files wait for the control plane to delete them.
    Gone,
}

pub(crate) struct Held {
    pub(crate) fence: Option<Fence>,
    pub(crate) phase: Phase,
    pub(crate) template: String,
    pub(crate) reason: String,
    pub(crate) paused: bool,
    pub(crate) since_unix_ms: i64,
    pub(crate) observation: u64,
    pub(crate) adopted: bool,
}

pub struct Entry {
    pub id: SandboxId,
    work: tokio::sync::Mutex<()>,
    held: Mutex<Held>,
}

pub struct Runs {
    pub config: NodeConfig,
    pub data_url: String,
    pub slots: Arc<Slots>,
    pub memory: Arc<Memory>,
    pub templates: Templates,
    pub warm: Warm,
    pub builds: Semaphore,
    entries: Mutex<HashMap<SandboxId, Arc<Entry>>>,
    changes: broadcast::Sender<RunStatus>,
    observation: AtomicU64,
    starts: Semaphore,
    /// Sandboxes that somebody waits for.
    awaited: AtomicUsize,
}

impl Entry {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn live(&self) -> Option<Arc<Live>> {
        match &self.held().phase {
            Phase::Running(live) => Some(live.clone()),
            _ => None,
        }
    }

    fn status(&self) -> Option<RunStatus> {
        let held = self.held();
        let fence = held.fence?;
        let state = match held.phase {
            Phase::Absent => return None,
            Phase::Starting => RunState::Starting,
            Phase::Running(_) if held.paused => RunState::Paused,
            Phase::Running(_) => RunState::Running,
            Phase::Gone => RunState::Gone,
        };
        Some(RunStatus {
            run: Some(space_proto::node::RunRef {
                sandbox: self.id.to_string(),
                run: fence.run.0,
                generation: fence.generation.0,
            }),
            state: state.into(),
            reason: held.reason.clone(),
            since_unix_ms: held.since_unix_ms,
            adopted: held.adopted,
            observation: held.observation,
            template: held.template.clone(),
        })
    }
}

impl Runs {
    pub async fn open(config: NodeConfig, data_url: String) -> Result<Arc<Self>, NodeError> {
        let count = config.sandboxes_max.min(u32::try_from(limits::SANDBOXES_PER_NODE_MAX).unwrap_or(1000));
        let runs = Arc::new(Self {
            slots: Arc::new(Slots::new(count)),
            memory: Memory::new(config.memory_budget_bytes),
            templates: Templates::new(config.host.clone()),
            warm: Warm::default(),
            builds: Semaphore::new(1),
            entries: Mutex::default(),
            changes: broadcast::channel(CHANGES_QUEUED).0,
            // Grows over restarts too, as time does.
            observation: AtomicU64::new(u64::try_from(unix_ms()).unwrap_or(0) << 10),
            starts: Semaphore::new(limits::STARTS_AT_ONCE),
            awaited: AtomicUsize::new(0),
            data_url,
            config,
        });
        runs.adopt_all().await?;
        Ok(runs)
    }

    /// Work that waits for the kernel, away from the runtime's own threads.
    pub async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, NodeError> + Send + 'static,
    ) -> Result<T, NodeError> {
        let runs = self.clone();
        tokio::task::spawn_blocking(move || work(&runs)).await.map_err(|_| NodeError::Cancelled)?
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Entry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn entry(&self, id: &SandboxId) -> Arc<Entry> {
        let mut entries = self.entries();
        if entries.len() > TOMBSTONES_MAX {
            entries.retain(|_, e| Arc::strong_count(e) > 1 || !matches!(e.held().phase, Phase::Absent));
        }
        let new = || {
            Arc::new(Entry {
                id: id.clone(),
                work: tokio::sync::Mutex::new(()),
                held: Mutex::new(Held {
                    fence: None,
                    phase: Phase::Absent,
                    template: String::new(),
                    reason: String::new(),
                    paused: false,
                    since_unix_ms: unix_ms(),
                    observation: 0,
                    adopted: false,
                }),
            })
        };
        entries.entry(id.clone()).or_insert_with(new).clone()
    }

    /// The run, if this node holds exactly that one and it is alive.
    pub fn live(&self, sandbox: &SandboxId, run: u32) -> Option<Arc<Live>> {
        let entry = self.entries().get(sandbox).cloned()?;
        entry.live().filter(|live| live.record.run.0 == run)
    }

    pub fn list(&self) -> Vec<RunStatus> {
        let entries: Vec<_> = self.entries().values().cloned().collect();
        entries.iter().filter_map(|entry| entry.status()).collect()
    }

    pub fn running(&self) -> usize {
        self.entries().values().filter(|entry| entry.live().is_some()).count()
    }

    /// Sandboxes of this node, alive or not, that were made from the template.
    pub fn made_from(&self, digest: &str) -> usize {
        let used = |entry: &&Arc<Entry>| {
            let held = entry.held();
            held.template == digest && !matches!(held.phase, Phase::Absent)
        };
        self.entries().values().filter(used).count()
    }

    pub fn watch(&self) -> broadcast::Receiver<RunStatus> {
        self.changes.subscribe()
    }

    /// The one place where what is held changes.
    pub(crate) fn change(&self, entry: &Entry, change: impl FnOnce(&mut Held)) {
        {
            let mut held = entry.held();
            change(&mut held);
            held.observation = self.observation.fetch_add(1, Ordering::Relaxed) + 1;
            held.since_unix_ms = unix_ms();
        }
        if let Some(status) = entry.status() {
            // Nobody watching is no fault: the list is read when somebody does.
            let _ = self.changes.send(status);
        }
    }

    /// Starts a run, or answers with it when it was started before.
    pub async fn start(self: &Arc<Self>, run: RunRef, request: StartRunRequest) -> Result<RunStatus, NodeError> {
        let runs = self.clone();
        let task = tokio::spawn(async move {
            let entry = runs.entry(&run.sandbox);
            let _work = entry.work.lock().await;
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
        let (fence, phase) = {
            let held = entry.held();
            (held.fence, held.phase.clone())
        };
        match (Fence::judge(fence, &run), phase) {
            (Verdict::Stale, _) => {
                return Err(NodeError::Stale(format!(
                    "run {} of {} was overtaken by a newer one",
                    run.run, run.sandbox
                )));
            }
            (Verdict::Same, Phase::Running(_)) => return Ok(()),
            (Verdict::Same, Phase::Gone) => {
                return Err(NodeError::Stale(format!("run {} of {} has ended", run.run, run.sandbox)));
            }
            (_, Phase::Running(_) | Phase::Gone) => {
                return Err(NodeError::Stale(format!(
                    "an older run of {} is still here; delete it first",
                    run.sandbox
                )));
            }
            (_, Phase::Absent | Phase::Starting) => {}
        }
        let template = self.usable_template(&request).await?;
        capacity::check_pool(&self.config.host, self.config.pool_reserve_bytes)?;
        self.change(entry, |held| {
            held.fence = Some(Fence::merged(held.fence, &run));
            held.phase = Phase::Starting;
            held.template.clone_from(&template.digest);
            held.reason.clear();
        });
        self.awaited.fetch_add(1, Ordering::Relaxed);
        let brought = self.bring_up(&run, &request, template).await;
        self.awaited.fetch_sub(1, Ordering::Relaxed);
        match brought {
            Ok(live) => {
                let live = Arc::new(live);
                self.change(entry, |held| held.phase = Phase::Running(live.clone()));
                self.guard(entry.clone(), live);
                Ok(())
            }
            Err(error) => {
                self.change(entry, |held| held.phase = Phase::Absent);
                Err(error)
            }
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
            sandbox: run.sandbox.clone(),
            run: run.run,
            generation: run.generation,
            template: template.digest.clone(),
            memory_mib: template.meta.memory_mib,
            slot: space_hostd::uids::Slot(0),
            cgroup: run.sandbox.to_string(),
            started_unix_ms: unix_ms(),
            vmm: None,
            confirmed: false,
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
        let machine = run::restore(self, template, Area::Sandboxes, &name, Some(&record), promise).await?;
        let refresh = RefreshRequest { realtime_ns: now_ns(), ..refresh };
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
            let mut refresh = tonic::Request::new(RefreshRequest { realtime_ns: now_ns(), ..refresh });
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

    /// Ends whatever there is of a sandbox. Absent: success.
    pub async fn delete(self: &Arc<Self>, run: RunRef) -> Result<(), NodeError> {
        let runs = self.clone();
        let task = tokio::spawn(async move {
            let entry = runs.entry(&run.sandbox);
            let _work = entry.work.lock().await;
            let (fence, phase) = {
                let held = entry.held();
                (held.fence, held.phase.clone())
            };
            if Fence::judge(fence, &run) == Verdict::Stale {
                return Err(NodeError::Stale(format!("run {} of {} was overtaken", run.run, run.sandbox)));
            }
            let name = run.sandbox.as_str();
            match &phase {
                Phase::Running(live) => {
                    // From here on its end is no news.
                    runs.change(&entry, |held| held.phase = Phase::Gone);
                    let machine = &live.machine;
                    run::destroy(&runs, Area::Sandboxes, name, machine.group.name(), Some(&machine.vm)).await?;
                }
                _ => run::destroy(&runs, Area::Sandboxes, name, name, None).await?,
            }
            runs.change(&entry, |held| {
                held.fence = Some(Fence::merged(held.fence, &run));
                held.phase = Phase::Absent;
            });
            Ok(())
        });
        task.await.map_err(|_| NodeError::Cancelled)?
    }

    /// Notices the end of a VM, and helps one over a full pool.
    pub(crate) fn guard(self: &Arc<Self>, entry: Arc<Entry>, live: Arc<Live>) {
        let runs = Arc::downgrade(self);
        tokio::spawn(async move {
            let vm = live.machine.vm.clone();
            let exit = loop {
                tokio::select! {
                    exit = vm.wait() => break exit,
                    () = tokio::time::sleep(WATCH_EVERY) => {}
                }
                let Some(runs) = runs.upgrade() else { return };
                runs.look_after(&entry, &live).await;
            };
            let Some(runs) = runs.upgrade() else { return };
            let _work = entry.work.lock().await;
            if !entry.live().is_some_and(|now| Arc::ptr_eq(&now, &live)) {
                return;
            }
            tracing::info!(sandbox = %entry.id, %exit, "a VM ended");
            runs.change(&entry, |held| {
                held.phase = Phase::Gone;
                held.paused = false;
                held.reason = format!("vm_exited: {exit}");
            });
            let group = live.machine.group.clone();
            let _ = runs.blocking(move |_| Ok(group.end()?)).await;
        });
    }

    async fn look_after(&self, entry: &Entry, live: &Live) {
        let was = entry.held().paused;
        let full = matches!(live.machine.vm.status().await, Ok(VmStatus::PausedByIoError));
        if full && !was {
            self.change(entry, |held| {
                held.paused = true;
                held.reason =
                    "pool_full: a write of the guest found no room in the pool; it goes on when there is".into();
            });
        }
        if full && capacity::check_pool(&self.config.host, self.config.pool_reserve_bytes).is_ok() {
            let _ = live.machine.vm.resume().await;
        } else if !full && was {
            self.change(entry, |held| {
                held.paused = false;
                held.reason.clear();
            });
        }
    }
}

fn now_ns() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
