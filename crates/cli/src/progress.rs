//! Progress of what takes longer than two seconds, on standard error: a bar on a terminal, a plain line per step otherwise.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::note;

/// Before this, nothing is shown of a copy.
const QUIET: Duration = Duration::from_secs(2);
/// Between two plain lines about the same step.
const LINE_EVERY: Duration = Duration::from_secs(15);

pub struct Progress {
    bar: Option<ProgressBar>,
    quiet_until: Instant,
    step: String,
    said: Option<Instant>,
    silent: bool,
}

fn style(bytes: bool) -> ProgressStyle {
    let template = if bytes {
        "  {spinner} {msg} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec}"
    } else {
        "  {spinner} {msg} [{elapsed}]"
    };
    ProgressStyle::with_template(template).expect("the template is a constant")
}

impl Progress {
    /// Of steps: the first is shown at once.
    pub fn steps(silent: bool) -> Self {
        Self::new(silent, Instant::now())
    }

    /// Of a copy: nothing is shown when it is quick.
    pub fn copy(silent: bool, what: &str) -> Self {
        let mut progress = Self::new(silent, Instant::now() + QUIET);
        progress.step = what.to_owned();
        progress
    }

    fn new(silent: bool, quiet_until: Instant) -> Self {
        let bar = (!silent && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
            bar.set_style(style(false));
            bar
        });
        Self { bar, quiet_until, step: String::new(), said: None, silent }
    }

    /// What is done now; `total` 0 when it is not known.
    pub fn set(&mut self, step: &str, done: u64, total: u64) {
        let new_step = step != self.step;
        self.step = step.to_owned();
        if self.silent || Instant::now() < self.quiet_until {
            return;
        }
        if let Some(bar) = &self.bar {
            if bar.is_hidden() {
                bar.set_draw_target(ProgressDrawTarget::stderr());
                bar.enable_steady_tick(Duration::from_millis(120));
            }
            bar.set_style(style(total > 0));
            bar.set_message(step.to_owned());
            if total > 0 {
                bar.set_length(total);
            }
            bar.set_position(done);
            return;
        }
        if new_step || self.said.is_none_or(|at| at.elapsed() > LINE_EVERY) {
            self.said = Some(Instant::now());
            match total {
                0 => note(format!("  {step} ...")),
                _ => note(format!("  {step} ... {}%", done.min(total) * 100 / total)),
            }
        }
    }

    /// More of the copy is done.
    pub fn bytes(&mut self, done: u64, total: u64) {
        let step = std::mem::take(&mut self.step);
        let again = step.clone();
        self.step = step;
        self.set(&again, done, total);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
