//! The table of commands: reserved, running, ended. It lives in the guest's memory, so it is there after a restart of the
//! server and in every snapshot.
//!
//! ```text
//! reserved ──attach or start──▶ running ──exit, drain──▶ exited (kept 10 minutes)
//! ```

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use space_proto::guest::{Exit, ExitReason, ProcessInfo, ProcessSpec, ProcessState, PtySize, Stream};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::cgroup::{self, Group, Groups};
use crate::output::{Budget, Log};
use crate::pumps::{feed, feed_terminal, pump, pump_terminal};
use crate::reaper::Status as Ended;
use crate::refresh::Settings;
use crate::{spawn, sys};

const LIVE_MAX: usize = 512;
const ENDED_MAX: usize = 1024;
const ENDED_KEPT: Duration = Duration::from_secs(600);
const RESERVED_KEPT: Duration = Duration::from_secs(120);
const RESERVED_KEPT_MAX: Duration = Duration::from_secs(3600);
const DRAIN_QUIET: Duration = Duration::from_millis(250);
const DRAIN_MAX: Duration = Duration::from_secs(2);
const STDIN_QUEUED: usize = 4;
const BUDGET_PART: u64 = 8;
const LISTED_ARGV_BYTES: usize = 1024;

/// Input for a command.
pub enum Input {
    Data(Bytes),
    Close,
}

enum Phase {
    Reserved {
        expires: Instant,
    },
    Running {
        pid: i32,
    },
    /// The main process has ended; its output is being drained.
    Draining,
    Exited {
        at: Instant,
    },
}

struct State {
    phase: Phase,
    started_unix_ms: i64,
    ended_unix_ms: i64,
    pid: u32,
    group: Option<Group>,
    terminal: Option<Arc<AsyncFd<OwnedFd>>>,
    stdin: Option<mpsc::Sender<Input>>,
    timed_out: bool,
}

pub struct Process {
    pub id: String,
    pub spec: ProcessSpec,
    pub log: Arc<Log>,
    state: Mutex<State>,
}

pub struct Table {
    pub groups: Groups,
    budget: Arc<Budget>,
    processes: Mutex<HashMap<String, Arc<Process>>>,
    pids: Mutex<HashMap<i32, oneshot::Sender<Ended>>>,
}

fn unix_ms() -> i64 {
    crate::refresh::now_ns() / 1_000_000
}

impl Process {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn info(&self) -> ProcessInfo {
        let (output_start, output_end) = self.log.range();
        let state = self.state();
        let phase = match state.phase {
            Phase::Reserved { .. } => ProcessState::Reserved,
            Phase::Running { .. } | Phase::Draining => ProcessState::Running,
            Phase::Exited { .. } => ProcessState::Exited,
        };
        ProcessInfo {
            process_id: self.id.clone(),
            state: phase.into(),
            spec: Some(self.spec.clone()),
            pid: state.pid,
            started_unix_ms: state.started_unix_ms,
            ended_unix_ms: state.ended_unix_ms,
            exit: self.log.exit(),
            output_start,
            output_end,
            attached: u32::try_from(self.log.attached()).unwrap_or(u32::MAX),
        }
    }

    pub fn is_reserved(&self) -> bool {
        matches!(self.state().phase, Phase::Reserved { .. })
    }

    pub fn has_terminal(&self) -> bool {
        self.spec.pty.is_some()
    }

    pub fn stdin(&self) -> Option<mpsc::Sender<Input>> {
        self.state().stdin.clone()
    }

    /// The program reads the end once what was sent before has been written.
    pub fn close_stdin(&self) {
        self.state().stdin = None;
    }

    pub fn resize(&self, size: PtySize) {
        if let Some(terminal) = &self.state().terminal {
            spawn::resize(terminal.get_ref(), size.cols, size.rows);
        }
    }

