//! The command line: global options and the list of commands. What a command takes stands in its own file.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::cmd;

const AFTER_HELP: &str = "\
Exit status: that of the program for run, exec and shell (128+N when signal N ended it); 125 when SPACE itself failed;
2 for a wrong command line; 1 when `doctor` found a fault; 141 when the reader of the output went away.

Examples:
  sudo space setup                                  prepare this machine once
  sudo space up --detach                            start the server
  space run -- python3 -c 'print(6*7)'              one command in a microVM of its own
  space create --name box && space shell box        a sandbox that stays";

/// Runs programs in microVMs, each with a kernel of its own.
#[derive(Parser)]
#[command(name = "space", version, after_help = AFTER_HELP, max_term_width = 110)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Args, Clone)]
pub struct Global {
    /// Address of the server [default: SPACE_URL, or what `space up` left in the data folder]
    #[arg(long, global = true, value_name = "URL", help_heading = "Global options")]
    pub url: Option<String>,
    /// API key [default: SPACE_API_KEY, or what `space up` left in the data folder]
    #[arg(long, global = true, value_name = "KEY", help_heading = "Global options")]
    pub key: Option<String>,
    /// Configuration file [default: SPACE_CONFIG, ./space.toml, /etc/space/space.toml]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub config: Option<PathBuf>,
    /// Data folder [default: SPACE_DATA_DIR, or the configuration, or /var/lib/space]
    #[arg(long, global = true, value_name = "DIR", help_heading = "Global options")]
    pub data_dir: Option<String>,
    /// Machine-readable output: one JSON document, or one per line where output is streamed
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
}

#[derive(Subcommand)]
pub enum Command {
    /// Prepare this machine: packages, pool, guest kernel, the template `seed`
    Setup(cmd::setup::Setup),
    /// Check this machine and say what is missing; changes nothing
    Doctor(cmd::doctor::Doctor),
    /// Start the server
    Up(cmd::up::Up),
    /// Stop the server; sandboxes go on unless told otherwise
    Down(cmd::down::Down),
    /// Run one command in a new sandbox, then delete it
    Run(cmd::run::Run),
    /// Create a sandbox
    Create(cmd::create::Create),
    /// Run a command in a sandbox
    Exec(cmd::exec::Exec),
    /// A shell in a sandbox, or in a new one that goes when the shell ends
    Shell(cmd::shell::Shell),
    /// Copy files and folders into and out of a sandbox
    Cp(cmd::cp::Cp),
    /// List sandboxes
    Ls(cmd::ls::Ls),
    /// List the processes of a sandbox
    Ps(cmd::ps::Ps),
    /// Show everything about a sandbox
    Inspect(cmd::inspect::Inspect),
    /// Output of a command, or the console of the guest
    Logs(cmd::logs::Logs),
    /// Delete sandboxes
    Delete(cmd::delete::Delete),
    /// Build, list, tag and delete templates
    Template(cmd::template::Template),
    /// Make, list and revoke API keys
    Key(cmd::key::Key),
    /// Show the configuration that is in force
    Config(cmd::config::Config),
    /// Completions for a shell
    Completions(cmd::completions::Completions),
    /// One of the processes that `space up` starts
    #[command(hide = true)]
    Role(crate::server::role::Role),
}

/// `KEY=VALUE`; a bare `KEY` takes its value from our own environment.
pub fn env_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("a variable needs a name: KEY=VALUE".into()),
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => match std::env::var(text) {
            Ok(value) => Ok((text.to_owned(), value)),
            Err(_) => Err(format!("write KEY=VALUE; {text} is not set here, so its value cannot be taken over")),
        },
    }
}

/// `KEY=VALUE`
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE".into()),
    }
}

/// `90`, `90s`, `10m`, `2h`, `1d`, in seconds.
pub fn duration(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a time; write 90s, 10m, 2h or 1d");
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = match &text[split..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(bad()),
    };
    text[..split].parse::<u64>().ok().and_then(|n| n.checked_mul(unit)).filter(|n| *n > 0).ok_or_else(bad)
}

/// `512` (MiB), `512MiB`, `1GiB`, in MiB.
pub fn memory_mib(text: &str) -> Result<u32, String> {
    if let Ok(mib) = text.parse::<u32>() {
        return Ok(mib);
    }
    let bytes = crate::config::parse_size(text)?;
    u32::try_from(bytes >> 20).map_err(|_| format!("{text:?} is more memory than there is anywhere"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        let mut cli = Cli::command();
        cli.build();
        for command in cli.get_subcommands().filter(|c| c.get_name() != "help" && !c.is_hide_set()) {
            let mut command = command.clone();
            let help = command.render_long_help().to_string();
            assert!(help.contains("Examples:") && help.contains("--json"), "{}: {help}", command.get_name());
        }
    }

    #[test]
    fn every_list_is_ls_too() {
        for what in ["template", "key"] {
            assert!(Cli::try_parse_from(["space", what, "ls"]).is_ok(), "space {what} ls");
        }
    }

    #[test]
    fn values() {
        assert_eq!(duration("2h"), Ok(7200));
        assert_eq!(memory_mib("1GiB"), Ok(1024));
        assert_eq!(memory_mib("512"), Ok(512));
        assert!(duration("0").is_err() && duration("5x").is_err() && pair("=x").is_err() && env_pair("A B").is_err());
    }
}
