//! Checkpoints: memory, disk and device state of one instant of a run, each one read-only subvolume.
//!
//! ```text
//! disk and memory written ahead ─▶ guest quiet ─▶ state saved ─▶ facts ─▶ one snapshot ─▶ VM goes on ─▶ guest goes on
//! ```
//! The snapshot is the moment: before it there is nothing that could be taken for a checkpoint, after it the checkpoint
//! is whole and on storage. A guest that was told to stand still is told to go on whatever happened in between; a guest that
//! does not stand still only gets a checkpoint like after a power cut. A checkpoint never ends a VM that could go on.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use space_core::{CheckpointId, RunNumber, RunRef, SandboxId};
use space_hostd::host::Host;
use space_hostd::points;
use space_hostd::pool::Area;
use space_hostd::protocol::HostError;
use space_proto::guest::Hook;
use space_proto::node::{CheckpointInfo, CheckpointRef};
use space_vmm::{SaveError, SaveKind, dir};

use crate::NodeError;
use crate::capacity;
use crate::fence::{Fence, Verdict};
use crate::record::GuestDefaults;
use crate::run::{Live, unix_ms};
use crate::runs::{Entry, Phase, Runs, Still};

const FILE: &str = "checkpoint.json";
const FORMAT: u32 = 1;
const FACTS_MAX_BYTES: u64 = 2 << 20;
/// A guest that has not stood still by then is saved as it is. Its own hooks have five seconds of it.
const QUIET_PATIENCE: Duration = Duration::from_secs(15);
/// For a guest that answered before the save, and for one that did not.
const GO_ON_PATIENCE: Duration = Duration::from_secs(60);
const GO_ON_SILENT: Duration = Duration::from_secs(5);

/// Names a checkpoint of a sandbox, and its subvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub sandbox: SandboxId,
    pub checkpoint: CheckpointId,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.sandbox, self.checkpoint)
    }
}

impl Name {
    pub fn of(named: &CheckpointRef) -> Result<Self, NodeError> {
        let invalid = |error: space_core::id::InvalidId| NodeError::Invalid(error.to_string());
        Ok(Self {
            sandbox: named.sandbox.parse().map_err(invalid)?,
            checkpoint: named.checkpoint.parse().map_err(invalid)?,
        })
    }

    fn of_subvolume(name: &str) -> Option<Self> {
        let (sandbox, checkpoint) = name.split_once('.')?;
        Some(Self { sandbox: sandbox.parse().ok()?, checkpoint: checkpoint.parse().ok()? })
    }
}

/// What stands in `checkpoint.json`: all that is needed to go on from it, without the template it came from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    format: u32,
    sandbox: SandboxId,
    checkpoint: CheckpointId,
    run: RunNumber,
    pub created_unix_ms: i64,
    pub template: String,
    pub memory_mib: u32,
    pub vcpus: u32,
    disk_bytes: u64,
    pub compatibility: String,
    quiesced: bool,
    pub rolling: bool,
    /// Up to the snapshot, which the file is in.
    paused_us: u64,
    pub machine_id: String,
    pub defaults: GuestDefaults,
}

impl Facts {
    pub fn name(&self) -> Name {
        Name { sandbox: self.sandbox.clone(), checkpoint: self.checkpoint.clone() }
    }

    pub fn info(&self) -> CheckpointInfo {
        CheckpointInfo {
            sandbox: self.sandbox.to_string(),
            checkpoint: self.checkpoint.to_string(),
            run: self.run.0,
            created_unix_ms: self.created_unix_ms,
            template: self.template.clone(),
            memory_bytes: u64::from(self.memory_mib) << 20,
            disk_bytes: self.disk_bytes,
            exclusive_bytes: 0,
            paused_us: self.paused_us,
            rolling: self.rolling,
            compatibility: self.compatibility.clone(),
            quiesced: self.quiesced,
        }
    }

    fn write(&self, folder: &Path) -> Result<(), NodeError> {
        let text = serde_json::to_vec(self).expect("plain data");
        let (new, file) = (folder.join("checkpoint.json.new"), folder.join(FILE));
        std::fs::write(&new, text).map_err(NodeError::io(format!("write {}", new.display())))?;
        std::fs::rename(&new, &file).map_err(NodeError::io(format!("write {}", file.display())))
    }
}

