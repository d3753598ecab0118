//! What is asked of a store and what it answers, as a history writes it down.

/// A number that stands for bytes: those of a response or a checkpoint, see `history`. 0: none.
pub(crate) type Bytes = u64;

/// What is asked of a reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    /// The request, of which there are two a key.
    pub(crate) request: u64,
    pub(crate) lease_ms: u64,
    pub(crate) policy: Policy,
    /// Waits for who is at work; the answer is still that of one moment.
    pub(crate) waits: bool,
}

/// What a reserve does about an attempt that was interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Surface,
    /// Takes over after a crash or a drop.
    TakeOver,
    /// Takes over whatever the cause.
    TakeOverLapsed,
}

impl Policy {
    pub(super) fn takes_over(self, cause: Cause) -> bool {
        match self {
            Self::Surface => false,
            Self::TakeOver => cause != Cause::LeaseLapsed,
            Self::TakeOverLapsed => true,
        }
    }
}

/// A call on one key, or what happens to all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Reserve(Ask),
    Complete {
        token: u64,
        body: Bytes,
    },
    Release {
        token: u64,
    },
    /// Lets a reservation fall, which was made with or without the wish to be released then.
    Drop {
        token: u64,
        release: bool,
    },
    Renew {
        token: u64,
        /// The call that made the guard.
        guard: u64,
        lease_ms: u64,
    },
    SaveCheckpoint {
        token: u64,
        guard: u64,
        bytes: Bytes,
        /// That of the reservation, which begins anew if it had lapsed.
        lease_ms: u64,
    },
    Detach {
        token: u64,
        lease_ms: u64,
    },
    Reattach {
        token: u64,
        lease_ms: u64,
    },
    /// By the handle of an interruption; when that is over, asks again.
    TakeOver {
        token: u64,
        ask: Ask,
    },
    Resolve {
        token: u64,
        body: Bytes,
    },
    ReleaseInterrupted {
        token: u64,
    },
    Peek,
    Forget,
    /// Time passes.
    Advance {
        ms: u64,
    },
    /// The process ends, and the next one opens the store.
    End(End),
}

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Kill,
    /// All calls were made at the level that survives it.
    PowerLoss,
    Close,
}

/// Why nobody is known to work on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cause {
    Crash,
    Dropped,
    LeaseLapsed,
}

/// The state of a key by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Name {
    InFlight,
    Interrupted,
    Done,
}

/// What a caller is told of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) token: u64,
    pub(crate) attempt: u64,
    pub(crate) checkpoint: Bytes,
}

/// What a caller is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Fresh(Shown),
    Replay {
        body: Bytes,
        attempt: u64,
    },
    InFlight(Shown),
    Interrupted(Shown, Cause),
    Mismatch(Name),
    Done,
    Superseded,
    /// To a reattachment: somebody holds it.
    Held,
    /// To a peek; a cause only of what is interrupted.
    Known {
        request: u64,
        name: Name,
        shown: Shown,
        cause: Option<Cause>,
    },
    /// Nothing is known of the key.
    Unknown,
    /// To what has no answer but its end.
    Over,
    /// The caller went away before it was told anything. By then the call has done its work or left no trace, but that
    /// it may have let go of what it held.
    Unheard,
}

impl Answer {
    /// The token of a new reservation.
    pub(crate) fn fresh(&self) -> Option<u64> {
        match self {
            Self::Fresh(shown) => Some(shown.token),
            _ => None,
        }
    }
}
