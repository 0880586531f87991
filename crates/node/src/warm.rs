//! Parked VMs: restored ahead, their exec path run once, frozen again and paused, so that a create is a rename, a resume
//! and a refresh. A miss is only slower.
//!
//! How many there are follows demand ([`crate::demand`]) within a share of the memory; a sandbox that needs the room gets
//! it. While one is made it has the CPU only when nobody else wants it.
//!
//! A parked VM belongs to nobody: its folder lies in `tmp/`, so a crash of the service leaves nothing that the next start
//! would take for a sandbox. It is never handed out twice, and never before its guest has confirmed the new identity.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use space_hostd::points;
use space_hostd::pool::Area;
use space_proto::guest::attach_input::Kind as In;
use space_proto::guest::{AttachInput, AttachOpen, ProcessSpec, QuiesceRequest, ReserveRequest};
use tokio::sync::Notify;

use crate::capacity::Promise;
use crate::demand::Demand;
use crate::guest::Guest;
use crate::run::{self, Machine};
use crate::runs::Runs;
use crate::template::Template;
use crate::{NodeError, WarmSize};

/// A template that nobody asked for this long gives its parked VMs back.
const IDLE: Duration = Duration::from_secs(600);
const GUEST_PATIENCE: Duration = Duration::from_secs(60);
/// After a failure; a pool that cannot be filled must not be a storm.
const BACK_OFF: Duration = Duration::from_secs(10);
/// While those that somebody waits for need all cores.
const BUSY_PAUSE: Duration = Duration::from_millis(50);
/// Parked VMs may hold at most this part of the memory budget.
const MEMORY_SHARE: u64 = 4;
/// Beyond what a paused VM was charged when it was parked: its memory file may still come back into the page cache.
const PARKED_SLACK_BYTES: u64 = 16 << 20;

struct Wanted {
    template: Arc<Template>,
    demand: Demand,
    parked: Vec<(Machine, Guest)>,
}

#[derive(Default)]
pub struct Warm {
    wanted: Mutex<HashMap<String, Wanted>>,
    changed: Notify,
    closing: AtomicBool,
    closed: Notify,
}

impl Warm {
    fn wanted_map(&self) -> std::sync::MutexGuard<'_, HashMap<String, Wanted>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody starts a sandbox of this template.
    pub fn wanted(&self, template: &Arc<Template>) {
        let mut wanted = self.wanted_map();
        let now = Instant::now();
        let new = || Wanted { template: template.clone(), demand: Demand::new(now), parked: Vec::new() };
        wanted.entry(template.digest.clone()).or_insert_with(new).demand.count(now);
        self.changed.notify_one();
    }

    /// A parked VM, whose owner the caller is from now on.
    pub fn take(&self, template: &Template) -> Option<(Machine, Guest)> {
        let taken = self.wanted_map().get_mut(&template.digest)?.parked.pop();
        self.changed.notify_one();
        taken
    }

    /// Ends all parked VMs of one template: it is about to be deleted.
    pub async fn forget(&self, runs: &Arc<Runs>, digest: &str) {
        let gone = self.wanted_map().remove(digest);
        end(runs, gone.into_iter().flat_map(|w| w.parked).collect()).await;
    }

    /// No more VMs are parked; one that is just being made is finished first, so that [`Warm::clear`] finds it.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.closed.notify_one();
        self.changed.notify_one();
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub async fn clear(&self, runs: &Arc<Runs>) {
        let all: Vec<_> = self.wanted_map().drain().flat_map(|(_, w)| w.parked).collect();
        end(runs, all).await;
    }

    fn expired(&self) -> Vec<(Machine, Guest)> {
        let (now, mut wanted) = (Instant::now(), self.wanted_map());
        let old: Vec<_> = wanted.iter().filter(|(_, w)| w.demand.idle(now) > IDLE).map(|(d, _)| d.clone()).collect();
        old.iter().filter_map(|digest| wanted.remove(digest)).flat_map(|w| w.parked).collect()
    }

    /// The template with the fewest parked VMs of those that lack some.
    fn lacking(&self, size: WarmSize) -> Option<Arc<Template>> {
        let (now, mut wanted) = (Instant::now(), self.wanted_map());
        let lacking = wanted.values_mut().filter_map(|w| {
            let target = match size {
                WarmSize::Fixed(count) => count,
                WarmSize::Learned => w.demand.target(now),
            };
            (w.parked.len() < usize::from(target)).then_some(w)
        });
        lacking.min_by_key(|w| w.parked.len()).map(|w| w.template.clone())
    }

    fn parked_bytes(&self) -> u64 {
        self.wanted_map().values().flat_map(|w| &w.parked).map(|(machine, _)| machine.promise.bytes()).sum()
    }

    /// Ends one parked VM, of the template that has most, for somebody who needs its memory. False: there is none.
    pub async fn make_room(&self, runs: &Arc<Runs>) -> bool {
        let one = {
            let mut wanted = self.wanted_map();
            wanted.values_mut().max_by_key(|w| w.parked.len()).and_then(|w| w.parked.pop())
        };
        let found = one.is_some();
        end(runs, one.into_iter().collect()).await;
        found
    }