    /// To the process group; a process that has ended takes no signal, and that is no fault.
    pub fn signal(&self, number: i32, tree: bool) -> Result<(), Status> {
        if !(1..=31).contains(&number) {
            return Err(Status::invalid_argument(format!("{number} is no signal: 1 to 31")));
        }
        let state = self.state();
        if tree
            && number == nix::libc::SIGKILL
            && let Some(group) = &state.group
        {
            return group.kill().map_err(|error| Status::internal(format!("cannot end the processes: {error}")));
        }
        let Phase::Running { pid } = state.phase else { return Ok(()) };
        let group = nix::unistd::Pid::from_raw(-pid);
        match nix::sys::signal::kill(group, nix::sys::signal::Signal::try_from(number).ok()) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => Ok(()),
            Err(errno) => Err(Status::internal(format!("cannot send signal {number}: {errno}"))),
        }
    }

    fn kill_tree(&self) {
        if self.state().group.is_none() || self.signal(nix::libc::SIGKILL, true).is_err() {
            let _ = self.signal(nix::libc::SIGKILL, false);
        }
    }
}

impl Table {
    pub fn new(groups: Groups) -> Self {
        let budget = usize::try_from(cgroup::memory("MemTotal") / BUDGET_PART).unwrap_or(usize::MAX).max(8 << 20);
        Self { groups, budget: Budget::new(budget), processes: Mutex::default(), pids: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Process>>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pids(&self) -> MutexGuard<'_, HashMap<i32, oneshot::Sender<Ended>>> {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, id: &str) -> Result<Arc<Process>, Status> {
        self.sweep();
        let text = || format!("no command {id}: it ended over 10 minutes ago, was never started in time, or never was");
        self.lock().get(id).cloned().ok_or_else(|| Status::not_found(text()))
    }

    pub fn list(&self) -> Vec<ProcessInfo> {
        self.sweep();
        let mut all: Vec<_> = self.lock().values().map(|process| shortened(process.info())).collect();
        all.sort_by(|a, b| a.process_id.cmp(&b.process_id));
        all
    }

    pub fn running(&self) -> usize {
        self.lock().values().filter(|p| matches!(p.state().phase, Phase::Running { .. })).count()
    }

    /// How many run that are not detached, and their CPU time in microseconds.
    pub fn foreground(&self) -> (u32, u64) {
        let groups: Vec<_> = self
            .lock()
            .values()
            .filter(|process| process.spec.foreground)
            .filter_map(|process| {
                let state = process.state();
                matches!(state.phase, Phase::Running { .. }).then(|| state.group.clone())
            })
            .collect();
        let cpu_us = groups.iter().flatten().map(Group::cpu_us).sum();
        (u32::try_from(groups.len()).unwrap_or(u32::MAX), cpu_us)
    }

    /// Runs a program of the daemon's own and waits for its end. It is never in the list, so no tenant can meet it.
    pub async fn run_unlisted(&self, id: &str, spec: ProcessSpec, settings: &Settings) -> Result<Exit, Status> {
        let process = Arc::new(self.new_process(id, spec, RESERVED_KEPT));
        if !self.start(&process, settings) {
            return Err(Status::unavailable("the programs stand still"));
        }
        Ok(process.log.finished().await)
    }

    fn new_process(&self, id: &str, spec: ProcessSpec, kept: Duration) -> Process {
        let state = State {
            phase: Phase::Reserved { expires: Instant::now() + kept },
            started_unix_ms: 0,
            ended_unix_ms: 0,
            pid: 0,
            group: None,
            terminal: None,
            stdin: None,
            timed_out: false,
        };
        Process { id: id.to_owned(), spec, log: Log::new(self.budget.clone()), state: Mutex::new(state) }
    }

    /// Drops what has been kept long enough, and the oldest beyond the limit.
    fn sweep(&self) {
        let mut processes = self.lock();
        let gone = |process: &Arc<Process>| {
            let state = process.state();
            match state.phase {
                Phase::Exited { at } => at.elapsed() > ENDED_KEPT && state.group.as_ref().is_none_or(Group::remove),
                Phase::Reserved { expires } => Instant::now() > expires,
                Phase::Running { .. } | Phase::Draining => false,
            }
        };
        processes.retain(|_, process| !gone(process));
        let mut ended: Vec<_> = processes
            .values()
            .filter_map(|p| match p.state().phase {
                Phase::Exited { at } => Some((at, p.id.clone())),
                _ => None,
            })
            .collect();
        if ended.len() > ENDED_MAX {
            ended.sort();
            for (_, id) in &ended[..ended.len() - ENDED_MAX] {
                processes.remove(id);
            }
        }
    }

    /// They belong to another life of this memory.
    pub fn forget_ended(&self) {
        self.lock().retain(|_, process| {
            let state = process.state();
            let ended = matches!(state.phase, Phase::Exited { .. } | Phase::Reserved { .. });
            !ended || !state.group.as_ref().is_none_or(Group::remove)
        });
    }

    pub fn reserve(&self, id: &str, spec: ProcessSpec, expires_ms: u64) -> Result<(), Status> {
        check(id, &spec)?;
        self.sweep();
        let mut processes = self.lock();
        if let Some(known) = processes.get(id) {
            return if known.spec == spec {
                Ok(())
            } else {
                Err(Status::already_exists(format!("{id} was reserved for another command")))
            };
        }
        let live = processes.values().filter(|p| !matches!(p.state().phase, Phase::Exited { .. })).count();
        if live >= LIVE_MAX {
            let text = format!("the sandbox has {LIVE_MAX} commands already; end some of them");
            return Err(Status::resource_exhausted(text));
        }
        let kept = match expires_ms {
            0 => RESERVED_KEPT,
            ms => Duration::from_millis(ms).min(RESERVED_KEPT_MAX),
        };
        processes.insert(id.to_owned(), Arc::new(self.new_process(id, spec, kept)));
        Ok(())
    }

    /// The reaper's news.
    pub fn ended(&self, pid: i32, status: Ended) {
        if let Some(waiting) = self.pids().remove(&pid) {
            let _ = waiting.send(status);
        }
    }

    /// Starts a reserved command; one that was started before stays as it is. `false`: the programs are frozen now, try
    /// again.
    pub fn start(&self, process: &Arc<Process>, settings: &Settings) -> bool {
        let mut state = process.state();
        if !matches!(state.phase, Phase::Reserved { .. }) {
            return true;
        }
        let Some(_running) = self.groups.while_running() else { return false };
        state.started_unix_ms = unix_ms();
        let group = match self.groups.create(&process.id) {
            Ok(group) => group,
            Err(error) => {
                process.not_started(&mut state, 126, format!("no control group: {error}"));
                return true;
            }
        };
        // The runtime has one thread, so the reaper cannot come in between the start and the entry in `pids`.
        let started = match spawn::start(&process.spec, settings, group.as_ref()) {
            Ok(started) => started,
            Err(error) => {
                if let Some(group) = group {
                    group.remove();
                }
                process.not_started(&mut state, error.code, error.message);
                return true;
            }
        };
        let (sender, status) = oneshot::channel();
        self.pids().insert(started.pid, sender);
        state.pid = u32::try_from(started.pid).unwrap_or(0);
        state.phase = Phase::Running { pid: started.pid };
        state.group = group;
        if let Err(error) = process.connect(&mut state, started) {
            crate::log::say(&format!("a command without its pipes: {error}"));
        }
        drop(state);
        tokio::spawn(process.clone().follow(status));
        if process.spec.timeout_ms > 0 {
            tokio::spawn(process.clone().time_out(Duration::from_millis(process.spec.timeout_ms)));
        }
        true
    }
}

/// All commands must fit into one message: without their environment, and without more of their arguments than tells what
/// they are.
fn shortened(mut info: ProcessInfo) -> ProcessInfo {
    if let Some(spec) = &mut info.spec {
        spec.env.clear();
        let mut left = LISTED_ARGV_BYTES;
        spec.argv.retain_mut(|argument| {
            let fits = left > 0;
            argument.truncate(argument.floor_char_boundary(left));
            left = left.saturating_sub(argument.len() + 1);
            fits
        });
    }
    info
}

fn check(id: &str, spec: &ProcessSpec) -> Result<(), Status> {
    let valid = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'_';
    if id.is_empty() || id.len() > 64 || !id.bytes().all(valid) {
        return Err(Status::invalid_argument("a command id has 1 to 64 letters, digits, - or _"));
    }
    if spec.argv.is_empty() || spec.argv[0].is_empty() {
        return Err(Status::invalid_argument("no program was named"));
    }
    let nul = spec.argv.iter().chain(spec.env.keys()).chain(spec.env.values()).any(|text| text.contains('\0'));
    if nul || spec.workdir.contains('\0') || spec.env.keys().any(|key| key.is_empty() || key.contains('=')) {
        return Err(Status::invalid_argument("a NUL byte in an argument or the environment, or a name that is none"));
    }
    Ok(())
}

impl Process {
    fn not_started(&self, state: &mut State, code: i32, message: String) {
        state.ended_unix_ms = unix_ms();
        state.phase = Phase::Exited { at: Instant::now() };
        self.log.finish(Exit { reason: ExitReason::StartFailed.into(), code, signal: 0, message });
    }

