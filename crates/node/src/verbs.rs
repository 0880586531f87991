//! What is asked of a run that is there: pause, resume, stop, end, delete. Each is repeatable, and what is meant to be is
//! written down before it is done, so that the next start of the service goes on with it.
//!
//! No verb waits without a limit for a guest or a VMM, and an end never waits for either.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use space_core::RunRef;
use space_hostd::points;
use space_hostd::pool::Area;
use space_proto::node::RunStatus;
use space_vmm::dir;

use crate::NodeError;
use crate::checkpoint;
use crate::fence::{Fence, Verdict};
use crate::record::{Marks, Record};
use crate::run;
use crate::runs::{Entry, Phase, Runs, Still};

/// Removes what only a running VM has; the disk stays.
pub fn drop_memory(folder: &Path) -> Result<(), NodeError> {
    for name in [dir::MEMORY, dir::DEVICE_STATE] {
        let file = folder.join(name);
        match std::fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(NodeError::io(format!("remove {}", file.display()))(error));
            }
            _ => {}
        }
    }
    Ok(())
}

fn status(entry: &Entry) -> Result<RunStatus, NodeError> {
    entry.status().ok_or_else(|| NodeError::Stale(format!("{} was deleted", entry.id)))
}

fn not_stale(entry: &Entry, run: &RunRef) -> Result<Phase, NodeError> {
    let (fence, phase) = entry.known();
    if Fence::judge(fence, run) == Verdict::Stale {
        return Err(NodeError::Stale(format!("run {} of {} was overtaken", run.run, run.sandbox)));
    }
    Ok(phase)
}

impl Runs {
    /// A verb runs to its end, also when its caller goes away.
    async fn verb<T, F>(
        self: &Arc<Self>,
        run: RunRef,
        work: impl FnOnce(Arc<Self>, Arc<Entry>, RunRef) -> F,
    ) -> Result<T, NodeError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, NodeError>> + Send + 'static,
    {
        let entry = self.entry(&run.sandbox);
        tokio::spawn(work(self.clone(), entry, run)).await.map_err(|_| NodeError::Cancelled)?
    }

    pub async fn pause(self: &Arc<Self>, run: RunRef) -> Result<RunStatus, NodeError> {
        self.verb(run, |runs, entry, run| async move {
            let _work = entry.work().await;
            let live = entry.held_run(&run)?;
            if live.marks().paused {
                return status(&entry);
            }
            // Frozen, nothing of it runs at the resume before clock and entropy are right.
            let quiet = runs.quiet(&live).await?;
            points::reach("pause.quiet");
            let stopped = async {
                live.mark(|marks| (marks.paused, marks.clean) = (true, quiet))?;
                points::reach("pause.noted");
                Ok(live.machine.vm.pause().await?)
            };
            if let Err(error) = stopped.await {
                let _ = live.mark(|marks| marks.paused = false);
                let _ = runs.go_on(&live, quiet).await;
                return Err(error);
            }
            points::reach("pause.paused");
            runs.set_still(&entry, Some(Still::Asked));
            status(&entry)
        })
        .await
    }

    pub async fn resume(self: &Arc<Self>, run: RunRef) -> Result<RunStatus, NodeError> {
        self.verb(run, |runs, entry, run| async move {
            let _work = entry.work().await;
            let live = entry.held_run(&run)?;
            if !live.marks().paused {
                return status(&entry);
            }
            // A guest that fails to confirm stays paused, as it was asked to be: nothing says that it runs.
            if let Err(error) = runs.go_on(&live, true).await {
                let _ = live.machine.vm.pause().await;
                return Err(error);
            }
            points::reach("resume.refreshed");
            live.mark(|marks| marks.paused = false)?;
            runs.set_still(&entry, None);
            status(&entry)
        })
        .await
    }

    /// The guest's file systems are on its disk, then the VM ends; memory goes, the disk stays.
    pub async fn stop(self: &Arc<Self>, run: RunRef) -> Result<RunStatus, NodeError> {
        self.verb(run, |runs, entry, run| async move {
            let _work = entry.work().await;
            if let Phase::Stopped(stopped) = not_stale(&entry, &run)?
                && stopped.run == run.run
            {
                return status(&entry);
            }
            let live = entry.held_run(&run)?;
            if !live.marks().paused {
                runs.quiet(&live).await?;
                points::reach("stop.quiet");
            }
            live.mark(|marks| *marks = Marks { stopped: true, ..Marks::default() })?;
            points::reach("stop.noted");
            let record = Arc::new(Record { marks: live.marks(), vmm: None, ..live.record.clone() });
            // From here on its end is no news.
            runs.change(&entry, |held| {
                held.phase = Phase::Stopped(record.clone());
                held.still = None;
                held.reason.clear();
            });
            let vm = &live.machine.vm;
            vm.kill().await?;
            vm.wait().await;
            points::reach("stop.killed");
            runs.settle_stopped(&record).await?;
            status(&entry)
        })
        .await
    }

    /// What is left of a stopped run: its disk and its record.
    pub(crate) async fn settle_stopped(self: &Arc<Self>, record: &Arc<Record>) -> Result<(), NodeError> {
        let record = record.clone();
        self.blocking(move |runs| {
            runs.config.host.group(&record.cgroup).end()?;
            let folder = runs.config.host.path(Area::Sandboxes, record.sandbox.as_str())?;
            drop_memory(&folder)?;
            record.write(&folder)
        })
        .await
    }

    /// Ends the VM and removes its files; the sandbox's checkpoints stay.
    pub async fn end(self: &Arc<Self>, run: RunRef) -> Result<(), NodeError> {
        self.verb(run, |runs, entry, run| async move { runs.remove(&entry, &run, false).await }).await
    }

    /// Ends whatever there is of a sandbox, its checkpoints too. Absent: success.
    pub async fn delete(self: &Arc<Self>, run: RunRef) -> Result<(), NodeError> {
        self.verb(run, |runs, entry, run| async move { runs.remove(&entry, &run, true).await }).await
    }

    async fn remove(self: &Arc<Self>, entry: &Arc<Entry>, run: &RunRef, all: bool) -> Result<(), NodeError> {
        if let Phase::Running(live) = not_stale(entry, run)? {
            live.ending.store(true, Ordering::Release);
            // At once: whatever holds the turn may be waiting for this VM, which may never answer.
            live.machine.vm.kill().await?;
        }
        let _work = entry.work().await;
        let phase = not_stale(entry, run)?;
        let name = run.sandbox.as_str();
        match &phase {
            Phase::Running(live) => {
                // From here on its end is no news.
                self.change(entry, |held| held.phase = Phase::Gone);
                let machine = &live.machine;
                run::destroy(self, Area::Sandboxes, name, machine.group.name(), Some(&machine.vm)).await?;
            }
            _ => run::destroy(self, Area::Sandboxes, name, name, None).await?,
        }
        if all {
            let sandbox = run.sandbox.clone();
            self.blocking(move |runs| checkpoint::delete_all(&runs.config.host, &sandbox)).await?;
        }
        self.change(entry, |held| {
            held.fence = Some(Fence::merged(held.fence, run));
            held.phase = if all || matches!(phase, Phase::Absent) { Phase::Absent } else { Phase::Ended };
            held.still = None;
            held.reason = if all { String::new() } else { "ended: its checkpoints are kept".to_owned() };
        });
        Ok(())
    }
}
