//! What takes more than one step, or more than one key: futures that wait, batches, and the work of a `once`.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use keyonce::testing::{Expected, Known, Owner};
use keyonce::{Ask, ErrorKind, Failed, Key, NotStored, OnceError, Outcome, Reserve, ReserveOptions, Token};

use super::acts::{keep, take};
use super::{Driver, HELD_MAX, Waiting, fingerprint, key};
use crate::machine::{With, Work};

impl Driver {
    pub(super) fn wait(&mut self, number: u8, request: u8, with: With, at_most: Duration) -> Result<(), String> {
        let (key, fingerprint) = (key(number), fingerprint(request));
        let options = self.options(with).wait(at_most);
        let mut future: Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(self.store().reserve_with_async(&key, fingerprint, &options));
        match self.model.wait(&key, fingerprint, &options) {
            Ok(id) => self.keep_waiting(Waiting { id, key, fingerprint, options, future }),
            Err(kind) => {
                let answer = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                let Poll::Ready(answer) = answer else { return Err(format!("it should be refused: {kind:?}")) };
                self.agree("wait", &Expected::from(&answer), &Expected::Refused(kind))
            }
        }
    }

    pub(super) fn wait_again(&mut self, pick: u8, at_most: Duration) -> Result<(), String> {
        let Some((handle, running, options)) = take(&mut self.running, pick) else { return Ok(()) };
        let id = self.model.wait_again(&handle, at_most);
        let (key, asked) = (handle.key().clone(), running.info().fingerprint);
        self.keep_waiting(Waiting {
            id,
            key,
            fingerprint: asked,
            options,
            future: Box::pin(running.wait_async(at_most)),
        })
    }

    fn keep_waiting(&mut self, waiting: Waiting) -> Result<(), String> {
        if let Some(waiting) = self.poll_it(waiting)?
            && let Some(given_up) = keep(&mut self.waiting, waiting, HELD_MAX)
        {
            self.give_it_up(given_up);
        }
        Ok(())
    }

    pub(super) fn poll(&mut self, pick: u8) -> Result<(), String> {
        if let Some(waiting) = take(&mut self.waiting, pick)
            && let Some(waiting) = self.poll_it(waiting)?
        {
            self.waiting.push(waiting);
        }
        Ok(())
    }

    pub(super) fn give_up(&mut self, pick: u8) -> Result<(), String> {
        if let Some(waiting) = take(&mut self.waiting, pick) {
            self.give_it_up(waiting);
        }
        Ok(())
    }

    fn give_it_up(&mut self, waiting: Waiting) {
        drop(waiting.future);
        self.model.give_up(waiting.id);
        self.until_guards_are_gone();
    }

    /// Polls a future, and gives it back if it is pending.
    fn poll_it(&mut self, mut waiting: Waiting) -> Result<Option<Waiting>, String> {
        let expected = self.model.poll(waiting.id);
        let mut context = Context::from_waker(Waker::noop());
        let mut answer = waiting.future.as_mut().poll(&mut context);
        // In a real directory another thread syncs, and prepares segments.
        while expected.is_some() && answer.is_pending() && self.has_threads() {
            std::thread::yield_now();
            answer = waiting.future.as_mut().poll(&mut context);
        }
        match (answer, expected) {
            (Poll::Pending, None) => Ok(Some(waiting)),
            (Poll::Pending, Some(expected)) => Err(self.waits_for_room(&expected)),
            (Poll::Ready(answer), None) => Err(format!("it should wait, and is told {answer:?}")),
            (Poll::Ready(answer), Some(expected)) => {
                self.agree("wait", &Expected::from(&answer), &expected)?;
                if let Ok(answer) = answer {
                    self.keep_answer(&waiting.key, waiting.fingerprint, &waiting.options, answer)?;
                }
                Ok(None)
            }
        }
    }

