//! The work behind operations.
//!
//! `drive` carries one sandbox on from whatever its row says; there is no other path, so a restart takes the same one as a
//! request. At most one driver per sandbox runs in this process; between processes the store's guarded updates and the
//! node's idempotence decide. `reconcile` finds sandboxes, builds and runs that nobody is at.
//!
//! Nothing here takes its input from a request: it is told an id and reads the rest.

pub mod build;
pub mod reconcile;
mod sandbox;

pub use sandbox::wake;
mod watch;

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use space_core::SandboxId;

use crate::app::App;

/// Starts what runs as long as the server does.
pub fn start(app: &Arc<App>) {
    app.spawn(reconcile::run(app.clone()));
    app.spawn(watch::run(app.clone()));
}

/// Sees to it that somebody carries the sandbox on: a new driver, or the one that is at it looks once more.
pub fn drive(app: &Arc<App>, id: &SandboxId) {
    let again = {
        let mut drivers = app.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(again) = drivers.get(id.as_str()) {
            again.store(true, Ordering::Release);
            return;
        }
        let again = Arc::new(AtomicBool::new(false));
        drivers.insert(id.as_str().to_owned(), again.clone());
        again
    };
    let (app_, id) = (app.clone(), id.clone());
    app.spawn(async move {
        // Also when the driver panics: the next one may go on.
        let _leave = Leave { app: app_.clone(), id: id.clone() };
        loop {
            sandbox::drive(&app_, &id).await;
            let drivers = app_.drivers.lock().unwrap_or_else(PoisonError::into_inner);
            if !again.swap(false, Ordering::AcqRel) {
                // Under the lock, so that nobody asks between the look and the leave.
                let mut drivers = drivers;
                drivers.remove(id.as_str());
                return;
            }
        }
    });
}

struct Leave {
    app: Arc<App>,
    id: SandboxId,
}

impl Drop for Leave {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.app.drivers.lock().unwrap_or_else(PoisonError::into_inner).remove(self.id.as_str());
        }
    }
}
