//! What should not be there: VMMs, folders and cgroups of sandboxes that the server does not know. Looked at only.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::Finding;
use crate::config::ServerConfig;

const NAME: &str = "leftovers";

/// VMM processes whose folder lies in this pool: process id and the name of the folder.
pub fn vmms(config: &ServerConfig) -> Vec<(u32, String)> {
    space_hostd::probe::vmms(&config.pool_root())
}

fn folders(config: &ServerConfig) -> BTreeSet<String> {
    let area: PathBuf = config.pool_root().join("sandboxes");
    let entries = std::fs::read_dir(area).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// `known`: ids of the server's sandboxes, or `None` when no server runs.
pub fn check(config: &ServerConfig, known: Option<&BTreeSet<String>>) -> Finding {
    let vmms = vmms(config);
    let Some(known) = known else {
        return match vmms.len() {
            0 => Finding::ok(NAME, "no VM runs without a server"),
            n => Finding::warn(
                NAME,
                format!("{n} VMs run and no server looks after them"),
                "`space up` adopts them; `space down --sandboxes` after that ends them",
            ),
        };
    };
    let mut strange: Vec<String> = Vec::new();
    for (pid, folder) in &vmms {
        let ours = folder.strip_prefix("sandboxes/").is_none_or(|id| known.contains(id));
        if !ours {
            strange.push(format!("VMM {pid} in {folder}"));
        }
    }
    strange.extend(folders(config).difference(known).map(|id| format!("folder {id}")));
    if strange.is_empty() {
        return Finding::ok(NAME, format!("none; {} sandboxes, {} VMs", known.len(), vmms.len()));
    }
    strange.truncate(8);
    Finding::warn(NAME, strange.join(", "), "a server sweeps them when it starts: space down && space up --detach")
}
