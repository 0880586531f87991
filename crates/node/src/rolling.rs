//! Checkpoints that the node takes by itself: one task per run, as long as that runs.
//!
//! It never ends a VM and never takes room from one: it skips what has not changed, lets the oldest go, and slows down when
//! a checkpoint takes long.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use space_core::CheckpointId;

use crate::NodeError;
use crate::capacity;
use crate::checkpoint::{self, Facts, Wish};
use crate::record::Rolling;
use crate::run::{Live, unix_ms};
use crate::runs::{Entry, Runs};

const INFO_PATIENCE: Duration = Duration::from_secs(5);

/// The pause to the next one: longer when the last took more than half of it.
fn next_pause(every: Duration, took: Duration) -> Duration {
    if took > every / 2 { every.max(took * 4) } else { every.saturating_sub(took) }
}

/// Which of the checkpoints, given by the time they were taken, oldest first, go. The newest never does.
fn surplus(taken: &[i64], keep: &[(u32, u32)], now: i64) -> Vec<usize> {
    let Some(newest) = taken.len().checked_sub(1) else { return Vec::new() };
    let mut kept = vec![false; taken.len()];
    kept[newest] = true;
    for (every_s, within_s) in keep {
        let (every, within) = (i64::from((*every_s).max(1)) * 1000, i64::from(*within_s) * 1000);
        let mut slot = None;
        for (index, at) in taken.iter().enumerate() {
            // Slots are of the clock and not of the age, so that the choice is the same each time; the oldest of one stays.
            if now - at <= within && slot != Some(at.div_euclid(every)) {
                slot = Some(at.div_euclid(every));
                kept[index] = true;
            }
        }
    }
    kept.iter().enumerate().filter(|(_, kept)| !**kept).map(|(index, _)| index).collect()
}

/// Begins with a run that wants it.
pub fn start(runs: &Arc<Runs>, entry: &Arc<Entry>, live: &Arc<Live>) {
    let Some(rolling) = live.record.rolling.clone() else { return };
    let (runs, entry, live) = (Arc::downgrade(runs), entry.clone(), Arc::downgrade(live));
    tokio::spawn(async move {
        let every = Duration::from_secs(u64::from(rolling.every_s.max(1)));
        let (mut pause, mut last) = (every, None);
        loop {
            tokio::time::sleep(pause).await;
            let (Some(runs), Some(live)) = (runs.upgrade(), live.upgrade()) else { return };
            if !entry.live().is_some_and(|now| Arc::ptr_eq(&now, &live)) {
                return;
            }
            let begun = Instant::now();
            if let Err(error) = turn(&runs, &live, &rolling, &mut last).await {
                tracing::info!(sandbox = %live.record.sandbox, error = error.text(), "no rolling checkpoint this time");
            }
            pause = next_pause(every, begun.elapsed());
        }
    });
}

/// What tells whether anything has happened in a guest: CPU time of its programs, and calls to it.
type Seen = Option<(Option<u64>, u64)>;

async fn turn(runs: &Arc<Runs>, live: &Arc<Live>, rolling: &Rolling, last: &mut Seen) -> Result<(), NodeError> {
    let marks = live.marks();
    if marks.paused {
        return Ok(());
    }
    let seen = (live.guest.cpu_us(INFO_PATIENCE).await, live.calls.load(Ordering::Relaxed));
    if seen.0.is_some() && *last == Some(seen) {
        return Ok(());
    }
    if capacity::check_pool(&runs.config.host, runs.config.pool_reserve_bytes).is_err() {
        make_room(runs).await?;
    }
    let wish = Wish { rolling: true, keep_paused: false };
    runs.checkpoint(live.record.run_ref(), CheckpointId::new(), wish).await?;
    *last = Some(seen);
    thin(runs, live, rolling).await
}

/// Lets go what no tier keeps.
async fn thin(runs: &Arc<Runs>, live: &Arc<Live>, rolling: &Rolling) -> Result<(), NodeError> {
    let (sandbox, keep) = (live.record.sandbox.clone(), rolling.keep.clone());
    runs.blocking(move |runs| {
        let host = &runs.config.host;
        let mut own = checkpoint::list(host, Some(&sandbox))?;
        own.retain(|facts| facts.rolling);
        let taken: Vec<i64> = own.iter().map(|facts| facts.created_unix_ms).collect();
        surplus(&taken, &keep, unix_ms()).into_iter().try_for_each(|index| checkpoint::delete(host, &own[index].name()))
    })
    .await
}

/// The pool is short: rolling checkpoints go, the oldest first, but for the newest of each sandbox.
pub async fn make_room(runs: &Arc<Runs>) -> Result<(), NodeError> {
    runs.blocking(|runs| {
        let (host, reserve) = (&runs.config.host, runs.config.pool_reserve_bytes);
        let all = checkpoint::list(host, None)?;
        let rolling: Vec<&Facts> = all.iter().filter(|facts| facts.rolling).collect();
        let newest: HashMap<_, _> = all.iter().map(|facts| (facts.name().sandbox, facts.name().checkpoint)).collect();
        for facts in rolling {
            if capacity::check_pool(host, reserve).is_ok() {
                return Ok(());
            }
            let name = facts.name();
            if newest.get(&name.sandbox) != Some(&name.checkpoint) {
                tracing::info!(%name, "a rolling checkpoint goes: the pool is short");
                checkpoint::delete(host, &name)?;
            }
        }
        capacity::check_pool(host, reserve)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kept ones of a checkpoint every ten seconds, thinned each time, in seconds of age.
    fn ages(keep: &[(u32, u32)], seconds: i64) -> Vec<i64> {
        let mut taken = Vec::new();
        for now in (0..=seconds).step_by(10).map(|s| s * 1000) {
            taken.push(now);
            for index in surplus(&taken, keep, now).into_iter().rev() {
                taken.remove(index);
            }
        }
        taken.iter().map(|at| seconds - at / 1000).collect()
    }

    #[test]
    fn each_tier_keeps_its_own_and_the_newest_stays() {
        assert_eq!(ages(&[], 1000), [0]);
        assert_eq!(ages(&[(10, 30)], 1000), [30, 20, 10, 0]);
        let two = ages(&[(10, 30), (60, 300)], 1000);
        assert_eq!(two, [280, 220, 160, 100, 40, 30, 20, 10, 0]);
        assert!(surplus(&[], &[(1, 1)], 5).is_empty());
    }

    #[test]
    fn a_slow_checkpoint_slows_the_next() {
        let second = Duration::from_secs(1);
        assert_eq!(next_pause(10 * second, second), 9 * second);
        assert_eq!(next_pause(second, 2 * second), 8 * second);
    }
}
