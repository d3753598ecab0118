//! The acts on one key, and what each answer means to the oracle.

use std::time::Duration;

use keyonce::{
    Attempt, Body, Cause, Completion, Durability, Error, NotReattached, NotStored, OnDrop, OnInterrupted, Reservation,
    Reserve, ReserveOptions, Token,
};

use super::{Asked, Clients, Guard, attached};
use crate::oracle::{Bytes, Fate, Owner, fingerprint, key};
use crate::workload::{LEASE_MS, Op, RETENTION_MS, With, body};

impl Clients {
    pub(super) fn act(&mut self, op: Op) {
        match op {
            Op::Reserve { key, request, with } => self.reserve(key, request, with),
            Op::Complete { key, bytes } => self.complete(key, bytes, true),
            Op::CompleteWithoutBody { key, bytes } => self.complete(key, bytes, false),
            Op::Release { key } => self.release(key),
            Op::Drop { key } => {
                if let Some(guard) = self.take_guard(key) {
                    self.drop_guard(guard);
                }
            }
            Op::Interrupt { key } => {
                if let Some(guard) = self.take_guard(key) {
                    self.end_guard(guard, OnDrop::Interrupt, Reservation::interrupt);
                }
            }
            Op::SaveCheckpoint { key, bytes } => self.save_checkpoint(key, bytes),
            Op::Renew { key, lease_ms } => self.renew(key, lease_ms),
            Op::Detach { key, lease_ms } => self.detach(key, lease_ms),
            Op::Reattach { key } => self.reattach(key),
            Op::TakeOver { key } => self.take_over(key),
            Op::Resolve { key, bytes } => self.resolve(key, bytes),
            Op::ReleaseInterrupted { key } => self.release_interrupted(key),
            Op::Peek { key } => self.peek(key),
            Op::Sync => match self.store().sync() {
                Ok(()) => self.oracle.told_all(true),
                Err(error) => self.told(error),
            },
            Op::Once { key, with, work } => self.once(key, with, work),
            Op::Wait { key, with, wait_ms } => self.wait(key, with, wait_ms),
            Op::Leave { key } => self.leave(key),
            Op::ReleaseUnseen { key } => self.release_unseen(key),
            Op::ReserveBatch { seed } => self.reserve_batch(seed),
            Op::CompleteBatch { count, bytes } => self.complete_batch(count, bytes),
            Op::Close | Op::DropStore | Op::Advance { .. } | Op::StepWall { .. } | Op::Reboot { .. } => {
                unreachable!("not a call of one client")
            }
            Op::Kill | Op::LosePower { .. } => unreachable!("not a call of a client"),
        }
    }

    /// The reservation of `token`, if it is the key's latest and not done.
    pub(super) fn latest(&self, key: usize, token: Token) -> Option<Owner> {
        self.oracle.last(key).unfinished().filter(|owner| owner.token == Some(token.to_u64())).cloned()
    }

    /// An answer for which nothing was written rests on what is known of the key.
    fn told_as_it_was(&mut self, key: usize, level: Durability) {
        let known = self.oracle.last(key).owner().map(|owner| owner.durability);
        self.oracle.told(key, level == Durability::PowerLoss || known == Some(Durability::PowerLoss));
    }

    pub(super) fn is_held(&self, key: usize) -> bool {
        self.guards.iter().any(|guard| guard.key == key && self.latest(key, guard.reservation.token()).is_some())
    }

    /// What a client asks for, in its own words and in the store's.
    pub(super) fn asking(&self, request: u8, with: With) -> (Asked, ReserveOptions) {
        let asked = Asked {
            request,
            durability: with.durability.unwrap_or(self.settings.durability),
            lease_ms: with.lease_ms.unwrap_or(LEASE_MS),
            retention_ms: with.retention_ms.unwrap_or(RETENTION_MS),
            on_drop: if with.release_on_drop { OnDrop::Release } else { OnDrop::Interrupt },
        };
        let policy = if with.take_over { OnInterrupted::TakeOver } else { OnInterrupted::Surface };
        let options = ReserveOptions::new()
            .lease(Duration::from_millis(asked.lease_ms))
            .retention(Duration::from_millis(asked.retention_ms))
            .on_drop(asked.on_drop)
            .on_interrupted(policy);
        let options = match with.durability {
            Some(durability) => options.durability(durability),
            None => options,
        };
        (asked, options)
    }

    /// Who owns an unfinished key next, if `take_over` is the rule of who asks.
    pub(super) fn next_owner(&self, number: usize, asked: Asked, take_over: bool) -> Option<Owner> {
        let earlier = self.oracle.last(number).unfinished().filter(|_| take_over)?;
        Some(Owner {
            retention_ms: asked.retention_ms,
            durability: stronger(earlier.durability, asked.durability),
            ..taken_over(earlier)
        })
    }

