//! `space run`: create, follow, delete, and end with the program's status.
//!
//! Whatever happens the sandbox goes: on every way out here it is deleted, and it is created with a short time to live that is
//! extended while we live, so that a `kill -9` of us leaks nothing either.

use std::time::Duration;

use clap::Args;
use space_api::client::{Client, ClientError, idempotency_key};
use space_api::problem::Code;
use space_api::{CreateSandbox, PatchSandbox, Sandbox};

use crate::args::{Global, memory_mib, pair};
use crate::connect;
use crate::failure::{Failure, OWN_FAILURE};
use crate::output::{self, note};
use crate::process::{Ended, ProcessArgs, Signals, Style, explain, follow};

/// How long a sandbox outlives a client that was killed.
const TTL: Duration = Duration::from_secs(90);
const EXTEND_EVERY: Duration = Duration::from_secs(30);
pub const CREATE_WAIT: Duration = Duration::from_secs(120);
pub const DELETE_WAIT: Duration = Duration::from_secs(60);

const AFTER_HELP: &str = "\
Without a command the template's own entry point runs. Ctrl-C goes to the program; a second one ends it and deletes the sandbox.
Without -i the program's input is empty. The exit status is the program's; 125 means that SPACE failed.

Examples:
  space run -- python3 -c 'print(6*7)'
  echo hi | space run -i -- cat
  space run -it -- bash
  space run --keep --name box -- sh -c 'echo hello > f'   the sandbox stays";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Run {
    #[command(flatten)]
    pub sandbox: SandboxArgs,
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Do not delete the sandbox at the end
    #[arg(long)]
    pub keep: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub argv: Vec<String>,
}

/// What a new sandbox is made of.
#[derive(Args, Clone)]
pub struct SandboxArgs {
    /// NAME[:TAG] or NAME@sha256:DIGEST
    #[arg(short = 'T', long, default_value = "seed")]
    pub template: String,
    /// Name of the sandbox [default: made up]
    #[arg(long)]
    pub name: Option<String>,
    /// Memory in MiB, or as 1GiB; must be the template's
    #[arg(long, value_parser = memory_mib)]
    pub memory: Option<u32>,
    /// Virtual CPUs; must be the template's
    #[arg(long)]
    pub vcpus: Option<u32>,
    /// Label; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = pair)]
    pub metadata: Vec<(String, String)>,
}

impl SandboxArgs {
    pub fn request(&self, ttl_seconds: Option<u64>) -> CreateSandbox {
        CreateSandbox {
            template: self.template.clone(),
            name: self.name.clone(),
            memory_mib: self.memory,
            vcpus: self.vcpus,
            metadata: self.metadata.iter().cloned().collect(),
            ttl_seconds,
            ..CreateSandbox::default()
        }
    }
}

/// Creates and waits; a sandbox that was made and does not run is deleted again. A signal that ends us does not leave one behind.
pub async fn create(client: &Client, body: &CreateSandbox, signals: &mut Signals) -> Result<Sandbox, Failure> {
    let key = idempotency_key();
    let made = async {
        let operation = client.create_sandbox(body, &key, Some(CREATE_WAIT)).await?;
        let id = operation.sandbox_id.clone();
        match client.finish(operation, CREATE_WAIT).await {
            Ok(operation) => Ok(operation),
            Err(error) => {
                if let Some(id) = id {
                    delete(client, &id, false).await;
                }
                Err(error)
            }
        }
    };
    let operation = tokio::select! {
        operation = made => operation?,
        number = signals.fatal() => {
            // The same key gives the same sandbox: that is how we learn what to delete.
            if let Ok(operation) = client.create_sandbox(body, &key, None).await
                && let Some(id) = operation.sandbox_id
            {
                delete(client, &id, false).await;
            }
            return Err(Failure { status: 128 + number, ..Failure::new("") });
        }
    };
    let bad = || Failure::new("the server reports a sandbox as created and does not say which; check its version");
    match operation.sandbox {
        Some(sandbox) => Ok(sandbox),
        None => Ok(client.sandbox(&operation.sandbox_id.ok_or_else(bad)?).await?),
    }
}

