//! The sequential contract of one key: what each call does to it, and how it is answered.
//!
//! It is the table of states, written once more and apart from the crate: no record, no log, no index. An answer that
//! was not heard is `None`; then every effect that the call may have had is a step.

pub(crate) use super::words::{Answer, Ask, Bytes, Call, Cause, End, Name, Policy, Shown};

/// How long keys are remembered in recorded histories.
pub(crate) const RETENTION_MS: u64 = 30 * 24 * 60 * 60 * 1000;

/// Time passes either by a leap of this length, or by moments that are together much shorter than a retention. So every
/// key that nobody holds is gone after a leap, done or unfinished, and none before: an unfinished one is kept for at
/// least a retention beyond its lease, and no longer than this.
pub(crate) const LEAP_MS: u64 = 400 * 24 * 60 * 60 * 1000;

/// Some of the causes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Causes {
    crash: bool,
    dropped: bool,
    lapsed: bool,
}

impl Causes {
    const ANY: Self = Self { crash: true, dropped: true, lapsed: true };

    fn only(cause: Cause) -> Self {
        Self { crash: cause == Cause::Crash, dropped: cause == Cause::Dropped, lapsed: cause == Cause::LeaseLapsed }
    }

    fn contains(self, cause: Cause) -> bool {
        match cause {
            Cause::Crash => self.crash,
            Cause::Dropped => self.dropped,
            Cause::LeaseLapsed => self.lapsed,
        }
    }
}

/// The latest attempt at a key that is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Owner {
    /// `None`: nobody was ever told.
    token: Option<u64>,
    attempt: u64,
    request: u64,
    checkpoint: Bytes,
    /// The call that made the living guard.
    guard: Option<u64>,
    detached: bool,
    /// 0 once it has lapsed or was interrupted.
    lease_end_ms: u64,
    /// How many leaps there had been when something last happened to it.
    touched_leaps: u64,
    /// Why the attempt before it may have stopped.
    earlier: Causes,
}

/// What is known of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Absent {
        /// Whoever gave the key back. That needs no sync, so a power loss may undo it.
        before: Option<Owner>,
    },
    InFlight(Owner),
    /// For one of these causes: which, is not known until somebody was told.
    Interrupted(Owner, Causes),
    Done {
        token: Option<u64>,
        attempt: u64,
        request: u64,
        body: Bytes,
        /// How many leaps there had been.
        touched_leaps: u64,
    },
}

/// A key, and the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// Some process of the history ends by a power loss, which may undo what needed no sync.
    loses_power: bool,
    now_ms: u64,
    /// The largest token that a reservation of the key is known to have had.
    token_max: u64,
    phase: Phase,
}

/// How far a call has come that takes more than one step: it has found that a handle is of no use any more.
const TOO_LATE: u8 = 1;
/// It was made the owner, and nobody was told that yet.
const UNSEEN: u8 = 2;