/// The facts of a checkpoint that is whole.
///
/// # Errors
/// `NotFound` when there is none.
pub fn find(host: &Host, name: &Name) -> Result<Facts, NodeError> {
    let missing =
        || NodeError::NotFound(format!("this node has no checkpoint {} of {}", name.checkpoint, name.sandbox));
    let file = host.path(Area::Checkpoints, &name.to_string())?.join(FILE);
    if std::fs::symlink_metadata(&file).map_err(|_| missing())?.len() > FACTS_MAX_BYTES {
        return Err(missing());
    }
    let facts: Facts =
        std::fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok()).ok_or_else(missing)?;
    // A sandbox's folder may hold the facts of an earlier one.
    if facts.name() == *name && facts.format == FORMAT { Ok(facts) } else { Err(missing()) }
}

/// Of one sandbox or of all, oldest first.
pub fn list(host: &Host, sandbox: Option<&SandboxId>) -> Result<Vec<Facts>, NodeError> {
    let names = host.list(Area::Checkpoints)?;
    let wanted = names.iter().filter_map(|name| Name::of_subvolume(name));
    let wanted = wanted.filter(|name| sandbox.is_none_or(|sandbox| name.sandbox == *sandbox));
    let mut all: Vec<Facts> = wanted.filter_map(|name| find(host, &name).ok()).collect();
    all.sort_by(|a, b| (a.created_unix_ms, a.checkpoint.as_str()).cmp(&(b.created_unix_ms, b.checkpoint.as_str())));
    Ok(all)
}

/// Absent: success. What runs from it shares no name with it, and keeps what it has.
pub fn delete(host: &Host, name: &Name) -> Result<(), NodeError> {
    host.delete(Area::Checkpoints, &name.to_string())?;
    points::reach("checkpoint.deleted");
    Ok(())
}

/// All of a sandbox, whole or not.
pub fn delete_all(host: &Host, sandbox: &SandboxId) -> Result<(), NodeError> {
    for name in host.list(Area::Checkpoints)? {
        if name.split_once('.').is_some_and(|(of, _)| of == sandbox.as_str()) {
            host.delete(Area::Checkpoints, &name)?;
        }
    }
    Ok(())
}

/// Removes what is none, at the start of a service.
pub fn sweep(host: &Host) -> Result<(), NodeError> {
    for name in host.list(Area::Checkpoints)? {
        if Name::of_subvolume(&name).is_none_or(|name| find(host, &name).is_err()) {
            tracing::info!(name, "removing a checkpoint that was not finished");
            host.delete(Area::Checkpoints, &name)?;
        }
    }
    Ok(())
}

/// How a checkpoint is wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wish {
    /// Nothing the run does after the instant may be lost by ending it.
    pub keep_paused: bool,
    pub rolling: bool,
}

impl Runs {
    pub async fn checkpoint(
        self: &Arc<Self>,
        run: RunRef,
        checkpoint: CheckpointId,
        wish: Wish,
    ) -> Result<CheckpointInfo, NodeError> {
        let runs = self.clone();
        let task = tokio::spawn(async move {
            let entry = runs.entry(&run.sandbox);
            let _work = entry.work().await;
            let live = entry.held_run(&run)?;
            let name = Name { sandbox: run.sandbox, checkpoint };
            if let Ok(facts) = find(&runs.config.host, &name) {
                // Asked for again, since the answer was lost.
                if wish.keep_paused && !live.marks().paused {
                    let text = format!("{} has gone on since {}; take another", name.sandbox, name.checkpoint);
                    return Err(NodeError::Stale(text));
                }
                return Ok(facts.info());
            }
            if let Err(full) = capacity::check_pool(&runs.config.host, runs.config.pool_reserve_bytes) {
                crate::rolling::make_room(&runs).await.map_err(|_| full)?;
            }
            runs.checkpoint_locked(&entry, &live, &name, wish).await
        });
        task.await.map_err(|_| NodeError::Cancelled)?
    }

    async fn checkpoint_locked(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        live: &Arc<Live>,
        name: &Name,
        wish: Wish,
    ) -> Result<CheckpointInfo, NodeError> {
        let was_paused = live.marks().paused;
        let mut quiesced = live.marks().clean;
        if !was_paused {
            live.machine.vm.sync_ahead().await?;
            quiesced = self.quiet(live).await?;
            points::reach("checkpoint.quiet");
        }
        // Nothing of the guest's programs runs from here on.
        let still_since = Instant::now();
        if wish.keep_paused {
            live.mark(|marks| (marks.paused, marks.clean) = (true, quiesced))?;
        }
        let taken = self.save(live, name, (quiesced, wish.rolling), still_since).await;
        match &taken {
            Err(NodeError::Save(SaveError::Terminal(_))) => {
                // Its memory cannot be trusted any more; the guard says that it ended.
                live.machine.vm.kill().await?;
                return taken.map(|facts| facts.info());
            }
            Ok(_) if wish.keep_paused && !was_paused => self.set_still(entry, Some(Still::Asked)),
            Err(_) if !was_paused => live.mark(|marks| marks.paused = false)?,
            _ => {}
        }
        if !live.marks().paused {
            self.go_on(live, quiesced).await?;
        }
        points::reach("checkpoint.resumed");
        let paused_us = u64::try_from(still_since.elapsed().as_micros()).unwrap_or(u64::MAX);
        taken.map(|facts| CheckpointInfo { paused_us, ..facts.info() })
    }

