//! Which calls of the control plane are stale. Pure, so that every order of calls can be tried without a VM.
//!
//! A node remembers, per sandbox, the newest run and generation it has heard of. A call that knows less was overtaken by
//! another writer and is refused; a call for the same run again is a repetition and gets the same answer.

use space_core::{Generation, RunNumber, RunRef};

/// The newest knowledge of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    pub run: RunNumber,
    pub generation: Generation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A run that was never heard of: a new life.
    New,
    /// The run that is held.
    Same,
    /// Overtaken.
    Stale,
}

impl Fence {
    pub fn of(run: &RunRef) -> Self {
        Self { run: run.run, generation: run.generation }
    }

    /// What a call is, given what was heard before.
    pub fn judge(held: Option<Self>, call: &RunRef) -> Verdict {
        match held {
            None => Verdict::New,
            Some(held) if call.generation < held.generation || call.run < held.run => Verdict::Stale,
            Some(held) if call.run == held.run => Verdict::Same,
            Some(_) => Verdict::New,
        }
    }

    /// Knowledge only grows.
    #[must_use]
    pub fn merged(held: Option<Self>, call: &RunRef) -> Self {
        let call = Self::of(call);
        match held {
            None => call,
            Some(held) => Self { run: held.run.max(call.run), generation: held.generation.max(call.generation) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn call(run: u32, generation: u64) -> RunRef {
        let sandbox = "sbx-00000000000000000000000000".parse().expect("an id");
        RunRef { sandbox, run: RunNumber(run), generation: Generation(generation) }
    }

    proptest! {
        /// Whatever order calls arrive in, an accepted one never knows less than any accepted before it.
        #[test]
        fn nothing_older_is_ever_accepted(calls in prop::collection::vec((1u32..5, 1u64..9), 1..40)) {
            let mut held = None;
            for (run, generation) in calls {
                let call = call(run, generation);
                if Fence::judge(held, &call) != Verdict::Stale {
                    if let Some(before) = held {
                        let before: Fence = before;
                        prop_assert!(call.generation >= before.generation && call.run >= before.run);
                    }
                    held = Some(Fence::merged(held, &call));
                }
            }
        }
    }

    #[test]
    fn a_repetition_is_the_same_and_a_larger_run_is_new() {
        let held = Some(Fence::of(&call(1, 4)));
        assert_eq!(Fence::judge(held, &call(1, 4)), Verdict::Same);
        assert_eq!(Fence::judge(held, &call(1, 3)), Verdict::Stale);
        assert_eq!(Fence::judge(held, &call(2, 5)), Verdict::New);
        assert_eq!(Fence::judge(None, &call(7, 1)), Verdict::New);
    }
}