/// What one step of a call may make of a key: the state, and how far the call has come; `None` when it is through.
/// Empty when the call cannot have taken effect here and been answered so. A call that was not answered and changes
/// nothing here takes no step.
pub(crate) fn steps(state: &State, op: &super::Op, progress: u8) -> Vec<(Option<u8>, State)> {
    let state = state.observed();
    let answer = op.answer();
    let through = |next: Option<State>| next.map(|next| (None, next)).into_iter().collect();
    let next: Vec<_> = match op.call {
        _ if progress == UNSEEN => state.unseen(op),
        Call::TakeOver { token, .. } if progress == 0 && state.stopped(token).is_none() => {
            vec![(Some(TOO_LATE), state)]
        }
        Call::TakeOver { token, ask } if progress == 0 => {
            let become_owner = |answer| {
                state
                    .stopped(token)
                    .and_then(|owner| state.take_over((owner, state.causes()), ask.lease_ms, op.id, answer))
            };
            state.told_or_unseen(answer, false, become_owner)
        }
        Call::TakeOver { ask, .. } => {
            let ask = Ask { policy: Policy::Surface, ..ask };
            state.told_or_unseen(answer, false, |answer| state.reserve(ask, op.id, answer))
        }
        Call::Reserve(ask) => state.told_or_unseen(answer, ask.waits, |answer| state.reserve(ask, op.id, answer)),
        Call::Peek => through(state.peek(answer)),
        Call::Forget if answer == Some(Answer::Unheard) => vec![(None, state), (None, state.forgotten())],
        Call::Forget => through(state.forget(answer)),
        Call::Advance { ms } => vec![(None, State { now_ms: state.now_ms + ms, ..state }.observed())],
        Call::End(_) => unreachable!("the end of a process is no call"),
        Call::Reattach { token, lease_ms } => state.reattach(token, lease_ms, op.id, answer),
        Call::Complete { .. }
        | Call::Release { .. }
        | Call::Drop { .. }
        | Call::Renew { .. }
        | Call::SaveCheckpoint { .. }
        | Call::Detach { .. }
        | Call::Resolve { .. }
        | Call::ReleaseInterrupted { .. } => state.act(&op.call, answer),
    };
    let hears =
        op.is_told() && answer != Some(Answer::Unheard) && !matches!(op.call, Call::Drop { .. } | Call::Advance { .. });
    let firm = |(progress, next): (Option<u8>, State)| match (state.phase, next.phase) {
        // Somebody was told that the key is free, so that is not undone any more.
        (Phase::Absent { .. }, Phase::Absent { .. }) if hears && progress.is_none() => {
            (progress, next.with(Phase::Absent { before: None }))
        }
        _ => (progress, next),
    };
    next.into_iter().map(firm).collect()
}

impl State {
    /// That of a key which nobody has named, in a history whose processes may lose power or not.
    pub(crate) fn first(loses_power: bool) -> Self {
        Self { loses_power, now_ms: 0, token_max: 0, phase: Phase::Absent { before: None } }
    }

    /// As a caller must see it now.
    fn observed(self) -> Self {
        let now_ms = self.now_ms;
        let phase = match self.phase {
            Phase::Done { touched_leaps, .. } if touched_leaps < self.leaps() => Phase::Absent { before: None },
            Phase::InFlight(owner) | Phase::Interrupted(owner, _)
                if owner.guard.is_none() && owner.touched_leaps < self.leaps() =>
            {
                Phase::Absent { before: None }
            }
            Phase::InFlight(owner) if owner.lease_end_ms <= now_ms => {
                Phase::Interrupted(Owner { lease_end_ms: 0, ..owner }, Causes::only(Cause::LeaseLapsed))
            }
            as_it_is => as_it_is,
        };
        Self { phase, ..self }
    }

