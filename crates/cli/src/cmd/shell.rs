//! `space shell`

use clap::Args;

use crate::args::Global;
use crate::cmd::exec::Exec;
use crate::cmd::run::{Run, SandboxArgs};
use crate::failure::Failure;
use crate::process::ProcessArgs;

const AFTER_HELP: &str = "\
Starts bash where the sandbox has it, sh otherwise.

Examples:
  space shell box
  space shell -u root box
  space shell                                       a new sandbox from `seed`, deleted when the shell ends
  space shell -T py:1";

/// Whichever shell there is, as a login shell.
const SHELL: &str = "if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Shell {
    /// User in the sandbox [default: the template's]
    #[arg(short, long)]
    user: Option<String>,
    /// Working folder [default: the template's]
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// Template of the new sandbox, when none is named
    #[arg(short = 'T', long, default_value = "seed")]
    template: String,
    /// Name or id
    sandbox: Option<String>,
}

impl Shell {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let process = ProcessArgs {
            interactive: true,
            tty: true,
            user: self.user,
            workdir: self.workdir,
            ..ProcessArgs::default()
        };
        let argv = ["sh", "-c", SHELL].map(str::to_owned).to_vec();
        match self.sandbox {
            Some(sandbox) => Exec { process, detach: false, sandbox, argv }.execute(global).await,
            None => {
                let sandbox = SandboxArgs {
                    template: self.template,
                    name: None,
                    memory: None,
                    vcpus: None,
                    metadata: Vec::new(),
                };
                Run { sandbox, process, keep: false, argv }.execute(global).await
            }
        }
    }
}
