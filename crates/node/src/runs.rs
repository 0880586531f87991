//! All sandboxes of a node: what is held, adoption at start, and the list that the control plane watches.
//!
//! Each sandbox has one entry and one lock: whoever starts or deletes it holds the lock from the first step to the last,
//! in a task of its own, so that a caller that goes away abandons nothing half-way.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use space_core::{SandboxId, limits};
use space_hostd::uids::Slots;
use space_proto::node::{RunState, RunStatus};
use space_vmm::VmStatus;
use tokio::sync::{Semaphore, broadcast};

use crate::capacity::{self, Memory};
use crate::fence::Fence;
use crate::record::Record;
use crate::run::{Live, unix_ms};
use crate::template::Templates;
use crate::warm::Warm;
use crate::{NodeConfig, NodeError};

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
    /// The VM has ended; its files wait for the control plane to end or delete them.
    Gone,
    /// No VM; the disk waits to be booted.
    Stopped(Arc<Record>),
    /// No VM and no files, but its checkpoints.
    Ended,
}

/// Why a VM stands still that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Still {
    /// Until somebody asks for the contrary.
    Asked,
    /// Until there is room.
    PoolFull,
}

pub(crate) struct Held {
    pub(crate) fence: Option<Fence>,
    pub(crate) phase: Phase,
    pub(crate) template: String,
    pub(crate) reason: String,
    pub(crate) still: Option<Still>,
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
    pub(crate) starts: Semaphore,
    /// Sandboxes that somebody waits for.
    pub(crate) awaited: AtomicUsize,
}

impl Entry {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn of whoever changes something.
    pub(crate) async fn work(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.work.lock().await
    }

    pub(crate) fn known(&self) -> (Option<Fence>, Phase) {
        let held = self.held();
        (held.fence, held.phase.clone())
    }

    pub fn live(&self) -> Option<Arc<Live>> {
        match &self.held().phase {
            Phase::Running(live) => Some(live.clone()),
            _ => None,
        }
    }

    pub(crate) fn status(&self) -> Option<RunStatus> {
        let held = self.held();
        let fence = held.fence?;
        let state = match held.phase {
            Phase::Absent => return None,
            Phase::Starting => RunState::Starting,
            Phase::Running(_) if held.still.is_some() => RunState::Paused,
            Phase::Running(_) => RunState::Running,
            Phase::Gone | Phase::Ended => RunState::Gone,
            Phase::Stopped(_) => RunState::Stopped,
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
                    still: None,
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
            let gone = live.ending.load(Ordering::Acquire);
            if gone || !entry.live().is_some_and(|now| Arc::ptr_eq(&now, &live)) {
                return;
            }
            tracing::info!(sandbox = %entry.id, %exit, "a VM ended");
            runs.change(&entry, |held| {
                held.phase = Phase::Gone;
                held.still = None;
                held.reason = format!("vm_exited: {exit}");
            });
            let group = live.machine.group.clone();
            let _ = runs.blocking(move |_| Ok(group.end()?)).await;
        });
    }

    /// Says whether a VM stands still, and why.
    pub(crate) fn set_still(&self, entry: &Entry, still: Option<Still>) {
        self.change(entry, |held| {
            held.still = still;
            held.reason = match still {
                None => String::new(),
                Some(Still::Asked) => "requested: it stands still until it is resumed".to_owned(),
                Some(Still::PoolFull) => {
                    "pool_full: a write of the guest found no room in the pool; it goes on when there is".to_owned()
                }
            };
        });
    }

    /// A VM that somebody paused is left alone, room or not.
    async fn look_after(&self, entry: &Entry, live: &Live) {
        let was = entry.held().still;
        if was == Some(Still::Asked) || live.marks().paused {
            return;
        }
        let full = matches!(live.machine.vm.status().await, Ok(VmStatus::PausedByIoError));
        if !full && was.is_none() {
            return;
        }
        // Whoever has the turn sees to it; the next look comes soon.
        let Ok(_work) = entry.work.try_lock() else { return };
        if live.marks().paused {
            return;
        }
        if full && was.is_none() {
            self.set_still(entry, Some(Still::PoolFull));
        }
        if full && capacity::check_pool(&self.config.host, self.config.pool_reserve_bytes).is_ok() {
            let _ = live.machine.vm.resume().await;
        } else if !full && was.is_some() {
            self.set_still(entry, None);
        }
    }
}