    /// What the next process may find.
    pub(crate) fn ended(self, end: End) -> Vec<Self> {
        let state = self.observed();
        let gone = |owner: Owner| Owner { guard: None, lease_end_ms: 0, ..owner };
        let crash = |causes: Causes| Causes { crash: true, ..causes };
        let phase = match (state.phase, end) {
            // Work that went on elsewhere outlives the process.
            (Phase::InFlight(owner), _) if owner.detached => Phase::InFlight(owner),
            (Phase::InFlight(owner), End::Kill | End::PowerLoss) => {
                Phase::Interrupted(gone(owner), Causes::only(Cause::Crash))
            }
            // The close itself says that it left somebody at work.
            (Phase::InFlight(owner), End::Close) => {
                let owner = Owner { touched_leaps: state.leaps(), ..gone(owner) };
                Phase::Interrupted(owner, Causes::only(Cause::LeaseLapsed))
            }
            // Whether the close says it once more, and so keeps the key for another while, is left to it.
            (Phase::Interrupted(owner, causes), End::Close) if owner.guard.is_some() => {
                let now = Owner { touched_leaps: state.leaps(), ..gone(owner) };
                return [gone(owner), now].map(|owner| state.with(Phase::Interrupted(owner, causes))).to_vec();
            }
            // Whether the lapse or the crash came first is not known to whoever comes later.
            (Phase::Interrupted(owner, causes), End::Kill) if owner.guard.is_some() => {
                Phase::Interrupted(gone(owner), crash(causes))
            }
            (Phase::Interrupted(owner, causes), End::Kill | End::Close) => Phase::Interrupted(gone(owner), causes),
            (Phase::Interrupted(owner, causes), End::PowerLoss) => Phase::Interrupted(gone(owner), crash(causes)),
            (Phase::Absent { before: Some(owner) }, End::PowerLoss) => {
                let undone = State { phase: Phase::Interrupted(gone(owner), Causes::ANY), ..state };
                return vec![State { phase: Phase::Absent { before: None }, ..state }, undone];
            }
            (Phase::Absent { .. }, _) => Phase::Absent { before: None },
            (done @ Phase::Done { .. }, _) => done,
        };
        vec![Self { phase, ..state }]
    }

    fn leaps(&self) -> u64 {
        self.now_ms / LEAP_MS
    }

    fn with(self, phase: Phase) -> Self {
        Self { phase, ..self }
    }

    /// The owner with this token of a key that is not done.
    fn latest(&self, token: u64) -> Option<Owner> {
        match self.phase {
            Phase::InFlight(owner) | Phase::Interrupted(owner, _) => Some(owner).filter(|_| owner.token == Some(token)),
            Phase::Absent { .. } | Phase::Done { .. } => None,
        }
    }

    /// The owner with this token of an interrupted key.
    /// Why the key may be interrupted.
    fn causes(&self) -> Causes {
        match self.phase {
            Phase::Interrupted(_, causes) => causes,
            Phase::Absent { .. } | Phase::InFlight(_) | Phase::Done { .. } => Causes::default(),
        }
    }

    fn stopped(&self, token: u64) -> Option<Owner> {
        match self.phase {
            Phase::Interrupted(..) => self.latest(token),
            Phase::Absent { .. } | Phase::InFlight(_) | Phase::Done { .. } => None,
        }
    }

    /// The state in which what was shown is true of the owner: it may tell a token that nobody knew.
    fn showing(self, owner: Owner, shown: Shown) -> Option<(Self, Owner)> {
        let token_fits = match owner.token {
            Some(token) => token == shown.token,
            None => shown.token > self.token_max,
        };
        let fits = token_fits && (owner.attempt, owner.checkpoint) == (shown.attempt, shown.checkpoint);
        let state = Self { token_max: self.token_max.max(shown.token), ..self };
        fits.then_some((state, Owner { token: Some(shown.token), ..owner }))
    }

    /// The key gets an owner, the `attempt`-th, by the call `guard`.
    fn owned_by(self, next: Owner, answer: Option<Answer>) -> Option<Self> {
        match answer {
            None => Some(self.with(Phase::InFlight(next))),
            Some(Answer::Fresh(shown)) if shown.token > self.token_max => {
                let (state, owner) = self.showing(next, shown)?;
                Some(state.with(Phase::InFlight(owner)))
            }
            Some(_) => None,
        }
    }

    fn take_over(
        self,
        (owner, earlier): (Owner, Causes),
        lease_ms: u64,
        guard: u64,
        answer: Option<Answer>,
    ) -> Option<Self> {
        let next = Owner {
            token: None,
            attempt: owner.attempt + 1,
            guard: Some(guard),
            detached: false,
            lease_end_ms: self.now_ms + lease_ms,
            touched_leaps: self.leaps(),
            earlier,
            ..owner
        };
        self.owned_by(next, answer)
    }

