//! `space-daemon`: PID 1 of a guest, and the only thing in it that speaks to the host.
//!
//! It mounts the disk, reaps what dies, runs programs for the host in cgroups of their own, keeps their output, serves
//! files, and sets clock, entropy and identity after every restore. It trusts nobody in the guest: programs run as their
//! own users, and none of them can reach the channel. It must never end: its end is the guest's.
//!
//! `space-daemon --socket PATH [--cgroup FOLDER]` serves the same interface on a Unix socket of an ordinary host, for tests; it then leaves
//! the host's clock, names and entropy alone.

mod archive;
mod boot;
mod cgroup;
mod files;
mod log;
mod output;
mod port;
mod processes;
mod reaper;
mod refresh;
mod service;
mod session;
mod spawn;
mod sys;
mod users;
mod vsock;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// More than there are transfers and watchers, so that short work on files finds a thread while all of those stand still.
const BLOCKING_THREADS_MAX: usize = 2 * files::TRANSFERS_MAX + watch::WATCHERS_MAX;

/// Where the daemon runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// PID 1 of a microVM.
    Guest,
    /// A process of a host, behind a Unix socket; with control groups below a folder that was made for it, if any.
    Host { socket: PathBuf, cgroup: Option<PathBuf> },
}

/// What the parts share.
pub struct Daemon {
    pub mode: Mode,
    pub table: processes::Table,
    pub identity: refresh::Identity,
}

fn mode() -> Result<Mode, String> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--socket", path] => Ok(Mode::Host { socket: path.into(), cgroup: None }),
        ["--socket", path, "--cgroup", group] => Ok(Mode::Host { socket: path.into(), cgroup: Some(group.into()) }),
        // The kernel passes on what it does not know of its command line.
        _ if std::process::id() == 1 => Ok(Mode::Guest),
        _ => Err("usage: space-daemon --socket PATH [--cgroup FOLDER]; without it this is PID 1 of a guest".to_owned()),
    }
}

fn main() -> ExitCode {
    let mode = match mode() {
        Ok(mode) => mode,
        Err(usage) => {
            eprintln!("{usage}");
            return ExitCode::from(2);
        }
    };
    if mode == Mode::Guest
        && let Err(error) = boot::boot()
    {
        // Nothing can be done without a root file system; the panic that follows ends the VM, and the console says why.
        log::say(&format!("cannot start: {error}"));
        return ExitCode::FAILURE;
    }
    if let Mode::Host { .. } = mode {
        eprintln!("space-daemon: on a host: clock, entropy, host name and machine-id are left alone");
    }
    match run(mode) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::say(&format!("ended: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(mode: Mode) -> std::io::Result<()> {
    sys::become_subreaper();
    // One thread runs everything: under emulation threads cost more than they give. What blocks has threads of its own.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .build()?;
    runtime.block_on(async {
        let groups = cgroup::Groups::open(&mode);
        let daemon =
            Arc::new(Daemon { table: processes::Table::new(groups), identity: refresh::Identity::default(), mode });
        reaper::start(daemon.clone())?;
        session::serve(daemon).await
    })
}
