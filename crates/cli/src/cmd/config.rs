//! `space config show`

use clap::{Args, Subcommand};

use crate::args::Global;
use crate::config::KEYS;
use crate::env;
use crate::failure::Failure;
use crate::output::{self, Table};

const AFTER_HELP: &str = "\
Sources, in rising order: defaults; ./space.toml or else /etc/space/space.toml (or the file of --config, SPACE_CONFIG);
SPACE_* variables; flags.

Examples:
  space config show
  SPACE_LISTEN=127.0.0.1:8080 space config show --json";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Config {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Every value and where it came from
    #[command(after_help = AFTER_HELP)]
    Show,
    /// Every environment variable that is read, and what for
    #[command(after_help = AFTER_HELP)]
    Variables,
}

impl Config {
    pub fn execute(self, global: &Global) -> Result<i32, Failure> {
        if let ConfigCommand::Variables = self.command {
            return Ok(variables(global.json));
        }
        let config = crate::layers(global)?.finish()?;
        if global.json {
            let all: serde_json::Map<_, _> = config
                .values
                .iter()
                .map(|(name, value, origin)| {
                    ((*name).to_owned(), serde_json::json!({"value": value, "origin": origin.to_string()}))
                })
                .collect();
            output::json(&all);
            return Ok(0);
        }
        let mut table = Table::new(&["NAME", "VALUE", "FROM", "VARIABLE", "MEANING"]);
        for ((name, value, origin), key) in config.values.into_iter().zip(KEYS) {
            let cells = [name, &value, &origin.to_string(), key.variable, key.meaning];
            table.row(cells.map(str::to_owned).to_vec());
        }
        table.print();
        Ok(0)
    }
}

fn variables(json: bool) -> i32 {
    if json {
        let all: serde_json::Map<_, _> = env::ALL.iter().map(|v| (v.name.to_owned(), v.meaning.into())).collect();
        output::json(&all);
        return 0;
    }
    let mut table = Table::new(&["NAME", "MEANING"]);
    for variable in env::ALL {
        table.row(vec![variable.name.to_owned(), variable.meaning.to_owned()]);
    }
    table.print();
    0
}
