//! `space setup`: every step looks first and does only what is missing, so it can be repeated, and taken up again after it was cut short.

mod uninstall;

use std::io::{BufRead as _, IsTerminal as _};
use std::path::{Path, PathBuf};

use clap::Args;
use space_api::client::Client;

use crate::args::Global;
use crate::config::{DriverChoice, ServerConfig};
use crate::connect::ClientFile;
use crate::failure::Failure;
use crate::host::{Finding, Level, firecracker, initramfs, kernel, packages, pool, seed};
use crate::output::{self, Paint, note, paint_err};
use crate::process::Signals;
use crate::progress::Progress;
use crate::server::{self, lock};

const AFTER_HELP: &str = "\
Needs root. Installs missing Debian packages, makes the pool (a sparse file with btrfs, unless --pool names a blank device or a folder on
btrfs), fetches the guest's kernel, makes the initramfs and builds the template `seed`. May be run again at any time.

Examples:
  sudo space setup
  sudo space setup --pool /dev/nvme1n1
  sudo space setup --no-install                     only says which packages are missing
  sudo space setup --firecracker                    Firecracker's pinned release; see vmm.driver
  sudo space setup --firecracker=./firecracker      a build of your own
  sudo space setup --uninstall                      removes pool and data";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Setup {
    /// A blank block device, or a folder on btrfs, for the pool [default: a file in the data folder]
    #[arg(long, value_name = "DEVICE|FOLDER")]
    pool: Option<String>,
    /// Size of the pool file, as 32GiB [default: most of the free space, at most 64GiB; it takes only what is used]
    #[arg(long, value_name = "SIZE")]
    pool_size: Option<String>,
    /// The daemon for guests [default: space-daemon beside this program]
    #[arg(long, value_name = "FILE")]
    daemon: Option<PathBuf>,
    /// A downloaded linux-image-…-cloud-amd64 package, instead of fetching one
    #[arg(long, value_name = "FILE")]
    kernel_package: Option<PathBuf>,
    /// Install Firecracker: its pinned release, or from an archive or program (PATH) or an archive elsewhere (URL)
    #[arg(long, value_name = "PATH|URL", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    firecracker: Option<String>,
    /// The SHA-256 that the archive of Firecracker must have, when it is not the pinned release's
    #[arg(long, value_name = "HEX", requires = "firecracker")]
    firecracker_sha256: Option<String>,
    /// Fetch the kernel again
    #[arg(long)]
    update_kernel: bool,
    /// Install nothing; say what is missing
    #[arg(long)]
    no_install: bool,
    /// Do not build the template `seed`
    #[arg(long)]
    skip_template: bool,
    /// Remove the pool and the data folder, with every sandbox and template
    #[arg(long, conflicts_with_all = ["pool", "pool_size", "daemon", "kernel_package", "firecracker", "update_kernel", "no_install", "skip_template"])]
    uninstall: bool,
    /// Ask nothing
    #[arg(long)]
    yes: bool,
}

/// What has been done, for people as it happens and for `--json` at the end.
pub struct Report {
    json: bool,
    steps: Vec<serde_json::Value>,
}

impl Report {
    fn done(&mut self, name: &str, changed: bool, detail: &str) {
        if !self.json {
            let mark = if changed { paint_err("done", Paint::Green) } else { paint_err("ok  ", Paint::Green) };
            note(format!("{mark}  {name:<16} {detail}"));
        }
        self.steps.push(serde_json::json!({"step": name, "changed": changed, "detail": detail}));
    }
}

/// Runs what blocks on a thread of its own, with its progress.
async fn step<T: Send + 'static>(
    silent: bool,
    first: &str,
    work: impl FnOnce(&dyn Fn(&str)) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let (to, mut from) = tokio::sync::mpsc::unbounded_channel::<String>();
    let mut progress = Progress::steps(silent);
    progress.set(first, 0, 0);
    let mut work = tokio::task::spawn_blocking(move || work(&|text: &str| drop(to.send(text.to_owned()))));
    loop {
        tokio::select! {
            Some(text) = from.recv() => progress.set(&text, 0, 0),
            result = &mut work => return result.map_err(|e| Failure::new(format!("a step of set-up broke off: {e}")))?,
        }
    }
}

