//! The wall clock in the unit of the API and of the store.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970 (UTC); 0 for a clock before that.
pub fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
