//! The states of a sandbox and the only moves between them, as data.
//!
//! ```text
//! creating ─▶ running ⇄ paused
//!                │         │
//!                ├────┬────┘
//!                ▼    ▼
//!       suspending    stopping            any ─▶ deleting ─▶ deleted
//!            │            │               any living ─▶ failed
//!            ▼            ▼
//!       suspended      stopped
//!            └─▶ waking ◀─┘ ─▶ running
//! ```
//!
//! `failed` keeps a reason and leaves by `waking` or `deleting`. Nothing else in the project may decide whether a move
//! is legal: the store asks `may_become`, and its guarded update names the state it moves from.

use serde::{Deserialize, Serialize};

/// What a user sees of a sandbox.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    Creating,
    Running,
    Paused,
    Suspending,
    Suspended,
    Stopping,
    Stopped,
    Waking,
    Failed,
    Deleting,
    Deleted,
}

use SandboxState::*;

/// Every legal move. A pair that is not here cannot happen.
pub const TRANSITIONS: &[(SandboxState, SandboxState)] = &[
    (Creating, Running),
    (Creating, Failed),
    (Creating, Deleting),
    (Running, Paused),
    (Running, Suspending),
    (Running, Stopping),
    (Running, Failed),
    (Running, Deleting),
    (Paused, Running),
    (Paused, Suspending),
    (Paused, Stopping),
    (Paused, Failed),
    (Paused, Deleting),
    (Suspending, Suspended),
    (Suspending, Running),
    (Suspending, Failed),
    (Suspending, Deleting),
    (Suspended, Waking),
    (Suspended, Deleting),
    (Stopping, Stopped),
    (Stopping, Failed),
    (Stopping, Deleting),
    (Stopped, Waking),
    (Stopped, Deleting),
    (Waking, Running),
    (Waking, Failed),
    (Waking, Deleting),
    (Failed, Waking),
    (Failed, Deleting),
    (Deleting, Deleted),
];

impl SandboxState {
    pub const ALL: [Self; 11] =
        [Creating, Running, Paused, Suspending, Suspended, Stopping, Stopped, Waking, Failed, Deleting, Deleted];
    /// No move leads out.
    pub const TERMINAL: [Self; 1] = [Deleted];
    /// A run of it may exist on a node.
    pub const LIVE: [Self; 6] = [Creating, Running, Paused, Suspending, Stopping, Waking];
    /// Work is under way; somebody must finish it.
    pub const TRANSIENT: [Self; 5] = [Creating, Suspending, Stopping, Waking, Deleting];

    pub fn may_become(self, next: Self) -> bool {
        TRANSITIONS.contains(&(self, next))
    }

    pub fn is_terminal(self) -> bool {
        Self::TERMINAL.contains(&self)
    }

    pub fn is_live(self) -> bool {
        Self::LIVE.contains(&self)
    }

    pub fn is_transient(self) -> bool {
        Self::TRANSIENT.contains(&self)
    }

    /// The word used in the API and in the store.
    pub fn as_str(self) -> &'static str {
        match self {
            Creating => "creating",
            Running => "running",
            Paused => "paused",
            Suspending => "suspending",
            Suspended => "suspended",
            Stopping => "stopping",
            Stopped => "stopped",
            Waking => "waking",
            Failed => "failed",
            Deleting => "deleting",
            Deleted => "deleted",
        }
    }
}

impl std::fmt::Display for SandboxState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// A word that is no state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no such state: {0:?}; states are creating, running, paused, suspending, suspended, stopping, stopped, waking, failed, deleting, deleted"
)]
pub struct UnknownState(pub String);

impl std::str::FromStr for SandboxState {
    type Err = UnknownState;
    fn from_str(text: &str) -> Result<Self, UnknownState> {
        Self::ALL.into_iter().find(|s| s.as_str() == text).ok_or_else(|| UnknownState(text.chars().take(40).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delete_never_needs_another_verb_first() {
        for state in SandboxState::ALL {
            let gone = matches!(state, Deleting | Deleted);
            assert_eq!(state.may_become(Deleting), !gone, "{state}");
        }
    }

    #[test]
    fn terminal_states_have_no_exit_and_all_others_do() {
        for state in SandboxState::ALL {
            let exits = TRANSITIONS.iter().filter(|(from, _)| *from == state).count();
            assert_eq!(exits == 0, state.is_terminal(), "{state}");
        }
    }

    #[test]
    fn every_state_is_reached_from_creating_and_reaches_deleted() {
        let reach = |start: SandboxState| {
            let mut seen = vec![start];
            let mut at = 0;
            while at < seen.len() {
                for (from, to) in TRANSITIONS {
                    if *from == seen[at] && !seen.contains(to) {
                        seen.push(*to);
                    }
                }
                at += 1;
            }
            seen
        };
        let from_start = reach(Creating);
        for state in SandboxState::ALL {
            assert!(from_start.contains(&state), "{state} is never reached");
            assert!(reach(state).contains(&Deleted), "{state} is stuck");
        }
    }

    #[test]
    fn a_transient_state_can_always_end_badly_or_be_deleted() {
        for state in SandboxState::TRANSIENT {
            assert!(state.may_become(Failed) || state.may_become(Deleting) || state == Deleting, "{state}");
        }
    }

    #[test]
    fn words_round_trip() {
        for state in SandboxState::ALL {
            assert_eq!(state.as_str().parse(), Ok(state));
        }
        assert!("Running".parse::<SandboxState>().is_err());
    }
}
