//! The rate of the host's time stamp counter, which an emulated guest sees as its own.
//!
//! `microvm` has no clock to measure the counter against but an interval timer whose interrupt a guest cannot route; a guest
//! that is not told the rate hangs at boot when the host is busy. A state saved at one rate keeps wrong time at another.
#![allow(unsafe_code, reason = "reading the time stamp counter")]

use std::time::{Duration, Instant};

const SPAN: Duration = Duration::from_millis(50);
const TRIES: usize = 64;

/// The counter and the time of it, from the attempt that was least disturbed.
#[cfg(target_arch = "x86_64")]
fn sample() -> (u64, Instant) {
    let attempt = || {
        let before = Instant::now();
        // SAFETY: every x86-64 processor has the instruction, and Linux allows it to programs.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        (before.elapsed(), ticks, before)
    };
    let best = (0..TRIES).map(|_| attempt()).min_by_key(|(width, ..)| *width);
    let (width, ticks, before) = best.expect("there is more than one try");
    (ticks, before + width / 2)
}

/// Counts per millisecond. Takes 50 ms; to be called once.
#[cfg(target_arch = "x86_64")]
pub(super) fn measure_khz() -> u64 {
    let (first, begun) = sample();
    std::thread::sleep(SPAN);
    let (second, ended) = sample();
    let nanos = ended.duration_since(begun).as_nanos().max(1);
    let khz = u128::from(second.wrapping_sub(first)) * 1_000_000 / nanos;
    u64::try_from(khz).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #[test]
    fn two_measurements_agree() {
        let (first, second) = (super::measure_khz(), super::measure_khz());
        assert!(first > 100_000 && first.abs_diff(second) < first / 5000, "{first} {second}");
    }
}
