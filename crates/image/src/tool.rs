//! Runs programs of the host: absolute path, cleared environment, no stdin, bounded output and
//! time, a process group of its own that is killed as a whole. Must never search `PATH`.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{ImageError, IoContext, Result};
use crate::progress::Progress;

/// How much of the end of a program's messages is kept.
const TAIL_BYTES: usize = 4096;
const POLL: Duration = Duration::from_millis(20);
/// After this parent dies, the kernel kills the program too: no disk is written by an orphan.
const SETPRIV: &str = "/usr/bin/setpriv";
const UNSHARE: &str = "/usr/bin/unshare";

/// One program and how to run it.
#[derive(Debug)]
pub struct Tool {
    /// Absolute path.
    path: &'static str,
    /// Debian package that has it, for the error.
    package: &'static str,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    timeout: Duration,
    isolated: bool,
}

impl Tool {
    /// `path` must be absolute.
    pub fn new(path: &'static str, package: &'static str) -> Self {
        Self {
            path,
            package,
            args: Vec::new(),
            env: vec![("PATH".into(), "/usr/sbin:/usr/bin:/sbin:/bin".into()), ("LC_ALL".into(), "C.UTF-8".into())],
            timeout: Duration::from_secs(30 * 60),
            isolated: false,
        }
    }

    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    #[must_use]
    pub fn args<I, S>(mut self, args: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        self.args.extend(args.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.env.push((key.into(), value.as_ref().to_owned()));
        self
    }

    /// Time after which the whole process group is killed.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Gives the program its own mounts and its own process numbers. What it mounts is never seen
    /// outside, and all its processes and mounts end with it, however it ends. For programs that
    /// mount: a mount left in a work directory would lead its removal into the host's files.
    #[must_use]
    pub fn isolated(mut self) -> Self {
        self.isolated = true;
        self
    }

    fn name(&self) -> String {
        Path::new(self.path).file_name().map_or_else(|| self.path.to_owned(), |n| n.to_string_lossy().into_owned())
    }

    fn spawn(&self, stdin: Stdio, stdout: Stdio) -> Result<Child> {
        require(self.path, self.package)?;
        // The isolation must not be left out silently; the other is a second safety.
        let mut line: Vec<&str> = Vec::new();
        if self.isolated {
            require(SETPRIV, "util-linux")?;
            require(UNSHARE, "util-linux")?;
        }
        if Path::new(SETPRIV).is_file() {
            line.extend([SETPRIV, "--pdeathsig", "KILL", "--"]);
        }
        if self.isolated {
            line.extend([UNSHARE, "--mount", "--propagation", "private", "--pid", "--fork"]);
            line.extend(["--kill-child=KILL", "--mount-proc", "--"]);
        }
        line.push(self.path);
        let mut command = Command::new(line[0]);
        command.args(&line[1..]);
        command
            .args(&self.args)
            .env_clear()
            .envs(self.env.iter().map(|(k, v)| (k, v)))
            .current_dir("/")
            .stdin(stdin)
            .stdout(stdout)
            .stderr(Stdio::piped())
            .process_group(0);
        command.spawn().ctx(|| format!("start {}", self.path))
    }

    /// Runs to the end. Standard output and error are kept together, the last 4 KiB of them; each
    /// full line is offered to `on_line` (for progress), at most one per poll.
    pub fn run(&self, progress: &dyn Progress, on_line: &dyn Fn(&str)) -> Result<String> {
        let mut child = self.spawn(Stdio::null(), Stdio::piped())?;
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        let mut group = Group::new(child);
        let tail = Arc::new(Mutex::new(Tail::default()));
        let readers: Vec<_> =
            [stdout.map(|s| tail_thread(s, Arc::clone(&tail))), stderr.map(|s| tail_thread(s, Arc::clone(&tail)))]
                .into_iter()
                .flatten()
                .collect();

        let deadline = Instant::now() + self.timeout;
        let status = loop {
            if let Some(status) = group.try_wait(&self.name())? {
                break status;
            }
            if progress.cancelled() {
                return Err(ImageError::Cancelled);
            }
            if Instant::now() >= deadline {
                return Err(ImageError::ToolTimeout { tool: self.name(), seconds: self.timeout.as_secs() });
            }
            if let Some(line) = lock(&tail).new_line.take() {
                on_line(&line);
            }
            std::thread::sleep(POLL);
        };
        // Helpers that the program left behind would hold the pipes open for ever.
        drop(group);
        for reader in readers {
            let _ = reader.join();
        }
        let said = lock(&tail).text();
        if status.success() {
            return Ok(said);
        }
        Err(ImageError::ToolFailed { tool: self.name(), status: status.to_string(), stderr: said })
    }

    /// Starts a filter that reads `input`; its standard output is the returned reader. The error
    /// of a failed filter comes out of the last `read`.
    pub fn filter(&self, input: std::fs::File) -> Result<Filter> {
        let mut child = self.spawn(Stdio::from(input), Stdio::piped())?;
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        let group = Group::new(child);
        let tail = Arc::new(Mutex::new(Tail::default()));
        let reader = stderr.map(|s| tail_thread(s, Arc::clone(&tail)));
        Ok(Filter { stdout, reader, tail, group, name: self.name() })
    }
}

fn require(path: &str, package: &str) -> Result<()> {
    if Path::new(path).is_file() {
        return Ok(());
    }
    Err(ImageError::ToolMissing { tool: path.to_owned(), package: package.to_owned() })
}

/// Output of a running filter; dropping it kills the filter.
pub struct Filter {
    stdout: Option<std::process::ChildStdout>,
    reader: Option<JoinHandle<()>>,
    tail: Arc<Mutex<Tail>>,
    group: Group,
    name: String,
}

impl Read for Filter {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let Some(stdout) = self.stdout.as_mut() else {
            return Ok(0);
        };
        let n = stdout.read(buf)?;
        if n > 0 || buf.is_empty() {
            return Ok(n);
        }
        self.stdout = None;
        let status = self.group.wait()?;
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        if status.success() {
            return Ok(0);
        }
        Err(std::io::Error::other(format!("{} failed ({status}): {}", self.name, lock(&self.tail).text())))
    }
}