    fn reserve(&mut self, number: usize, request: u8, with: With) {
        let (asked, options) = self.asking(request, with);
        let before = self.oracle.last(number).clone();
        let next = self.next_owner(number, asked, with.take_over);
        match self.store().reserve_with(&key(number), fingerprint(number, request), &options) {
            Ok(answer) => self.answered(number, asked, answer, next),
            // It may have been written for all that is known.
            Err(error) => {
                let forgotten = self.now_ms() >= before.kept_until_ms();
                let first = forgotten.then(|| self.first_owner(asked));
                for owner in first.into_iter().chain(next) {
                    let owner = self.leased(owner, asked);
                    self.oracle.asked(number, Fate::Held(owner));
                }
                self.told(error);
            }
        }
    }

    /// The first owner of a key that was absent.
    pub(super) fn first_owner(&self, asked: Asked) -> Owner {
        Owner {
            request: asked.request,
            token: None,
            attempt: 1,
            checkpoint: Bytes::default(),
            lease_end_ms: 0,
            retention_ms: asked.retention_ms,
            detached: false,
            durability: asked.durability,
        }
    }

    pub(super) fn leased(&self, owner: Owner, asked: Asked) -> Owner {
        Owner { lease_end_ms: self.now_ms() + asked.lease_ms, ..owner }
    }

    /// A client was told that it owns a key; `next` is who would be the next owner of an unfinished one.
    pub(super) fn owns(&mut self, number: usize, asked: Asked, view: &Attempt, next: Option<Owner>) {
        let before = self.oracle.last(number).clone();
        let owner = if view.number() == 1 {
            let forgotten = self.now_ms() >= before.kept_until_ms() && !self.is_held(number);
            assert!(forgotten || self.oracle.is_key_in_doubt(number), "key {number} is given away: {before:?}");
            self.first_owner(asked)
        } else {
            let owner = next.unwrap_or_else(|| panic!("key {number} is given away: {before:?}"));
            assert!(owner.attempt == view.number() && owner.request == asked.request, "{owner:?} of {number}");
            assert_eq!(Bytes(view.checkpoint().to_vec()), owner.checkpoint, "key {number}");
            owner
        };
        let token = view.token().to_u64();
        assert!(token > self.oracle.token_max(), "the token {token} of key {number} is not new");
        self.oracle.token_told(token);
        let owner = self.leased(Owner { token: Some(token), ..owner }, asked);
        let durable = owner.durability == Durability::PowerLoss;
        self.oracle.asked(number, Fate::Held(owner));
        self.oracle.confirmed(number, durable);
    }

    /// A reserve or a take-over was answered; `next` is who would be the next owner of an unfinished key.
    pub(super) fn answered(&mut self, number: usize, asked: Asked, answer: Reserve, next: Option<Owner>) {
        let before = self.oracle.last(number).clone();
        let now_ms = self.now_ms();
        match answer {
            Reserve::Fresh(reservation) => {
                self.owns(number, asked, &reservation.attempt_view(), next);
                let (on_drop, lease_ms) = (asked.on_drop, asked.lease_ms);
                self.guards.push(Guard { key: number, on_drop, lease_ms, reservation });
                return;
            }
            Reserve::Replay(response) => {
                let found = match response.body() {
                    Body::Kept(bytes) => (bytes, true),
                    Body::NotKept { reference } => (reference, false),
                };
                let Fate::Done { owner, bytes, kept, until_ms } = &before else { panic!("{before:?} was replayed") };
                assert_eq!(found, (bytes.0.as_slice(), *kept), "key {number}");
                assert!(owner.request == asked.request && now_ms < *until_ms, "key {number}: {before:?}");
            }
            Reserve::Interrupted(interrupted) => {
                let owner = self.latest(number, interrupted.token);
                assert!(owner.is_some_and(|owner| owner.request == asked.request), "key {number}: {before:?}");
                self.interrupted.push((number, asked, interrupted));
            }
            Reserve::InFlight(_) => {
                let owner = before.unfinished();
                assert!(owner.is_some_and(|owner| owner.request == asked.request), "key {number}: {before:?}");
            }
            Reserve::Mismatch(_) => {
                assert!(before.owner().is_some_and(|owner| owner.request != asked.request), "{number}: {before:?}");
            }
            Reserve::TooOld(_) => panic!("nobody said when the request was issued"),
        }
        self.told_as_it_was(number, asked.durability);
    }

