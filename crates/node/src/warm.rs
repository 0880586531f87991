//! Parked VMs: restored ahead, their exec path run once, frozen again and paused, so that a create is a rename, a resume
//! and a refresh. A miss is only slower.
//!
//! A parked VM belongs to nobody: its folder lies in `tmp/`, so a crash of the service leaves nothing that the next start
//! would take for a sandbox. It is never handed out twice, and never before its guest has confirmed the new identity.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use space_hostd::pool::Area;
use space_proto::guest::{GetProcessRequest, ProcessSpec, QuiesceRequest, ReserveRequest};
use space_vmm::AfterRestore;
use tokio::sync::Notify;

use crate::NodeError;
use crate::guest::Guest;
use crate::run::{self, Machine};
use crate::runs::Runs;
use crate::template::Template;

/// A template that nobody asked for this long gives its parked VMs back.
const IDLE: Duration = Duration::from_secs(600);
const GUEST_PATIENCE: Duration = Duration::from_secs(60);
/// After a failure; a pool that cannot be filled must not be a storm.
const BACK_OFF: Duration = Duration::from_secs(10);
/// Parked VMs may promise at most this part of the memory budget.
const MEMORY_SHARE: u64 = 4;

struct Wanted {
    template: Arc<Template>,
    last: Instant,
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
        let new = || Wanted { template: template.clone(), last: Instant::now(), parked: Vec::new() };
        wanted.entry(template.digest.clone()).or_insert_with(new).last = Instant::now();
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
        let mut wanted = self.wanted_map();
        let old: Vec<_> = wanted.iter().filter(|(_, w)| w.last.elapsed() > IDLE).map(|(d, _)| d.clone()).collect();
        old.iter().filter_map(|digest| wanted.remove(digest)).flat_map(|w| w.parked).collect()
    }

    /// The template that lacks most, and how many VMs are parked for it.
    fn lacking(&self, size: usize) -> Option<Arc<Template>> {
        let wanted = self.wanted_map();
        let lacking = wanted.values().filter(|w| w.parked.len() < size);
        lacking.min_by_key(|w| w.parked.len()).map(|w| w.template.clone())
    }

    fn parked_bytes(&self) -> u64 {
        self.wanted_map().values().map(|w| (w.parked.len() as u64 * u64::from(w.template.meta.memory_mib)) << 20).sum()
    }

    fn park(&self, template: &Template, machine: Machine, guest: Guest) -> Option<(Machine, Guest)> {
        match self.wanted_map().get_mut(&template.digest) {
            Some(wanted) => wanted.parked.push((machine, guest)),
            None => return Some((machine, guest)),
        }
        None
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
    let size = runs.config.warm_per_template;
    loop {
        // A tick lets old templates go.
        let _ = tokio::time::timeout(Duration::from_secs(60), runs.warm.changed.notified()).await;
        if runs.warm.is_closing() {
            return;
        }
        end(&runs, runs.warm.expired()).await;
        while let Some(template) = runs.warm.lacking(size) {
            let room = runs.warm.parked_bytes() + (u64::from(template.meta.memory_mib) << 20)
                <= runs.config.memory_budget_bytes / MEMORY_SHARE;
            if !room {
                break;
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
    crate::capacity::check_pool(&runs.config.pool, runs.config.pool_reserve_bytes)?;
    let name = format!("warm-{}", uuid::Uuid::new_v4().simple());
    let refresh = run::refresh("parked", std::collections::HashMap::new(), &template)?;
    let machine = run::restore(runs, template, Area::Tmp, &name, None, AfterRestore::Run).await?;
    let warmed = async {
        let guest = Guest::refreshed(machine.vm.clone(), None, 0, refresh, GUEST_PATIENCE).await?;
        run_once(&guest, &["/bin/sh", "-c", ":"]).await?;
        quiesce(&guest).await?;
        machine.vm.pause().await?;
        Ok(guest)
    };
    match warmed.await {
        Ok(guest) => Ok((machine, guest)),
        Err(error) => {
            machine.destroy(runs).await?;
            Err(error)
        }
    }
}

pub async fn quiesce(guest: &Guest) -> Result<(), NodeError> {
    let (mut client, _) = guest.client().await?;
    let mut request = tonic::Request::new(QuiesceRequest { freeze: true, drop_caches: false });
    request.set_timeout(GUEST_PATIENCE);
    client.quiesce(request).await.map_err(|status| NodeError::Guest(status.message().to_owned()))?;
    Ok(())
}

/// Runs a program to its end, whatever that is: what counts is that the way there was taken. A guest without the program
/// is warm enough.
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
    client.start(space_proto::guest::ProcessRef { process_id: process_id.clone() }).await.map_err(failed)?;
    let mut wait = tonic::Request::new(GetProcessRequest { process_id, wait_ms: 30_000 });
    wait.set_timeout(GUEST_PATIENCE);
    client.get_process(wait).await.map_err(failed)?;
    Ok(())
}
