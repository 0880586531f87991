//! `space logs`

use std::io::Write as _;

use clap::Args;
use space_api::client::Download;

use crate::args::Global;
use crate::connect;
use crate::failure::Failure;
use crate::output::{self, BROKEN_PIPE_STATUS};
use crate::process::{Signals, Style, follow};

const AFTER_HELP: &str = "\
What is held is the last 1 MiB of each command's output, both streams together, until 10 minutes after its end.

Examples:
  space logs box cmd-…
  space logs --follow box cmd-…                     until it ends; the exit status is the command's
  space logs --console box                          what the guest's kernel said";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Logs {
    /// The guest's console instead of a command's output
    #[arg(long, conflicts_with_all = ["command", "follow"])]
    console: bool,
    /// Go on until the command ends
    #[arg(short, long)]
    follow: bool,
    /// From this byte on
    #[arg(long, default_value_t = 0)]
    offset: u64,
    /// Name or id
    sandbox: String,
    /// The command's id; `space ps` lists them
    #[arg(required_unless_present = "console")]
    command: Option<String>,
}

/// Copies a body to standard output; the status to end with.
async fn print(mut from: Download, json: bool) -> Result<i32, Failure> {
    let mut held = Vec::new();
    while let Some(chunk) = from.chunk().await? {
        if json {
            held.extend_from_slice(&chunk);
            continue;
        }
        let mut out = std::io::stdout().lock();
        if out.write_all(&chunk).and_then(|()| out.flush()).is_err() {
            return Ok(BROKEN_PIPE_STATUS);
        }
    }
    if json {
        output::json(&serde_json::json!({"text": String::from_utf8_lossy(&held), "bytes": held.len()}));
    }
    Ok(0)
}

impl Logs {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let Some(command) = &self.command else {
            return print(client.console(&self.sandbox).await?, global.json).await;
        };
        if !self.follow {
            return print(client.output(&self.sandbox, command, self.offset).await?, global.json).await;
        }
        let session = client.reattach(&self.sandbox, command).await?;
        let style = Style { interactive: false, tty: false, json: global.json, read_only: true };
        let ended = follow(&client, session, self.offset, style, &mut Signals::listen()?).await?;
        Ok(ended.status())
    }
}