    fn park(&self, template: &Template, machine: Machine, guest: Guest) -> Option<(Machine, Guest)> {
        match self.wanted_map().get_mut(&template.digest) {
            Some(wanted) => wanted.parked.push((machine, guest)),
            None => return Some((machine, guest)),
        }
        None
    }
}

impl Runs {
    /// Memory for one more VM. Parked ones, which nobody owns yet, make room for it.
    pub async fn promise(self: &Arc<Self>, memory_mib: u32) -> Result<Promise, NodeError> {
        loop {
            match self.memory.promise(memory_mib) {
                Err(NodeError::NoCapacity(why)) => {
                    if !self.warm.make_room(self).await {
                        return Err(NodeError::NoCapacity(why));
                    }
                }
                other => return other,
            }
        }
    }
}

async fn end(runs: &Arc<Runs>, parked: Vec<(Machine, Guest)>) {
    for (machine, guest) in parked {
        drop(guest);
        if let Err(error) = machine.destroy(runs).await {
            tracing::warn!(error = error.text(), "a parked VM could not be removed");
        }
    }
}

/// Keeps the pool filled, one VM at a time, so that creates come first. Ends when the pool is closed.
pub async fn keep(runs: Arc<Runs>) {
    let size = runs.config.warm;
    loop {
        // A tick lets old templates go.
        let _ = tokio::time::timeout(Duration::from_secs(60), runs.warm.changed.notified()).await;
        if runs.warm.is_closing() {
            return;
        }
        end(&runs, runs.warm.expired()).await;
        while let Some(template) = runs.warm.lacking(size) {
            if runs.warm.parked_bytes() >= runs.config.memory_budget_bytes / MEMORY_SHARE {
                break;
            }
            if runs.is_busy() {
                let _ = tokio::time::timeout(BUSY_PAUSE, runs.warm.closed.notified()).await;
                if runs.warm.is_closing() {
                    return;
                }
                continue;
            }
            match prepare(&runs, template.clone()).await {
                Ok((machine, guest)) => {
                    let unwanted = runs.warm.park(&template, machine, guest);
                    end(&runs, unwanted.into_iter().collect()).await;
                    if runs.warm.is_closing() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::debug!(error = error.text(), "no VM could be parked");
                    let _ = tokio::time::timeout(BACK_OFF, runs.warm.closed.notified()).await;
                    break;
                }
            }
        }
    }
}

async fn prepare(runs: &Arc<Runs>, template: Arc<Template>) -> Result<(Machine, Guest), NodeError> {
    crate::capacity::check_pool(&runs.config.host, runs.config.pool_reserve_bytes)?;
    let name = format!("warm-{}", uuid::Uuid::new_v4().simple());
    let refresh = run::refresh("parked", std::collections::HashMap::new(), &template)?;
    // Not at the cost of another parked VM.
    let promise = runs.memory.promise(template.meta.memory_mib)?;
    let mut machine = run::restore(runs, template.saved(), Area::Tmp, &name, None, promise).await?;
    let warmed = async {
        points::reach("warm.restored");
        let guest = Guest::refreshed(machine.vm.clone(), None, 0, refresh, GUEST_PATIENCE).await?;
        run_once(&guest, &["/bin/sh", "-c", "echo"]).await?;
        quiesce(&guest).await?;
        points::reach("warm.quiet");
        machine.vm.pause().await?;
        points::reach("warm.parked");
        Ok((guest, machine.group.memory_used()?))
    };
    match warmed.await {
        Ok((guest, used)) => {
            let bytes = machine.promise.bytes().min(used + PARKED_SLACK_BYTES);
            machine.promise = runs.memory.paused(bytes);
            Ok((machine, guest))
        }
        Err(error) => {
            machine.destroy(runs).await?;
            Err(error)
        }
    }
}

pub async fn quiesce(guest: &Guest) -> Result<(), NodeError> {
    let (mut client, _) = guest.client().await?;
    let mut request = tonic::Request::new(QuiesceRequest { freeze: true, ..QuiesceRequest::default() });
    request.set_timeout(GUEST_PATIENCE);
    client.quiesce(request).await.map_err(|status| NodeError::Guest(status.message().to_owned()))?;
    Ok(())
}

/// Runs a program to its end, whatever that is, the way a client does: what counts is that this way was taken. A guest
/// without the program is warm enough.
pub async fn run_once(guest: &Guest, argv: &[&str]) -> Result<(), NodeError> {
    let spec = ProcessSpec {
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        foreground: true,
        ..ProcessSpec::default()
    };
    let failed = |status: tonic::Status| NodeError::Guest(status.message().to_owned());
    let (mut client, _) = guest.client().await?;
    let process_id = space_core::CommandId::new().to_string();
    let reserve = ReserveRequest { process_id: process_id.clone(), spec: Some(spec), expires_ms: 0 };
    client.reserve(reserve).await.map_err(failed)?;
    let open = AttachInput { kind: Some(In::Open(AttachOpen { process_id, ..AttachOpen::default() })) };
    let run = async {
        let mut output = client.attach(tokio_stream::once(open)).await?.into_inner();
        while output.message().await?.is_some() {}
        Ok(())
    };
    let late = |_| NodeError::Guest(format!("{argv:?} did not end within {GUEST_PATIENCE:?}"));
    tokio::time::timeout(GUEST_PATIENCE, run).await.map_err(late)?.map_err(failed)
}