    pub(super) fn reserve_batch(&mut self, asks: [(u8, u8, With); 3], waits: u8) -> Result<(), String> {
        let mut batch = Vec::new();
        for (at, (number, request, with)) in asks.into_iter().enumerate() {
            let waits = usize::from(waits) == at;
            let options = self.options(with).wait(if waits { Duration::from_secs(1) } else { Duration::ZERO });
            batch.push((key(number), fingerprint(request), options, waits));
        }
        let asks: Vec<Ask> =
            batch.iter().map(|(key, asked, with, _)| Ask::new(key, *asked).options(with.clone())).collect();
        let answers = match self.store().reserve_batch(&asks) {
            Ok(answers) => answers,
            Err(error) => {
                for (key, fingerprint, options, _) in batch.iter().filter(|(.., waits)| !waits) {
                    // Of a key that was reserved by such a call, nobody knows whose it is.
                    if !self.model.nameless().contains(key) {
                        self.model.reserve(key, *fingerprint, options);
                    }
                }
                return Err(self.failed("a batch", &error));
            }
        };
        let mut told = Vec::new();
        let mut kept = Vec::new();
        for ((key, fingerprint, options, waits), answer) in batch.into_iter().zip(answers) {
            let expected = if waits {
                Expected::Refused(ErrorKind::InvalidOptions)
            } else if self.model.nameless().contains(&key) {
                // It was reserved by an item that failed. No answer rests on that.
                match answer {
                    Err(_) | Ok(Reserve::TooOld(_)) => Expected::from(&answer),
                    Ok(_) => Expected::Held,
                }
            } else {
                self.model.reserve(&key, fingerprint, &options)
            };
            let agrees = (Expected::from(&answer), expected);
            if let (Ok(Reserve::Fresh(reservation)), Expected::Owns { .. }) = (&answer, &agrees.1) {
                self.model.owner(&key, reservation.token());
            }
            told.push(agrees);
            kept.extend(answer.ok().map(|answer| (key, fingerprint, options, answer)));
        }
        told.iter().try_for_each(|(answer, expected)| self.agree("reserve in a batch", answer, expected))?;
        for (key, fingerprint, options, answer) in kept {
            self.keep_answer(&key, fingerprint, &options, answer)?;
        }
        Ok(())
    }

    pub(super) fn complete_batch(&mut self, pick: u8, bytes: usize) -> Result<(), String> {
        let mut items = Vec::new();
        for number in 0..3 {
            let bytes = self.bytes(bytes + number);
            if let Some((owner, reservation)) = take(&mut self.guards, pick) {
                items.push((owner, bytes, reservation));
            }
        }
        let mut owners: Vec<(Owner, Vec<u8>)> = Vec::new();
        let mut batch = Vec::new();
        for (owner, bytes, reservation) in items {
            batch.push((reservation, bytes.clone()));
            owners.push((owner, bytes));
        }
        let answers = self.store().complete_batch(batch);
        let mut told = Vec::new();
        for ((owner, bytes), answer) in owners.into_iter().zip(answers) {
            told.push((Expected::from(&answer), self.model.complete(&owner, &bytes)));
            if let Err(not_stored) = answer {
                self.guards.push((owner, not_stored.reservation));
            }
        }
        told.iter().try_for_each(|(answer, expected)| self.agree("complete in a batch", answer, expected))
    }

