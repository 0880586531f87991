//! `space template`

use std::time::Duration;

use clap::{Args, Subcommand};
use space_api::client::{Client, ClientError, idempotency_key};
use space_api::{BuildTemplate, Operation, Template as Info, TemplateOptions};

use crate::args::{Global, duration, env_pair, memory_mib};
use crate::cmd::inspect::print_fields;
use crate::config::parse_size;
use crate::connect;
use crate::failure::Failure;
use crate::output::{self, Table, age, size};
use crate::progress::Progress;

const AFTER_HELP: &str = "\
Sources: seed[:SUITE], debian:SUITE[+PACKAGE,…], tar:FILE, dir:FOLDER, oci:FOLDER[#TAG], oci-archive:FILE[#TAG],
docker://HOST[:PORT]/NAME[:TAG][@DIGEST]. Files and folders are those of the server's machine.

Examples:
  space template build py:1 --source docker://127.0.0.1:5000/python:3.12
  space template build web --source dir:./rootfs \\
    --start-command 'python3 -m http.server 8000' --ready-command 'nc -z 127.0.0.1 8000'
  space template list
  space template tag seed:latest seed:good
  space template delete py:1";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Template {
    #[command(subcommand)]
    command: TemplateCommand,
}

#[derive(Subcommand)]
enum TemplateCommand {
    /// Make a template: a disk, then a boot, then a freeze
    #[command(after_help = AFTER_HELP)]
    Build(Box<Build>),
    /// List templates
    #[command(visible_alias = "ls", after_help = AFTER_HELP)]
    List,
    /// Show everything about a template
    #[command(after_help = AFTER_HELP)]
    Inspect { template: String },
    /// Give a template another tag
    #[command(after_help = AFTER_HELP)]
    Tag { template: String, tag: String },
    /// Delete templates; refused while sandboxes use them
    #[command(after_help = AFTER_HELP)]
    Delete {
        #[arg(required = true, value_name = "TEMPLATE")]
        templates: Vec<String>,
    },
}

#[derive(Args)]
struct Build {
    /// NAME[:TAG] that will point to it
    tag: String,
    /// Where its files come from
    #[arg(long, short)]
    source: String,
    /// MiB, or as 1GiB [default: 512 MiB]
    #[arg(long, value_parser = memory_mib)]
    memory: Option<u32>,
    /// Virtual CPUs [default: 1]
    #[arg(long)]
    vcpus: Option<u32>,
    /// Size of the disk, as 4GiB; sparse [default: 2GiB]
    #[arg(long, value_parser = parse_size)]
    disk: Option<u64>,
    /// Shell command that is started before the freeze
    #[arg(long, value_name = "COMMAND")]
    start_command: Option<String>,
    /// Shell command that must succeed before the freeze
    #[arg(long, value_name = "COMMAND")]
    ready_command: Option<String>,
    /// How long that may take [default: the server's]
    #[arg(long, value_parser = duration)]
    ready_timeout: Option<u64>,
    /// Environment; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = env_pair)]
    env: Vec<(String, String)>,
    /// User of commands [default: the image's]
    #[arg(short, long)]
    user: Option<String>,
    /// Working folder of commands [default: the image's]
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// Allow a registry without TLS on another machine
    #[arg(long)]
    insecure_registry: bool,
}

/// A relative path means ours, not the server's working folder.
fn absolute_source(source: &str) -> String {
    for kind in ["tar:", "dir:", "oci:", "oci-archive:"] {
        if let Some(path) = source.strip_prefix(kind)
            && !path.is_empty()
            && let Ok(absolute) = std::path::absolute(path)
        {
            return format!("{kind}{}", absolute.display());
        }
    }
    source.to_owned()
}

/// Builds and shows progress until the end.
pub async fn build(client: &Client, body: &BuildTemplate, silent: bool) -> Result<Operation, ClientError> {
    let operation = client.build_template(body, &idempotency_key()).await?;
    watch(client, operation, silent).await
}

