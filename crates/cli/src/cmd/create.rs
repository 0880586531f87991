//! `space create`

use std::collections::BTreeMap;

use clap::Args;

use crate::args::{Global, duration, env_pair};
use crate::cmd::run::{SandboxArgs, create};
use crate::connect;
use crate::failure::Failure;
use crate::output;
use crate::process::Signals;

const AFTER_HELP: &str = "\
Prints the name of the sandbox once it runs.

Examples:
  space create --name box
  space create -T py:1 --ttl 1h -m task=17 -e MODE=test
  BOX=$(space create) && space exec $BOX -- uname -r";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Create {
    #[command(flatten)]
    sandbox: SandboxArgs,
    /// Environment of every command in it; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = env_pair)]
    env: Vec<(String, String)>,
    /// Delete it after this time, as 30m or 2h
    #[arg(long, value_parser = duration)]
    ttl: Option<u64>,
}

impl Create {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let mut body = self.sandbox.request(self.ttl);
        body.env = self.env.into_iter().collect::<BTreeMap<_, _>>();
        let sandbox = create(&client, &body, &mut Signals::listen()?).await?;
        if global.json {
            output::json(&sandbox);
        } else {
            output::line(&sandbox.name);
        }
        Ok(0)
    }
}
