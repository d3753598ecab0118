//! One act: the store is asked, the model is asked, and the two agree.

use std::time::{Duration, UNIX_EPOCH};

use keyonce::testing::{Expected, Owner};
use keyonce::{Fingerprint, Key, KeyState, OnDrop, Reservation, Reserve, ReserveOptions};

use super::{Driver, HELD_MAX, KEYS, WINDOW_MS, agree, fingerprint, key};
use crate::machine::{Op, With};
use crate::workload::body;

/// How often a helper thread is looked for before it counts as idle.
const LOOKS_MAX: u32 = 1_000_000;

/// Takes one of what is held.
pub(super) fn take<T>(held: &mut Vec<T>, pick: u8) -> Option<T> {
    let at = index(held.len(), pick)?;
    Some(held.remove(at))
}

/// The newest is picked as often as all others together.
pub(super) fn index(len: usize, pick: u8) -> Option<usize> {
    let newest = len.checked_sub(1)?;
    Some(if pick < 128 { newest } else { usize::from(pick) % len })
}

/// Keeps one more, and lets the oldest go when there are too many.
pub(super) fn keep<T>(held: &mut Vec<T>, one: T, held_max: usize) -> Option<T> {
    held.push(one);
    (held.len() > held_max).then(|| held.remove(0))
}

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A millisecond before, at, or after.
fn shifted(moment: Duration, offset_ms: i8) -> Duration {
    moment - ms(1) + ms(u64::try_from(offset_ms + 1).unwrap())
}

impl Driver {
    pub(crate) fn act(&mut self, op: Op) -> Result<(), String> {
        self.tally.ops += 1;
        self.calls += 1;
        if self.faults.is_none() { self.act_soundly(op) } else { self.act_amid_faults(op) }
    }

    /// One act on a disk that does what it is told.
    pub(super) fn act_soundly(&mut self, op: Op) -> Result<(), String> {
        match op {
            Op::Reserve { key, request, with } => self.reserve(key, request, with)?,
            Op::Complete { pick, bytes } => self.complete(pick, bytes, true)?,
            Op::CompleteWithoutBody { pick, bytes } => self.complete(pick, bytes, false)?,
            Op::Release { pick } => self.release(pick)?,
            Op::Drop { pick } => {
                if let Some((owner, reservation)) = take(&mut self.guards, pick) {
                    self.drop_guard(&owner, reservation)?;
                }
            }
            Op::Interrupt { pick } => {
                if let Some((owner, reservation)) = take(&mut self.guards, pick) {
                    reservation.interrupt();
                    self.model.interrupt(&owner);
                    self.until_guards_are_gone();
                }
            }
            Op::Renew { pick, lease_ms, by_view } => self.renew(pick, ms(lease_ms), by_view)?,
            Op::SaveCheckpoint { pick, bytes, by_view } => self.save_checkpoint(pick, bytes, by_view)?,
            Op::Detach { pick, lease_ms } => self.detach(pick, ms(lease_ms))?,
            Op::Reattach { pick } => self.reattach(pick)?,
            Op::TakeOver { pick } => self.take_over(pick)?,
            Op::Resolve { pick, bytes } => self.resolve(pick, bytes)?,
            Op::ReleaseInterrupted { pick } => self.release_interrupted(pick)?,
            Op::AskAgain { pick } => self.ask_again(pick)?,
            Op::DropHandle { pick } => {
                take(&mut self.interrupted, pick);
                take(&mut self.running, pick);
            }
            Op::Forget { key, bytes } => self.forget(key, bytes)?,
            Op::Wait { key, request, with, wait_ms } => self.wait(key, request, with, ms(wait_ms))?,
            Op::WaitAgain { pick, wait_ms } => self.wait_again(pick, ms(wait_ms))?,
            Op::Poll { pick } => self.poll(pick)?,
            Op::GiveUp { pick } => self.give_up(pick)?,
            Op::ReserveBatch { asks, waits } => self.reserve_batch(asks, waits)?,
            Op::CompleteBatch { pick, bytes } => self.complete_batch(pick, bytes)?,
            Op::Once { key, request, work } => self.once(key, request, work)?,
            Op::Peek { key: number } => self.peek(&key(number))?,
            Op::PeekAll => self.peek_all()?,
            Op::Sync => self.sync()?,
            Op::AdvanceTo { pick, offset } => self.advance_to(pick, offset),
            Op::Advance { ms: by_ms } => self.clock.advance(ms(by_ms)),
            Op::Reopen(way, reboot) => self.reopen(way, reboot)?,
            Op::Fail { after, fault, then } => self.fail(after, fault, then),
            Op::Heal => self.heal()?,
        }
        self.learn()
    }