    /// An owner's act was answered; `fate` is what it asked for.
    pub(super) fn acted(
        &mut self,
        key: usize,
        completion: Completion,
        latest: Option<Owner>,
        fate: impl FnOnce(Owner) -> Fate,
    ) {
        match (completion, latest) {
            (Completion::Done, Some(owner)) => {
                let fate = fate(owner);
                let durable = match &fate {
                    // Losing these leaves the key interrupted, and nobody was promised more.
                    Fate::Absent | Fate::Stopped { .. } => false,
                    Fate::Held(owner) | Fate::Done { owner, .. } => owner.durability == Durability::PowerLoss,
                };
                self.oracle.asked(key, fate);
                self.oracle.confirmed(key, durable);
            }
            (Completion::Superseded, None) => self.told_as_it_was(key, self.settings.durability),
            (answer, latest) => panic!("an act on key {key} was answered {answer:?}, its latest owner is {latest:?}"),
        }
    }

    fn complete(&mut self, key: usize, bytes: usize, kept: bool) {
        let Some(guard) = self.take_guard(key) else { return };
        let latest = self.latest(key, guard.reservation.token());
        let bytes = body(key, self.oracle.calls(), bytes);
        let stored = match kept {
            true => guard.reservation.complete(&bytes),
            false => guard.reservation.complete_without_body(&bytes),
        };
        let now_ms = self.now_ms();
        let done = |owner: Owner| done(owner, bytes, kept, now_ms);
        match stored {
            Ok(completion) => self.acted(key, completion, latest, done),
            Err(NotStored { error, reservation }) => {
                if let Some(owner) = latest {
                    self.oracle.asked(key, done(owner));
                }
                self.guards.push(Guard { reservation, ..guard });
                self.told(error);
            }
        }
    }

    fn release(&mut self, key: usize) {
        let Some(guard) = self.take_guard(key) else { return };
        let latest = self.latest(key, guard.reservation.token());
        let since_ms = self.now_ms();
        let released = |owner: Owner| given_back(owner, since_ms);
        match guard.reservation.release() {
            Ok(completion) => self.acted(key, completion, latest, released),
            Err(error) => {
                if let Some(owner) = latest {
                    self.oracle.asked(key, released(owner));
                }
                self.told(error);
            }
        }
    }

    fn drop_guard(&mut self, guard: Guard) {
        let on_drop = guard.on_drop;
        self.end_guard(guard, on_drop, drop);
    }

    /// A guard ends without an answer.
    fn end_guard(&mut self, guard: Guard, on_drop: OnDrop, end: impl FnOnce(Reservation)) {
        let latest = self.latest(guard.key, guard.reservation.token());
        end(guard.reservation);
        let Some(owner) = latest else { return };
        let since_ms = self.now_ms();
        let fate = match on_drop {
            OnDrop::Release => given_back(owner, since_ms),
            OnDrop::Interrupt => Fate::Stopped { owner: attached(owner), cause: Cause::Dropped, since_ms },
        };
        self.oracle.asked(guard.key, fate);
        if !self.is_shaken() {
            self.oracle.confirmed(guard.key, false);
        }
    }

    fn save_checkpoint(&mut self, key: usize, bytes: usize) {
        let Some(guard) = self.take_guard(key) else { return };
        let latest = self.latest(key, guard.reservation.token());
        let bytes = body(key, self.oracle.calls(), bytes);
        let now_ms = self.now_ms();
        let saved = |mut owner: Owner| {
            if owner.lease_end_ms <= now_ms {
                owner.lease_end_ms = now_ms + guard.lease_ms;
            }
            Fate::Held(Owner { checkpoint: Bytes(bytes.clone()), ..owner })
        };
        match guard.reservation.save_checkpoint(&bytes) {
            Ok(completion) => self.acted(key, completion, latest, saved),
            Err(error) => self.asked_in_vain(key, error, latest.map(saved)),
        }
        self.guards.push(guard);
    }

    fn renew(&mut self, key: usize, lease_ms: u64) {
        let Some(guard) = self.take_guard(key) else { return };
        let latest = self.latest(key, guard.reservation.token());
        let lease_end_ms = self.now_ms() + lease_ms;
        let renewed = |owner: Owner| Fate::Held(Owner { lease_end_ms, ..owner });
        match guard.reservation.renew(Duration::from_millis(lease_ms)) {
            Ok(completion) => self.acted(key, completion, latest, renewed),
            Err(error) => self.asked_in_vain(key, error, latest.map(renewed)),
        }
        self.guards.push(guard);
    }

    fn detach(&mut self, key: usize, lease_ms: u64) {
        let Some(guard) = self.take_guard(key) else { return };
        let latest = self.latest(key, guard.reservation.token());
        let lease_end_ms = self.now_ms() + lease_ms;
        let detached = |owner: Owner| Fate::Held(Owner { lease_end_ms, detached: true, ..owner });
        match guard.reservation.detach(Duration::from_millis(lease_ms)) {
            Ok(token) => {
                self.detached.push((key, token));
                self.acted(key, Completion::Done, latest, detached);
            }
            Err(NotStored { error, reservation }) => {
                match latest {
                    Some(owner) => self.asked_in_vain(key, error, Some(detached(owner))),
                    None => self.told_as_it_was(key, self.settings.durability),
                }
                self.guards.push(Guard { reservation, ..guard });
            }
        }
    }

