//! `make demo`: from a fresh machine to a program in a microVM, and how long that took. The server it starts stays up, for what a
//! person tries next; the sandboxes it makes do not.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use space_api::client::{AttachOptions, Client, idempotency_key};
use space_api::frame::Frame;
use space_api::{CreateCommand, CreateSandbox};

use crate::{output_of, run as run_command, shown, space_binary};

const ROUNDS: usize = 10;
const LEARNS: Duration = Duration::from_secs(60);
const WAIT: Duration = Duration::from_secs(60);

const PROGRAM: &str = r#"
import platform, sys, time
print("hello from Python", platform.python_version(), "on Linux", platform.release(), flush=True)
for n in range(1, 6):
    print(f"  {n} squared is {n * n}", flush=True)
    time.sleep(0.2)
print("this line went to standard error", file=sys.stderr)
"#;

/// `space ARGS`, as root where we are not.
fn space(args: &[&str]) -> Command {
    let mut command = if is_root() {
        Command::new(space_binary())
    } else {
        let mut sudo = Command::new("sudo");
        sudo.arg("--preserve-env").arg(space_binary());
        sudo
    };
    command.args(args);
    command
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    // Our own process folder belongs to whom we act as.
    std::fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

fn show(command: &mut Command) -> Result<()> {
    let words: Vec<String> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let line = words.iter().filter(|word| !word.starts_with("--preserve-env") && !word.ends_with("/space"));
    let line =
        line.map(|word| if word.contains('\n') { "'…'".into() } else { word.clone() }).collect::<Vec<_>>().join(" ");
    println!("\n$ space {line}");
    run_command(command)
}

/// Address and key as `space up` left them; they are readable for root only.
fn connection() -> Result<(String, String)> {
    let config: serde_json::Value = serde_json::from_str(&output_of(&mut space(&["config", "show", "--json"]))?)?;
    let folder = config["data_dir"]["value"].as_str().context("no data_dir in the configuration")?;
    let path = PathBuf::from(folder).join("client.toml");
    let text = if is_root() {
        std::fs::read_to_string(&path).with_context(|| path.display().to_string())?
    } else {
        output_of(Command::new("sudo").arg("cat").arg(&path))?
    };
    let file: toml::Table = toml::from_str(&text)?;
    let field = |name: &str| file.get(name).and_then(|v| v.as_str()).map(str::to_owned).context("client.toml");
    Ok((field("url")?, field("key")?))
}

/// Milliseconds from the request until the sandbox runs, and until the first byte of `echo`.
async fn round(client: &Client) -> Result<(f64, f64)> {
    let started = Instant::now();
    let body = CreateSandbox { template: "seed".into(), ttl_seconds: Some(300), ..CreateSandbox::default() };
    let operation = client.create_sandbox(&body, &idempotency_key(), Some(WAIT)).await?;
    let id = operation.sandbox_id.clone().context("no sandbox")?;
    client.finish(operation, WAIT).await?;
    let created = started.elapsed();
    let command = CreateCommand { argv: vec!["echo".into(), "hi".into()], ..CreateCommand::default() };
    let session = client.create_command(&id, &command).await?;
    let mut attach = client.attach(session, AttachOptions::default()).await?;
    let first = loop {
        match attach.next().await.context("the stream ended early")?? {
            Frame::Stdout { data, .. } if !data.is_empty() => break started.elapsed(),
            Frame::Exit(exit) => bail!("`echo` ended without output: {exit:?}"),
            Frame::Error(problem) => return Err(problem.into()),
            _ => {}
        }
    };
    let operation = client.delete_sandbox(&id, Some(WAIT)).await?;
    client.finish(operation, WAIT).await?;
    Ok((created.as_secs_f64() * 1000.0, first.as_secs_f64() * 1000.0))
}

/// The p-th percentile of sorted values: the smallest that at least p percent do not exceed.
fn percentile(sorted: &[f64], p: usize) -> f64 {
    sorted[(sorted.len() * p).div_ceil(100).max(1) - 1]
}

fn print_times(name: &str, mut times: Vec<f64>) {
    times.sort_by(f64::total_cmp);
    println!("  {name:<26} p50 {:>6.1} ms    p90 {:>6.1} ms", percentile(&times, 50), percentile(&times, 90));
}

/// So many sandboxes, `parallel` of them at the same time.
async fn measure(rounds: usize, parallel: usize) -> Result<()> {
    let (url, key) = connection()?;
    let client = Client::new(&url, Some(&key))?;
    let (mut created, mut first) = (Vec::new(), Vec::new());
    let mut running = tokio::task::JoinSet::new();
    let mut started = 0;
    while created.len() < rounds {
        while started < rounds && running.len() < parallel {
            let client = client.clone();
            running.spawn(async move { round(&client).await });
            started += 1;
        }
        let (a, b) = running.join_next().await.context("nothing runs")???;
        created.push(a);
        first.push(b);
    }
    let how = if parallel == 1 { "one after the other".to_owned() } else { format!("{parallel} at a time") };
    println!("\n{rounds} sandboxes, {how}, through the HTTP API:");
    print_times("create", created);
    print_times("create to first output", first);
    Ok(())
}

fn measured(rounds: usize, parallel: usize) -> Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(measure(rounds, parallel))
}

/// `xtask measure`: the figures of docs/performance.md, against the server that runs.
pub fn figures() -> Result<()> {
    measured(50, 1)?;
    learned();
    measured(50, 1)?;
    learned();
    measured(50, 10)
}

/// Time for the server to park as many VMs as the run before wanted.
fn learned() {
    println!("\n(waiting {} seconds: the server parks as many VMs as were just wanted)", LEARNS.as_secs());
    std::thread::sleep(LEARNS);
}

fn kernels() -> Result<()> {
    let guest = output_of(&mut space(&["run", "--", "uname", "-r"]))?;
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    println!("\n  kernel of the host:   {}\n  kernel of the guest:  {}", host.trim(), guest.trim());
    if guest.trim() == host.trim() {
        bail!("the guest runs under the host's kernel");
    }
    Ok(())
}

pub fn run() -> Result<()> {
    if !space_binary().is_file() {
        bail!("{} is missing: `make demo` builds it first", space_binary().display());
    }
    show(&mut space(&["setup"]))?;
    let running =
        space(&["ls", "--quiet"]).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).status();
    if running.is_ok_and(|status| status.success()) {
        println!("\nThe server runs already.");
    } else {
        show(&mut space(&["up", "--detach"]))?;
    }
    show(&mut space(&["doctor"]))?;
    show(&mut space(&["run", "--template", "seed", "--", "python3", "-c", PROGRAM]))?;
    kernels()?;
    measured(ROUNDS, 1)?;
    let sudo = if is_root() { "" } else { "sudo " };
    let program = shown(&Command::new(space_binary()));
    println!(
        "\nThe server stays up. What to try next (`space` is {program}):\n  \
         {sudo}space run -- python3 -c 'print(6*7)'\n  \
         {sudo}space shell                                   a shell in a new sandbox\n  \
         {sudo}space create --name box; {sudo}space exec box -- sh -c 'echo kept > f'; {sudo}space cp box:f -\n  \
         {sudo}space template build py:1 --source debian:bookworm+python3\n  \
         {sudo}space down --sandboxes                        when you are done"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentiles() {
        let ten: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!((percentile(&ten, 50), percentile(&ten, 90), percentile(&ten, 100)), (5.0, 9.0, 10.0));
        assert_eq!(percentile(&[7.0], 50), 7.0);
    }
}
