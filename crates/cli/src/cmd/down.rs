//! `space down`

use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use space_api::client::Client;

use crate::args::Global;
use crate::cmd::delete::{all_ids, delete_many};
use crate::connect::ClientFile;
use crate::failure::Failure;
use crate::host::leftovers;
use crate::output::{self, note};
use crate::server::{self, lock};

const WAIT: Duration = Duration::from_secs(40);

const AFTER_HELP: &str = "\
Sandboxes go on without a server; the next `space up` takes them over with their programs still running.

Examples:
  sudo space down
  sudo space down --sandboxes";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Down {
    /// Delete every sandbox first
    #[arg(long)]
    sandboxes: bool,
    /// Unmount the pool at the end; refused while sandboxes go on
    #[arg(long)]
    unmount: bool,
}

impl Down {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let config = crate::layers(global)?.finish()?;
        server::require_root("space down")?;
        let pid = lock::running(&config);
        if self.sandboxes {
            let Some(file) = ClientFile::read(&config.client_file()).filter(|_| pid.is_some()) else {
                return Err(Failure::new(
                    "no server runs, so there is nobody to delete the sandboxes: `space up` first",
                ));
            };
            let client = Client::new(&file.url, Some(&file.key))?;
            for (id, result) in delete_many(&client, all_ids(&client).await?).await {
                result.map_err(|e| Failure::new(format!("{id}: {e}; the server goes on")))?;
            }
        }
        if let Some(pid) = pid {
            stop(pid, || lock::is_held(&config)).await?;
        }
        let left = leftovers::vmms(&config).len();
        if self.unmount {
            if left > 0 {
                return Err(Failure::new(format!(
                    "{left} sandboxes go on, so the pool stays mounted; use --sandboxes"
                )));
            }
            let held = lock::Lock::take(&config)?;
            crate::host::pool::open(&config)?.unmount().map_err(|e| Failure::from(anyhow::Error::from(e)))?;
            drop(held);
        }
        if global.json {
            output::json(&serde_json::json!({"stopped": pid.is_some(), "sandboxes_left": left}));
            return Ok(0);
        }
        note(match pid {
            Some(_) => "the server has ended".to_owned(),
            None => format!("no server runs on {}", config.data_dir.display()),
        });
        if left > 0 {
            note(format!("{left} sandboxes go on; `space up` takes them over"));
        }
        Ok(0)
    }
}

/// Tells it to end and waits until it has let go of the folder.
async fn stop(pid: i32, held: impl Fn() -> bool) -> Result<(), Failure> {
    match kill(Pid::from_raw(pid), Signal::SIGTERM) {
        Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
        Err(errno) => return Err(Failure::new(format!("cannot tell the server (process {pid}) to end: {errno}"))),
    }
    let started = Instant::now();
    while held() {
        if started.elapsed() > WAIT {
            return Err(Failure::new(format!(
                "the server (process {pid}) has not ended after {} s; `kill -9 {pid}` is safe, sandboxes go on",
                WAIT.as_secs()
            )));
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    Ok(())
}