    /// Ties our ends of pipes or terminal to the log and the queue of input.
    fn connect(self: &Arc<Self>, state: &mut State, started: spawn::Started) -> io::Result<()> {
        if let Some(terminal) = started.terminal {
            set_nonblocking(&terminal)?;
            let terminal = Arc::new(sys::async_fd(terminal)?);
            state.terminal = Some(terminal.clone());
            self.log.pump_begins();
            tokio::spawn(pump_terminal(self.log.clone(), terminal.clone()));
            if self.spec.stdin {
                let (sender, input) = mpsc::channel(STDIN_QUEUED);
                state.stdin = Some(sender);
                tokio::spawn(feed_terminal(terminal, input));
            }
        }
        for (pipe, stream) in [(started.stdout, Stream::Stdout), (started.stderr, Stream::Stderr)] {
            if let Some(pipe) = pipe {
                let pipe = pipe::Receiver::from_owned_fd(pipe)?;
                self.log.pump_begins();
                tokio::spawn(pump(self.log.clone(), pipe, stream));
            }
        }
        if let Some(pipe) = started.stdin {
            let (sender, input) = mpsc::channel(STDIN_QUEUED);
            state.stdin = Some(sender);
            tokio::spawn(feed(pipe::Sender::from_owned_fd(pipe)?, input));
        }
        Ok(())
    }

