//! Starts one program: its user, environment, folder, group, terminal or pipes. Blocks for the length of a fork and exec.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::libc;
use nix::pty::openpty;
use space_proto::guest::ProcessSpec;

use crate::cgroup::Group;
use crate::refresh::Settings;
use crate::sys::{self, ChildSetup};
use crate::users::{self, User};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const SIZE_MAX: u32 = 10_000;

/// A program that runs, and our ends of what it reads and writes.
pub struct Started {
    pub pid: i32,
    pub terminal: Option<OwnedFd>,
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
}

/// Why it could not start, with the status a shell would report.
pub struct NotStarted {
    pub code: i32,
    pub message: String,
}

fn not(code: i32, message: impl Into<String>) -> NotStarted {
    NotStarted { code, message: message.into() }
}

/// The user a spec means.
pub fn user(spec_user: &str, settings: &Settings) -> Result<User, String> {
    let wanted = if spec_user.is_empty() { settings.defaults.user.as_str() } else { spec_user };
    users::resolve(if wanted.is_empty() { "root" } else { wanted })
}

fn environment(spec: &ProcessSpec, settings: &Settings, user: &User) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), PATH.to_owned()),
        ("HOME".to_owned(), user.home.clone()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
        ("SHELL".to_owned(), user.shell.clone()),
    ]);
    if spec.pty.is_some() {
        env.insert("TERM".to_owned(), "xterm-256color".to_owned());
    }
    for layer in [&settings.defaults.env, &settings.env, &spec.env] {
        env.extend(layer.iter().map(|(k, v)| (k.clone(), v.clone())));
    }
    // The template's environment is of its own user.
    if user.uid == 0 && !spec.env.contains_key("HOME") {
        env.insert("HOME".to_owned(), user.home.clone());
    }
    env
}

fn workdir(spec: &ProcessSpec, settings: &Settings, user: &User) -> Result<PathBuf, NotStarted> {
    if !spec.workdir.is_empty() {
        let path = Path::new(&user.home).join(&spec.workdir);
        return if path.is_dir() {
            Ok(path)
        } else {
            Err(not(126, format!("the working folder {} is not there", path.display())))
        };
    }
    // Defaults are wishes: a folder that went away must not make a sandbox useless.
    let wishes = [settings.defaults.workdir.as_str(), user.home.as_str(), "/"];
    let found = wishes.into_iter().find(|dir| dir.starts_with('/') && Path::new(dir).is_dir());
    Ok(PathBuf::from(found.unwrap_or("/")))
}

/// As `execvp` would, but with the process's own `PATH` and folder.
fn find_program(name: &str, env: &BTreeMap<String, String>, dir: &Path) -> Result<PathBuf, NotStarted> {
    if name.contains('/') {
        return Ok(dir.join(name));
    }
    let path = env.get("PATH").map_or(PATH, String::as_str);
    let mut found_any = false;
    for folder in path.split(':') {
        let file = dir.join(folder).join(name);
        if let Ok(meta) = fs::metadata(&file)
            && meta.is_file()
        {
            found_any = true;
            if meta.permissions().mode() & 0o111 != 0 {
                return Ok(file);
            }
        }
    }
    if found_any {
        return Err(not(126, format!("{name}: not executable")));
    }
    Err(not(127, format!("{name}: not found in {path}")))
}

fn why(program: &Path, error: &io::Error) -> NotStarted {
    let name = program.display();
    match error.raw_os_error() {
        Some(libc::ENOENT) if program.exists() => not(127, format!("{name}: its interpreter is not there")),
        Some(libc::ENOENT | libc::ENOTDIR) => not(127, format!("{name}: not found")),
        Some(libc::EACCES) => not(126, format!("{name}: permission denied")),
        Some(libc::ENOEXEC) => not(126, format!("{name}: not a program this system can run")),
        Some(libc::EAGAIN) => not(126, format!("{name}: the sandbox has as many processes as it may have")),
        Some(libc::ENOMEM) => not(126, format!("{name}: the sandbox is out of memory")),
        Some(libc::E2BIG) => not(126, format!("{name}: arguments and environment are too long")),
        _ => not(126, format!("{name}: {error}")),
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd), NotStarted> {
    nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|errno| not(126, format!("no pipe: {errno}")))
}

pub fn start(spec: &ProcessSpec, settings: &Settings, group: Option<&Group>) -> Result<Started, NotStarted> {
    let user = user(&spec.user, settings).map_err(|message| not(126, message))?;
    let env = environment(spec, settings, &user);
    let dir = workdir(spec, settings, &user)?;
    let name = spec.argv.first().ok_or_else(|| not(126, "no program was named"))?;
    let program = find_program(name, &env, &dir)?;
    let procs = group.map(Group::procs).transpose().map_err(|e| not(126, format!("no control group: {e}")))?;

    let mut command = Command::new(&program);
    std::os::unix::process::CommandExt::arg0(&mut command, name);
    command.args(&spec.argv[1..]).env_clear().envs(env.iter().map(|(k, v)| (OsString::from(k), OsString::from(v))));
    command.current_dir(&dir);
    let setup = ChildSetup {
        uid: user.uid,
        gid: user.gid,
        groups: user.groups.clone(),
        cgroup: procs.as_ref().map(|fd| fd.as_raw_fd()),
        terminal: spec.pty.is_some(),
    };
    let mut started = Started { pid: 0, terminal: None, stdin: None, stdout: None, stderr: None };
    if let Some(size) = &spec.pty {
        let pty = openpty(None, None).map_err(|errno| not(126, format!("no terminal: {errno}")))?;
        for end in [&pty.master, &pty.slave] {
            let _ = nix::fcntl::fcntl(end, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC));
        }
        resize(&pty.master, size.cols, size.rows);
        let owner = (Some(user.uid), None);
        let _ = std::os::unix::fs::fchown(&pty.slave, owner.0, owner.1);
        let copy = || pty.slave.try_clone().map_err(|e| not(126, format!("no terminal: {e}")));
        command.stdin(copy()?).stdout(copy()?).stderr(copy()?);
        started.terminal = Some(pty.master);
    } else {
        if spec.stdin {
            let (read, write) = pipe()?;
            command.stdin(read);
            started.stdin = Some(write);
        } else {
            command.stdin(Stdio::null());
        }
        let (out, err) = (pipe()?, pipe()?);
        command.stdout(out.1).stderr(err.1);
        (started.stdout, started.stderr) = (Some(out.0), Some(err.0));
    }
    sys::prepare(&mut command, setup);
    let child = command.spawn().map_err(|error| why(&program, &error))?;
    // Never waited for here: the reaper does that.
    started.pid = i32::try_from(child.id()).unwrap_or(i32::MAX);
    Ok(started)
}

pub fn resize(terminal: &OwnedFd, cols: u32, rows: u32) {
    let bounded = |n: u32| u16::try_from(n.clamp(1, SIZE_MAX)).unwrap_or(80);
    let _ = sys::set_window_size(terminal.as_fd(), bounded(cols), bounded(rows));
}
