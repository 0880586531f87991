//! `space ps`

use clap::Args;

use crate::args::Global;
use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Table, age, size};

const AFTER_HELP: &str = "\
Shows the commands that were started through SPACE, also those that ended less than 10 minutes ago.

Examples:
  space ps box
  space ps box --json";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Ps {
    /// Name or id
    sandbox: String,
}

impl Ps {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let processes = client.processes(&self.sandbox).await?;
        if global.json {
            output::json(&processes);
            return Ok(0);
        }
        let mut table = Table::new(&["COMMAND ID", "STATE", "PID", "USER", "AGE", "OUTPUT", "COMMAND"]);
        for process in processes {
            let state = match &process.exit {
                Some(exit) => format!("{} {}", exit.reason, exit.code),
                None => process.state,
            };
            table.row(vec![
                process.id,
                state,
                process.pid.to_string(),
                if process.user.is_empty() { "-".into() } else { process.user },
                process.started_at_ms.map_or("-".into(), age),
                size(process.output_end),
                process.argv.join(" ").chars().take(80).collect(),
            ]);
        }
        table.print();
        Ok(0)
    }
}
