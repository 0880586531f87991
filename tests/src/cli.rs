//! The command line, as a person uses it.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::Server;

#[derive(Debug)]
pub struct Output {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// `space ARGS` against the server, with the input on standard input.
pub fn space(server: &Server, args: &[&str], input: &str) -> Result<Output> {
    let mut child = Command::new(crate::server::binary())
        .args(args)
        .env("SPACE_DATA_DIR", &server.data_dir)
        .env_remove("SPACE_URL")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().expect("piped");
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let out = child.wait_with_output()?;
    Ok(Output {
        code: out.status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
    })
}