impl Setup {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let mut layers = crate::layers(global)?;
        if let Some(place) = &self.pool {
            use std::os::unix::fs::FileTypeExt as _;
            let meta = std::fs::metadata(place).map_err(|e| {
                Failure::usage(format!("--pool {place}: {e}; name a block device or a folder on btrfs"))
            })?;
            let name = if meta.file_type().is_block_device() { "pool.device" } else { "pool.path" };
            layers.flag(name, "--pool", Some(place.clone()));
        }
        layers.flag("pool.size", "--pool-size", self.pool_size.clone());
        let config = layers.finish()?;
        server::require_root("space setup")?;
        let mut signals = Signals::listen()?;
        let mut report = Report { json: global.json, steps: Vec::new() };
        if self.uninstall {
            return uninstall::run(&config, self.yes, global.json);
        }
        tokio::select! {
            done = self.prepare(&config, &mut report) => done?,
            // Every step can be taken up again, and what it made so far is under passing names.
            number = signals.fatal() => return Err(interrupted(number)),
        }
        if !self.skip_template {
            self.template(&config, &mut report, &mut signals).await?;
        }
        if self.pool.is_some() {
            note("note: write the pool into /etc/space/space.toml, so that `space up` finds it:");
            note(format!("  [pool]\n  {}", pool_line(&config)));
        }
        if global.json {
            output::json(&serde_json::json!({"steps": report.steps}));
        } else {
            note("This machine is ready: `sudo space up --detach`, then `space run -- uname -r`");
        }
        Ok(0)
    }

    async fn prepare(&self, config: &ServerConfig, report: &mut Report) -> Result<(), Failure> {
        let silent = report.json;
        self.packages(report).await?;
        must_pass(tokio::task::spawn_blocking(check_host).await.unwrap_or_default())?;

        lock::make_folders(config)?;
        if !lock::is_held(config) {
            let cloned = config.clone();
            let text = step(silent, "making the pool", move |_| {
                let held = lock::Lock::take(&cloned)?;
                let pool = pool::open(&cloned)?;
                let usage = pool.usage().map_err(|e| Failure::from(anyhow::Error::from(e)))?;
                drop(held);
                Ok(format!(
                    "{}, {} free of {}",
                    pool.root().display(),
                    output::size(usage.free),
                    output::size(usage.total)
                ))
            });
            report.done("pool", false, &text.await?);
        } else {
            report.done("pool", false, "in use by the running server");
        }

        self.firecracker(config, report).await?;
        self.kernel(config, report).await?;
        let (cloned, daemon) = (config.clone(), self.daemon.clone());
        let outcome =
            step(silent, "making the initramfs", move |_| initramfs::ensure(&cloned, daemon.as_deref())).await?;
        match outcome {
            initramfs::Outcome::UpToDate => report.done("initramfs", false, "up to date"),
            initramfs::Outcome::Built { replaced } => {
                report.done("initramfs", true, "built");
                if replaced && !silent {
                    note(
                        "      templates that are there keep the old kernel and daemon; `seed` is rebuilt, build the others again",
                    );
                }
            }
        }
        Ok(())
    }

    async fn packages(&self, report: &mut Report) -> Result<(), Failure> {
        let missing = packages::missing();
        if missing.is_empty() {
            report.done("packages", false, "all installed");
            return Ok(());
        }
        let command = packages::command_line(&missing);
        if self.no_install {
            return Err(Failure::new(format!("packages are missing; install them with: {command}")));
        }
        let text = format!("installing {}", missing.join(", "));
        let names = missing.clone();
        step(report.json, &text, move |_| packages::install(&names)).await?;
        report.done("packages", true, &missing.join(", "));
        Ok(())
    }

    async fn firecracker(&self, config: &ServerConfig, report: &mut Report) -> Result<(), Failure> {
        let Some(text) = &self.firecracker else { return Ok(()) };
        let source = firecracker::Source::parse(text);
        let progress = std::cell::RefCell::new(Progress::copy(report.json, "downloading Firecracker"));
        let shown = |done, total| progress.borrow_mut().set("downloading Firecracker", done, total);
        let changed = firecracker::install(config, &source, self.firecracker_sha256.as_deref(), shown).await?;
        drop(progress);
        report.done("firecracker", changed, &firecracker::place(config).display().to_string());
        if config.driver != DriverChoice::Firecracker && !report.json {
            note("      it is used where vmm.driver is \"firecracker\"; it boots uncompressed kernels (vmm.kernel)");
        }
        Ok(())
    }

    async fn kernel(&self, config: &ServerConfig, report: &mut Report) -> Result<(), Failure> {
        if self.kernel_package.is_none()
            && !self.update_kernel
            && let Some(version) = kernel::version(config)
        {
            report.done("guest kernel", false, &version);
            return Ok(());
        }
        if config.kernel_dir.is_file() {
            // It is the operator's.
            let text = format!("vmm.kernel names the file {}: set-up does not replace it", config.kernel_dir.display());
            return Err(Failure::usage(text));
        }
        let (cloned, package) = (config.clone(), self.kernel_package.clone());
        let version = step(report.json, "fetching the guest kernel", move |say| match package {
            Some(path) => kernel::from_package(&cloned, &path),
            None => kernel::fetch(&cloned, say),
        });
        report.done("guest kernel", true, &version.await?);
        Ok(())
    }

    /// By the server that runs, or by one of our own for the time of the build.
    async fn template(&self, config: &ServerConfig, report: &mut Report, signals: &mut Signals) -> Result<(), Failure> {
        let silent = report.json;
        let built = if lock::is_held(config) {
            let file = ClientFile::read(&config.client_file());
            let file =
                file.ok_or_else(|| Failure::new("a server runs and client.toml cannot be read: start it again"))?;
            let client = Client::new(&file.url, Some(&file.key))?;
            tokio::select! {
                built = seed::ensure(config, &client, silent) => built?,
                number = signals.fatal() => return Err(interrupted(number)),
            }
        } else {
            let held = lock::Lock::take(config)?;
            let mut private = config.clone();
            // Any port: a build must not collide with what else runs here.
            private.listen.set_port(0);
            private.data_listen.set_port(0);
            let mut running = server::start(&private, &held).await?;
            let client = Client::new(&running.url, Some(&running.admin_key))?;
            let built = tokio::select! {
                built = seed::ensure(config, &client, silent) => built,
                never = running.keep() => match never {},
                number = signals.fatal() => Err(interrupted(number)),
            };
            running.stop().await;
            if built.is_err() {
                // Opening sweeps what the build left half done; otherwise the next start does.
                let _ = tokio::task::spawn_blocking(move || pool::open(&private).map(drop)).await;
            }
            drop(held);
            built?
        };
        report.done("template seed", built, if built { "built" } else { "up to date" });
        Ok(())
    }
}