    pub(super) fn sync(&mut self) -> Result<(), String> {
        let answer = self.store().sync();
        let expected = self.model.sync();
        answer.map_err(|error| self.failed("sync", &error))?;
        agree("sync", &Ok(()), &expected)
    }

    /// Tells the model the tokens of those who were handed a key and have not yet taken it.
    pub(super) fn learn(&mut self) -> Result<(), String> {
        let mut owned = Vec::new();
        for key in self.model.nameless() {
            let seen = self.store().peek(&key).map_err(|error| self.failed("peeking", &error))?;
            let Some(seen) = seen.filter(|seen| seen.state == KeyState::InFlight) else {
                return Err(self.waits_for_room(&format!("{key:?}, handed over")));
            };
            owned.push((key, seen));
        }
        owned.sort_by_key(|(_, seen)| seen.token);
        for (key, seen) in &owned {
            self.model.learn(key, seen.token);
        }
        owned.iter().try_for_each(|(key, seen)| self.peeked(key, Some(seen)))
    }

    pub(super) fn agree(&mut self, call: &str, store: &Expected, model: &Expected) -> Result<(), String> {
        if let Expected::Refused(kind) = store
            && store != model
            && self.may_be_refused(*kind)
        {
            self.refused = Some(*kind);
        }
        self.tally.count(call, model);
        agree(call, store, model)
    }

    pub(super) fn bytes(&self, bytes: usize) -> Vec<u8> {
        body(0, usize::try_from(self.calls).unwrap(), bytes)
    }

    pub(super) fn options(&mut self, with: With) -> ReserveOptions {
        let mut options = ReserveOptions::new();
        if let Some(durability) = with.durability {
            options = options.durability(durability);
        }
        if let Some(lease_ms) = with.lease_ms {
            options = options.lease(ms(lease_ms));
        }
        if let Some(retention_ms) = with.retention_ms {
            options = options.retention(ms(retention_ms));
        }
        if let Some(policy) = with.on_interrupted {
            options = options.on_interrupted(policy);
        }
        if let Some(releases) = with.releases_on_drop {
            options = options.on_drop(if releases { OnDrop::Release } else { OnDrop::Interrupt });
        }
        if let Some(offset_ms) = with.issued_offset_ms {
            let retention = ms(with.retention_ms.unwrap_or(WINDOW_MS));
            let now = self.model.now().duration_since(UNIX_EPOCH).unwrap();
            options = options.issued_at(UNIX_EPOCH + shifted(now - retention, offset_ms));
        }
        options
    }

    fn reserve(&mut self, number: u8, request: u8, with: With) -> Result<(), String> {
        let (key, fingerprint) = (key(number), fingerprint(request));
        let options = self.options(with);
        let answer = self.store().reserve_with(&key, fingerprint, &options);
        let expected = self.model.reserve(&key, fingerprint, &options);
        self.agree("reserve", &Expected::from(&answer), &expected)?;
        match answer {
            Ok(answer) => self.keep_answer(&key, fingerprint, &options, answer),
            Err(_) => Ok(()),
        }
    }

