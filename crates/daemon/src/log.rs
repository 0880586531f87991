//! A few lines for the console. A guest's programs can make the daemon say things, so it says little and not often.

use std::io::Write as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const LINES_PER_WINDOW: u32 = 20;
const WINDOW: Duration = Duration::from_secs(10);

static SAID: Mutex<Option<(Instant, u32)>> = Mutex::new(None);

pub fn say(text: &str) {
    let mut said = SAID.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let now = Instant::now();
    let (start, count) = match *said {
        Some((start, count)) if now.duration_since(start) < WINDOW => (start, count + 1),
        _ => (now, 1),
    };
    *said = Some((start, count));
    if count <= LINES_PER_WINDOW {
        let _ = writeln!(std::io::stderr(), "space-daemon: {text}");
    }
}
