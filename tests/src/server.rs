//! Servers under test: the shared one, and own ones that may be killed.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::Api;

pub struct Server {
    pub data_dir: PathBuf,
    child: Option<Child>,
    /// Removed with the server: the data folder of an own one.
    own: Option<tempfile::TempDir>,
}

fn base() -> Option<PathBuf> {
    std::env::var_os("SPACE_TEST_DATA_DIR").map(PathBuf::from)
}

pub(crate) fn binary() -> PathBuf {
    std::env::var_os("SPACE_TEST_BIN")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/release/space"), PathBuf::from)
}

impl Server {
    pub fn shared() -> Option<Self> {
        Some(Self { data_dir: base()?, child: None, own: None })
    }

    /// A server with its own store and its own pool: a folder on the shared pool's btrfs, with every template of the
    /// shared pool in it, so that it starts in a moment. `config` is more TOML for its `space.toml`.
    pub async fn own(config: &str) -> Result<Self> {
        let base = base().context("SPACE_TEST_DATA_DIR is not set")?;
        let own = tempfile::Builder::new().prefix("own-").tempdir_in(base.join("pool"))?;
        let data = own.path().to_path_buf();
        for dir in ["pool", "pool/templates", "pool/sandboxes", "pool/checkpoints", "pool/tmp", "run", "drill"] {
            std::fs::create_dir_all(data.join(dir))?;
        }
        // Whichever process reaches a point removes the file.
        std::fs::set_permissions(data.join("drill"), std::fs::Permissions::from_mode(0o777))?;
        for entry in std::fs::read_dir(base.join("pool/templates"))? {
            let entry = entry?;
            run(Command::new("/usr/bin/btrfs")
                .args(["subvolume", "snapshot", "-r"])
                .arg(entry.path())
                .arg(data.join("pool/templates").join(entry.file_name())))?;
        }
        for name in ["kernel", "initramfs.img"] {
            std::os::unix::fs::symlink(base.join(name), data.join(name))?;
        }
        let pool = format!("\n[pool]\npath = {:?}\n", data.join("pool"));
        std::fs::write(data.join("space.toml"), format!("{config}{pool}"))?;
        let mut server = Self { data_dir: data, child: None, own: Some(own) };
        server.start().await?;
        server.tag_templates_of(&base).await?;
        Ok(server)
    }

    /// A server whose pool is a file of so many MiB, to be filled.
    pub async fn own_small(mib: u64) -> Result<Self> {
        let base = base().context("SPACE_TEST_DATA_DIR is not set")?;
        let own = tempfile::Builder::new().prefix("small-").tempdir_in(&base)?;
        let data = own.path().to_path_buf();
        std::fs::create_dir_all(data.join("run"))?;
        for name in ["kernel", "initramfs.img"] {
            std::os::unix::fs::symlink(base.join(name), data.join(name))?;
        }
        std::fs::write(data.join("space.toml"), format!("[pool]\nsize = \"{mib}MiB\"\n"))?;
        let mut server = Self { data_dir: data, child: None, own: Some(own) };
        server.start().await?;
        Ok(server)
    }

    /// The store of an own server is empty: give the templates the tags they have on the shared one.
    async fn tag_templates_of(&self, base: &Path) -> Result<()> {
        let shared = Api::new(base)?;
        let own = self.api()?;
        for template in shared.get("/v1/templates").await?["templates"].as_array().context("no list")? {
            let digest = template["digest"].as_str().context("no digest")?;
            for tag in template["tags"].as_array().context("no tags")? {
                own.put_json(&format!("/v1/templates/{digest}/tags"), serde_json::json!({"tag": tag})).await?;
            }
        }
        Ok(())
    }