/// Shows the progress of a build until its end.
pub async fn watch(client: &Client, mut operation: Operation, silent: bool) -> Result<Operation, ClientError> {
    let mut progress = Progress::steps(silent);
    let mut step = String::from("building");
    while !operation.state.ended() {
        match &operation.progress {
            Some(now) => {
                // Bytes within a step come without its name.
                if !now.step.is_empty() {
                    step = output::clean(&now.step);
                }
                progress.set(&step, now.done, now.total);
            }
            None => progress.set("waiting for the build to start", 0, 0),
        }
        match client.operation(&operation.id, Some(Duration::from_secs(1))).await {
            Ok(now) => operation = now,
            Err(e) if e.is_transient() => tokio::time::sleep(Duration::from_secs(1)).await,
            Err(e) => return Err(e),
        }
    }
    drop(progress);
    client.finish(operation, Duration::from_secs(1)).await
}

impl Build {
    fn request(self) -> BuildTemplate {
        BuildTemplate {
            tag: self.tag,
            source: absolute_source(&self.source),
            options: TemplateOptions {
                memory_mib: self.memory,
                vcpus: self.vcpus,
                disk_bytes: self.disk,
                start_command: self.start_command,
                ready_command: self.ready_command,
                ready_timeout_seconds: self.ready_timeout,
                env: self.env.into_iter().collect(),
                user: self.user,
                workdir: self.workdir,
            },
            insecure_registry: self.insecure_registry,
        }
    }
}

fn list(templates: Vec<Info>) {
    let mut table = Table::new(&["TAGS", "DIGEST", "SOURCE", "MEMORY", "DISK USED", "SANDBOXES", "AGE"]);
    for template in templates {
        table.row(vec![
            if template.tags.is_empty() { "-".into() } else { template.tags.join(",") },
            template.digest.chars().take(19).collect(),
            template.source,
            format!("{} MiB", template.memory_mib),
            size(template.disk_bytes_used + template.memory_bytes_used),
            template.sandboxes.to_string(),
            age(template.created_at_ms),
        ]);
    }
    table.print();
}

impl Template {
    pub async fn execute(self, global: &Global) -> Result<i32, Failure> {
        let client = connect::client(global)?;
        match self.command {
            TemplateCommand::Build(args) => {
                let body = args.request();
                let started = std::time::Instant::now();
                let operation = build(&client, &body, global.json).await?;
                if global.json {
                    output::json(&operation);
                } else {
                    let digest = operation.template.map(|t| t.digest).unwrap_or_default();
                    output::line(format!("{} {digest} ({:.0} s)", body.tag, started.elapsed().as_secs_f64()));
                }
            }
            TemplateCommand::List => {
                let templates = client.templates().await?;
                if global.json { output::json(&templates) } else { list(templates) }
            }
            TemplateCommand::Inspect { template } => {
                let found = client.template(&template).await?;
                if global.json {
                    output::json(&found);
                } else {
                    print_fields(&serde_json::to_value(found).expect("a template is plain data"));
                }
            }
            TemplateCommand::Tag { template, tag } => {
                client.tag_template(&template, &tag).await?;
                if global.json {
                    output::json(&serde_json::json!({"template": template, "tag": tag}));
                }
            }
            TemplateCommand::Delete { templates } => {
                for name in &templates {
                    client.delete_template(name).await?;
                    if !global.json {
                        output::line(name);
                    }
                }
                if global.json {
                    output::json(&serde_json::json!({"deleted": templates}));
                }
            }
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::absolute_source;

    #[test]
    fn relative_paths_are_ours() {
        let here = std::env::current_dir().expect("a folder");
        assert_eq!(absolute_source("dir:x"), format!("dir:{}", here.join("x").display()));
        assert_eq!(absolute_source("oci:/a#v1"), "oci:/a#v1");
        assert_eq!(absolute_source("docker://h/x"), "docker://h/x");
    }
}
