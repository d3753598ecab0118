//! Acts on a disk that fails: what may be refused then, and what must hold of the store that is opened afterwards.
//!
//! A call that was answered is answered for good. One that was refused has happened or not, and it is the next opening
//! that tells; but for calls of which a full disk promises that they change nothing.

use std::time::Duration;

use keyonce::testing::{Model, SimDisk};
use keyonce::{Error, ErrorKind, Health};

use super::{Driver, Ground, KEYS, RESPONSE_BYTES_MAX, key};
use crate::machine::ops::Fault;
use crate::machine::{Op, Reopen};

/// The store makes another try at a segment each second.
const RETRY: Duration = Duration::from_secs(1);

/// What fails, or has failed.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// The step that will fail, or the first one of them.
    armed: Option<(u64, Fault)>,
    then: Option<Reopen>,
    /// Something has failed since the store was opened: what is not said of a dropped guard yet is not on the disk.
    strained: bool,
}

impl Faults {
    pub(super) fn is_none(&self) -> bool {
        self.armed.is_none() && !self.strained
    }
}

impl Driver {
    /// A call has failed; whether that may be is for the faults to say.
    pub(super) fn failed(&mut self, call: &str, error: &Error) -> String {
        if self.may_be_refused(error.kind()) {
            self.refused = Some(error.kind());
        }
        format!("{call}: {error}")
    }

    pub(super) fn may_be_refused(&self, kind: ErrorKind) -> bool {
        let by_a_fault = matches!(kind, ErrorKind::Io | ErrorKind::Poisoned | ErrorKind::Full { .. });
        by_a_fault && self.is_strained()
    }

    /// Something has failed since the store was opened, or while it was.
    pub(super) fn is_strained(&self) -> bool {
        self.faults.strained || self.has_failed()
    }

    /// Nothing has happened yet that should have; a full disk explains it.
    pub(super) fn waits_for_room(&mut self, expected: &impl std::fmt::Debug) -> String {
        if self.is_strained() {
            self.refused = Some(ErrorKind::Full { retry_after: RETRY });
        }
        format!("it waits, and should have come to {expected:?}")
    }

    fn disk(&self) -> Option<&SimDisk> {
        match &self.ground {
            Ground::Disk(disk) => Some(disk),
            Ground::Root(..) => None,
        }
    }

    fn has_failed(&self) -> bool {
        let failed = |disk: &SimDisk| self.faults.armed.is_some_and(|(step, _)| disk.steps() > step);
        self.disk().is_some_and(failed)
    }

    pub(super) fn fail(&mut self, after: u64, fault: Fault, then: Reopen) {
        if let Some(disk) = self.disk() {
            disk.heal();
            let step = disk.steps() + after;
            self.faults.armed = Some((step, fault));
            self.faults.then = Some(then);
            self.model.expect_failures();
            self.arm();
        }
    }

    fn arm(&self) {
        if let (Some(disk), Some((step, fault))) = (self.disk(), self.faults.armed) {
            match fault.lasts {
                true => disk.fail_from(step, fault.raw_os_error),
                false => disk.fail_at(step, fault.raw_os_error),
            }
        }
    }

    /// Goes on with what a crash has left; what was going to fail still is.
    pub(super) fn take_to(&mut self, left: Ground) {
        let steps_before = self.disk().map_or(0, SimDisk::steps);
        self.ground = left;
        if let (Some(disk), Some((step, fault))) = (self.disk(), self.faults.armed) {
            self.faults.armed = Some((disk.steps() + step.saturating_sub(steps_before), fault));
            self.arm();
        }
        self.faults.strained = false;
    }

    /// Nothing fails any more; a second later the store is as sound as ever.
    pub(super) fn heal(&mut self) -> Result<(), String> {
        if let Some(disk) = self.disk() {
            disk.heal();
        }
        self.faults.armed = None;
        if self.faults.strained {
            self.clock.advance(RETRY);
            self.learn()?;
            self.sync()?;
            self.faults.strained = false;
        }
        Ok(())
    }

