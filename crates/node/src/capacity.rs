//! Whether one more run fits: memory that is promised, and room in the pool. Checked before anything is made.

use std::sync::Mutex;

use crate::NodeError;

/// What a VMM needs beside the guest's memory.
pub const OVERHEAD_BYTES: u64 = 192 << 20;
const MIB: u64 = 1 << 20;

/// Memory promised to runs. A promise is a value that gives itself back.
#[derive(Debug)]
pub struct Memory {
    budget: u64,
    promised: Mutex<u64>,
}

/// Bytes a run may use; returned when dropped.
pub struct Promise {
    memory: std::sync::Arc<Memory>,
    bytes: u64,
}

impl Memory {
    pub fn new(budget: u64) -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self { budget, promised: Mutex::new(0) })
    }

    pub fn promised(&self) -> u64 {
        *self.promised.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// For a paused VM, which cannot grow: what it uses, whether that fits or not.
    pub fn paused(self: &std::sync::Arc<Self>, bytes: u64) -> Promise {
        *self.promised.lock().unwrap_or_else(std::sync::PoisonError::into_inner) += bytes;
        Promise { memory: self.clone(), bytes }
    }

    /// For what runs already, whether it fits or not.
    pub fn must(self: &std::sync::Arc<Self>, memory_mib: u32) -> Promise {
        let bytes = u64::from(memory_mib) * MIB + OVERHEAD_BYTES;
        *self.promised.lock().unwrap_or_else(std::sync::PoisonError::into_inner) += bytes;
        Promise { memory: self.clone(), bytes }
    }

    pub fn promise(self: &std::sync::Arc<Self>, memory_mib: u32) -> Result<Promise, NodeError> {
        let bytes = u64::from(memory_mib) * MIB + OVERHEAD_BYTES;
        let mut promised = self.promised.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *promised + bytes > self.budget {
            return Err(NodeError::NoCapacity(format!(
                "a sandbox of {memory_mib} MiB does not fit: it needs {} MiB with its VMM, and {} of {} MiB are promised; \
                 delete sandboxes, or raise limits.memory",
                bytes / MIB,
                *promised / MIB,
                self.budget / MIB
            )));
        }
        *promised += bytes;
        Ok(Promise { memory: self.clone(), bytes })
    }
}

impl Promise {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        *self.memory.promised.lock().unwrap_or_else(std::sync::PoisonError::into_inner) -= self.bytes;
    }
}

/// Refuses before the pool is full: a running guest needs the rest.
pub fn check_pool(host: &space_hostd::host::Host, reserve: u64) -> Result<(), NodeError> {
    let usage = host.usage()?;
    if usage.free >= reserve {
        return Ok(());
    }
    Err(NodeError::NoCapacity(format!(
        "the pool is nearly full: {} of {} MiB are free and {} MiB are kept for running sandboxes; delete sandboxes or \
         templates, or make the pool larger",
        usage.free / MIB,
        usage.total / MIB,
        reserve / MIB
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_never_exceed_the_budget_and_come_back() {
        let memory = Memory::new(3 * (512 * MIB + OVERHEAD_BYTES));
        let mut held: Vec<_> = (0..3).map(|_| memory.promise(512)).collect();
        assert!(held.iter().all(Result::is_ok));
        assert!(matches!(memory.promise(128), Err(NodeError::NoCapacity(_))));
        held.pop();
        assert!(memory.promise(512).is_ok());
        drop(held);
        assert_eq!(memory.promised(), 0);
    }
}
