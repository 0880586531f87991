//! What only the host knows, set after every restore: clock, entropy, names, environment. Any step that fails fails the
//! whole: a guest with the wrong time or somebody else's randomness must not be used.

use std::collections::HashMap;
use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_settime};
use space_proto::guest::{Defaults, RefreshReply, RefreshRequest};

use crate::{Daemon, Mode, hooks, sys};

const ENTROPY_MAX_BYTES: usize = 512;
const ENV_MAX_BYTES: usize = 512 * 1024;
const MACHINE_ID: &str = "/etc/machine-id";

/// What processes are started with.
#[derive(Default)]
pub struct Identity {
    inner: Mutex<Settings>,
}

#[derive(Clone, Default)]
pub struct Settings {
    pub defaults: Defaults,
    pub env: HashMap<String, String>,
}

impl Identity {
    fn lock(&self) -> MutexGuard<'_, Settings> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn settings(&self) -> Settings {
        self.lock().clone()
    }
}

fn failed<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}

impl Daemon {
    /// Idempotent. The order matters: randomness and time first, then the disk, which names are written to; programs run again
    /// last, and hooks are programs.
    pub async fn refresh(self: &Arc<Self>, request: RefreshRequest) -> Result<RefreshReply, String> {
        let (hook, hooks_ms) = (hooks::When::asked(request.hook()), request.hooks_ms);
        let mut reply = self.set(request)?;
        if let Some(when) = hook {
            reply.hook_failures = hooks::run(self, when, hooks_ms).await;
        }
        Ok(reply)
    }

    fn set(&self, request: RefreshRequest) -> Result<RefreshReply, String> {
        let env: usize = request.env.iter().map(|(k, v)| k.len() + v.len()).sum();
        if env > ENV_MAX_BYTES {
            return Err("the environment is too large".to_owned());
        }
        if self.mode == Mode::Guest {
            set_entropy(&request.entropy)?;
            set_clock(request.realtime_ns)?;
        }
        if request.thaw {
            self.disk.thaw().map_err(failed("let the disk be written again"))?;
        }
        if self.mode == Mode::Guest {
            set_names(&request.hostname, &request.machine_id)?;
        }
        {
            let mut settings = self.identity.lock();
            settings.env = request.env;
            if let Some(defaults) = request.defaults {
                settings.defaults = defaults;
            }
        }
        if request.forget_ended {
            self.table.forget_ended();
        }
        if request.thaw {
            self.table.groups.thaw().map_err(failed("let the programs run again"))?;
        }
        Ok(RefreshReply { realtime_ns: now_ns(), boot_id: boot_id(), ..RefreshReply::default() })
    }
}

pub fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn set_entropy(bytes: &[u8]) -> Result<(), String> {
    if bytes.len() < 32 || bytes.len() > ENTROPY_MAX_BYTES {
        return Err("the host sent no entropy, or too much".to_owned());
    }
    let device = fs::File::options().write(true).open("/dev/urandom").map_err(failed("open /dev/urandom"))?;
    sys::add_entropy(device.as_fd(), bytes).map_err(failed("reseed the kernel"))
}

fn set_clock(realtime_ns: i64) -> Result<(), String> {
    if realtime_ns <= 0 {
        return Err("the host sent no time".to_owned());
    }
    let time = nix::sys::time::TimeSpec::new(realtime_ns / 1_000_000_000, realtime_ns % 1_000_000_000);
    clock_settime(ClockId::CLOCK_REALTIME, time).map_err(failed("set the clock"))
}

fn set_names(hostname: &str, machine_id: &str) -> Result<(), String> {
    if !hostname.is_empty() {
        nix::unistd::sethostname(hostname).map_err(failed("set the host name"))?;
        write_if_other("/etc/hostname", &format!("{hostname}\n"))?;
        own_hosts_line(hostname)?;
    }
    if !machine_id.is_empty() {
        if machine_id.len() != 32 || !machine_id.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err("the host sent a machine-id that is none".to_owned());
        }
        write_if_other(MACHINE_ID, &format!("{machine_id}\n"))?;
    }
    Ok(())
}

/// A read-only root, or one without `/etc`, is the template's choice and no fault.
fn write_if_other(path: &str, text: &str) -> Result<(), String> {
    if fs::read_to_string(path).is_ok_and(|now| now == text) || !Path::new("/etc").is_dir() {
        return Ok(());
    }
    match fs::write(path, text) {
        Err(error) if error.kind() == std::io::ErrorKind::ReadOnlyFilesystem => Ok(()),
        other => other.map_err(failed(path)),
    }
}

/// Programs such as sudo want to find their own host.
fn own_hosts_line(hostname: &str) -> Result<(), String> {
    const MARK: &str = "127.0.1.1\t";
    let now = fs::read_to_string("/etc/hosts").unwrap_or_default();
    let kept = now.lines().filter(|line| !line.starts_with(MARK)).take(1000);
    let mut text: String = kept.flat_map(|line| [line, "\n"]).collect();
    text.push_str(&format!("{MARK}{hostname}\n"));
    write_if_other("/etc/hosts", &text)
}