    fn reattach(&mut self, number: usize) {
        let Some(at) = self.detached.iter().rposition(|(other, _)| *other == number) else {
            return;
        };
        let token = self.detached[at].1;
        let latest = self.latest(number, token);
        let lease_end_ms = self.now_ms() + LEASE_MS;
        let reattached = |owner: Owner| Fate::Held(Owner { lease_end_ms, ..attached(owner) });
        match self.store().reattach(&key(number), token) {
            Ok(reservation) => {
                let owner = latest.filter(|owner| owner.detached);
                assert!(owner.is_some(), "key {number} has no detached owner of token {token}");
                self.acted(number, Completion::Done, owner, reattached);
                self.guards.push(Guard { key: number, on_drop: OnDrop::Interrupt, lease_ms: LEASE_MS, reservation });
            }
            Err(NotReattached::InFlight | NotReattached::Superseded) => {
                self.told_as_it_was(number, self.settings.durability);
            }
            Err(NotReattached::Store(error)) => self.asked_in_vain(number, error, latest.map(reattached)),
        }
    }

    fn asked_in_vain(&mut self, key: usize, error: Error, fate: Option<Fate>) {
        if let Some(fate) = fate {
            self.oracle.asked(key, fate);
        }
        self.told(error);
    }

    fn take_over(&mut self, number: usize) {
        let Some((asked, interrupted)) = self.take_interrupted(number) else {
            return;
        };
        let next = self.latest(number, interrupted.token).as_ref().map(taken_over);
        match interrupted.take_over() {
            Ok(answer) => self.answered(number, asked, answer, next),
            Err(error) => {
                let fate = next.map(|owner| Fate::Held(self.leased(owner, asked)));
                self.asked_in_vain(number, error, fate);
            }
        }
    }

    fn resolve(&mut self, key: usize, bytes: usize) {
        let Some((_, interrupted)) = self.take_interrupted(key) else {
            return;
        };
        let latest = self.latest(key, interrupted.token);
        let bytes = body(key, self.oracle.calls(), bytes);
        let now_ms = self.now_ms();
        let done = |owner: Owner| done(owner, bytes.clone(), true, now_ms);
        match interrupted.resolve(&bytes) {
            Ok(Completion::Superseded) => self.told_as_it_was(key, self.settings.durability),
            Ok(Completion::Done) => self.acted(key, Completion::Done, latest, done),
            Err(error) => self.asked_in_vain(key, error, latest.map(done)),
        }
    }

    fn release_interrupted(&mut self, key: usize) {
        let Some((_, interrupted)) = self.take_interrupted(key) else {
            return;
        };
        let latest = self.latest(key, interrupted.token);
        match interrupted.release() {
            Ok(Completion::Superseded) => self.told_as_it_was(key, self.settings.durability),
            Ok(Completion::Done) => self.acted(key, Completion::Done, latest, |_| Fate::Absent),
            Err(error) => self.asked_in_vain(key, error, latest.map(|_| Fate::Absent)),
        }
    }

    fn peek(&mut self, number: usize) {
        match self.store().peek(&key(number)) {
            Ok(info) => {
                let known = self.oracle.last(number).owner().and_then(|owner| owner.token);
                assert!(info.is_none_or(|info| Some(info.token.to_u64()) == known), "key {number}");
                self.told_as_it_was(number, self.settings.durability);
            }
            Err(error) => self.told(error),
        }
    }
}

/// What a completion makes of a reservation.
pub(super) fn done(owner: Owner, bytes: Vec<u8>, kept: bool, now_ms: u64) -> Fate {
    let until_ms = now_ms + owner.retention_ms;
    Fate::Done { owner, bytes: Bytes(bytes), kept, until_ms }
}

/// What a release makes of a reservation: of an earlier attempt the outcome is still unknown.
pub(super) fn given_back(owner: Owner, since_ms: u64) -> Fate {
    if owner.attempt == 1 {
        Fate::Absent
    } else {
        Fate::Stopped { owner: attached(owner), cause: Cause::Dropped, since_ms }
    }
}

/// Who owns a key after `earlier`, for whom somebody takes over.
fn taken_over(earlier: &Owner) -> Owner {
    Owner { token: None, attempt: earlier.attempt + 1, detached: false, ..earlier.clone() }
}

fn stronger(one: Durability, other: Durability) -> Durability {
    if one == Durability::PowerLoss { one } else { other }
}
