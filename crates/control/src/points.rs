//! Named points between two steps of the work, where a test can stop the control plane as a crash would.
//!
//! Without a hook a point costs one check of an option and does nothing.

use std::sync::Arc;

type Hook = dyn Fn(&'static str) -> bool + Send + Sync;

/// Decides at each named point whether the process "dies" there: whoever reaches it never goes on.
#[derive(Clone, Default)]
pub struct Points(Option<Arc<Hook>>);

impl Points {
    /// Every point the control plane passes, in the order of a sandbox's life.
    pub const ALL: &'static [&'static str] = &[
        "create.intent",
        "create.node_done",
        "create.recorded",
        "delete.intent",
        "delete.node_done",
        "delete.recorded",
        "build.node_done",
        "build.recorded",
        "template_delete.intent",
        "template_delete.node_done",
    ];

    /// `dies(point)` true: the caller stops there for ever (until its task is dropped).
    pub fn new(dies: impl Fn(&'static str) -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(dies)))
    }

    pub(crate) async fn reach(&self, point: &'static str) {
        if let Some(hook) = &self.0 {
            debug_assert!(Self::ALL.contains(&point), "{point} is not in the list");
            if hook(point) {
                std::future::pending::<()>().await;
            }
        }
    }
}

impl std::fmt::Debug for Points {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Points(hooked)" } else { "Points" })
    }
}
