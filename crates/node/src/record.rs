//! What is on disk of a run, in its own subvolume: enough for the next start of the service to adopt or to clean up.
//!
//! Written by rename and without fsync: it must survive the death of this process, not of the host. After the host's
//! death the VM is gone anyway, and a record that is missing or torn means just that.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use space_core::{Generation, RunNumber, RunRef, SandboxId};
use space_hostd::uids::Slot;
use space_vmm::ProcessIdentity;

use crate::NodeError;

pub const FILE: &str = "run.json";
/// Most of it is the environment.
const RECORD_MAX_BYTES: u64 = 2 << 20;

/// A run that was begun. `vmm` is absent until its process exists.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    pub sandbox: SandboxId,
    pub run: RunNumber,
    pub generation: Generation,
    pub template: String,
    pub memory_mib: u32,
    pub slot: Slot,
    pub cgroup: String,
    pub started_unix_ms: i64,
    pub vmm: Option<ProcessIdentity>,
    /// The guest has confirmed its refresh. Until then the VM is half made, however alive. Records of a server that did not know
    /// this are of sandboxes that ran.
    #[serde(default = "yes")]
    pub confirmed: bool,
    /// 0 in records of a server that did not know it.
    #[serde(default)]
    pub vcpus: u32,
    /// What the guest was told, so that it can be told again.
    #[serde(default)]
    pub hostname: String,
    #[serde(default)]
    pub env: HashMap<String, String>,
    #[serde(default)]
    pub machine_id: String,
    #[serde(default)]
    pub defaults: GuestDefaults,
    #[serde(default)]
    pub rolling: Option<Rolling>,
    #[serde(default)]
    pub marks: Marks,
    /// The stopped run whose disk this one boots. Until it is confirmed the disk is that run's, and outlives a failure.
    #[serde(default)]
    pub boots_from: Option<RunNumber>,
}

/// What is meant to be, written before it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Marks {
    /// Somebody asked for it: only who asks for the contrary lets it run.
    pub paused: bool,
    /// The guest was told to stand still, and must be told to go on.
    pub quiet: bool,
    /// It did before it was paused.
    pub clean: bool,
    /// No VM; the disk is kept.
    pub stopped: bool,
}

/// What a process gets when its order leaves it open. From the template, which a stopped sandbox outlives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestDefaults {
    pub user: String,
    pub workdir: String,
    pub env: HashMap<String, String>,
}

/// Checkpoints that the node takes by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rolling {
    pub every_s: u32,
    /// `(every_s, within_s)`; none: the newest is kept.
    pub keep: Vec<(u32, u32)>,
}

impl From<space_proto::guest::Defaults> for GuestDefaults {
    fn from(from: space_proto::guest::Defaults) -> Self {
        Self { user: from.user, workdir: from.workdir, env: from.env }
    }
}

impl From<GuestDefaults> for space_proto::guest::Defaults {
    fn from(from: GuestDefaults) -> Self {
        Self { user: from.user, workdir: from.workdir, env: from.env }
    }
}

fn yes() -> bool {
    true
}

impl Record {
    pub fn run_ref(&self) -> RunRef {
        RunRef { sandbox: self.sandbox.clone(), run: self.run, generation: self.generation }
    }

    /// What is left when it has no VM and keeps its disk: the run that was stopped, also when another was about to boot it.
    pub fn stopped(&self) -> Option<Self> {
        let run = if self.marks.stopped { Some(self.run) } else { self.boots_from.filter(|_| !self.confirmed) };
        let marks = Marks { stopped: true, ..Marks::default() };
        run.map(|run| Self { run, marks, vmm: None, boots_from: None, confirmed: true, ..self.clone() })
    }

    pub fn write(&self, dir: &Path) -> Result<(), NodeError> {
        let text = serde_json::to_vec(self).expect("a record is plain data");
        let (new, file) = (dir.join("run.json.new"), dir.join(FILE));
        std::fs::write(&new, text).map_err(NodeError::io(format!("write {}", new.display())))?;
        std::fs::rename(&new, &file).map_err(NodeError::io(format!("write {}", file.display())))
    }

    /// `None` when there is none that makes sense.
    pub fn read(dir: &Path) -> Option<Self> {
        let file = dir.join(FILE);
        if std::fs::symlink_metadata(&file).ok()?.len() > RECORD_MAX_BYTES {
            return None;
        }
        Self::parse(&std::fs::read(file).ok()?)
    }

    /// `None` when it makes no sense.
    pub fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }
}
