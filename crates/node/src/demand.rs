//! How many sandboxes of a template were wanted lately, and so how many VMs to keep parked for it. Pure: time comes from
//! the caller.

use std::time::{Duration, Instant};

const SLOT: Duration = Duration::from_secs(60);
/// Demand older than this many slots is forgotten.
const SLOTS: usize = 10;
/// Kept ready even when only one was wanted.
const FLOOR: u16 = 8;
const CEILING: u16 = 256;

/// Counts of the last minutes, the current one first.
#[derive(Debug)]
pub struct Demand {
    counts: [u16; SLOTS],
    slot_began: Instant,
    last: Instant,
}

impl Demand {
    pub fn new(now: Instant) -> Self {
        Self { counts: [0; SLOTS], slot_began: now, last: now }
    }

    fn turn(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.slot_began).as_secs() / SLOT.as_secs();
        let steps = usize::try_from(passed).unwrap_or(SLOTS).min(SLOTS);
        if steps > 0 {
            self.counts.rotate_right(steps);
            self.counts[..steps].fill(0);
            self.slot_began = now;
        }
    }

    pub fn count(&mut self, now: Instant) {
        self.turn(now);
        self.counts[0] = self.counts[0].saturating_add(1);
        self.last = now;
    }

    pub fn idle(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last)
    }

    /// The largest number wanted within one minute, of the last ten.
    pub fn target(&mut self, now: Instant) -> u16 {
        self.turn(now);
        self.counts.iter().copied().max().unwrap_or(0).clamp(FLOOR, CEILING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_minute_counts_until_it_is_forgotten() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut demand = Demand::new(begun);
        demand.count(at(1));
        assert_eq!(demand.target(at(1)), FLOOR);
        (0..30).for_each(|_| demand.count(at(70)));
        (0..20).for_each(|_| demand.count(at(140)));
        assert_eq!((demand.target(at(150)), demand.idle(at(150)).as_secs()), (30, 10));
        assert_eq!(demand.target(at(70 + 500)), 30);
        assert_eq!(demand.target(at(140 + 700)), FLOOR);
    }

    #[test]
    fn no_demand_is_beyond_the_ceiling() {
        let begun = Instant::now();
        let mut demand = Demand::new(begun);
        (0..70_000).for_each(|_| demand.count(begun));
        assert_eq!(demand.target(begun), CEILING);
    }
}