    /// One act while something fails, or has failed.
    pub(super) fn act_amid_faults(&mut self, op: Op) -> Result<(), String> {
        self.model.expect_failures();
        let before = self.model.clone();
        (self.refused, self.done_of_it) = (None, None);
        let result = self.act_soundly(op);
        let before = self.done_of_it.take().unwrap_or(before);
        if self.has_failed() {
            self.faults.strained = true;
            self.faults.armed = self.faults.armed.filter(|(_, fault)| fault.lasts);
        }
        let is_poisoned = self.store.as_ref().is_none_or(|store| matches!(store.health(), Health::Poisoned(_)));
        match (result, self.refused.take()) {
            (Err(why), None) => Err(why),
            (Err(_), Some(_)) if !is_poisoned && changes_nothing_when_refused(op) => {
                self.model = before;
                self.tried(op);
                Ok(())
            }
            (Err(why), Some(_)) => {
                if matches!(op, Op::Reopen(Reopen::Kill | Reopen::LosePower | Reopen::LoseSome { .. }, _)) {
                    // The opening failed: what the crash has left is durable no more than it was.
                    self.model = before.clone();
                }
                self.reopen_in_doubt(Some(&before)).map_err(|after| format!("{after}\nafter {why}"))
            }
            (Ok(()), _) if is_poisoned || self.faults.strained && !changes_nothing_when_refused(op) => {
                self.reopen_in_doubt((!answers(op)).then_some(&before))
            }
            (Ok(()), _) => Ok(()),
        }
    }

    /// A guard whose completion was tried never gives its key back.
    fn tried(&mut self, op: Op) {
        if matches!(op, Op::Complete { .. } | Op::CompleteWithoutBody { .. })
            && let Some((owner, _)) = self.guards.last()
        {
            self.model.complete(owner, &[0; RESPONSE_BYTES_MAX + 1]);
        }
    }

    /// Ends a store of which nobody knows how it stands, and looks what the next opening finds: what the model knows,
    /// or what it knew `before` the call that failed.
    fn reopen_in_doubt(&mut self, before: Option<&Model>) -> Result<(), String> {
        let Some(disk) = self.disk() else { return Ok(()) };
        let left = match self.faults.then {
            Some(Reopen::LosePower) => disk.crash_all_old(),
            Some(Reopen::LoseSome { seed }) => disk.crash_image(seed),
            Some(Reopen::Close | Reopen::DropStore | Reopen::Kill) | None => disk.kill(),
        };
        self.waiting.clear();
        self.guards.clear();
        self.views.clear();
        self.interrupted.clear();
        self.running.clear();
        self.store = None;
        self.ground = Ground::Disk(left);
        self.faults = Faults::default();
        self.open().map_err(|error| format!("it does not open: {error}"))?;
        match before {
            Some(before) => self.model.lose_call(before),
            None => self.model.lose_power(),
        }
        self.model.open();
        let mut shown = Vec::new();
        for number in 0..KEYS {
            let info = self.store().peek(&key(number)).map_err(|error| format!("peeking: {error}"))?;
            shown.push((key(number), info));
        }
        self.model.learn_lost(&shown);
        self.compare_opening(true)
    }
}

/// Whether somebody is told that it is done.
fn answers(op: Op) -> bool {
    !matches!(
        op,
        Op::Drop { .. }
            | Op::Interrupt { .. }
            | Op::GiveUp { .. }
            | Op::DropHandle { .. }
            | Op::AdvanceTo { .. }
            | Op::Advance { .. }
            | Op::Reopen(Reopen::DropStore, _)
    )
}

/// Whether a refusal on a full disk has changed nothing, and leaves the caller with all it had.
fn changes_nothing_when_refused(op: Op) -> bool {
    match op {
        Op::Reserve { .. }
        | Op::Complete { .. }
        | Op::CompleteWithoutBody { .. }
        | Op::Renew { .. }
        | Op::SaveCheckpoint { .. }
        | Op::Forget { .. }
        | Op::Peek { .. }
        | Op::PeekAll
        | Op::Sync
        | Op::DropHandle { .. }
        | Op::Fail { .. }
        | Op::Heal => true,
        Op::Release { .. }
        | Op::Drop { .. }
        | Op::Interrupt { .. }
        | Op::Detach { .. }
        | Op::Reattach { .. }
        | Op::TakeOver { .. }
        | Op::Resolve { .. }
        | Op::ReleaseInterrupted { .. }
        | Op::AskAgain { .. }
        | Op::Wait { .. }
        | Op::WaitAgain { .. }
        | Op::Poll { .. }
        | Op::GiveUp { .. }
        | Op::ReserveBatch { .. }
        | Op::CompleteBatch { .. }
        | Op::Once { .. }
        | Op::AdvanceTo { .. }
        | Op::Advance { .. }
        | Op::Reopen(..) => false,
    }
}
