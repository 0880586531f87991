//! Programs that the owner of a guest wants run around snapshots, for what only they know: connections to close, pools of random
//! numbers to throw away.
//!
//! `/etc/space/hooks/{before-checkpoint,after-restore,after-fork}/*`, in the order of their names, as root. Whoever may write there
//! is root in the guest already; a file that others could have written is not run. A hook that fails or takes too long is
//! reported and stops nothing: a broken hook must not cost a checkpoint.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use space_proto::guest::{ExitReason, Hook, ProcessSpec};

use crate::{Daemon, Mode};

pub const FOLDER: &str = "/etc/space/hooks";
const HOOKS_MAX: usize = 16;
const TIME_DEFAULT: Duration = Duration::from_secs(5);
const TIME_MAX: Duration = Duration::from_secs(60);
/// Of what was wrong with one hook.
const REPORT_MAX_BYTES: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    BeforeCheckpoint,
    AfterRestore,
    AfterFork,
}

impl When {
    /// What a refresh asks for.
    pub fn asked(hook: Hook) -> Option<Self> {
        match hook {
            Hook::None => None,
            Hook::AfterRestore => Some(Self::AfterRestore),
            Hook::AfterFork => Some(Self::AfterFork),
        }
    }

    fn folder(self) -> &'static str {
        match self {
            Self::BeforeCheckpoint => "before-checkpoint",
            Self::AfterRestore => "after-restore",
            Self::AfterFork => "after-fork",
        }
    }
}

/// Runs them one after the other, all within one time limit. Answers with what went wrong, a line for each.
pub async fn run(daemon: &Arc<Daemon>, when: When, limit_ms: u32) -> Vec<String> {
    let root = match &daemon.mode {
        Mode::Guest => Path::new(FOLDER),
        Mode::Host { hooks: Some(hooks), .. } => hooks,
        Mode::Host { hooks: None, .. } => return Vec::new(),
    };
    let limit = match limit_ms {
        0 => TIME_DEFAULT,
        ms => Duration::from_millis(ms.into()).min(TIME_MAX),
    };
    let end = Instant::now() + limit;
    let (programs, mut failures) = find(&root.join(when.folder()));
    for program in programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let left = end.saturating_duration_since(Instant::now());
        let outcome = match left.is_zero() {
            true => Err("not run: the time for hooks was up".to_owned()),
            false => run_one(daemon, &program, when, left).await,
        };
        if let Err(why) = outcome {
            failures.push(report(&name, &why));
        }
    }
    failures
}

fn report(name: &str, why: &str) -> String {
    let mut text = format!("{name}: {why}");
    text.truncate(text.floor_char_boundary(REPORT_MAX_BYTES));
    text
}

/// No folder, no hooks.
fn find(folder: &Path) -> (Vec<PathBuf>, Vec<String>) {
    let mut programs: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    programs.sort();
    let mut failures = Vec::new();
    if programs.len() > HOOKS_MAX {
        failures.push(format!("{} hooks, {HOOKS_MAX} may be: those behind them are not run", programs.len()));
        programs.truncate(HOOKS_MAX);
    }
    programs.retain(|program| {
        let fit = fit(program);
        if let Err(why) = &fit {
            failures.push(report(&program.file_name().unwrap_or_default().to_string_lossy(), why));
        }
        fit.is_ok()
    });
    (programs, failures)
}

fn fit(program: &Path) -> Result<(), String> {
    let meta = std::fs::metadata(program).map_err(|error| format!("not run: {error}"))?;
    let mode = meta.permissions().mode();
    match () {
        () if !meta.is_file() => Err("not run: not a file".to_owned()),
        () if meta.uid() != 0 || mode & 0o022 != 0 => {
            Err("not run: it must be root's, and nobody else may write to it (chown root, chmod 755)".to_owned())
        }
        () if mode & 0o111 == 0 => Err("not run: not executable (chmod 755)".to_owned()),
        () => Ok(()),
    }
}

async fn run_one(daemon: &Arc<Daemon>, program: &Path, when: When, left: Duration) -> Result<(), String> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let id = format!("hook-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let spec = ProcessSpec {
        argv: vec![program.to_string_lossy().into_owned()],
        env: [("SPACE_HOOK".to_owned(), when.folder().to_owned())].into(),
        workdir: "/".to_owned(),
        user: "0:0".to_owned(),
        timeout_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
        ..ProcessSpec::default()
    };
    let settings = daemon.identity.settings();
    let exit = daemon.table.run_unlisted(&id, spec, &settings).await.map_err(|status| status.message().to_owned())?;
    match exit.reason() {
        ExitReason::ExitedNormally if exit.code == 0 => Ok(()),
        ExitReason::ExitedNormally => Err(format!("exit code {}", exit.code)),
        ExitReason::Timeout => Err(format!("took longer than the {} ms that were left", left.as_millis())),
        ExitReason::Signaled | ExitReason::OomKilled => Err(format!("ended by signal {}", exit.signal)),
        _ => Err(exit.message),
    }
}
