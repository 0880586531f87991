//! `space doctor`

use std::path::PathBuf;

use clap::Args;

use crate::args::Global;
use crate::failure::{Failure, NO};
use crate::host::{Finding, Level, checks};
use crate::output::{self, Paint, paint};

const AFTER_HELP: &str = "\
Changes nothing. Exit status 1 when something must be fixed before sandboxes can run; warnings do not count.

Examples:
  sudo space doctor
  sudo space doctor --json | jq '.findings[] | select(.level != \"ok\")'";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Doctor {
    /// The space-daemon that set-up would use [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    daemon: Option<PathBuf>,
}

fn print(finding: &Finding) {
    let mark = match finding.level {
        Level::Ok => paint("ok  ", Paint::Green),
        Level::Warn => paint("warn", Paint::Yellow),
        Level::Fail => paint("FAIL", Paint::Red),
    };
    output::line(format!("{mark}  {:<20} {}", finding.name, output::clean(&finding.detail)));
    if let Some(fix) = &finding.fix {
        output::line(format!("      {:<20} {} {fix}", "", paint("fix:", Paint::Bold)));
    }
}

impl Doctor {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let config = crate::layers(global)?.finish()?;
        let findings = checks::all(&config, self.daemon.as_deref()).await;
        let failed = findings.iter().filter(|finding| finding.level == Level::Fail).count();
        if global.json {
            output::json(&serde_json::json!({"ok": failed == 0, "findings": findings}));
        } else {
            findings.iter().for_each(print);
            if failed > 0 {
                output::line(format!("{failed} to fix"));
            }
        }
        Ok(if failed == 0 { 0 } else { NO })
    }
}
