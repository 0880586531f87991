//! `space exec`

use clap::Args;
use space_api::SendSignal;

use crate::args::Global;
use crate::connect;
use crate::failure::Failure;
use crate::output;
use crate::process::{Ended, ProcessArgs, Signals, Style, explain, follow};

const AFTER_HELP: &str = "\
The exit status is the program's; 125 means that SPACE failed. Ctrl-C goes to the program; a second one kills it and all it started.
When we are told to end otherwise (SIGTERM, SIGHUP, a closed output), the program goes on: `space logs` follows it.

Examples:
  space exec box -- ls -la
  space exec -it box -- bash
  space exec -u root -w /tmp -e KEY=value box -- env
  tar c src | space exec -i box -- tar x
  space exec -d box -- python3 server.py            prints the command's id and returns";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Exec {
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Start it, print its id and return
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    /// Name or id
    pub sandbox: String,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    pub argv: Vec<String>,
}

impl Exec {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let mut signals = Signals::listen()?;
        let request = self.process.request(self.argv, self.detach);
        let session = tokio::select! {
            session = client.create_command(&self.sandbox, &request) => session?,
            number = signals.fatal() => return Ok(128 + number),
        };
        if self.detach {
            if global.json {
                output::json(&serde_json::json!({"id": session.id, "sandbox_id": session.sandbox_id}));
            } else {
                output::line(&session.id);
            }
            return Ok(0);
        }
        let ProcessArgs { interactive, tty, .. } = self.process;
        let command = session.id.clone();
        let style = Style { interactive, tty, json: global.json, read_only: false };
        let ended = follow(&client, session, 0, style, &mut signals).await?;
        match &ended {
            Ended::Exit(exit) => explain(exit),
            Ended::Signal(2) => {
                let kill = SendSignal { signal: "KILL".into(), tree: true };
                client.signal(&self.sandbox, &command, &kill).await?;
            }
            _ => {}
        }
        Ok(ended.status())
    }
}