    /// Keeps what a caller was given.
    pub(super) fn keep_answer(
        &mut self,
        key: &Key,
        asked: Fingerprint,
        options: &ReserveOptions,
        answer: Reserve,
    ) -> Result<(), String> {
        match answer {
            Reserve::Fresh(reservation) => self.keep_guard(key, reservation)?,
            Reserve::InFlight(running) => {
                let handle = self.model.handle(key, asked, options, running.info().token);
                keep(&mut self.running, (handle, running, options.clone()), HELD_MAX);
            }
            Reserve::Interrupted(unknown) => {
                let handle = self.model.handle(key, asked, options, unknown.token);
                keep(&mut self.interrupted, (handle, unknown), HELD_MAX);
            }
            Reserve::Replay(_) | Reserve::Mismatch(_) | Reserve::TooOld(_) => {}
        }
        Ok(())
    }

    pub(super) fn keep_guard(&mut self, key: &Key, reservation: Reservation) -> Result<(), String> {
        let owner = self.model.owner(key, reservation.token());
        keep(&mut self.tokens, (key.clone(), reservation.token()), 2 * HELD_MAX);
        keep(&mut self.views, (owner.clone(), reservation.attempt_view()), HELD_MAX);
        if let Some((owner, reservation)) = keep(&mut self.guards, (owner, reservation), HELD_MAX) {
            self.drop_guard(&owner, reservation)?;
        }
        Ok(())
    }

    fn drop_guard(&mut self, owner: &Owner, reservation: Reservation) -> Result<(), String> {
        drop(reservation);
        self.model.drop_guard(owner);
        self.until_guards_are_gone();
        self.learn()
    }

    /// A drop never waits: where the segment is full, the store's helper thread says that the guard is gone.
    pub(super) fn until_guards_are_gone(&self) {
        let mut looks_left = if self.has_threads() { LOOKS_MAX } else { 0 };
        while looks_left > 0 && self.store().stats().guards > self.model.stats().guards {
            std::thread::yield_now();
            looks_left -= 1;
        }
    }

    fn complete(&mut self, pick: u8, bytes: usize, body_kept: bool) -> Result<(), String> {
        let Some((owner, reservation)) = take(&mut self.guards, pick) else { return Ok(()) };
        let bytes = self.bytes(bytes);
        let (call, answer, expected) = if body_kept {
            ("complete", reservation.complete(&bytes), self.model.complete(&owner, &bytes))
        } else {
            let answer = reservation.complete_without_body(&bytes);
            ("complete without body", answer, self.model.complete_without_body(&owner, &bytes))
        };
        let told = Expected::from(&answer);
        if let Err(not_stored) = answer {
            self.guards.push((owner, not_stored.reservation));
        }
        self.agree(call, &told, &expected)
    }

    fn release(&mut self, pick: u8) -> Result<(), String> {
        let Some((owner, reservation)) = take(&mut self.guards, pick) else { return Ok(()) };
        let answer = reservation.release();
        let expected = self.model.release(&owner);
        self.agree("release", &Expected::from(&answer), &expected)
    }

    fn renew(&mut self, pick: u8, lease: Duration, by_view: bool) -> Result<(), String> {
        let (call, owner, answer) = if by_view {
            let Some(at) = index(self.views.len(), pick) else { return Ok(()) };
            let (owner, attempt) = &self.views[at];
            ("renew by a view", owner, attempt.renew(lease))
        } else {
            let Some(at) = index(self.guards.len(), pick) else { return Ok(()) };
            let (owner, reservation) = &self.guards[at];
            ("renew", owner, reservation.renew(lease))
        };
        let expected = self.model.renew(owner, lease);
        self.agree(call, &Expected::from(&answer), &expected)
    }

    fn save_checkpoint(&mut self, pick: u8, bytes: usize, by_view: bool) -> Result<(), String> {
        let bytes = self.bytes(bytes);
        let (call, owner, answer) = if by_view {
            let Some(at) = index(self.views.len(), pick) else { return Ok(()) };
            let (owner, attempt) = &self.views[at];
            ("save checkpoint by a view", owner, attempt.save_checkpoint(&bytes))
        } else {
            let Some(at) = index(self.guards.len(), pick) else { return Ok(()) };
            let (owner, reservation) = &self.guards[at];
            ("save checkpoint", owner, reservation.save_checkpoint(&bytes))
        };
        let expected = self.model.save_checkpoint(owner, &bytes);
        self.agree(call, &Expected::from(&answer), &expected)
    }

