//! Templates on disk: one read-only subvolume each, named by the digest of its content.
//!
//! A template is used only by a VMM that can load its state: what made it is recorded and compared before anything starts.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use space_hostd::host::Host;
use space_hostd::pool::Area;
use space_proto::guest::Defaults;
use space_proto::node::{TemplateInfo, TemplateOptions};

use crate::NodeError;

pub const FILE: &str = "meta.json";
pub const FORMAT: u32 = 1;
const META_MAX_BYTES: u64 = 1 << 20;
const PREFIX: &str = "sha256:";

/// What stands in `meta.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Meta {
    pub format: u32,
    pub source: String,
    pub memory_mib: u32,
    pub vcpus: u32,
    pub disk_bytes: u64,
    pub disk_bytes_used: u64,
    pub memory_bytes_used: u64,
    pub start_command: String,
    pub ready_command: String,
    pub user: String,
    pub workdir: String,
    pub env: BTreeMap<String, String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub kernel: String,
    pub vmm: String,
    /// Only a driver with the same text can load the state.
    pub compatibility: String,
    pub guest_protocol: u32,
    pub created_unix_ms: i64,
    /// The build that made it, so that one which is asked for again after its answer was lost is not made again.
    #[serde(default)]
    pub build_id: String,
}

impl Meta {
    /// `None` when it is damaged or of another format.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let meta: Meta = serde_json::from_slice(text).ok()?;
        (meta.format == FORMAT).then_some(meta)
    }

    pub fn defaults(&self) -> Defaults {
        let env = self.env.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        Defaults { user: self.user.clone(), workdir: self.workdir.clone(), env }
    }

    /// What belongs to the content beside the files: everything but times and sizes.
    pub fn digested(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            ("format".to_owned(), self.format.to_string()),
            ("memory_mib".to_owned(), self.memory_mib.to_string()),
            ("vcpus".to_owned(), self.vcpus.to_string()),
            ("user".to_owned(), self.user.clone()),
            ("workdir".to_owned(), self.workdir.clone()),
            ("env".to_owned(), json(&self.env)),
            ("entrypoint".to_owned(), json(&self.entrypoint)),
            ("cmd".to_owned(), json(&self.cmd)),
            ("compatibility".to_owned(), self.compatibility.clone()),
            ("guest_protocol".to_owned(), self.guest_protocol.to_string()),
        ])
    }
}

/// JSON of plain data, which cannot fail.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("plain data")
}

/// A template that this node has.
#[derive(Debug)]
pub struct Template {
    /// `sha256:…`
    pub digest: String,
    /// Of its subvolume: the hex of the digest.
    pub name: String,
    pub meta: Meta,
}

impl Template {
    pub fn info(&self, sandboxes: usize) -> TemplateInfo {
        let meta = &self.meta;
        TemplateInfo {
            digest: self.digest.clone(),
            options: Some(TemplateOptions {
                memory_mib: meta.memory_mib,
                vcpus: meta.vcpus,
                disk_bytes: meta.disk_bytes,
                start_command: meta.start_command.clone(),
                ready_command: meta.ready_command.clone(),
                ready_timeout_ms: 0,
                env: meta.env.iter().map(|(k, v)| (k.clone(), v.clone())).collect::<HashMap<_, _>>(),
                user: meta.user.clone(),
                workdir: meta.workdir.clone(),
            }),
            source: meta.source.clone(),
            created_unix_ms: meta.created_unix_ms,
            disk_bytes_used: meta.disk_bytes_used,
            memory_bytes_used: meta.memory_bytes_used,
            kernel: meta.kernel.clone(),
            vmm: meta.vmm.clone(),
            sandboxes: u32::try_from(sandboxes).unwrap_or(u32::MAX),
            defaults: Some(meta.defaults()),
            entrypoint: meta.entrypoint.clone(),
            cmd: meta.cmd.clone(),
        }
    }
}

/// The templates of a pool. Their files never change, so what was read once stays true while the subvolume is there.
pub struct Templates {
    host: Host,
    known: Mutex<HashMap<String, Arc<Template>>>,
}

/// The name of a digest's subvolume.
pub fn name_of(digest: &str) -> Result<&str, NodeError> {
    let hex = digest.strip_prefix(PREFIX).filter(|_| space_core::name::is_digest(digest));
    hex.ok_or_else(|| NodeError::Invalid(format!("{digest:?} is not a digest: sha256: and 64 hex digits")))
}

fn read(dir: &Path) -> Option<Meta> {
    let file = dir.join(FILE);
    if std::fs::symlink_metadata(&file).ok()?.len() > META_MAX_BYTES {
        return None;
    }
    Meta::parse(&std::fs::read(file).ok()?)
}

impl Templates {
    pub fn new(host: Host) -> Self {
        Self { host, known: Mutex::default() }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<Template>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// `NotFound` when this node has no such template.
    pub fn get(&self, digest: &str) -> Result<Arc<Template>, NodeError> {
        let name = name_of(digest)?;
        if let Some(template) = self.known().get(name) {
            return Ok(template.clone());
        }
        let missing =
            || NodeError::NotFound(format!("this node has no template {digest}; build it, or choose another"));
        let meta = read(&self.host.path(Area::Templates, name)?).ok_or_else(missing)?;
        let template = Arc::new(Template { digest: digest.to_owned(), name: name.to_owned(), meta });
        self.known().insert(name.to_owned(), template.clone());
        Ok(template)
    }

    /// All of them, oldest first. What cannot be read is left out.
    pub fn list(&self) -> Result<Vec<Arc<Template>>, NodeError> {
        let names = self.host.list(Area::Templates)?;
        let mut all: Vec<_> = names.iter().filter_map(|name| self.get(&format!("{PREFIX}{name}")).ok()).collect();
        all.sort_by_key(|template| template.meta.created_unix_ms);
        Ok(all)
    }

    /// What this build made, if it came to its end.
    pub fn made_by(&self, build_id: &str) -> Result<Option<Arc<Template>>, NodeError> {
        let made = |template: &Arc<Template>| !build_id.is_empty() && template.meta.build_id == build_id;
        Ok(self.list()?.into_iter().find(made))
    }

    /// Removes it; the caller has made sure that nothing uses it. Gone already is no error.
    pub fn delete(&self, digest: &str) -> Result<(), NodeError> {
        let name = name_of(digest)?;
        self.known().remove(name);
        Ok(self.host.delete(Area::Templates, name)?)
    }
}
