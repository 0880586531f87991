//! The pool as the configuration wants it.

use std::path::Path;

use space_hostd::pool::{MIN_POOL_BYTES, Pool, PoolSource};

use super::Finding;
use crate::config::{PoolConfig, ServerConfig};
use crate::failure::Failure;
use crate::output::size;

/// A pool file is sparse; beyond this it should be chosen by a person.
const DEFAULT_BYTES: u64 = 64 << 30;
/// Left to the rest of the machine.
const RESERVE_BYTES: u64 = 2 << 30;
/// Less does not hold `seed` and a few sandboxes.
const USEFUL_BYTES: u64 = 3 << 30;

/// The nearest folder above that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

fn free(path: &Path) -> u64 {
    space_hostd::probe::free_bytes(existing(path)).unwrap_or(0)
}

/// Where its bytes are. A file gets its default size from what is free now; an existing one keeps its own.
pub fn source(config: &ServerConfig) -> Result<PoolSource, Failure> {
    Ok(match &config.pool {
        PoolConfig::Device(device) => PoolSource::Device(device.clone()),
        PoolConfig::Path(_) => PoolSource::Existing,
        PoolConfig::File { bytes } => {
            let image = config.data_dir.join("pool.img");
            let bytes = match (bytes, image.exists()) {
                (Some(bytes), _) => *bytes,
                (None, true) => DEFAULT_BYTES,
                (None, false) => {
                    let free = free(&config.data_dir);
                    if free < USEFUL_BYTES + RESERVE_BYTES {
                        return Err(Failure::new(format!(
                            "{} has {} free and the pool needs at least {}: free some space, or choose another place with \
                             --data-dir, --pool DEVICE or --pool-size",
                            existing(&config.data_dir).display(),
                            size(free),
                            size(USEFUL_BYTES + RESERVE_BYTES)
                        )));
                    }
                    DEFAULT_BYTES.min(free - RESERVE_BYTES)
                }
            };
            if bytes < MIN_POOL_BYTES {
                return Err(Failure::usage(format!("a pool of {} is too small: give it 3GiB or more", size(bytes))));
            }
            PoolSource::LoopFile { image, bytes }
        }
    })
}

/// Makes it when it is missing and mounts it. Only by the one who holds the server's lock: opening sweeps unfinished work.
pub fn open(config: &ServerConfig) -> Result<Pool, Failure> {
    let source = source(config)?;
    Pool::open(&config.pool_root(), source).map_err(|e| Failure::from(anyhow::Error::from(e)))
}

/// Whether it exists, is mounted and has room. `server`: one runs, and mounts it.
pub fn check(config: &ServerConfig) -> Finding {
    const NAME: &str = "pool";
    let root = config.pool_root();
    if let PoolConfig::File { .. } = &config.pool
        && !config.data_dir.join("pool.img").exists()
    {
        let image = config.data_dir.join("pool.img");
        return Finding::fail(NAME, format!("{} does not exist", image.display()), "sudo space setup");
    }
    let mounted = space_hostd::btrfs::is_btrfs(&root).unwrap_or(false) && root.join("templates").is_dir();
    if !mounted {
        let fix = "`space up` mounts it; `sudo space setup` makes it";
        return Finding::warn(NAME, format!("{} is not mounted", root.display()), fix);
    }
    let free = free(&root);
    let text = format!("{}, {} free", root.display(), size(free));
    if free < 1 << 30 {
        return Finding::fail(
            NAME,
            text,
            "delete sandboxes or templates (space ls, space template list), or make it larger",
        );
    }
    // The file is sparse: the pool can promise more than the disk below it holds.
    let below = self::free(&config.data_dir);
    if matches!(config.pool, PoolConfig::File { .. }) && below < 1 << 30 {
        let fix = "free space there: a guest whose memory finds no room dies";
        return Finding::fail(NAME, format!("{text}, but only {} below it", size(below)), fix);
    }
    Finding::ok(NAME, text)
}
