//! What is on disk of a run, in its own subvolume: enough for the next start of the service to adopt or to clean up.
//!
//! Written by rename and without fsync: it must survive the death of this process, not of the host. After the host's
//! death the VM is gone anyway, and a record that is missing or torn means just that.

use std::path::Path;

use serde::{Deserialize, Serialize};
use space_core::{Generation, RunNumber, RunRef, SandboxId};
use space_hostd::uids::Slot;
use space_vmm::ProcessIdentity;

use crate::NodeError;

pub const FILE: &str = "run.json";
const RECORD_MAX_BYTES: u64 = 64 * 1024;

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
}

fn yes() -> bool {
    true
}

impl Record {
    pub fn run_ref(&self) -> RunRef {
        RunRef { sandbox: self.sandbox.clone(), run: self.run, generation: self.generation }
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
