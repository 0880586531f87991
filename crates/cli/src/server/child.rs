//! One process of a server: started with few rights, told one line, watched, started anew.

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use space_hostd::process::{self, HOST_CAPABILITIES, Output, Rights, Rlimits, SpawnSpec, VmmProcess};
use space_hostd::seccomp::Profile;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _};
use tokio::net::unix::pipe;

use super::role::Said;
use super::start::{copies, failure};
use crate::failure::Failure;

/// Every sandbox costs a few descriptors in the node and in the control plane.
const OPEN_FILES: u64 = 65_536;
/// A node that adopts many sandboxes takes its time.
const READY_PATIENCE: Duration = Duration::from_secs(120);
const SAID_MAX_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `space-hostd`: root, with what it needs.
    Host,
    /// A user of its own, with nothing.
    Role,
}

/// How to start it, any number of times.
pub struct Plan {
    pub kind: Kind,
    pub program: PathBuf,
    pub args: Vec<String>,
    pub user: u32,
    /// What it is told: one line.
    pub line: Vec<u8>,
    /// What it inherits after its lifeline.
    pub doors: Vec<OwnedFd>,
}

pub struct Child {
    plan: Plan,
    pub process: VmmProcess,
    /// It ends when this does.
    lifeline: Option<OwnedFd>,
    answer: Option<pipe::Receiver>,
}

impl Child {
    pub fn start(plan: Plan) -> Result<Child, Failure> {
        let (process, lifeline, answer) = spawn(&plan)?;
        Ok(Child { plan, process, lifeline: Some(lifeline), answer })
    }

    pub fn name(&self) -> &str {
        self.plan.args.last().map_or("space-hostd", String::as_str)
    }

    /// What it says when it is ready.
    pub async fn said(&mut self) -> Result<Said, Failure> {
        let Some(answer) = self.answer.take() else { return Ok(Said::Ready) };
        let mut line = String::new();
        let mut reader = tokio::io::BufReader::new(answer.take(SAID_MAX_BYTES));
        let read = tokio::time::timeout(READY_PATIENCE, reader.read_line(&mut line)).await;
        match read {
            Ok(Ok(1..)) => match serde_json::from_str(&line).map_err(failure)? {
                Said::Failed(text) => Err(Failure::new(text)),
                said => Ok(said),
            },
            Ok(_) => {
                let exit = self.process.wait().await;
                Err(Failure::new(format!("{} ended before it was ready ({exit:?})", self.name())))
            }
            Err(_) => Err(Failure::new(format!("{} was not ready in time", self.name()))),
        }
    }

    /// Starts it again and waits until it is ready.
    pub async fn restart(&mut self) -> Result<(), Failure> {
        let (process, lifeline, answer) = spawn(&self.plan)?;
        (self.process, self.lifeline, self.answer) = (process, Some(lifeline), answer);
        self.said().await.map(drop)
    }

    /// Tells it to end, and ends it when it does not.
    pub async fn stop(&mut self, patience: Duration) {
        if !patience.is_zero() && self.process.terminate().is_ok() {
            let _ = tokio::time::timeout(patience, self.process.wait()).await;
        }
        self.lifeline = None;
        let _ = self.process.kill();
        self.process.wait().await;
    }
}

/// As many open files as a child may have: the kernel lets not every root raise the limit.
fn open_files() -> u64 {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 1024 };
    if hard < OPEN_FILES && setrlimit(Resource::RLIMIT_NOFILE, soft, OPEN_FILES).is_err() {
        return hard;
    }
    OPEN_FILES
}

type Started = (VmmProcess, OwnedFd, Option<pipe::Receiver>);

fn spawn(plan: &Plan) -> Result<Started, Failure> {
    let failed = |e: io::Error| Failure::new(format!("cannot start {}: {e}", plan.program.display()));
    let (told, mut lifeline) = io::pipe().map_err(failed)?;
    let mut inherited = vec![told.into()];
    inherited.extend(copies(&plan.doors)?);
    let answer = match plan.kind {
        Kind::Host => None,
        Kind::Role => {
            let (answer, said) = io::pipe().map_err(failed)?;
            inherited.push(said.into());
            Some(pipe::Receiver::from_owned_fd(answer.into()).map_err(failed)?)
        }
    };
    let process = process::spawn(SpawnSpec {
        program: plan.program.clone(),
        args: plan.args.clone(),
        cwd: PathBuf::from("/"),
        uid: plan.user,
        gid: plan.user,
        cgroup: None,
        output: Output::Fd(super::log::for_child().map_err(failed)?),
        limits: Rlimits { open_files: Some(open_files()), file_size_bytes: None },
        inherited,
        env: Vec::new(),
        rights: if plan.kind == Kind::Host { Rights::Root(HOST_CAPABILITIES) } else { Rights::None },
        profile: Some(if plan.kind == Kind::Host { Profile::Root } else { Profile::Service }),
        jail: None,
    })
    .map_err(failure)?;
    // A child that is gone already has said why.
    let _ = lifeline.write_all(&plan.line);
    Ok((process, lifeline.into(), answer))
}
