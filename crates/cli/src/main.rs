//! The binary `space`: every command, the server, the set-up. It holds no logic that another client of the API could not have; what
//! only this machine can do (set-up, doctor, up) is the exception.

mod args;
mod cmd;
mod config;
mod connect;
mod env;
mod failure;
mod host;
mod output;
mod process;
mod progress;
mod server;
mod term;

use std::future::Future;

use clap::Parser as _;

use crate::args::{Cli, Command, Global};
use crate::failure::Failure;

fn main() {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => e.exit(),
    };
    let json = cli.global.json;
    let status = dispatch(cli).unwrap_or_else(|failure| failure.report(json));
    // Not by returning: a thread may be in a read of standard input that nothing can interrupt.
    std::process::exit(status);
}

fn dispatch(cli: Cli) -> Result<i32, Failure> {
    let global = &cli.global;
    match cli.command {
        Command::Setup(c) => on_many_threads(c.execute(global)),
        Command::Doctor(c) => on_many_threads(c.execute(global)),
        Command::Up(c) => c.execute(global),
        Command::Down(c) => on_one_thread(c.execute(global)),
        Command::Run(c) => on_one_thread(c.execute(global)),
        Command::Create(c) => on_one_thread(c.execute(global)),
        Command::Exec(c) => on_one_thread(c.execute(global)),
        Command::Shell(c) => on_one_thread(c.execute(global)),
        Command::Cp(c) => on_one_thread(c.execute(global)),
        Command::Ls(c) => on_one_thread(c.execute(global)),
        Command::Ps(c) => on_one_thread(c.execute(global)),
        Command::Inspect(c) => on_one_thread(c.execute(global)),
        Command::Logs(c) => on_one_thread(c.execute(global)),
        Command::Delete(c) => on_one_thread(c.execute(global)),
        Command::Template(c) => on_one_thread(c.execute(global)),
        Command::Key(c) => on_one_thread(c.execute(global)),
        Command::Config(c) => c.execute(global),
        Command::Completions(c) => c.execute(),
        Command::Role(c) => c.execute(),
    }
}

fn runtime(builder: &mut tokio::runtime::Builder) -> Result<tokio::runtime::Runtime, Failure> {
    builder.enable_all().build().map_err(|e| Failure::new(format!("cannot start the runtime: {e}")))
}

/// For client commands: they start faster on one thread.
fn on_one_thread(work: impl Future<Output = Result<i32, Failure>>) -> Result<i32, Failure> {
    let runtime = runtime(&mut tokio::runtime::Builder::new_current_thread())?;
    let result = runtime.block_on(work);
    runtime.shutdown_background();
    result
}

/// For what runs a server in this process.
pub(crate) fn on_many_threads(work: impl Future<Output = Result<i32, Failure>>) -> Result<i32, Failure> {
    let runtime = runtime(&mut tokio::runtime::Builder::new_multi_thread())?;
    let result = runtime.block_on(work);
    runtime.shutdown_background();
    result
}

/// The configuration with the flags every command has.
pub(crate) fn layers(global: &Global) -> Result<config::Layers, Failure> {
    let mut layers = config::Layers::load(global.config.as_deref())?;
    layers.flag("data_dir", "--data-dir", global.data_dir.clone());
    Ok(layers)
}
