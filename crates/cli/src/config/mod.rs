//! The configuration of a server: a file, then environment variables, then flags, each above the one before. Parsed once, in
//! `main`; nothing below reads a file or a variable again. Each value remembers where it came from.

mod file;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

pub use space_core::size::parse_size;
use space_node::WarmSize;

use crate::env;
use crate::failure::Failure;

/// One setting: its name in the file (with a dot for its table) and its variable.
pub struct Key {
    pub name: &'static str,
    pub variable: &'static str,
    pub default: &'static str,
    pub meaning: &'static str,
}

const fn key(name: &'static str, variable: &'static str, default: &'static str, meaning: &'static str) -> Key {
    Key { name, variable, default, meaning }
}

pub const KEYS: &[Key] = &[
    key("data_dir", env::DATA_DIR, "/var/lib/space", "where everything is kept"),
    key("listen", env::LISTEN, "127.0.0.1:7070", "address of the API; port 0: any"),
    key("data_listen", env::DATA_LISTEN, "127.0.0.1:7071", "address of the data plane (attach); port 0: any"),
    key("log", env::LOG, "info", "log filter"),
    key("log_format", env::LOG_FORMAT, "text", "text or json"),
    key(
        "pool.size",
        env::POOL_SIZE,
        "auto",
        "size of the pool file when it is made; auto: most of the free space, at most 64 GiB",
    ),
    key("pool.device", env::POOL_DEVICE, "", "a blank block device, instead of a file"),
    key("pool.path", env::POOL_PATH, "", "a folder on an existing btrfs, instead of a file"),
    key("vmm.driver", env::VMM_DRIVER, "auto", "auto, firecracker, qemu, qemu-tcg, qemu-kvm"),
    key("vmm.program", env::VMM_PROGRAM, "", "absolute path of the VMM; empty: the distribution's"),
    key(
        "vmm.kernel",
        env::VMM_KERNEL,
        "",
        "guest kernel: a folder that set-up made, or a vmlinux; empty: DATA_DIR/kernel",
    ),
    key("vmm.kernel_args", env::VMM_KERNEL_ARGS, "", "added to the guest kernel's command line"),
    key(
        "vmm.core_scheduling",
        env::VMM_CORE_SCHEDULING,
        "off",
        "on: no two VMs on the hyper-threads of one core at a time (costs throughput); off",
    ),
    key(
        "warm.per_template",
        env::WARM_PER_TEMPLATE,
        "auto",
        "VMs kept parked for each template in use, within a quarter of limits.memory; auto: learned from demand",
    ),
    key("limits.memory", env::LIMITS_MEMORY, "auto", "memory of all sandboxes together; auto: most of the host's"),
    key("limits.sandboxes", env::LIMITS_SANDBOXES, "1000", "sandboxes at the same time"),
];

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    File(PathBuf),
    Variable(&'static str),
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::Flag(flag) => f.write_str(flag),
        }
    }
}

/// Where the pool's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolConfig {
    /// A sparse file in the data folder; `None`: as large as makes sense.
    File {
        bytes: Option<u64>,
    },
    Device(PathBuf),
    Path(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum LogFormat {
    Text,
    Json,
}

/// The VMM that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverChoice {
    Auto,
    Firecracker,
    QemuTcg,
    QemuKvm,
}