/// Deletes and waits for the end of it. False, with a note, when that did not work.
pub async fn delete(client: &Client, sandbox: &str, expires: bool) -> bool {
    let mut last = None;
    for attempt in 0..3 {
        if attempt > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let done = async {
            let operation = client.delete_sandbox(sandbox, Some(DELETE_WAIT)).await?;
            client.finish(operation, DELETE_WAIT).await
        };
        match done.await {
            Ok(_) => return true,
            Err(e) if e.is(Code::NotFound) || e.is(Code::Gone) => return true,
            Err(e) => last = Some(e),
        }
    }
    if let Some(error) = last {
        let then = if expires { "; it deletes itself within 90 s" } else { "" };
        note(format!("space: the sandbox {sandbox} could not be deleted: {error}{then}"));
    }
    false
}

async fn extend(client: Client, sandbox: String) {
    let body = PatchSandbox { ttl_seconds: Some(Some(TTL.as_secs())), ..PatchSandbox::default() };
    loop {
        tokio::time::sleep(EXTEND_EVERY).await;
        // A server that is away for a moment: the next turn comes well before the time is over.
        let _ = client.patch_sandbox(&sandbox, &body).await;
    }
}

impl Run {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        let mut signals = Signals::listen()?;
        let argv = if self.argv.is_empty() { self.entry_point(&client).await? } else { self.argv.clone() };
        let ttl = (!self.keep).then_some(TTL.as_secs());
        let sandbox = create(&client, &self.sandbox.request(ttl), &mut signals).await?;
        if global.json {
            output::json_line(&serde_json::json!({"event": "created", "sandbox": sandbox}));
        }
        let heart = (!self.keep).then(|| tokio::spawn(extend(client.clone(), sandbox.id.clone())));
        let ended = self.follow(&client, &sandbox, argv, global.json, &mut signals).await;
        if let Some(heart) = heart {
            heart.abort();
        }
        let deleted = if self.keep {
            note(format!("space: the sandbox {} stays; delete it with `space delete {0}`", sandbox.name));
            true
        } else {
            tokio::select! {
                deleted = delete(&client, &sandbox.id, true) => deleted,
                _ = signals.fatal() => false,
            }
        };
        let ended = ended?;
        if let Ended::Exit(exit) = &ended {
            explain(exit);
        }
        Ok(if deleted { ended.status() } else { OWN_FAILURE })
    }

    async fn follow(
        &self,
        client: &Client,
        sandbox: &Sandbox,
        argv: Vec<String>,
        json: bool,
        signals: &mut Signals,
    ) -> Result<Ended, Failure> {
        let request = self.process.request(argv, false);
        let session = tokio::select! {
            session = client.create_command(&sandbox.id, &request) => session?,
            number = signals.fatal() => return Ok(Ended::Signal(number)),
        };
        let ProcessArgs { interactive, tty, .. } = self.process;
        follow(client, session, 0, Style { interactive, tty, json, read_only: false }, signals).await
    }

    /// What the template runs by itself.
    async fn entry_point(&self, client: &Client) -> Result<Vec<String>, Failure> {
        let template = match client.template(&self.sandbox.template).await {
            Ok(template) => template,
            Err(ClientError::Problem(problem)) if problem.is(Code::NotFound) => {
                return Err(ClientError::Problem(problem).into());
            }
            Err(e) => return Err(e.into()),
        };
        let argv: Vec<String> = template.entrypoint.into_iter().chain(template.cmd).collect();
        if argv.is_empty() {
            let name = &self.sandbox.template;
            return Err(Failure::usage(format!(
                "the template {name} has no command of its own; give one, as in `space run -- uname -r`"
            )));
        }
        Ok(argv)
    }
}
