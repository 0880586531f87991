//! How a client command finds its server: flags, then `SPACE_URL` and `SPACE_API_KEY`, then what `space up` left in the data folder.

use std::path::Path;

use serde::{Deserialize, Serialize};
use space_api::client::Client;

use crate::args::Global;
use crate::config::Layers;
use crate::env;
use crate::failure::Failure;

/// `<data>/client.toml`, 0600.
#[derive(Serialize, Deserialize)]
pub struct ClientFile {
    pub url: String,
    pub key: String,
}

impl ClientFile {
    /// `None` when there is none, or when it is not readable for us: then there is no server for us here.
    pub fn read(path: &Path) -> Option<Self> {
        toml::from_str(&std::fs::read_to_string(path).ok()?).ok()
    }

    /// Under a passing name first: a reader never sees half of it.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        use std::io::Write as _;
        use std::os::unix::fs::OpenOptionsExt as _;
        let new = path.with_extension("toml.new");
        let _ = std::fs::remove_file(&new);
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        let text = toml::to_string(self).expect("two strings");
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    }
}

pub const DEFAULT_URL: &str = "http://127.0.0.1:7070";

/// The client for a command.
pub fn client(global: &Global) -> Result<Client, Failure> {
    let url = global.url.clone().or_else(|| env::get(env::URL));
    let key = global.key.clone().or_else(|| env::get(env::API_KEY));
    let (url, key) = match (url, key) {
        (Some(url), Some(key)) => (url, Some(key)),
        (url, key) => {
            let mut layers = Layers::load(global.config.as_deref())?;
            layers.flag("data_dir", "--data-dir", global.data_dir.clone());
            let path = layers.data_dir()?.join("client.toml");
            let file = ClientFile::read(&path);
            if file.is_none() && url.is_none() && path.exists() {
                return Err(Failure::new(format!(
                    "{} cannot be read: use sudo, or set SPACE_URL and SPACE_API_KEY",
                    path.display()
                )));
            }
            // A key that belongs to the local server is not sent to another one.
            match (url, file) {
                (Some(url), Some(file)) if url.trim_end_matches('/') == file.url => (url, key.or(Some(file.key))),
                (Some(url), _) => (url, key),
                (None, Some(file)) => (file.url, key.or(Some(file.key))),
                (None, None) => (DEFAULT_URL.to_owned(), key),
            }
        }
    };
    Ok(Client::new(&url, key.as_deref())?)
}
