//! A VMM that was just started and is not a VM yet: what it is told at its start, and its end if it does not become one.

use std::os::fd::OwnedFd;

use space_hostd::host::Host;
use space_hostd::pool::Area;
use space_hostd::process::{Exit, VmmProcess};
use space_hostd::protocol::Start;

use crate::dir::DISK;
use crate::said::Said;
use crate::{ExitReason, VmDir, VmSpec, VmmError};

/// What differs between the VMMs of a start.
pub(crate) struct Program<'a> {
    pub driver: &'static str,
    pub args: Vec<String>,
    /// Show it the guest's kernel.
    pub boot: bool,
    /// The files it gets.
    pub given: Vec<&'a str>,
    pub open_files: u64,
    /// What it inherits, after its standard error.
    pub inherited: Vec<OwnedFd>,
    /// Why it ended, when nothing but the end of the process is known.
    pub exit_reason: fn(Exit) -> ExitReason,
}

/// A VMM whose process runs.
pub(crate) struct Started {
    pub process: VmmProcess,
    said: Said,
    exit_reason: fn(Exit) -> ExitReason,
}

impl Started {
    pub fn new(host: &Host, spec: &VmSpec, dir: &VmDir, program: Program<'_>) -> Result<Started, VmmError> {
        let disk_bytes = std::fs::metadata(dir.file(DISK)).map_err(dir.error("inspect", DISK))?.len();
        let (said, output) = Said::listen(dir)?;
        let start = Start {
            driver: program.driver.to_owned(),
            args: program.args,
            // Found by the folder.
            area: Area::Sandboxes,
            name: String::new(),
            slot: spec.jail.slot,
            group: spec.jail.group.clone(),
            boot: program.boot,
            given: program.given.into_iter().map(str::to_owned).collect(),
            open_files: program.open_files,
            // No file of it may outgrow what it was given, whatever becomes of the VMM.
            file_size_bytes: disk_bytes.max(u64::from(spec.memory_mib) << 20),
        };
        // Closed here after the start: our end would keep the pipe of its messages open.
        let fds: Vec<OwnedFd> = std::iter::once(output).chain(program.inherited).collect();
        let process = host.start(dir.path(), start, &fds)?;
        Ok(Started { process, said, exit_reason: program.exit_reason })
    }

    /// Waits for `act`, and kills a VMM for which it fails: nothing half-started is left.
    pub async fn or_kill<T>(&self, act: impl Future<Output = Result<T, VmmError>>) -> Result<T, VmmError> {
        let result = tokio::select! {
            biased;
            result = act => result,
            exit = self.process.wait() => Err(self.died(exit).await),
        };
        if let Err(error) = result {
            self.process.kill()?;
            let exit = self.process.wait().await;
            return Err(match error {
                VmmError::Disconnected { .. } => self.died(exit).await,
                other => other,
            });
        }
        result
    }

    pub async fn died(&self, exit: Exit) -> VmmError {
        VmmError::Died { reason: (self.exit_reason)(exit), said: self.said.last_words().await }
    }
}

/// A VMM that ends by itself while it loads a state says that the state does not fit.
pub(crate) fn bad_state(error: VmmError) -> VmmError {
    match error {
        VmmError::Died { reason: ExitReason::Failed { .. }, said } => VmmError::BadState { message: said },
        other => other,
    }
}
