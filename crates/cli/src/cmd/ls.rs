//! `space ls`

use clap::Args;
use space_api::ListSandboxesQuery;

use crate::args::{Global, pair};
use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Table, age};

const AFTER_HELP: &str = "\
Examples:
  space ls
  space ls --state running,failed --template seed
  space ls -m task=17 --json";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Ls {
    /// Only these states, with commas [default: all but deleted]
    #[arg(long)]
    state: Option<String>,
    /// Only sandboxes of this template: tag or digest
    #[arg(short = 'T', long)]
    template: Option<String>,
    /// Only sandboxes with this label; several: all must match
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Names only
    #[arg(short, long)]
    quiet: bool,
}

impl Ls {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let query = ListSandboxesQuery { state: self.state, template: self.template, ..Default::default() };
        let sandboxes = client.all_sandboxes(&query, &self.metadata).await?;
        if global.json {
            output::json(&sandboxes);
            return Ok(0);
        }
        if self.quiet {
            for sandbox in &sandboxes {
                output::line(&sandbox.name);
            }
            return Ok(0);
        }
        let mut table = Table::new(&["NAME", "ID", "TEMPLATE", "STATE", "MEMORY", "AGE", "EXPIRES"]);
        for sandbox in sandboxes {
            table.row(vec![
                sandbox.name,
                sandbox.id,
                sandbox.template,
                sandbox.state,
                format!("{} MiB", sandbox.memory_mib),
                age(sandbox.created_at_ms),
                sandbox.expires_at_ms.map_or("-".into(), |at| format!("in {}", age(at))),
            ]);
        }
        table.print();
        Ok(0)
    }
}