    pub(super) fn once(&mut self, number: u8, request: u8, work: Work) -> Result<(), String> {
        let (key, fingerprint) = (key(number), fingerprint(request));
        let bytes = match work {
            Work::Responds { bytes } => self.bytes(bytes),
            Work::NothingHappened | Work::Unknown | Work::Panics => Vec::new(),
        };
        let token = Cell::new(None);
        let answer = catch_unwind(AssertUnwindSafe(|| {
            self.store().once(&key, fingerprint, |attempt| {
                token.set(Some(attempt.token()));
                match work {
                    Work::Responds { .. } => Ok(bytes.clone()),
                    Work::NothingHappened => Err(Failed::NothingHappened(work)),
                    Work::Unknown => Err(Failed::Unknown(work)),
                    // No message: it is part of the plan.
                    Work::Panics => std::panic::resume_unwind(Box::new(work)),
                }
            })
        }));
        let expected = self.model.reserve(&key, fingerprint, &ReserveOptions::new());
        let seen = match (&answer, token.get()) {
            (_, Some(_)) => None,
            (Ok(answer), None) => Some(once_answer(answer)?),
            (Err(_), None) => return Err("it panicked before its work".to_owned()),
        };
        if let Some(seen) = seen {
            return self.agree("once", &seen, &expected);
        }
        self.tally.count("once", &expected);
        match expected {
            Expected::Owns { .. } => self.once_ran(&key, token.get().unwrap(), work, &bytes, answer.ok()),
            expected => Err(format!("once: it ran, and should be told {expected:?}")),
        }
    }

    /// What became of work that ran.
    fn once_ran(
        &mut self,
        key: &Key,
        token: Token,
        work: Work,
        bytes: &[u8],
        answer: Option<Result<Outcome, OnceError<Work>>>,
    ) -> Result<(), String> {
        let owner = self.model.owner(key, token);
        if self.is_strained() {
            self.done_of_it = Some(self.model.clone());
        }
        match (work, answer) {
            (Work::Responds { .. }, Some(Ok(Outcome::Ran(response)))) if response == bytes => {
                if self.model.complete(&owner, bytes) == Expected::Refused(ErrorKind::TooLarge) {
                    super::agree("once", &Expected::Done, &self.model.complete_without_body(&owner, &[]))?;
                }
            }
            (Work::NothingHappened, Some(Err(OnceError::Work(Work::NothingHappened)))) => {
                self.model.release(&owner);
            }
            (Work::Unknown, Some(Err(OnceError::Work(Work::Unknown)))) => self.model.interrupt(&owner),
            (Work::Panics, None) => self.model.drop_guard(&owner),
            (
                _,
                Some(Err(OnceError::NotStored { not_stored: NotStored { error, .. }, .. } | OnceError::Store(error))),
            ) => {
                // On a full disk nothing was written; else anything may have been.
                match work {
                    Work::Responds { .. } if !matches!(error.kind(), ErrorKind::Full { .. }) => {
                        self.model.complete(&owner, bytes);
                    }
                    Work::NothingHappened if !matches!(error.kind(), ErrorKind::Full { .. }) => {
                        self.model.release(&owner);
                    }
                    _ => self.model.interrupt(&owner),
                }
                return Err(self.failed("once", &error));
            }
            (work, answer) => return Err(format!("once: {work:?} came to {answer:?}")),
        }
        self.until_guards_are_gone();
        Ok(())
    }

    pub(super) fn has_threads(&self) -> bool {
        self.settings.place == super::Place::Directory
    }
}

/// The answer of a `once` whose work did not run.
fn once_answer(answer: &Result<Outcome, OnceError<Work>>) -> Result<Expected, String> {
    match answer {
        Ok(Outcome::Replayed(response)) => Ok(Expected::from(&Reserve::Replay(response.clone()))),
        Err(OnceError::InFlight(running)) => {
            Ok(Expected::InFlight { known: Known::from(running.info()), retry_after: running.retry_after() })
        }
        Err(OnceError::Interrupted(unknown)) => Ok(Expected::Interrupted(Known::from(unknown.info()))),
        Err(OnceError::Mismatch(mismatch)) => Ok(Expected::from(&Reserve::Mismatch(*mismatch))),
        Err(OnceError::TooOld(too_old)) => Ok(Expected::from(&Reserve::TooOld(*too_old))),
        Err(OnceError::Store(error)) => Ok(Expected::from(error)),
        answer => Err(format!("once: {answer:?}, though nothing ran")),
    }
}