fn pool_line(config: &ServerConfig) -> String {
    match &config.pool {
        crate::config::PoolConfig::Device(device) => format!("device = {device:?}"),
        _ => format!("path = {:?}", config.pool_root()),
    }
}

fn interrupted(number: i32) -> Failure {
    let message = "set-up was interrupted; run it again to go on";
    Failure { status: 128 + number, ..Failure::new(message) }
}

/// What no package brings.
fn check_host() -> Vec<Finding> {
    let facts = space_hostd::probe::host();
    let mut findings = Vec::new();
    if facts.cgroup_version.is_none() {
        let problem = facts.cgroup_problem.unwrap_or_else(|| "no controllers".into());
        findings.push(Finding::fail("cgroup", problem, "mount the controllers memory, cpu and pids"));
    }
    if !facts.btrfs {
        findings.push(Finding::fail("btrfs", "the kernel has no btrfs", "modprobe btrfs, or boot a kernel with it"));
    }
    findings
}

fn must_pass(findings: Vec<Finding>) -> Result<(), Failure> {
    match findings.into_iter().find(|finding| finding.level == Level::Fail) {
        None => Ok(()),
        Some(finding) => {
            let fix = finding.fix.unwrap_or_default();
            Err(Failure::new(format!("{}: {}. Fix: {fix}", finding.name, finding.detail)))
        }
    }
}

/// Asks on the terminal; without one the answer is no.
fn confirm(question: &str) -> bool {
    if !std::io::stdin().is_terminal() {
        return false;
    }
    note(format!("{question} Type yes:"));
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer).is_ok() && answer.trim() == "yes"
}

/// Whether the folder is one of ours, so that a mistyped --data-dir removes nothing.
fn is_data_dir(path: &Path) -> bool {
    path.join("run/server.lock").is_file()
}
