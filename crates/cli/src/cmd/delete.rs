//! `space delete`

use clap::Args;
use futures::StreamExt as _;
use space_api::ListSandboxesQuery;
use space_api::client::{Client, ClientError};

use crate::args::Global;
use crate::cmd::run::DELETE_WAIT;
use crate::connect;
use crate::failure::{Failure, OWN_FAILURE};
use crate::output::{self, note};

/// More at once gains nothing on one machine.
const AT_ONCE: usize = 8;

const AFTER_HELP: &str = "\
Examples:
  space delete box
  space delete box-1 box-2
  space delete --all";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Delete {
    /// Every sandbox there is
    #[arg(long, conflicts_with = "sandboxes")]
    all: bool,
    /// Names or ids
    #[arg(required_unless_present = "all", value_name = "SANDBOX")]
    sandboxes: Vec<String>,
}

async fn delete_one(client: &Client, name: &str) -> Result<(), ClientError> {
    let operation = client.delete_sandbox(name, Some(DELETE_WAIT)).await?;
    client.finish(operation, DELETE_WAIT).await.map(drop)
}

/// Deletes them all, several at a time; what went wrong, by name.
pub async fn delete_many(client: &Client, names: Vec<String>) -> Vec<(String, Result<(), ClientError>)> {
    futures::stream::iter(names)
        .map(|name| async move {
            let result = delete_one(client, &name).await;
            (name, result)
        })
        .buffered(AT_ONCE)
        .collect()
        .await
}

/// Every sandbox that is not deleted, by id.
pub async fn all_ids(client: &Client) -> Result<Vec<String>, ClientError> {
    let all = client.all_sandboxes(&ListSandboxesQuery::default(), &[]).await?;
    Ok(all.into_iter().map(|sandbox| sandbox.id).collect())
}

impl Delete {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let names = if self.all { all_ids(&client).await? } else { self.sandboxes };
        let results = delete_many(&client, names).await;
        let mut status = 0;
        let mut report = Vec::new();
        for (name, result) in results {
            let error = result.err().map(Failure::from);
            match &error {
                None if !global.json => output::line(&name),
                None => {}
                Some(failure) => {
                    status = OWN_FAILURE;
                    if !global.json {
                        note(format!("error: {name}: {failure}"));
                    }
                }
            }
            let error = error.map(|e| serde_json::json!({"code": e.code, "message": e.message}));
            report.push(serde_json::json!({"sandbox": name, "deleted": error.is_none(), "error": error}));
        }
        if global.json {
            output::json(&report);
        }
        Ok(status)
    }
}
