//! What every request and every piece of work shares.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use space_core::token::TokenSigner;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::node::Node;
use crate::points::Points;
use crate::secrets::Seed;
use crate::store::Store;
use crate::waiters::Waiters;

pub struct App {
    pub store: Store,
    pub node: Node,
    pub seed: Seed,
    pub signer: TokenSigner,
    pub project: String,
    /// Names this copy in leases.
    pub instance: String,
    pub waiters: Waiters,
    pub points: Points,
    pub stopping: CancellationToken,
    /// The reconciler looks around at once when this is notified.
    pub look: Notify,
    /// Sandboxes that a driver of this copy is at. True: look once more before leaving.
    pub drivers: Mutex<HashMap<String, Arc<AtomicBool>>>,
    pub requests: tokio::sync::Semaphore,
    /// The node's name and attach address, from its last answer.
    node_said: Mutex<Option<(String, String)>>,
    tasks: Mutex<JoinSet<()>>,
}

impl App {
    pub fn new(store: Store, node: Node, seed: Seed, project: String, points: Points) -> Self {
        let instance = space_core::OperationId::new().as_str().replace("op-", "copy-");
        Self {
            store,
            node,
            signer: seed.signer(),
            seed,
            project,
            instance,
            waiters: Waiters::default(),
            points,
            stopping: CancellationToken::new(),
            look: Notify::new(),
            drivers: Mutex::default(),
            requests: tokio::sync::Semaphore::new(REQUESTS_AT_ONCE),
            node_said: Mutex::default(),
            tasks: Mutex::default(),
        }
    }

    pub fn remember_node(&self, id: &str, data_url: &str) {
        let said = Some((id.to_owned(), data_url.to_owned()));
        *self.node_said.lock().unwrap_or_else(PoisonError::into_inner) = said;
    }

    /// Empty while the node has not said it.
    pub fn node_id(&self) -> String {
        let said = self.node_said.lock().unwrap_or_else(PoisonError::into_inner);
        said.as_ref().map(|(id, _)| id.clone()).unwrap_or_default()
    }

    pub fn data_url(&self) -> Option<String> {
        self.node_said.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(_, url)| url.clone())
    }

    /// Work of its own, so that a client that goes away abandons nothing. Ends with the server.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(work);
    }

    /// Stops every piece of work where it is; what is in the store says how to go on.
    pub fn abort_all(&self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

/// Requests that are worked on at the same time, waits included.
const REQUESTS_AT_ONCE: usize = 4096;
