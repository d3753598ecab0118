//! What a history proves about a key, whatever the order of its calls; and how a history is changed.

use crate::linear::spec::{Answer, Bytes, Call, Shown};
use crate::linear::{NEVER, Op};

/// A history that was recorded while time stood still, in the order of invocations.
pub(super) struct Facts<'a> {
    pub(super) ops: &'a [Op],
}

/// The token that an owner or the holder of a handle names.
pub(super) fn token(call: &Call) -> Option<u64> {
    match *call {
        Call::Complete { token, .. }
        | Call::Release { token }
        | Call::Drop { token, .. }
        | Call::Renew { token, .. }
        | Call::SaveCheckpoint { token, .. }
        | Call::Detach { token, .. }
        | Call::Reattach { token, .. }
        | Call::TakeOver { token, .. }
        | Call::Resolve { token, .. }
        | Call::ReleaseInterrupted { token } => Some(token),
        Call::Reserve(_) | Call::Peek | Call::Forget | Call::Advance { .. } | Call::End(_) => None,
    }
}

/// The response that a call stores or would store.
pub(super) fn body(op: &Op) -> Option<Bytes> {
    match op.call {
        Call::Complete { body, .. } | Call::Resolve { body, .. } => Some(body),
        _ => None,
    }
}

/// Whether a call is known to have stored a response.
pub(super) fn completes(op: &Op) -> bool {
    body(op).is_some() && op.is_told() && op.answer() == Some(Answer::Done)
}

/// Whether a call gives a key back.
pub(super) fn releases(op: &Op) -> bool {
    matches!(op.call, Call::Release { .. })
}

/// What was shown of an attempt that is not done.
pub(super) fn unfinished(answer: &Answer) -> Option<Shown> {
    match answer {
        Answer::InFlight(shown) | Answer::Interrupted(shown, _) => Some(*shown),
        _ => None,
    }
}

impl<'a> Facts<'a> {
    pub(super) fn new(ops: &'a [Op]) -> Self {
        Self { ops }
    }

    pub(super) fn stamp_max(&self) -> u64 {
        self.ops.iter().map(|op| op.invoked).max().unwrap_or(0) + 1
    }

    /// A first owner with a token that is larger than every other.
    pub(super) fn new_owner(&self) -> Shown {
        let token = self.ops.iter().filter_map(|op| op.answer()?.fresh()).max().unwrap_or(0) + 1_000_000;
        Shown { token, attempt: 1, checkpoint: 0 }
    }

    pub(super) fn on_key_of(&self, op: &Op) -> impl DoubleEndedIterator<Item = &'a Op> {
        let key = op.key;
        self.ops.iter().filter(move |other| other.key == key)
    }

    /// Every reservation that somebody was told of.
    pub(super) fn fresh(&self) -> impl Iterator<Item = &'a Op> {
        self.ops.iter().filter(|op| op.is_told() && op.answer().is_some_and(|answer| answer.fresh().is_some()))
    }

    fn fresh_of(&self, token: u64) -> Option<&'a Op> {
        self.fresh().find(|op| op.answer().and_then(|answer| answer.fresh()) == Some(token))
    }

    /// The call that made the reservation which this act names.
    pub(super) fn reservation(&self, act: &Op) -> Option<&'a Op> {
        self.fresh_of(token(&act.call)?)
    }

    /// Which attempt the owner of this token was told to be.
    pub(super) fn attempt(&self, token: u64) -> Option<u64> {
        match self.fresh_of(token)?.answer()? {
            Answer::Fresh(shown) => Some(shown.attempt),
            _ => None,
        }
    }

    /// The tokens of this key that were told before the call.
    pub(super) fn told_tokens_before(&self, op: &Op) -> impl Iterator<Item = u64> {
        let (key, invoked) = (op.key, op.invoked);
        let before = self.fresh().filter(move |other| other.key == key && other.answered_at() < invoked);
        before.filter_map(|other| other.answer()?.fresh())
    }

    /// Whether nothing for which `ends` holds may have taken effect after `since` began and before `op` was answered.
    fn undisturbed(&self, since: &Op, op: &Op, ends: impl Fn(&Op) -> bool) -> bool {
        let mut others = self.ops.iter().filter(|other| other.key.is_none() || other.key == op.key);
        let disturbs = |other: &Op| {
            other.id != op.id
                && other.id != since.id
                && other.invoked < op.answered_at()
                && other.answered_at() > since.invoked
                && ends(other)
        };
        !others.any(disturbs)
    }

    /// The owner who held the key throughout the call: it was told so before, and nothing that could end its attempt
    /// began before the answer.
    pub(super) fn held(&self, op: &Op) -> Option<&'a Op> {
        let owners = self.fresh().filter(|other| other.key == op.key && other.is_before(op));
        let owner = owners.max_by_key(|other| other.answered_at())?;
        let own = owner.answer()?.fresh();
        let ends = |other: &Op| match other.call {
            Call::Forget | Call::End(_) => true,
            Call::Complete { .. } | Call::Release { .. } | Call::Drop { .. } | Call::Detach { .. } => {
                token(&other.call) == own
            }
            _ => false,
        };
        self.undisturbed(owner, op, ends).then_some(owner)
    }

    /// The completion that stood throughout the call: it was told before, and nobody could forget it.
    pub(super) fn done(&self, op: &Op) -> Option<&'a Op> {
        let completions = self.on_key_of(op).filter(|other| completes(other) && other.is_before(op));
        let completion = completions.max_by_key(|other| other.answered_at())?;
        self.undisturbed(completion, op, |other| other.call == Call::Forget).then_some(completion)
    }

    /// Whether somebody was told before the call that the key is not free, nothing that could free it began since and
    /// before the answer, and in between lies a whole call of this kind.
    pub(super) fn is_taken(&self, op: &Op, between: impl Fn(&Op) -> bool) -> bool {
        let first_attempt = |token: Option<u64>| token.and_then(|token| self.attempt(token)).is_none_or(|n| n == 1);
        let frees = |other: &Op| match other.call {
            // It may have been the owner for a while, as nobody was told, and have let go.
            _ if other.answer() == Some(Answer::Unheard) => true,
            Call::Forget | Call::ReleaseInterrupted { .. } => true,
            Call::Release { .. } | Call::Drop { release: true, .. } => first_attempt(token(&other.call)),
            _ => false,
        };
        let tells = |other: &&Op| {
            other.is_told()
                && other.is_before(op)
                && matches!(
                    other.answer(),
                    Some(
                        Answer::Fresh(_)
                            | Answer::Replay { .. }
                            | Answer::InFlight(_)
                            | Answer::Interrupted(..)
                            | Answer::Mismatch(_)
                            | Answer::Known { .. }
                    )
                )
        };
        let mut lie_between = self.ops.iter().filter(|other| other.key.is_none() || other.key == op.key);
        let Some(last) = lie_between.rfind(|other| other.is_told() && other.is_before(op) && between(other)) else {
            return false;
        };
        let mut told = self.on_key_of(op).filter(tells).filter(|other| other.is_before(last) || other.id == last.id);
        told.next_back().is_some_and(|told| self.undisturbed(told, op, frees))
    }

    /// The history with one call changed.
    pub(super) fn changing(&self, op: &Op, change: impl FnOnce(&mut Op)) -> Vec<Op> {
        let mut ops = self.ops.to_vec();
        change(ops.iter_mut().find(|other| other.id == op.id).unwrap());
        ops
    }

    /// The history with another answer to one call.
    pub(super) fn answering(&self, op: &Op, answer: Answer) -> Vec<Op> {
        assert_ne!(op.answer(), Some(answer), "nothing would change");
        self.changing(op, |op| op.answered = op.answered.map(|(at, _)| (at, answer)))
    }

    /// The history with another attempt shown in one answer.
    pub(super) fn showing(&self, op: &Op, shown: Shown) -> Vec<Op> {
        let answer = match op.answer() {
            Some(Answer::InFlight(_)) => Answer::InFlight(shown),
            Some(Answer::Interrupted(_, cause)) => Answer::Interrupted(shown, cause),
            other => panic!("{other:?} shows no attempt"),
        };
        self.answering(op, answer)
    }
}

