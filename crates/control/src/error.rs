//! Why the control plane could not start or had to stop. Errors of single requests are `space_api::Problem`.

use std::path::PathBuf;

use crate::store::StoreError;

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("cannot listen on {addr}: {source}; another server may be running, or choose another address")]
    Listen { addr: std::net::SocketAddr, source: std::io::Error },
    #[error("cannot {act} {path}: {source}; check that the folder exists, is yours and has room", path = path.display())]
    File { act: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{path} is not a secret that this server wrote ({why}); remove it to have a new one made", path = path.display())]
    BadSecret { path: PathBuf, why: &'static str },
    #[error("the system gave no random bytes: {0}")]
    Random(String),
    #[error("the node's address is not usable: {0}")]
    Node(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the HTTP server ended: {0}")]
    Http(std::io::Error),
}
