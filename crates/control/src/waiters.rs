//! Wakes requests that wait for an operation, or for a thing of that name, to change.
//!
//! A hint only: whoever is woken reads the store again, and polls slowly besides, because another copy of the control
//! plane may have made the change.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

#[derive(Default)]
pub struct Waiters(Mutex<HashMap<String, Arc<Notify>>>);

/// A place in the line for one id; leaves it when dropped.
pub struct Waiter<'a> {
    waiters: &'a Waiters,
    id: String,
    pub notify: Arc<Notify>,
}

impl Waiters {
    pub fn register(&self, id: &str) -> Waiter<'_> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let notify = map.entry(id.to_owned()).or_default().clone();
        Waiter { waiters: self, id: id.to_owned(), notify }
    }

    pub fn wake(&self, id: &str) {
        let map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = map.get(id) {
            notify.notify_waiters();
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut map = self.waiters.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The map's and ours: nobody else waits.
        if map.get(&self.id).is_some_and(|n| Arc::strong_count(n) <= 2) {
            map.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_waiter_is_woken_and_leaves_nothing() {
        let waiters = Waiters::default();
        {
            let one = waiters.register("op-1");
            let two = waiters.register("op-1");
            let (first, second) = (one.notify.notified(), two.notify.notified());
            tokio::pin!(first, second);
            first.as_mut().enable();
            second.as_mut().enable();
            waiters.wake("op-1");
            waiters.wake("op-2");
            first.await;
            second.await;
        }
        assert!(waiters.0.lock().expect("not poisoned").is_empty());
    }
}