    fn detach(&mut self, pick: u8, lease: Duration) -> Result<(), String> {
        let Some((owner, reservation)) = take(&mut self.guards, pick) else { return Ok(()) };
        let answer = reservation.detach(lease);
        let expected = self.model.detach(&owner, lease);
        self.agree("detach", &Expected::from(&answer), &expected)?;
        if let Err(not_stored) = answer {
            self.guards.push((owner, not_stored.reservation));
        }
        Ok(())
    }

    fn reattach(&mut self, pick: u8) -> Result<(), String> {
        let Some(at) = index(self.tokens.len(), pick) else { return Ok(()) };
        let (key, token) = self.tokens[at].clone();
        let answer = self.store().reattach(&key, token);
        let expected = self.model.reattach(&key, token);
        self.agree("reattach", &Expected::from(&answer), &expected)?;
        if let Ok(reservation) = answer {
            self.keep_guard(&key, reservation)?;
        }
        Ok(())
    }

    fn take_over(&mut self, pick: u8) -> Result<(), String> {
        let Some((handle, unknown)) = take(&mut self.interrupted, pick) else { return Ok(()) };
        let answer = unknown.take_over();
        let expected = self.model.take_over(&handle);
        self.agree("take over", &Expected::from(&answer), &expected)?;
        if let Ok(Reserve::Fresh(reservation)) = answer {
            self.keep_guard(handle.key(), reservation)?;
        }
        Ok(())
    }

    fn resolve(&mut self, pick: u8, bytes: usize) -> Result<(), String> {
        let Some((handle, unknown)) = take(&mut self.interrupted, pick) else { return Ok(()) };
        let bytes = self.bytes(bytes);
        let answer = unknown.resolve(&bytes);
        let expected = self.model.resolve(&handle, &bytes);
        self.agree("resolve", &Expected::from(&answer), &expected)
    }

    fn release_interrupted(&mut self, pick: u8) -> Result<(), String> {
        let Some((handle, unknown)) = take(&mut self.interrupted, pick) else { return Ok(()) };
        let answer = unknown.release();
        let expected = self.model.release_interrupted(&handle);
        self.agree("release interrupted", &Expected::from(&answer), &expected)
    }

    fn ask_again(&mut self, pick: u8) -> Result<(), String> {
        let Some((handle, running, _)) = take(&mut self.running, pick) else { return Ok(()) };
        let answer = running.wait(Duration::ZERO);
        let expected = self.model.ask_again(&handle);
        self.agree("ask again", &Expected::from(&answer), &expected)?;
        if let Ok(Reserve::Fresh(reservation)) = answer {
            self.keep_guard(handle.key(), reservation)?;
        }
        Ok(())
    }

    fn forget(&mut self, number: u8, bytes: usize) -> Result<(), String> {
        let (key, reason) = (key(number), "x".repeat(bytes));
        let answer = self.store().forget(&key, &reason);
        let expected = self.model.forget(&key, &reason);
        self.agree("forget", &Expected::from(&answer), &expected)
    }

    /// Lets time pass until shortly before, at, or shortly after a moment at which something changes by itself.
    fn advance_to(&mut self, pick: u8, offset_ms: i8) {
        let now = self.model.now().duration_since(UNIX_EPOCH).unwrap();
        let due = self.model.due().into_iter().map(|due| due.duration_since(UNIX_EPOCH).unwrap());
        let due: Vec<Duration> = due.filter(|due| *due > now).collect();
        // The next moments are picked more often than those that lie far ahead.
        let Some(moment) = due.get(usize::from(pick) % usize::from(KEYS)).or(due.first()) else { return };
        self.clock.advance(shifted(*moment, offset_ms).saturating_sub(now));
    }
}
