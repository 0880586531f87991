//! `space completions`

use clap::{Args, CommandFactory as _};

use crate::args::Cli;
use crate::failure::Failure;

const AFTER_HELP: &str = "\
Examples:
  space completions bash > /etc/bash_completion.d/space
  space completions zsh > ~/.zfunc/_space
  space completions fish > ~/.config/fish/completions/space.fish";

#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Completions {
    shell: clap_complete::Shell,
}

impl Completions {
    pub fn execute(self) -> Result<i32, Failure> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "space", &mut script);
        crate::output::line(String::from_utf8_lossy(&script).trim_end());
        Ok(0)
    }
}