    fn reserve(self, ask: Ask, guard: u64, answer: Option<Answer>) -> Option<Self> {
        let (request, name) = match self.phase {
            Phase::Absent { .. } => {
                let first = Owner {
                    token: None,
                    attempt: 1,
                    request: ask.request,
                    checkpoint: 0,
                    guard: Some(guard),
                    detached: false,
                    lease_end_ms: self.now_ms + ask.lease_ms,
                    touched_leaps: self.leaps(),
                    earlier: Causes::default(),
                };
                return self.owned_by(first, answer);
            }
            Phase::InFlight(owner) => (owner.request, Name::InFlight),
            Phase::Interrupted(owner, _) => (owner.request, Name::Interrupted),
            Phase::Done { request, .. } => (request, Name::Done),
        };
        if request != ask.request {
            return (answer? == Answer::Mismatch(name)).then_some(self);
        }
        match (self.phase, answer) {
            (Phase::InFlight(owner), Some(Answer::InFlight(shown))) => {
                let (state, owner) = self.showing(owner, shown)?;
                Some(state.with(Phase::InFlight(owner)))
            }
            (Phase::Interrupted(owner, causes), None | Some(Answer::Fresh(_))) => {
                let all = [Cause::Crash, Cause::Dropped, Cause::LeaseLapsed];
                if all.into_iter().any(|cause| causes.contains(cause) && ask.policy.takes_over(cause)) {
                    self.take_over((owner, causes), ask.lease_ms, guard, answer)
                } else {
                    None
                }
            }
            (Phase::Interrupted(owner, causes), Some(Answer::Interrupted(shown, cause))) => {
                let fits = causes.contains(cause) && !ask.policy.takes_over(cause);
                let (state, owner) = self.showing(owner, shown)?;
                fits.then_some(state.with(Phase::Interrupted(owner, Causes::only(cause))))
            }
            (Phase::Done { body, attempt, .. }, Some(told)) => {
                (told == Answer::Replay { body, attempt }).then_some(self)
            }
            (Phase::Absent { .. } | Phase::InFlight(_) | Phase::Interrupted(..) | Phase::Done { .. }, _) => None,
        }
    }

    /// A call that may become the owner: it is told so at once; or, where it waits or goes away unheard, it may be made
    /// the owner before anybody is told.
    fn told_or_unseen(
        self,
        answer: Option<Answer>,
        waits: bool,
        become_owner: impl Fn(Option<Answer>) -> Option<Self>,
    ) -> Vec<(Option<u8>, Self)> {
        let goes_unheard = answer == Some(Answer::Unheard);
        let told = if goes_unheard { Some(self) } else { become_owner(answer) };
        let unseen = if goes_unheard || waits { become_owner(None) } else { None };
        let told = told.into_iter().map(|state| (None, state));
        told.chain(unseen.into_iter().map(|state| (Some(UNSEEN), state))).collect()
    }

    /// What becomes of an owner that nobody was told of: it is told, and its lease begins; or it goes away, and the key
    /// is released. So it is, too, when the lease lapses before, and when somebody else decides the key's fate it is no
    /// owner any more; then it goes on to wait.
    fn unseen(self, op: &super::Op) -> Vec<(Option<u8>, Self)> {
        let unheard = op.answer() == Some(Answer::Unheard);
        let goes_on = if unheard { None } else { Some(0) };
        let (owner, lapsed) = match self.phase {
            Phase::InFlight(owner) if owner.guard == Some(op.id) => (owner, false),
            Phase::Interrupted(owner, _) if owner.guard == Some(op.id) => (owner, true),
            _ => return vec![(goes_on, self)],
        };
        let mut next = Vec::new();
        match (op.call, op.answer()) {
            (Call::Reattach { lease_ms, .. }, _) => {
                let lease_end_ms = self.now_ms + lease_ms;
                let owner = Owner { guard: None, detached: true, lease_end_ms, touched_leaps: self.leaps(), ..owner };
                return vec![(None, self.with(Phase::InFlight(owner)))];
            }
            (Call::Reserve(Ask { lease_ms, .. }), Some(Answer::Fresh(shown))) => {
                next.extend(self.showing(owner, shown).map(|(state, owner)| {
                    let lease_end_ms = self.now_ms + lease_ms;
                    (None, state.with(Phase::InFlight(Owner { lease_end_ms, touched_leaps: self.leaps(), ..owner })))
                }));
            }
            _ => {}
        }
        if unheard || lapsed {
            next.push((goes_on, self.with(self.released(owner))));
        }
        next
    }