#[derive(Clone, Debug)]
pub struct ServerConfig {
    pub data_dir: PathBuf,
    pub listen: SocketAddr,
    pub data_listen: SocketAddr,
    pub log: String,
    pub log_format: LogFormat,
    pub pool: PoolConfig,
    pub driver: DriverChoice,
    pub vmm_program: Option<PathBuf>,
    pub kernel_dir: PathBuf,
    pub kernel_args: String,
    pub core_scheduling: bool,
    pub warm: WarmSize,
    pub memory_bytes: Option<u64>,
    pub sandboxes: u32,
    /// Every value as text, with its origin, in the order of `KEYS`.
    pub values: Vec<(&'static str, String, Origin)>,
}

/// Values before they are checked.
#[derive(Default)]
pub struct Layers(BTreeMap<&'static str, (String, Origin)>);

impl Layers {
    /// The file and the variables. `file`: the one named by a flag, which must exist.
    pub fn load(file: Option<&Path>) -> Result<Self, Failure> {
        let mut layers = Self::default();
        for key in KEYS {
            layers.0.insert(key.name, (key.default.to_owned(), Origin::Default));
        }
        if let Some(path) = file::find(file)? {
            for (name, value) in file::read(&path)? {
                layers.put(name, value, Origin::File(path.clone()));
            }
        }
        for key in KEYS {
            if let Some(value) = env::get(key.variable) {
                layers.put(key.name, value, Origin::Variable(key.variable));
            }
        }
        Ok(layers)
    }

    /// A flag, when it was given.
    pub fn flag(&mut self, name: &'static str, flag: &str, value: Option<String>) {
        if let Some(value) = value {
            self.put(name, value, Origin::Flag(flag.to_owned()));
        }
    }

    fn put(&mut self, name: &'static str, value: String, origin: Origin) {
        self.0.insert(name, (value, origin));
    }

    fn text(&self, name: &'static str) -> &str {
        self.0.get(name).map_or("", |(value, _)| value.as_str())
    }

    fn bad(&self, name: &'static str, why: impl fmt::Display) -> Failure {
        let (value, origin) = &self.0[name];
        Failure::usage(format!("{name} = {value:?} (from {origin}): {why}"))
    }

    fn parse<T: std::str::FromStr>(&self, name: &'static str, what: &str) -> Result<T, Failure> {
        self.text(name).parse().map_err(|_| self.bad(name, format!("expected {what}")))
    }

    fn path(&self, name: &'static str) -> Result<Option<PathBuf>, Failure> {
        let text = self.text(name);
        if text.is_empty() {
            return Ok(None);
        }
        std::path::absolute(text).map(Some).map_err(|e| self.bad(name, e))
    }

    fn size(&self, name: &'static str) -> Result<Option<u64>, Failure> {
        match self.text(name) {
            "" | "auto" => Ok(None),
            text => parse_size(text).map(Some).map_err(|why| self.bad(name, why)),
        }
    }

    fn pool(&self) -> Result<PoolConfig, Failure> {
        match (self.path("pool.device")?, self.path("pool.path")?) {
            (Some(_), Some(_)) => Err(self.bad("pool.device", "pool.path is set as well; choose one")),
            (Some(device), None) => Ok(PoolConfig::Device(device)),
            (None, Some(path)) => Ok(PoolConfig::Path(path)),
            (None, None) => Ok(PoolConfig::File { bytes: self.size("pool.size")? }),
        }
    }

    /// Just the data folder, for client commands: a mistake elsewhere in a server's file must not stop them.
    pub fn data_dir(&self) -> Result<PathBuf, Failure> {
        self.path("data_dir")?.ok_or_else(|| self.bad("data_dir", "it must not be empty"))
    }

    pub fn finish(self) -> Result<ServerConfig, Failure> {
        let data_dir = self.data_dir()?;
        let kernel_dir = self.path("vmm.kernel")?.unwrap_or_else(|| data_dir.join("kernel"));
        let log_format = match self.text("log_format") {
            "text" => LogFormat::Text,
            "json" => LogFormat::Json,
            _ => return Err(self.bad("log_format", "expected text or json")),
        };
        let driver = match self.text("vmm.driver") {
            "auto" | "qemu" => DriverChoice::Auto,
            "firecracker" => DriverChoice::Firecracker,
            "qemu-tcg" => DriverChoice::QemuTcg,
            "qemu-kvm" => DriverChoice::QemuKvm,
            _ => return Err(self.bad("vmm.driver", "expected auto, firecracker, qemu, qemu-tcg or qemu-kvm")),
        };
        Ok(ServerConfig {
            listen: self.parse("listen", "ADDRESS:PORT, as 127.0.0.1:7070")?,
            data_listen: self.parse("data_listen", "ADDRESS:PORT, as 127.0.0.1:7071")?,
            log: self.text("log").to_owned(),
            log_format,
            pool: self.pool()?,
            driver,
            vmm_program: self.path("vmm.program")?,
            kernel_dir,
            kernel_args: self.text("vmm.kernel_args").to_owned(),
            memory_bytes: self.size("limits.memory")?,
            core_scheduling: match self.text("vmm.core_scheduling") {
                "on" => true,
                "off" => false,
                _ => return Err(self.bad("vmm.core_scheduling", "expected on or off")),
            },
            warm: match self.text("warm.per_template") {
                "auto" => WarmSize::Learned,
                _ => WarmSize::Fixed(self.parse("warm.per_template", "auto or a number up to 65535")?),
            },
            sandboxes: self.parse("limits.sandboxes", "a number")?,
            data_dir,
            values: KEYS
                .iter()
                .map(|key| {
                    let (value, origin) = self.0[key.name].clone();
                    (key.name, value, origin)
                })
                .collect(),
        })
    }
}

impl ServerConfig {
    /// The folder the pool is mounted at, or is.
    pub fn pool_root(&self) -> PathBuf {
        match &self.pool {
            PoolConfig::Path(path) => path.clone(),
            _ => self.data_dir.join("pool"),
        }
    }

    pub fn initramfs(&self) -> PathBuf {
        self.data_dir.join("initramfs.img")
    }

    /// Sockets and the lock of the running server.
    pub fn run_dir(&self) -> PathBuf {
        self.data_dir.join("run")
    }

    /// What only the control plane touches.
    pub fn control_dir(&self) -> PathBuf {
        self.data_dir.join("control")
    }

    pub fn client_file(&self) -> PathBuf {
        self.data_dir.join("client.toml")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn defaults() -> Layers {
        let mut layers = Layers::default();
        for key in KEYS {
            layers.0.insert(key.name, (key.default.to_owned(), Origin::Default));
        }
        layers
    }

    /// Of a server with this data folder.
    pub(crate) fn config_in(folder: &Path) -> ServerConfig {
        let mut layers = defaults();
        layers.put("data_dir", folder.display().to_string(), Origin::Default);
        layers.finish().expect("a configuration")
    }

    #[test]
    fn the_defaults_are_valid() {
        let config = defaults().finish().expect("defaults");
        assert_eq!(config.pool, PoolConfig::File { bytes: None });
        assert_eq!(config.kernel_dir, Path::new("/var/lib/space/kernel"));
    }

    #[test]
    fn a_bad_value_names_its_place() {
        let mut layers = defaults();
        layers.put("listen", "nowhere".into(), Origin::Variable(env::LISTEN));
        let text = layers.finish().expect_err("no address").to_string();
        assert!(text.contains("listen") && text.contains("SPACE_LISTEN") && text.contains("127.0.0.1:7070"), "{text}");
    }

    #[test]
    fn one_pool_only() {
        let mut layers = defaults();
        layers.put("pool.device", "/dev/x".into(), Origin::Default);
        layers.put("pool.path", "/y".into(), Origin::Default);
        assert!(layers.finish().is_err());
    }

    #[test]
    fn every_key_has_its_variable_in_the_registry() {
        for key in KEYS {
            assert!(env::ALL.iter().any(|variable| variable.name == key.variable), "{}", key.name);
        }
    }
}