    /// Asks the guest to stand still; false: it did not. What is asked is written down first.
    pub(crate) async fn quiet(&self, live: &Live) -> Result<bool, NodeError> {
        live.mark(|marks| marks.quiet = true)?;
        Ok(live.guest.quiesce(true, QUIET_PATIENCE).await)
    }

    /// The VM runs again, and the guest's programs with it. A guest that was silent before may stay so.
    pub(crate) async fn go_on(&self, live: &Live, answered: bool) -> Result<(), NodeError> {
        live.machine.vm.resume().await?;
        let limit = if answered { GO_ON_PATIENCE } else { GO_ON_SILENT };
        match live.guest.go_on(&live.record, Hook::None, limit).await {
            Ok(()) => live.mark(|marks| (marks.quiet, marks.clean) = (false, false)),
            Err(error) if answered => Err(error),
            Err(error) => {
                let (sandbox, error) = (&live.record.sandbox, error.text());
                tracing::warn!(%sandbox, error, "a silent guest goes on unrefreshed");
                Ok(())
            }
        }
    }

    /// From the standing guest to the snapshot. The VM stands still afterwards, or is as it was.
    async fn save(
        self: &Arc<Self>,
        live: &Live,
        name: &Name,
        (quiesced, rolling): (bool, bool),
        still_since: Instant,
    ) -> Result<Facts, NodeError> {
        let saved = live.machine.vm.save(SaveKind::Changed).await;
        live.guest.cut().await;
        saved?;
        points::reach("checkpoint.saved");
        let record = &live.record;
        let mut facts = Facts {
            format: FORMAT,
            sandbox: name.sandbox.clone(),
            checkpoint: name.checkpoint.clone(),
            run: record.run,
            created_unix_ms: unix_ms(),
            template: record.template.clone(),
            memory_mib: record.memory_mib,
            vcpus: self.vcpus(record)?,
            disk_bytes: std::fs::metadata(live.machine.dir.join(dir::DISK)).map_or(0, |meta| meta.len()),
            compatibility: self.config.driver.compatibility().await?,
            quiesced,
            rolling,
            paused_us: 0,
            machine_id: record.machine_id.clone(),
            defaults: record.defaults.clone(),
        };
        let (folder, name) = (live.machine.dir.clone(), name.to_string());
        self.blocking(move |runs| {
            facts.paused_us = u64::try_from(still_since.elapsed().as_micros()).unwrap_or(u64::MAX);
            facts.write(&folder)?;
            points::reach("checkpoint.facts");
            let from = facts.sandbox.to_string();
            // The kernel commits it to storage before it returns.
            match runs.config.host.snapshot((Area::Sandboxes, &from), (Area::Checkpoints, &name), true) {
                // It has no facts of its own: nobody has ever been told of it.
                Err(HostError::AlreadyExists(_)) => {
                    runs.config.host.delete(Area::Checkpoints, &name)?;
                    runs.config.host.snapshot((Area::Sandboxes, &from), (Area::Checkpoints, &name), true)?;
                }
                other => drop(other?),
            }
            points::reach("checkpoint.taken");
            Ok(facts)
        })
        .await
    }

    /// Records of an earlier server do not say; its runs are all of a template that is still there.
    fn vcpus(&self, record: &crate::record::Record) -> Result<u32, NodeError> {
        if record.vcpus > 0 { Ok(record.vcpus) } else { Ok(self.templates.get(&record.template)?.meta.vcpus) }
    }
}

impl Entry {
    /// The run that a call is about, alive.
    pub(crate) fn held_run(&self, run: &RunRef) -> Result<Arc<Live>, NodeError> {
        let (fence, phase) = self.known();
        match (Fence::judge(fence, run), phase) {
            (Verdict::Same, Phase::Running(live)) if live.record.run == run.run => Ok(live),
            (Verdict::Stale, _) => Err(NodeError::Stale(format!("run {} of {} was overtaken", run.run, run.sandbox))),
            _ => Err(NodeError::Stale(format!(
                "misdirected: this node does not hold run {} of {}",
                run.run, run.sandbox
            ))),
        }
    }
}
