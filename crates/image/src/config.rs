//! What an image says about how to run in it. Plain data; nothing here is checked against a file
//! system, and nothing in it is trusted beyond its size.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{ImageError, Result};

/// All strings of a configuration together.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Settings of an image, in the words of the OCI image format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// Program and first arguments of the image's own service.
    pub entrypoint: Vec<String>,
    /// Further arguments, or the program when there is no entrypoint.
    pub cmd: Vec<String>,
    /// Environment; always has `PATH`.
    pub env: BTreeMap<String, String>,
    /// Absolute path.
    pub workdir: String,
    /// `name`, `uid`, `name:group` or `uid:gid`; never empty. See [`crate::resolve_user`].
    pub user: String,
    /// `80/tcp`, as the image writes them.
    pub exposed_ports: Vec<String>,
    pub labels: BTreeMap<String, String>,
    /// Signal that asks the service to end, as the image writes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
}

impl Default for ImageConfig {
    fn default() -> Self {
        Self {
            entrypoint: Vec::new(),
            cmd: Vec::new(),
            env: BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]),
            workdir: "/".to_owned(),
            user: "root".to_owned(),
            exposed_ports: Vec::new(),
            labels: BTreeMap::new(),
            stop_signal: None,
        }
    }
}

impl ImageConfig {
    /// For the images made here: the user `user` in its own home.
    pub fn for_user() -> Self {
        let mut config = Self { user: "user".to_owned(), workdir: "/home/user".to_owned(), ..Self::default() };
        config.env.insert("LANG".to_owned(), "C.UTF-8".to_owned());
        config
    }

    /// Entrypoint and command as one command line; empty when the image has neither.
    pub fn command_line(&self) -> Vec<String> {
        self.entrypoint.iter().chain(&self.cmd).cloned().collect()
    }

    pub(crate) fn from_oci(raw: OciRunConfig) -> Result<Self> {
        let mut config = Self {
            entrypoint: raw.entrypoint.unwrap_or_default(),
            cmd: raw.cmd.unwrap_or_default(),
            labels: raw.labels.unwrap_or_default(),
            exposed_ports: raw.exposed_ports.unwrap_or_default().into_keys().collect(),
            stop_signal: raw.stop_signal.filter(|s| !s.is_empty()),
            ..Self::default()
        };
        for line in raw.env.unwrap_or_default() {
            // A name alone asks for the value of the machine that runs it: there is none.
            if let Some((key, value)) = line.split_once('=')
                && !key.is_empty()
            {
                config.env.insert(key.to_owned(), value.to_owned());
            }
        }
        if let Some(dir) = raw.working_dir.filter(|d| !d.is_empty()) {
            config.workdir = if dir.starts_with('/') { dir } else { format!("/{dir}") };
        }
        if let Some(user) = raw.user.filter(|u| !u.is_empty()) {
            config.user = user;
        }
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let pairs = self.env.iter().chain(&self.labels);
        let strings = self
            .entrypoint
            .iter()
            .chain(&self.cmd)
            .chain(&self.exposed_ports)
            .chain([&self.workdir, &self.user])
            .chain(&self.stop_signal)
            .chain(pairs.flat_map(|(k, v)| [k, v]));
        let mut bytes = 0;
        for s in strings {
            bytes += s.len();
            if s.contains('\0') {
                return Err(ImageError::image("its configuration contains a NUL byte"));
            }
        }
        if bytes > MAX_CONFIG_BYTES {
            return Err(ImageError::LimitExceeded {
                what: "the size of the image's configuration",
                limit: MAX_CONFIG_BYTES as u64,
            });
        }
        Ok(())
    }
}

/// The `config` object of an OCI image configuration. Each field may be absent or `null`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct OciRunConfig {
    user: Option<String>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    labels: Option<BTreeMap<String, String>>,
    stop_signal: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oci_fields_are_taken_over() {
        let raw = r#"{"User":"app:staff","Env":["A=b=c","PATH=/x","LONE"],"Entrypoint":["/e"],
            "Cmd":null,"WorkingDir":"srv","ExposedPorts":{"80/tcp":{}},"Labels":{"a":"b"}}"#;
        let config = ImageConfig::from_oci(serde_json::from_str(raw).unwrap()).unwrap();
        assert_eq!(config.user, "app:staff");
        assert_eq!(config.env["A"], "b=c");
        assert_eq!(config.env["PATH"], "/x");
        assert!(!config.env.contains_key("LONE"));
        assert_eq!(config.workdir, "/srv");
        assert_eq!(config.exposed_ports, ["80/tcp"]);
        assert_eq!(config.command_line(), ["/e"]);
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ImageConfig>(&json).unwrap(), config);
    }

    #[test]
    fn empty_and_hostile_fields() {
        let config = ImageConfig::from_oci(serde_json::from_str("{}").unwrap()).unwrap();
        assert_eq!(config, ImageConfig::default());
        let raw = serde_json::json!({"Env": ["A=\0"]});
        assert!(ImageConfig::from_oci(serde_json::from_value(raw).unwrap()).is_err());
        for signal in ["SIG\0TERM".to_owned(), "S".repeat(MAX_CONFIG_BYTES)] {
            let raw = serde_json::json!({"StopSignal": signal});
            assert!(ImageConfig::from_oci(serde_json::from_value(raw).unwrap()).is_err());
        }
        let raw = serde_json::json!({"Cmd": ["x".repeat(MAX_CONFIG_BYTES)]});
        assert!(ImageConfig::from_oci(serde_json::from_value(raw).unwrap()).is_err());
    }
}