    fn interrupted(self, owner: Owner) -> Phase {
        let owner = Owner { guard: None, detached: false, lease_end_ms: 0, touched_leaps: self.leaps(), ..owner };
        Phase::Interrupted(owner, Causes::only(Cause::Dropped))
    }

    fn released(self, owner: Owner) -> Phase {
        match self.interrupted(owner) {
            // Why the attempt before had stopped; unless its owner came back in between, of which the log tells no more.
            Phase::Interrupted(stopped, dropped) if owner.attempt > 1 => {
                let Causes { crash, lapsed, .. } = owner.earlier;
                Phase::Interrupted(stopped, Causes { crash, lapsed, ..dropped })
            }
            _ => self.free(owner),
        }
    }

    fn free(self, owner: Owner) -> Phase {
        Phase::Absent { before: Some(owner).filter(|_| self.loses_power) }
    }

    fn peek(self, answer: Option<Answer>) -> Option<Self> {
        match (self.phase, answer?) {
            (_, Answer::Unheard) => Some(self),
            (Phase::Absent { .. }, told) => (told == Answer::Unknown).then_some(self),
            (Phase::InFlight(owner), Answer::Known { request, name: Name::InFlight, shown, cause: None }) => {
                let (state, owner) = self.showing(owner, shown)?;
                (request == owner.request).then_some(state.with(Phase::InFlight(owner)))
            }
            (
                Phase::Interrupted(owner, causes),
                Answer::Known { request, name: Name::Interrupted, shown, cause: Some(cause) },
            ) => {
                let (state, owner) = self.showing(owner, shown)?;
                let fits = request == owner.request && causes.contains(cause);
                fits.then_some(state.with(Phase::Interrupted(owner, Causes::only(cause))))
            }
            (
                Phase::Done { token, attempt, request, body, touched_leaps },
                Answer::Known { request: told, name: Name::Done, shown, cause: None },
            ) => {
                // What was completed by one who did not live to be told has a token that nobody knew.
                let fits = token.is_none_or(|token| token == shown.token) && shown.checkpoint == 0;
                let fits = fits && (request, attempt) == (told, shown.attempt);
                let state = Self { token_max: self.token_max.max(shown.token), ..self };
                let done = Phase::Done { token: Some(shown.token), attempt, request, body, touched_leaps };
                fits.then_some(state.with(done))
            }
            (Phase::InFlight(_) | Phase::Interrupted(..) | Phase::Done { .. }, _) => None,
        }
    }

    fn forget(self, answer: Option<Answer>) -> Option<Self> {
        let (told, changed) = match self.phase {
            Phase::Absent { .. } => (Answer::Unknown, false),
            Phase::InFlight(_) | Phase::Interrupted(..) | Phase::Done { .. } => (Answer::Done, true),
        };
        let fits = answer.map_or(changed, |answer| answer == told);
        fits.then_some(if changed { self.forgotten() } else { self })
    }

    fn forgotten(self) -> Self {
        self.with(Phase::Absent { before: None })
    }

