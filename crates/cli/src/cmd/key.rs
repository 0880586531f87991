//! `space key`

use clap::{Args, Subcommand, ValueEnum};
use space_api::{CreateKey, Scope};

use crate::args::Global;
use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Table, age, note};

const AFTER_HELP: &str = "\
Examples:
  space key create ci --scope use                   prints the secret, once
  space key list
  space key revoke key-…";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Key {
    #[command(subcommand)]
    command: KeyCommand,
}

#[derive(Subcommand)]
enum KeyCommand {
    /// Make a key; its secret is shown once
    #[command(after_help = AFTER_HELP)]
    Create {
        /// What it is for
        name: String,
        #[arg(long, value_enum, default_value_t = ScopeArg::Use)]
        scope: ScopeArg,
    },
    /// List keys, without their secrets
    #[command(visible_alias = "ls", after_help = AFTER_HELP)]
    List,
    /// Make keys useless, at once
    #[command(after_help = AFTER_HELP)]
    Revoke {
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum ScopeArg {
    /// Everything, keys and templates from host paths included
    Admin,
    /// Sandboxes, commands, files, templates from registries
    Use,
    /// Only reading
    Read,
}

impl Key {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        match self.command {
            KeyCommand::Create { name, scope } => {
                let scope = match scope {
                    ScopeArg::Admin => Scope::Admin,
                    ScopeArg::Use => Scope::Use,
                    ScopeArg::Read => Scope::Read,
                };
                let made = client.create_key(&CreateKey { name, scope }).await?;
                if global.json {
                    output::json(&made);
                } else {
                    note(format!("key {} made; its secret is shown only now:", made.key.id));
                    output::line(&made.secret);
                }
            }
            KeyCommand::List => {
                let keys = client.keys().await?;
                if global.json {
                    output::json(&keys);
                    return Ok(0);
                }
                let mut table = Table::new(&["ID", "NAME", "SCOPE", "AGE", "LAST USED"]);
                for key in keys {
                    let scope = serde_json::to_value(key.scope).ok().and_then(|v| v.as_str().map(str::to_owned));
                    let used = key.last_used_at_ms.map_or("never".into(), |at| format!("{} ago", age(at)));
                    table.row(vec![key.id, key.name, scope.unwrap_or_default(), age(key.created_at_ms), used]);
                }
                table.print();
            }
            KeyCommand::Revoke { ids } => {
                for id in &ids {
                    client.revoke_key(id).await?;
                    if !global.json {
                        output::line(id);
                    }
                }
                if global.json {
                    output::json(&serde_json::json!({"revoked": ids}));
                }
            }
        }
        Ok(0)
    }
}
