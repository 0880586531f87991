//! Slots: each running VMM has a user and group of its own, so that one that breaks out owns nothing of another.
//!
//! Nothing is stored: what runs says which slots are in use, and the node tells the allocator at start.

use std::collections::BTreeSet;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

/// The default first user id of the range.
pub const DEFAULT_BASE: u32 = 200_000;

/// The number of one VMM among those of its node; stored with the run so that it can be claimed again after a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Slot(pub u32);

/// Hands out slots, the lowest free one first.
#[derive(Debug)]
pub struct Slots {
    count: u32,
    used: Mutex<BTreeSet<u32>>,
}

impl Slots {
    /// Slots `0..count`.
    pub fn new(count: u32) -> Self {
        Slots { count, used: Mutex::new(BTreeSet::new()) }
    }

    fn used(&self) -> std::sync::MutexGuard<'_, BTreeSet<u32>> {
        self.used.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The lowest free slot, or `None` when all are in use.
    pub fn take(&self) -> Option<Slot> {
        let mut used = self.used();
        let free = (0..self.count).find(|slot| !used.contains(slot))?;
        used.insert(free);
        Some(Slot(free))
    }

    /// Marks a slot as in use (of a VMM found alive). False when it already was, or is out of range.
    pub fn claim(&self, slot: Slot) -> bool {
        slot.0 < self.count && self.used().insert(slot.0)
    }

    /// Gives a slot back. Only after its VMM is gone: the next one inherits the user id.
    pub fn release(&self, slot: Slot) {
        self.used().remove(&slot.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_never_handed_out_twice() {
        let slots = Slots::new(3);
        assert!(slots.claim(Slot(1)));
        assert!(!slots.claim(Slot(1)) && !slots.claim(Slot(3)));
        assert_eq!((slots.take(), slots.take(), slots.take()), (Some(Slot(0)), Some(Slot(2)), None));
        slots.release(Slot(1));
        assert_eq!(slots.take(), Some(Slot(1)));
    }
}
