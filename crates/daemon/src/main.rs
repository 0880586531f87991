//! `space-daemon`: PID 1 of a guest, and the only thing in it that speaks to the host.
//!
//! It mounts the disk, reaps what dies, runs programs for the host in cgroups of their own, keeps their output, serves
//! files, and sets clock, entropy and identity after every restore. It trusts nobody in the guest: programs run as their
//! own users, and none of them can reach the channel. It must never end: its end is the guest's.
//!
//! `space-daemon --socket PATH [--cgroup FOLDER] [--hooks FOLDER] [--disk FOLDER]` serves the same interface on a Unix socket of an ordinary host, for tests; it then leaves
//! the host's clock, names and entropy alone.

mod archive;
mod boot;
mod cgroup;
mod files;
mod hooks;
mod log;
mod output;
mod port;
mod ports;
mod processes;
mod pumps;
mod reaper;
mod refresh;
mod service;
mod session;
mod spawn;
mod standstill;
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
    /// A process of a host, behind a Unix socket. Control groups, hooks and a file system to freeze only where they are named.
    Host { socket: PathBuf, cgroup: Option<PathBuf>, hooks: Option<PathBuf>, disk: Option<PathBuf> },
}

/// What the parts share.
pub struct Daemon {
    pub mode: Mode,
    pub table: processes::Table,
    pub identity: refresh::Identity,
    pub disk: standstill::Disk,
    pub ports: ports::Ports,
}

fn mode() -> Result<Mode, String> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // The kernel passes on what it does not know of its command line.
    if std::process::id() == 1 {
        return Ok(Mode::Guest);
    }
    let usage = "usage: space-daemon --socket PATH [--cgroup FOLDER] [--hooks FOLDER] [--disk FOLDER]; without it this is PID 1 of a guest";
    let (mut socket, mut cgroup, mut hooks, mut disk) = (None, None, None, None);
    for pair in args.chunks(2) {
        let [option, value] = pair else { return Err(usage.to_owned()) };
        let place = match option.as_str() {
            "--socket" => &mut socket,
            "--cgroup" => &mut cgroup,
            "--hooks" => &mut hooks,
            "--disk" => &mut disk,
            _ => return Err(usage.to_owned()),
        };
        *place = Some(PathBuf::from(value));
    }
    let socket = socket.ok_or(usage)?;
    Ok(Mode::Host { socket, cgroup, hooks, disk })
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
        let daemon = Arc::new(Daemon {
            table: processes::Table::new(groups),
            identity: refresh::Identity::default(),
            disk: standstill::Disk::of(&mode),
            ports: ports::Ports::default(),
            mode,
        });
        reaper::start(daemon.clone())?;
        session::serve(daemon).await
    })
}