    /// From the end of the main process to the end of the command.
    async fn follow(self: Arc<Self>, status: oneshot::Receiver<Ended>) {
        let status = status.await;
        let (timed_out, group) = {
            let mut state = self.state();
            state.phase = Phase::Draining;
            state.ended_unix_ms = unix_ms();
            // Whoever still writes gets told that nobody reads.
            state.stdin = None;
            (state.timed_out, state.group.clone())
        };
        self.log.drained(DRAIN_QUIET, DRAIN_MAX).await;
        let out_of_memory = || group.as_ref().is_some_and(Group::ran_out_of_memory);
        let (reason, code, signal) = match status {
            _ if timed_out => (ExitReason::Timeout, 124, 0),
            Ok(Ended::Code(code)) => (ExitReason::ExitedNormally, code, 0),
            Ok(Ended::Signal(9)) if out_of_memory() => (ExitReason::OomKilled, 137, 9),
            Ok(Ended::Signal(signal)) => (ExitReason::Signaled, 128 + signal, signal),
            Err(_) => (ExitReason::Lost, 255, 0),
        };
        {
            let mut state = self.state();
            state.phase = Phase::Exited { at: Instant::now() };
            state.terminal = None;
        }
        self.log.finish(Exit { reason: reason.into(), code, signal, message: String::new() });
        if let Some(group) = group {
            group.remove();
        }
    }

    async fn time_out(self: Arc<Self>, limit: Duration) {
        tokio::select! {
            _ = self.log.finished() => {}
            () = tokio::time::sleep(limit) => {
                {
                    let mut state = self.state();
                    if !matches!(state.phase, Phase::Running { .. }) {
                        return;
                    }
                    state.timed_out = true;
                }
                self.kill_tree();
            }
        }
    }
}

fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    Ok(rustix::fs::fcntl_setfl(fd, rustix::fs::fcntl_getfl(fd)? | rustix::fs::OFlags::NONBLOCK)?)
}