/// A child and its process group: killed and reaped when dropped.
struct Group {
    child: Child,
}

impl Group {
    fn new(child: Child) -> Self {
        Self { child }
    }

    fn try_wait(&mut self, name: &str) -> Result<Option<ExitStatus>> {
        self.child.try_wait().ctx(|| format!("wait for {name}"))
    }

    fn wait(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The group outlives its leader as long as it has a member, and its number is not given
        // out again before that, so this cannot hit a stranger while members exist.
        let id = i32::try_from(self.child.id()).ok();
        if let Some(pid) = id.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

#[derive(Default)]
struct Tail {
    bytes: Vec<u8>,
    line: Vec<u8>,
    new_line: Option<String>,
}

impl Tail {
    fn push(&mut self, data: &[u8]) {
        self.bytes.extend_from_slice(data);
        if self.bytes.len() > 2 * TAIL_BYTES {
            let cut = self.bytes.len() - TAIL_BYTES;
            self.bytes.drain(..cut);
        }
        for part in data.split_inclusive(|b| *b == b'\n' || *b == b'\r') {
            let room = TAIL_BYTES.saturating_sub(self.line.len());
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") || part.ends_with(b"\r") {
                let line = String::from_utf8_lossy(&self.line).trim().to_owned();
                self.line.clear();
                if !line.is_empty() {
                    self.new_line = Some(line);
                }
            }
        }
    }

    fn text(&self) -> String {
        let from = self.bytes.len().saturating_sub(TAIL_BYTES);
        String::from_utf8_lossy(&self.bytes[from..]).trim().to_owned()
    }
}

fn lock(tail: &Mutex<Tail>) -> std::sync::MutexGuard<'_, Tail> {
    // A reader thread that panicked leaves plain bytes behind: still good for a message.
    tail.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn tail_thread(mut from: impl Read + Send + 'static, to: Arc<Mutex<Tail>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buf = [0u8; 4096];
        while let Ok(n) = from.read(&mut buf) {
            if n == 0 {
                break;
            }
            lock(&to).push(&buf[..n]);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::NoProgress;

    struct Cancel;
    impl Progress for Cancel {
        fn step(&self, _: &str) {}
        fn bytes(&self, _: u64, _: Option<u64>) {}
        fn cancelled(&self) -> bool {
            true
        }
    }

    fn sh(script: &str) -> Tool {
        Tool::new("/bin/sh", "dash").arg("-c").arg(script)
    }

    #[test]
    fn output_is_bounded_and_the_end_is_kept() {
        let e = sh("head -c 300000 /dev/zero | tr '\\0' x >&2; echo the-end >&2; exit 3")
            .run(&NoProgress, &|_| ())
            .unwrap_err();
        let ImageError::ToolFailed { stderr, status, .. } = e else { panic!("{e:?}") };
        assert!(stderr.ends_with("the-end") && stderr.len() <= TAIL_BYTES);
        assert!(status.contains('3'), "{status}");
    }

    #[test]
    fn environment_is_cleared() {
        let said = sh("env").env("A", "b").run(&NoProgress, &|_| ()).unwrap();
        assert!(said.contains("A=b") && !said.contains("CARGO"), "{said}");
    }

    #[test]
    fn timeout_and_cancel_kill_the_whole_group() {
        let mark = format!("31{}", std::process::id());
        let start = Instant::now();
        let e = sh(&format!("sleep {mark} & sleep {mark}"))
            .timeout(Duration::from_millis(100))
            .run(&NoProgress, &|_| ())
            .unwrap_err();
        assert!(matches!(e, ImageError::ToolTimeout { .. }));
        let e = sh(&format!("sleep {mark} & sleep {mark}")).run(&Cancel, &|_| ()).unwrap_err();
        assert!(matches!(e, ImageError::Cancelled));
        assert!(start.elapsed() < Duration::from_secs(10));
        gone(&mark);
    }

    /// Also what double-forks into a session of its own, where no signal to the group reaches.
    #[test]
    fn isolated_programs_leave_no_process_and_no_mount() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().display().to_string();
        let mark = format!("32{}", std::process::id());
        let script = format!(
            "mount -t tmpfs none {place} && touch {place}/in && \
             (setsid sleep {mark} >/dev/null 2>&1 &) ; sleep 0.3; "
        );
        let run = |end: &str, time| {
            let tool = sh(&format!("{script}{end}")).isolated();
            tool.timeout(Duration::from_millis(time)).run(&NoProgress, &|_| ())
        };
        run("exit 0", 20_000).unwrap();
        assert!(matches!(run("exit 9", 20_000), Err(ImageError::ToolFailed { .. })));
        let e = run("sleep 100", 1500).unwrap_err();
        assert!(matches!(e, ImageError::ToolTimeout { .. }), "{e:?}");
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        assert!(!mounts.contains(&place), "{mounts}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        gone(&mark);
    }

    /// A process that was killed is there until the kernel has torn it down.
    fn gone(mark: &str) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while running(mark) {
            assert!(Instant::now() < deadline, "a process was left behind");
            std::thread::sleep(POLL);
        }
    }

    fn running(mark: &str) -> bool {
        std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            let cmd = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
            cmd.contains(mark)
        })
    }

    #[test]
    fn missing_program_names_its_package() {
        let e = Tool::new("/usr/sbin/no-such-tool", "the-package").run(&NoProgress, &|_| ()).unwrap_err();
        assert!(e.to_string().contains("the-package"));
    }
}
