//! `space up`: the server, in the foreground or behind.

use std::io::{Read as _, Seek as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use space_api::client::Client;
use space_hostd::process::STARTER_CAPABILITIES;

use crate::args::Global;
use crate::cmd::delete::{all_ids, delete_many};
use crate::config::ServerConfig;
use crate::connect::ClientFile;
use crate::failure::Failure;
use crate::host::leftovers;
use crate::output::{self, Paint, note, paint_err};
use crate::process::Signals;
use crate::server::{self, lock};

/// For a server that starts behind; adopting many sandboxes takes its time.
const READY_WAIT: Duration = Duration::from_secs(60);
const LOG_TAIL_BYTES: u64 = 4096;

const AFTER_HELP: &str = "\
Needs root, and a machine that `space setup` prepared. It leaves the address and an admin key in DATA_DIR/client.toml (0600), where the
other commands find them. Ctrl-C or SIGTERM end the server; sandboxes go on, and the next `space up` takes them over.

Examples:
  sudo space up
  sudo space up --detach
  sudo space up --listen 127.0.0.1:8080 --data-dir /srv/space";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Up {
    /// Start it behind, wait until it is ready, and return
    #[arg(short, long)]
    detach: bool,
    /// Address of the API [default: 127.0.0.1:7070]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Address of the data plane [default: 127.0.0.1:7071]
    #[arg(long, value_name = "ADDRESS:PORT")]
    data_listen: Option<String>,
    /// Log filter, as info or space_node=debug,info
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
    /// text or json
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
    /// Delete every sandbox when the server ends
    #[arg(long)]
    delete_on_exit: bool,
    /// We are the process that `--detach` started
    #[arg(long, hide = true)]
    behind: bool,
}

impl Up {
    pub fn execute(self, global: &Global) -> Result<i32, Failure> {
        let mut layers = crate::layers(global)?;
        layers.flag("listen", "--listen", self.listen.clone());
        layers.flag("data_listen", "--data-listen", self.data_listen.clone());
        layers.flag("log", "--log", self.log.clone());
        layers.flag("log_format", "--log-format", self.log_format.clone());
        let config = layers.finish()?;
        server::require_root("space up")?;
        if self.detach {
            return start_behind(&config, global.json);
        }
        if self.behind {
            // Away from the terminal that started us; fails only when we lead already.
            let _ = nix::unistd::setsid();
        }
        space_hostd::process::keep_only(STARTER_CAPABILITIES)
            .map_err(|e| Failure::new(format!("cannot give up what a server does not need: {e}")))?;
        let held = lock::Lock::take(&config)?;
        server::log::start(&config.log, config.log_format, self.behind.then(|| log_file(&config)).as_deref())?;
        let status = crate::on_many_threads(self.serve(&config, &held, global.json));
        drop(held);
        status
    }

    async fn serve(&self, config: &ServerConfig, held: &lock::Lock, json: bool) -> Result<i32, Failure> {
        let mut signals = Signals::listen()?;
        let mut running = tokio::select! {
            running = server::start(config, held) => running?,
            number = signals.fatal() => return Ok(128 + number),
        };
        let file = ClientFile { url: running.url.clone(), key: running.admin_key.clone() };
        let path = config.client_file();
        file.write(&path).map_err(|e| Failure::new(format!("cannot write {}: {e}", path.display())))?;
        if !self.behind {
            announce(config, &running.url, json);
        }
        tokio::select! {
            never = running.keep() => match never {},
            _ = signals.fatal() => {}
        }
        if self.delete_on_exit {
            let client = Client::new(&file.url, Some(&file.key))?;
            for (id, result) in delete_many(&client, all_ids(&client).await?).await {
                if let Err(error) = result {
                    note(format!("{id}: {error}"));
                }
            }
        }
        tokio::select! {
            () = running.stop() => {}
            _ = signals.fatal() => {}
        }
        let _ = std::fs::remove_file(&path);
        let left = leftovers::vmms(config).len();
        if left > 0 {
            note(format!(
                "{left} sandboxes go on; `space up` takes them over, and then `space delete --all` ends them"
            ));
        }
        Ok(0)
    }
}

fn log_file(config: &ServerConfig) -> PathBuf {
    config.data_dir.join("server.log")
}

fn announce(config: &ServerConfig, url: &str, json: bool) {
    if json {
        output::json_line(&serde_json::json!({"url": url, "data_dir": config.data_dir}));
        return;
    }
    note(format!("{} at {url}, data in {}", paint_err("SPACE is up", Paint::Green), config.data_dir.display()));
    note("  try:  space run -- python3 -c 'print(6*7)'");
    note("        space create --name box && space shell box");
}

/// Starts ourselves again without a terminal and waits until that server answers.
fn start_behind(config: &ServerConfig, json: bool) -> Result<i32, Failure> {
    if lock::is_held(config) {
        drop(lock::Lock::take(config)?);
    }
    lock::make_folders(config)?;
    space_hostd::process::keep_descriptors();
    let failed = |e: std::io::Error| Failure::new(format!("cannot start the server: {e}"));
    let own = std::env::current_exe().map_err(failed)?;
    let args = std::env::args_os().skip(1).filter(|arg| arg != "--detach" && arg != "-d" && arg != "--json");
    let mut early = tempfile::tempfile().map_err(failed)?;
    let _ = std::fs::remove_file(config.client_file());
    let mut command = Command::new(own);
    command.args(args).arg("--behind").stdin(Stdio::null());
    command.stdout(early.try_clone().map_err(failed)?).stderr(early.try_clone().map_err(failed)?);
    let mut child = command.spawn().map_err(failed)?;
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            let mut said = String::new();
            let _ = early.rewind().and_then(|()| early.read_to_string(&mut said));
            let said = if said.trim().is_empty() { log_tail(config) } else { said };
            let said = said.trim().trim_start_matches("error: ");
            return Err(Failure::new(format!("the server did not start ({status}): {said}")));
        }
        let file =
            ClientFile::read(&config.client_file()).filter(|_| lock::running(config) == i32::try_from(child.id()).ok());
        if let Some(file) = file
            && crate::on_many_threads(healthy(file.url.clone())).is_ok()
        {
            announce(config, &file.url, json);
            if !json {
                note(format!("  log:  {}", log_file(config).display()));
            }
            return Ok(0);
        }
        if started.elapsed() > READY_WAIT {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::SIGTERM);
            return Err(Failure::new(format!(
                "the server was not ready after {} s and was told to end; {} has its log: {}",
                READY_WAIT.as_secs(),
                log_file(config).display(),
                log_tail(config)
            )));
        }
        std::thread::sleep(Duration::from_millis(30));
    }
}

async fn healthy(url: String) -> Result<i32, Failure> {
    Client::new(&url, None)?.health().await?;
    Ok(0)
}

/// The last lines of the log.
fn log_tail(config: &ServerConfig) -> String {
    let Ok(mut file) = std::fs::File::open(log_file(config)) else { return String::new() };
    let length = file.metadata().map_or(0, |meta| meta.len());
    let mut tail = Vec::new();
    let _ = file.seek(std::io::SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)));
    let _ = file.take(LOG_TAIL_BYTES).read_to_end(&mut tail);
    let text = String::from_utf8_lossy(&tail);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("; ")
}