/// The history with one token in the place of another, wherever it is named.
pub(super) fn renamed(ops: &[Op], from: u64, to: u64) -> Vec<Op> {
    let name = |token: u64| if token == from { to } else { token };
    let show = |shown: Shown| Shown { token: name(shown.token), ..shown };
    let call = |call: Call| match call {
        Call::Complete { token, body } => Call::Complete { token: name(token), body },
        Call::Release { token } => Call::Release { token: name(token) },
        Call::Drop { token, release } => Call::Drop { token: name(token), release },
        Call::Renew { token, guard, lease_ms } => Call::Renew { token: name(token), guard, lease_ms },
        Call::SaveCheckpoint { token, guard, bytes, lease_ms } => {
            Call::SaveCheckpoint { token: name(token), guard, bytes, lease_ms }
        }
        Call::Detach { token, lease_ms } => Call::Detach { token: name(token), lease_ms },
        Call::Reattach { token, lease_ms } => Call::Reattach { token: name(token), lease_ms },
        Call::TakeOver { token, ask } => Call::TakeOver { token: name(token), ask },
        Call::Resolve { token, body } => Call::Resolve { token: name(token), body },
        Call::ReleaseInterrupted { token } => Call::ReleaseInterrupted { token: name(token) },
        other => other,
    };
    let answer = |answer: Answer| match answer {
        Answer::Fresh(shown) => Answer::Fresh(show(shown)),
        Answer::InFlight(shown) => Answer::InFlight(show(shown)),
        Answer::Interrupted(shown, cause) => Answer::Interrupted(show(shown), cause),
        Answer::Known { request, name, shown, cause } => Answer::Known { request, name, shown: show(shown), cause },
        other => other,
    };
    let rename =
        |op: &Op| Op { call: call(op.call), answered: op.answered.map(|(at, told)| (at, answer(told))), ..*op };
    ops.iter().map(rename).collect()
}

/// The history in which `op` was over just before `other` began.
pub(super) fn moved_before(ops: &[Op], op: &Op, other: &Op) -> Vec<Op> {
    let wide = |at: u64| if at == NEVER { NEVER } else { at * 4 };
    let mut moved = ops.to_vec();
    for each in &mut moved {
        each.invoked = wide(each.invoked);
        each.answered = each.answered.map(|(at, answer)| (wide(at), answer));
        if each.id == op.id {
            each.invoked = wide(other.invoked) - 2;
            each.answered = each.answered.map(|(_, answer)| (wide(other.invoked) - 1, answer));
        }
    }
    moved
}
