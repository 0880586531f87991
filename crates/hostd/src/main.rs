//! `space-hostd`: the one process of a node that keeps root's rights. It is started with what it may do (see
//! [`space_hostd::service::Config`]) on descriptor 3, whose end is also the end of this process, and a listening socket on 4.
//!
//! Whoever starts it has taken away the capabilities it does not need, put it behind a filter of system calls and turned off
//! new privileges; it refuses to run otherwise. VMMs outlive it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use space_hostd::server;
use space_hostd::service::{Config, Service};

const CONFIG_MAX_BYTES: u64 = 256 << 10;

fn run() -> Result<(), String> {
    nix::sys::prctl::set_dumpable(false).map_err(|errno| errno.to_string())?;
    if nix::sys::prctl::get_no_new_privs() != Ok(true) {
        return Err("new privileges are on: `space up` starts this program".to_owned());
    }
    let (lifeline, listener) = (own(3)?, own(4)?);
    let mut lifeline = BufReader::new(File::from(lifeline));
    let mut line = String::new();
    lifeline.by_ref().take(CONFIG_MAX_BYTES).read_line(&mut line).map_err(|error| error.to_string())?;
    let config: Config = serde_json::from_str(&line).map_err(|error| format!("the configuration: {error}"))?;
    config.drill.clone().into_iter().for_each(space_hostd::points::obey);
    let service = Service::open(config).map_err(|error| error.to_string())?;
    let groups = service.groups().clone();
    std::thread::spawn(move || {
        let _ = lifeline.read(&mut [0]);
        groups.remove_if_empty();
        std::process::exit(0);
    });
    server::serve(service, &listener).map_err(|error| error.to_string())
}

fn own(fd: i32) -> Result<OwnedFd, String> {
    space_hostd::process::inherited(fd).map_err(|error| format!("descriptor {fd}: {error}"))
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("space-hostd: {error}");
            ExitCode::FAILURE
        }
    }
}
