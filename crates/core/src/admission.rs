//! Whether a verb may start now: a pure value from the state, with three answers, so that every verb is idempotent.
//!
//! One task per sandbox executes what was accepted; nothing here knows who that is.

use crate::state::SandboxState;

/// What a user may ask of a sandbox that exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Verb {
    Delete,
    /// Run a command, read a file, look at processes: needs a guest that answers.
    Use,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Do it; the sandbox moves to this state first (the same state: no move needed).
    Accept(SandboxState),
    /// It is so already, or under way: answer with what there is.
    AlreadySo,
    Refuse(Refusal),
}

/// A refusal says what the caller can do about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, thiserror::Error)]
pub enum Refusal {
    #[error("the sandbox is gone")]
    Gone,
    #[error("the sandbox is still being made; wait for its operation")]
    NotYet,
    #[error("the sandbox is not running")]
    NotRunning,
    #[error("the sandbox has failed; see its reason, or delete it")]
    Failed,
}

pub fn admit(verb: Verb, state: SandboxState) -> Admission {
    use SandboxState::*;
    match (verb, state) {
        (Verb::Delete, Deleted | Deleting) => Admission::AlreadySo,
        (Verb::Delete, _) => Admission::Accept(Deleting),
        (Verb::Use, Running) => Admission::Accept(Running),
        (Verb::Use, Creating | Waking) => Admission::Refuse(Refusal::NotYet),
        (Verb::Use, Deleting | Deleted) => Admission::Refuse(Refusal::Gone),
        (Verb::Use, Failed) => Admission::Refuse(Refusal::Failed),
        (Verb::Use, Paused | Suspending | Suspended | Stopping | Stopped) => Admission::Refuse(Refusal::NotRunning),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is asked in whatever order, an accepted move is always a legal one and asking twice changes nothing.
        #[test]
        fn accepted_moves_are_legal(start in 0usize..SandboxState::ALL.len(), verbs in prop::collection::vec(any::<bool>(), 1..20)) {
            let mut state = SandboxState::ALL[start];
            for delete in verbs {
                let verb = if delete { Verb::Delete } else { Verb::Use };
                if let Admission::Accept(next) = admit(verb, state) {
                    prop_assert!(next == state || state.may_become(next));
                    state = next;
                    prop_assert!(matches!(admit(verb, state), Admission::AlreadySo | Admission::Accept(_)));
                    if let Admission::Accept(again) = admit(verb, state) {
                        prop_assert_eq!(again, state);
                    }
                }
            }
        }
    }
}
