//! Start and end of the control plane.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::app::App;
use crate::node::{Node, NodeEndpoint};
use crate::points::Points;
use crate::secrets::{AdminKey, bootstrap_admin_key, load_seed};
use crate::store::Store;
use crate::{ControlError, http, work};

/// How long open requests may take to end once the server stops.
const DRAIN: Duration = Duration::from_secs(3);
const STORE_FILE: &str = "control.db";

#[derive(Clone, Debug)]
pub struct ControlConfig {
    /// Port 0: any. Not used when there is a `listener`.
    pub listen: SocketAddr,
    /// Opened by whoever started us.
    pub listener: Option<Arc<std::net::TcpListener>>,
    /// Holds `control.db`, `admin.key` and `token.seed`.
    pub data_dir: PathBuf,
    pub node: NodeEndpoint,
    pub project: String,
    /// For tests of crashes; `Points::default()` otherwise.
    pub points: Points,
}

impl ControlConfig {
    pub fn new(listen: SocketAddr, data_dir: PathBuf, node: NodeEndpoint) -> Self {
        Self { listen, listener: None, data_dir, node, project: "default".to_owned(), points: Points::default() }
    }
}

/// The server accepts requests.
#[derive(Clone, Debug)]
pub struct Ready {
    pub addr: SocketAddr,
    pub admin_key: AdminKey,
}

/// Whatever the server still works on ends with it, also when its future is dropped.
struct Ends(Arc<App>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.stopping.cancel();
        self.0.abort_all();
    }
}

/// Serves until `shutdown` is ready. The node need not be there yet. `ready` is sent when requests are accepted.
///
/// Dropping the future is a crash: nothing is finished, and the next start goes on from the store.
pub async fn serve(
    config: ControlConfig,
    ready: oneshot::Sender<Ready>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ControlError> {
    let failed = |source| ControlError::File { act: "make the folder", path: config.data_dir.clone(), source };
    std::fs::create_dir_all(&config.data_dir).map_err(failed)?;
    let store = Store::open(&config.data_dir.join(STORE_FILE)).await?;
    let seed = load_seed(&config.data_dir)?;
    let admin_key = bootstrap_admin_key(&store, &config.data_dir).await?;
    let node = Node::new(config.node.channel()?);
    let app = Arc::new(App::new(store, node, seed, config.project, config.points));
    let _ends = Ends(app.clone());

    let listening = |source| ControlError::Listen { addr: config.listen, source };
    let listener = match &config.listener {
        Some(open) => open.try_clone().and_then(from_std).map_err(listening)?,
        None => TcpListener::bind(config.listen).await.map_err(listening)?,
    };
    let addr = listener.local_addr().map_err(listening)?;
    work::start(&app);
    tracing::info!(%addr, "the API is served");
    // Nobody may be waiting for it.
    let _ = ready.send(Ready { addr, admin_key });

    let stopping = app.stopping.clone();
    let server = space_api::serve::serve(listener, http::router(app.clone()), stopping.cancelled_owned());
    tokio::pin!(server, shutdown);
    tokio::select! {
        () = &mut server => return Ok(()),
        () = &mut shutdown => {}
    }
    tracing::info!("stopping");
    app.stopping.cancel();
    // Uploads and the like may be cut: their clients see a broken connection and what was half written is thrown away.
    let _ = tokio::time::timeout(DRAIN, server).await;
    Ok(())
}

fn from_std(listener: std::net::TcpListener) -> std::io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}