    fn reattach(self, token: u64, lease_ms: u64, guard: u64, answer: Option<Answer>) -> Vec<(Option<u8>, Self)> {
        let told = match self.latest(token) {
            Some(Owner { guard: Some(_), .. }) => Answer::Held,
            Some(owner) if owner.detached => Answer::Done,
            Some(_) | None => Answer::Superseded,
        };
        let attached = self.latest(token).filter(|_| told == Answer::Done).map(|owner| {
            let (lease_end_ms, touched_leaps) = (self.now_ms + lease_ms, self.leaps());
            self.with(Phase::InFlight(Owner {
                guard: Some(guard),
                detached: false,
                lease_end_ms,
                touched_leaps,
                ..owner
            }))
        });
        match answer {
            // Nobody holds it: it is detached again.
            Some(Answer::Unheard) => {
                let detached = attached.map(|state| (Some(UNSEEN), state));
                [(None, self)].into_iter().chain(detached).collect()
            }
            Some(answer) if answer == told => vec![(None, attached.unwrap_or(self))],
            Some(_) => Vec::new(),
            None => attached.map(|state| (None, state)).into_iter().collect(),
        }
    }

    /// The act of an owner or of somebody with the handle of an interruption.
    fn act(self, call: &Call, answer: Option<Answer>) -> Vec<(Option<u8>, Self)> {
        let now_ms = self.now_ms;
        let guarded = |token, guard| self.latest(token).filter(|owner| owner.guard == Some(guard));
        let in_flight = |owner: Owner| Phase::InFlight(Owner { touched_leaps: self.leaps(), ..owner });
        let done = |owner: Owner, body| Phase::Done {
            token: owner.token,
            attempt: owner.attempt,
            request: owner.request,
            body,
            touched_leaps: self.leaps(),
        };
        let phase = match *call {
            Call::Complete { token, body } => self.latest(token).map(|owner| done(owner, body)),
            Call::Resolve { token, body } => self.stopped(token).map(|owner| done(owner, body)),
            Call::ReleaseInterrupted { token } => self.stopped(token).map(|owner| self.free(owner)),
            Call::Release { token } | Call::Drop { token, release: true } => {
                self.latest(token).map(|owner| self.released(owner))
            }
            Call::Drop { token, release: false } => self.latest(token).map(|owner| self.interrupted(owner)),
            Call::Renew { token, guard, lease_ms } => {
                guarded(token, guard).map(|owner| in_flight(Owner { lease_end_ms: now_ms + lease_ms, ..owner }))
            }
            Call::SaveCheckpoint { token, guard, bytes, lease_ms } => guarded(token, guard).map(|owner| {
                let lapsed = self.stopped(token).is_some();
                let lease_end_ms = if lapsed { now_ms + lease_ms } else { owner.lease_end_ms };
                in_flight(Owner { checkpoint: bytes, lease_end_ms, ..owner })
            }),
            Call::Detach { token, lease_ms } => self.latest(token).map(|owner| {
                in_flight(Owner { guard: None, detached: true, lease_end_ms: now_ms + lease_ms, ..owner })
            }),
            Call::Reserve(_)
            | Call::TakeOver { .. }
            | Call::Reattach { .. }
            | Call::Peek
            | Call::Forget
            | Call::Advance { .. }
            | Call::End(_) => unreachable!("{call:?} is no act of an owner"),
        };
        let told = if phase.is_some() { Answer::Done } else { Answer::Superseded };
        let acted = phase.map(|phase| (None, self.with(phase)));
        match answer {
            None => acted.into_iter().collect(),
            Some(Answer::Unheard) => {
                // Whoever gave the reservation into the call does not get it back: at least it falls.
                let otherwise = match *call {
                    Call::Complete { token, .. } | Call::Release { token } | Call::Detach { token, .. } => {
                        self.latest(token).map_or(self, |owner| self.with(self.interrupted(owner)))
                    }
                    _ => self,
                };
                acted.into_iter().chain([(None, otherwise)]).collect()
            }
            Some(Answer::Over) => vec![acted.unwrap_or((None, self))],
            Some(answer) if answer == told => vec![acted.unwrap_or((None, self))],
            Some(_) => Vec::new(),
        }
    }
}