    pub async fn start(&mut self) -> Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.data_dir.join("server.log"))?;
        let child = Command::new(binary())
            .args(["up", "--config"])
            .arg(self.data_dir.join("space.toml"))
            .env("SPACE_DATA_DIR", &self.data_dir)
            .env("SPACE_LISTEN", "127.0.0.1:0")
            .env("SPACE_DATA_LISTEN", "127.0.0.1:0")
            .env("SPACE_DRILL", self.drill())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting `space up`")?;
        self.child = Some(child);
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.as_mut().expect("just started").try_wait()? {
                bail!("`space up` ended with {status}:\n{}", self.log());
            }
            if let Ok(api) = self.api()
                && api.healthy().await
            {
                return Ok(());
            }
            if started.elapsed() > Duration::from_secs(60) {
                bail!("`space up` was not ready after a minute:\n{}", self.log());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn api(&self) -> Result<Api> {
        Api::new(&self.data_dir)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.data_dir.join("server.log")).unwrap_or_default()
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// The file that names the point where one process of this server dies next; gone when it has.
    pub fn drill(&self) -> PathBuf {
        self.data_dir.join("drill/point")
    }

    /// As a crash would: no handler runs.
    pub fn kill_dead(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(self.data_dir.join("client.toml"));
    }

    /// What a killed server leaves (parked VMs, their control groups) is for the next start to remove, so one more start
    /// and an orderly end must leave nothing; the count of leaks at the end of the run checks that they do.
    fn recover_and_end(&self) {
        for args in [&["up", "--detach"][..], &["down", "--sandboxes", "--unmount"]] {
            let done = Command::new(binary())
                .args(args)
                .arg("--config")
                .arg(self.data_dir.join("space.toml"))
                .env("SPACE_DATA_DIR", &self.data_dir)
                .env("SPACE_LISTEN", "127.0.0.1:0")
                .env("SPACE_DATA_LISTEN", "127.0.0.1:0")
                .stdin(Stdio::null())
                .output();
            match done {
                Ok(out) if out.status.success() => {}
                Ok(out) => eprintln!("space {args:?}: {}", String::from_utf8_lossy(&out.stderr)),
                Err(error) => eprintln!("space {args:?}: {error}"),
            }
        }
    }

    /// The VMMs of sandboxes; parked ones belong to none.
    pub fn vmms(&self) -> Vec<u32> {
        let area = self.data_dir.join("pool/sandboxes");
        let folders = std::fs::read_dir(area).into_iter().flatten().flatten();
        let mut found: Vec<u32> = folders.flat_map(|folder| vmms_in(&folder.path())).collect();
        found.sort_unstable();
        found
    }
}

/// Every VMM process whose folder this is. It sees it at another path, in a mount namespace of its own.
pub fn vmms_in(folder: &Path) -> Vec<u32> {
    use std::os::unix::fs::MetadataExt;
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    let Some(wanted) = identity(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Ok(name) = std::fs::read_to_string(entry.path().join("comm")) else { continue };
        let vmm = name.starts_with("qemu-system") || name.starts_with("firecracker");
        if vmm && identity(&entry.path().join("cwd")) == Some(wanted) {
            found.push(pid);
        }
    }
    found
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.own.is_none() {
            return;
        }
        self.kill_dead();
        self.recover_and_end();
        for area in ["sandboxes", "tmp"] {
            let folders = std::fs::read_dir(self.data_dir.join("pool").join(area)).into_iter().flatten().flatten();
            for pid in folders.flat_map(|folder| vmms_in(&folder.path())) {
                let _ = Command::new("/bin/kill").args(["-9", &pid.to_string()]).status();
            }
        }
        std::thread::sleep(Duration::from_millis(200));
        if std::thread::panicking() {
            eprintln!("---- server log ----\n{}", self.log());
        }
        for folder in ["sandboxes", "checkpoints", "templates", "tmp", "warm"] {
            for entry in std::fs::read_dir(self.data_dir.join("pool").join(folder)).into_iter().flatten().flatten() {
                let _ = Command::new("/usr/bin/btrfs")
                    .args(["subvolume", "delete"])
                    .arg(entry.path())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .status();
            }
        }
        if self.data_dir.join("pool.img").exists() {
            let _ = Command::new("/usr/bin/umount").arg(self.data_dir.join("pool")).status();
        }
    }
}

fn run(command: &mut Command) -> Result<()> {
    let out = command.output()?;
    if !out.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(())
}

/// The processes of a server: `space up` itself, and the root process, the node and the control plane that it started.
/// The first is the given one.
pub fn processes_of(server: u32) -> Vec<u32> {
    let children = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse::<u32>().ok()?;
        let parent = status_of(pid, "PPid").ok()?;
        (parent == server.to_string()).then_some(pid)
    });
    std::iter::once(server).chain(children).collect()
}

/// A field of `/proc/PID/status`.
pub fn status_of(pid: u32, field: &str) -> Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    Ok(line.with_context(|| format!("no {field}"))?.trim().to_owned())
}

/// Resident memory of all processes of the shared server together, in KiB.
pub fn server_memory_kib() -> Result<u64> {
    let server = std::env::var("SPACE_TEST_SERVER_PID")?.parse()?;
    let mut total = 0;
    for pid in processes_of(server) {
        total += status_of(pid, "VmRSS")?.trim_end_matches("kB").trim().parse::<u64>()?;
    }
    Ok(total)
}
