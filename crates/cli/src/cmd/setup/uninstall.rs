//! `space setup --uninstall`: the pool and the data folder go; packages stay.

use crate::config::{PoolConfig, ServerConfig};
use crate::failure::Failure;
use crate::host::{leftovers, pool};
use crate::output::{self, note};
use crate::server::lock;

/// What we ever put into a data folder; anything else is somebody's and stays.
const OURS: [&str; 23] = [
    "vmm",
    "control",
    "jails",
    "build",
    "pool.img",
    "pool.img.new",
    "kernel",
    "kernel.new",
    "kernel.unpack",
    "kernel-download",
    "initramfs.img",
    "initramfs.new",
    "initramfs.json",
    "seed.json",
    "seed-build.json",
    "control.db",
    "control.db-wal",
    "control.db-shm",
    "node",
    "client.toml",
    "admin.key",
    "token.seed",
    "server.log",
];

pub fn run(config: &ServerConfig, yes: bool, json: bool) -> Result<i32, Failure> {
    let data = &config.data_dir;
    if !super::is_data_dir(data) {
        return Err(Failure::new(format!("{} is not a data folder of SPACE; nothing was removed", data.display())));
    }
    if let Some(pid) = lock::running(config) {
        return Err(Failure::new(format!("a server (process {pid}) runs: `space down --sandboxes` first")));
    }
    let vmms = leftovers::vmms(config).len();
    if vmms > 0 {
        return Err(Failure::new(format!(
            "{vmms} sandboxes still run: `space up --detach`, then `space down --sandboxes`"
        )));
    }
    let question = format!("This removes {} with every sandbox and template.", data.display());
    if !yes && !super::confirm(&question) {
        return Err(Failure::new("nothing was removed; --yes answers the question"));
    }
    let held = lock::Lock::take(config)?;
    // Opening makes a pool that is not there; then there is none to take down.
    let there = match &config.pool {
        PoolConfig::File { .. } => data.join("pool.img").exists(),
        _ => true,
    };
    if there {
        let failed = |e: space_hostd::pool::PoolError| Failure::from(anyhow::Error::from(e));
        let open = pool::open(config)?;
        remove_subvolumes(&open)?;
        open.unmount().map_err(failed)?;
    }
    if !matches!(config.pool, PoolConfig::Path(_)) {
        let _ = std::fs::remove_dir(data.join("pool"));
    }
    for name in OURS {
        let path = data.join(name);
        let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        if let Err(e) = removed
            && e.kind() != std::io::ErrorKind::NotFound
        {
            return Err(Failure::new(format!("cannot remove {}: {e}", path.display())));
        }
    }
    let _ = std::fs::remove_file(data.join("server.log.1"));
    let _ = std::fs::remove_dir_all(config.run_dir());
    drop(held);
    let emptied = std::fs::remove_dir(data).is_ok();
    if json {
        output::json(&serde_json::json!({"removed": emptied}));
    } else if emptied {
        note(format!("{} is gone; packages stay installed", data.display()));
    } else {
        note(format!("{} stays: it holds files that are not ours", data.display()));
    }
    Ok(0)
}

/// Also where the pool is a folder of somebody else's btrfs, which stays.
fn remove_subvolumes(open: &space_hostd::pool::Pool) -> Result<(), Failure> {
    use space_hostd::pool::Area;
    for area in [Area::Sandboxes, Area::Checkpoints, Area::Templates] {
        let failed = |e: space_hostd::pool::PoolError| Failure::from(anyhow::Error::from(e));
        for name in open.list(area).map_err(failed)? {
            open.delete(area, &name).map_err(failed)?;
        }
    }
    Ok(())
}
