//! One of the threads that make a history: it calls what it can, by chance, and writes down how it was answered.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use keyonce::{
    Attempt, Body, Completion, Durability, Error, Failed, Fingerprint, InFlight, Interrupted, Key, KeyInfo, KeyState,
    NotReattached, OnDrop, OnInterrupted, OnceError, Outcome, Reservation, Reserve, ReserveOptions, Store, Token,
};

use super::record::{Log, bytes_of, number_of};
use crate::linear::spec::{Answer, Ask, Call, Cause, Name, Policy, Shown};
use crate::workload::Random;

/// What the threads of a history have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    pub(crate) keys: u64,
    pub(crate) lease_ms: &'static [u64],
    pub(crate) wait: Duration,
    /// Calls bring levels of their own.
    pub(crate) levels: bool,
    /// Some callers are tasks.
    pub(crate) tasks: bool,
    /// Tasks drop some of their futures.
    pub(crate) goes_away: bool,
}

/// A call on a thread that sleeps, or by a task that polls; `None` when the task went away before the answer.
macro_rules! heard {
    ($worker:ident, $on:expr, $thread:ident or $task:ident($($given:expr),*)) => {
        if $worker.is_task {
            let future = $on.$task($($given),*);
            $worker.poll(0, future)
        } else {
            Some($on.$thread($($given),*))
        }
    };
}

/// As `heard`, for a call that is given the guard: a task polls it at least once, since the guard of a call that was
/// never made falls as it would anywhere.
macro_rules! heard_with_guard {
    ($worker:ident, $on:expr, $thread:ident or $task:ident($($given:expr),*)) => {
        if $worker.is_task {
            let future = $on.$task($($given),*);
            $worker.poll(1, future)
        } else {
            Some($on.$thread($($given),*))
        }
    };
}

/// Wakes a thread that polls.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What every thread of a process can get at.
#[derive(Default)]
pub(crate) struct Shared {
    views: Mutex<Vec<(Hold, Attempt)>>,
    detached: Mutex<Vec<(u64, u64)>>,
}

/// A guard as the history names it.
#[derive(Clone, Copy, Debug)]
struct Hold {
    key: u64,
    token: u64,
    guard: u64,
    lease_ms: u64,
    release_on_drop: bool,
}

/// What was asked for, also by the handles that came of it.
#[derive(Clone, Copy, Debug)]
struct Asked {
    ask: Ask,
    release_on_drop: bool,
}

/// A thread.
pub(crate) struct Worker<'a> {
    pub(crate) store: Store,
    pub(crate) log: Log<'a>,
    pub(crate) random: Random,
    pub(crate) manner: Manner,
    pub(crate) shared: &'a Shared,
    is_task: bool,
    guards: Vec<(Hold, Reservation)>,
    handles: Vec<(u64, Asked, Interrupted)>,
}

/// Views and tokens beyond this many are forgotten, oldest first.
const SHARED_MAX: usize = 12;

/// A task that nobody wakes polls again, so that a history always comes to its end.
const WOKEN_WITHIN: Duration = Duration::from_secs(5);

pub(crate) fn key(number: u64) -> Key {
    Key::new("history", format!("key {number}")).unwrap()
}

fn fingerprint(request: u64) -> Fingerprint {
    Fingerprint::of(request.to_le_bytes())
}

fn request_of(told: Fingerprint) -> u64 {
    (0..2).find(|request| fingerprint(*request) == told).unwrap_or(u64::MAX)
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

impl<'a> Worker<'a> {
    pub(crate) fn new(store: Store, log: Log<'a>, mut random: Random, manner: Manner, shared: &'a Shared) -> Self {
        let is_task = manner.tasks && random.one_in(2);
        Self { store, log, random, manner, shared, is_task, guards: Vec::new(), handles: Vec::new() }
    }

    /// What the future comes to; or drops it after a few polls, perhaps when it has just been woken.
    fn poll<T>(&mut self, polls_min: u64, future: impl Future<Output = T>) -> Option<T> {
        let goes_away = self.manner.goes_away && self.random.one_in(4);
        let polls_max = if goes_away { polls_min + self.random.below(3) } else { u64::MAX };
        let waits_to_the_last = self.random.one_in(2);
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut future = pin!(future);
        for polls_left in (0..polls_max).rev() {
            if let Poll::Ready(answer) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return Some(answer);
            }
            if polls_left > 0 || waits_to_the_last {
                thread::park_timeout(WOKEN_WITHIN);
            }
        }
        None
    }

    /// Asks for each key what it is, and what both requests are told.
    pub(crate) fn look_at_all(&mut self) {
        for number in 0..self.manner.keys {
            self.peek(number);
            for request in 0..2 {
                let ask = Ask { request, lease_ms: self.lease_ms(), policy: Policy::Surface, waits: false };
                self.ask(number, ask, false);
            }
        }
    }

    /// One call.
    pub(crate) fn act(&mut self) {
        let key = self.random.below(self.manner.keys);
        match self.random.below(100) {
            28..31 => self.reserve_batch(),
            31..34 => self.once(key),
            34..36 if self.guards.len() > 1 => self.complete_batch(),
            36..48 if !self.guards.is_empty() => self.complete(),
            48..53 if !self.guards.is_empty() => self.release(),
            53..60 if !self.guards.is_empty() => self.drop_guard(),
            60..64 => self.renew(),
            64..68 => self.save_checkpoint(),
            68..72 if !self.guards.is_empty() => self.detach(),
            72..76 => self.reattach(),
            76..82 if !self.handles.is_empty() => self.take_over(),
            82..85 if !self.handles.is_empty() => self.resolve(),
            85..88 if !self.handles.is_empty() => self.release_interrupted(),
            88..93 => self.peek(key),
            // Who goes away unheard is thought to have been handed the key once at most: an operator who takes it away
            // again lets one wait on, and be handed it anew.
            93..99 if !self.manner.goes_away => self.forget(key),
            _ => self.reserve(key),
        }
    }

    fn lease_ms(&mut self) -> u64 {
        self.random.of(self.manner.lease_ms)
    }

    fn a_guard(&mut self) -> (Hold, Reservation) {
        let at = self.random.index(self.guards.len());
        self.guards.swap_remove(at)
    }

    fn a_handle(&mut self) -> (u64, Asked, Interrupted) {
        let at = self.random.index(self.handles.len());
        self.handles.swap_remove(at)
    }

    fn an_ask(&mut self) -> Ask {
        Ask {
            request: u64::from(self.random.one_in(4)),
            lease_ms: self.lease_ms(),
            policy: self.random.of(&[
                Policy::Surface,
                Policy::Surface,
                Policy::Surface,
                Policy::Surface,
                Policy::TakeOver,
                Policy::TakeOverLapsed,
            ]),
            waits: self.random.one_in(5),
        }
    }

    /// Whether a guard is released when it falls; never one that may fall with a future, which would have to be told
    /// apart from one that fell by itself.
    fn releases_on_drop(&mut self) -> bool {
        let falls_with_a_future = self.is_task && self.manner.goes_away;
        !falls_with_a_future && self.random.one_in(5)
    }

    fn reserve(&mut self, number: u64) {
        let ask = self.an_ask();
        let release_on_drop = self.releases_on_drop();
        let in_flight = self.ask(number, ask, release_on_drop);
        if let Some(in_flight) = in_flight.filter(|_| !ask.waits && self.random.one_in(8)) {
            let ask = Ask { waits: true, ..ask };
            let guard = self.log.invoke(Some(number), |_| Call::Reserve(ask));
            let answer = heard!(self, in_flight, wait or wait_async(self.manner.wait));
            self.told(number, guard, Asked { ask, release_on_drop }, answer);
        }
    }

    fn ask(&mut self, number: u64, ask: Ask, release_on_drop: bool) -> Option<InFlight> {
        let with = self.options(ask, release_on_drop);
        let guard = self.log.invoke(Some(number), |_| Call::Reserve(ask));
        let (key, fingerprint) = (key(number), fingerprint(ask.request));
        let answer = heard!(self, self.store, reserve_with or reserve_with_async(&key, fingerprint, &with));
        self.told(number, guard, Asked { ask, release_on_drop }, answer)
    }

    fn options(&mut self, ask: Ask, release_on_drop: bool) -> ReserveOptions {
        let mut with = ReserveOptions::new().lease(ms(ask.lease_ms));
        with = match ask.policy {
            Policy::Surface => with,
            Policy::TakeOver => with.on_interrupted(OnInterrupted::TakeOver),
            Policy::TakeOverLapsed => with.on_interrupted(OnInterrupted::TakeOverLapsed),
        };
        if ask.waits {
            with = with.wait(self.manner.wait);
        }
        if release_on_drop {
            with = with.on_drop(OnDrop::Release);
        }
        if self.manner.levels {
            let level = self.random.of(&[None, Some(Durability::PowerLoss), Some(Durability::ProcessCrash)]);
            with = level.map_or(with.clone(), |level| with.durability(level));
        }
        with
    }

    /// Many questions at once, perhaps of one key.
    fn reserve_batch(&mut self) {
        let count = 2 + self.random.below(3);
        let asked: Vec<_> = (0..count)
            .map(|_| {
                let number = self.random.below(self.manner.keys);
                let ask = Ask { waits: false, ..self.an_ask() };
                (number, Asked { ask, release_on_drop: self.releases_on_drop() })
            })
            .collect();
        let mut questions = Vec::new();
        for (number, Asked { ask, release_on_drop }) in &asked {
            let with = self.options(*ask, *release_on_drop);
            questions.push(keyonce::Ask::new(&key(*number), fingerprint(ask.request)).options(with));
        }
        let guards: Vec<_> =
            asked.iter().map(|(number, asked)| self.log.invoke(Some(*number), |_| Call::Reserve(asked.ask))).collect();
        let answers = heard!(self, self.store, reserve_batch or reserve_batch_async(&questions));
        let answers: Vec<_> = match answers {
            None => asked.iter().map(|_| None).collect(),
            Some(answers) => answers.unwrap().into_iter().map(Some).collect(),
        };
        for (((number, asked), guard), answer) in asked.into_iter().zip(guards).zip(answers) {
            self.told(number, guard, asked, answer);
        }
    }

    fn complete_batch(&mut self) {
        let count = self.guards.len().min(3);
        let (mut items, mut ids) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let (Hold { key, token, .. }, reservation) = self.a_guard();
            let id = self.log.invoke(Some(key), |id| Call::Complete { token, body: id });
            items.push((reservation, bytes_of(id)));
            ids.push(id);
        }
        let done = heard_with_guard!(self, self.store, complete_batch or complete_batch_async(items));
        let done: Vec<_> = match done {
            None => ids.iter().map(|_| None).collect(),
            Some(done) => done.into_iter().map(|done| Some(done.unwrap())).collect(),
        };
        for (id, done) in ids.into_iter().zip(done) {
            self.log.answer_to(id, completion(done));
        }
    }

    /// The whole way of a caller who hands the work over.
    fn once(&mut self, number: u64) {
        let ask = Ask { waits: false, ..self.an_ask() };
        let with = self.options(ask, false);
        let (fate, log) = (self.random.below(4), &mut self.log);
        let guard = log.invoke(Some(number), |_| Call::Reserve(ask));
        let outcome = self.store.once_with(&key(number), fingerprint(ask.request), &with, |attempt| {
            let (token, checkpoint) = (attempt.token().to_u64(), number_of(attempt.checkpoint()));
            log.answer_to(guard, Answer::Fresh(Shown { token, attempt: u64::from(attempt.number()), checkpoint }));
            if fate < 2 {
                let release = fate == 0;
                log.invoke(Some(number), |_| Call::Drop { token, release });
                return Err(if release { Failed::NothingHappened(()) } else { Failed::Unknown(()) });
            }
            let body = log.invoke(Some(number), |id| Call::Complete { token, body: id });
            Ok(bytes_of(body))
        });
        let answer = match outcome {
            Ok(Outcome::Ran(_)) => return self.log.answer(Answer::Done),
            Err(OnceError::Superseded { .. }) => return self.log.answer(Answer::Superseded),
            Err(OnceError::Work(())) => return self.log.answer(Answer::Over),
            Ok(Outcome::Replayed(response)) => Reserve::Replay(response),
            Err(OnceError::InFlight(in_flight)) => Reserve::InFlight(in_flight),
            Err(OnceError::Interrupted(interrupted)) => Reserve::Interrupted(interrupted),
            Err(OnceError::Mismatch(mismatch)) => Reserve::Mismatch(mismatch),
            Err(error) => panic!("{error:?}"),
        };
        self.told(number, guard, Asked { ask, release_on_drop: false }, Some(Ok(answer)));
    }

    /// Writes the answer down, and keeps what it brought.
    fn told(&mut self, key: u64, guard: u64, asked: Asked, answer: Option<Result<Reserve, Error>>) -> Option<InFlight> {
        let Asked { ask, release_on_drop } = asked;
        let Some(answer) = answer else {
            self.log.answer_to(guard, Answer::Unheard);
            return None;
        };
        match answer.unwrap() {
            Reserve::Fresh(reservation) => {
                self.log.answer_to(guard, Answer::Fresh(shown_of(&reservation)));
                let token = reservation.token().to_u64();
                self.keep(Hold { key, token, guard, lease_ms: ask.lease_ms, release_on_drop }, reservation);
            }
            Reserve::Replay(response) => {
                let body = match response.body() {
                    Body::Kept(bytes) => number_of(bytes),
                    Body::NotKept { .. } => u64::MAX,
                };
                self.log.answer_to(guard, Answer::Replay { body, attempt: u64::from(response.attempt()) });
            }
            Reserve::InFlight(in_flight) => {
                self.log.answer_to(guard, Answer::InFlight(shown_of_info(in_flight.info())));
                return Some(in_flight);
            }
            Reserve::Interrupted(interrupted) => {
                let told = Answer::Interrupted(shown_of_info(interrupted.info()), cause_of(interrupted.cause()));
                self.log.answer_to(guard, told);
                self.handles.push((key, asked, interrupted));
            }
            Reserve::Mismatch(mismatch) => self.log.answer_to(guard, Answer::Mismatch(name_of(mismatch.state))),
            Reserve::TooOld(_) => panic!("nobody said when the key was issued"),
        }
        None
    }

    fn keep(&mut self, hold: Hold, reservation: Reservation) {
        let mut views = self.shared.views.lock().unwrap();
        if views.len() == SHARED_MAX {
            views.remove(0);
        }
        views.push((hold, reservation.attempt_view()));
        drop(views);
        self.guards.push((hold, reservation));
    }

    fn complete(&mut self) {
        let (Hold { key, token, .. }, reservation) = self.a_guard();
        let body = self.log.invoke(Some(key), |id| Call::Complete { token, body: id });
        let done = heard_with_guard!(self, reservation, complete or complete_async(&bytes_of(body)));
        self.log.answer(completion(done.map(Result::unwrap)));
    }

    fn release(&mut self) {
        let (Hold { key, token, .. }, reservation) = self.a_guard();
        self.log.invoke(Some(key), |_| Call::Release { token });
        let done = heard_with_guard!(self, reservation, release or release_async());
        self.log.answer(completion(done.map(Result::unwrap)));
    }

    fn drop_guard(&mut self) {
        let (Hold { key, token, release_on_drop, .. }, reservation) = self.a_guard();
        let interrupts = release_on_drop && self.random.one_in(3);
        self.log.invoke(Some(key), |_| Call::Drop { token, release: release_on_drop && !interrupts });
        if interrupts {
            reservation.interrupt();
        } else {
            drop(reservation);
        }
        self.log.answer(Answer::Over);
    }

    /// A view of an attempt, perhaps another thread's.
    fn a_view(&mut self) -> Option<(Hold, Attempt)> {
        let views = self.shared.views.lock().unwrap();
        (!views.is_empty()).then(|| views[self.random.index(views.len())].clone())
    }

    fn renew(&mut self) {
        let lease_ms = self.lease_ms();
        if let Some((Hold { key, token, guard, .. }, view)) = self.a_view() {
            self.log.invoke(Some(key), |_| Call::Renew { token, guard, lease_ms });
            let done = heard!(self, view, renew or renew_async(ms(lease_ms)));
            self.log.answer(completion(done.map(Result::unwrap)));
        }
    }

    fn save_checkpoint(&mut self) {
        let Some((Hold { key, token, guard, lease_ms, .. }, view)) = self.a_view() else { return };
        let id = self.log.invoke(Some(key), |bytes| Call::SaveCheckpoint { token, guard, bytes, lease_ms });
        let done = heard!(self, view, save_checkpoint or save_checkpoint_async(&bytes_of(id)));
        self.log.answer(completion(done.map(Result::unwrap)));
    }

    fn detach(&mut self) {
        let lease_ms = self.lease_ms();
        let (Hold { key, token, .. }, reservation) = self.a_guard();
        self.log.invoke(Some(key), |_| Call::Detach { token, lease_ms });
        let told = match heard_with_guard!(self, reservation, detach or detach_async(ms(lease_ms))) {
            None => Answer::Unheard,
            Some(Ok(told)) => {
                assert_eq!(told.to_u64(), token);
                Answer::Done
            }
            Some(Err(not_stored)) => {
                self.log.answer(Answer::Superseded);
                // The guard came back; what its end does is a call of its own.
                self.log.invoke(Some(key), |_| Call::Drop { token, release: false });
                not_stored.reservation.interrupt();
                Answer::Over
            }
        };
        self.log.answer(told);
        let mut detached = self.shared.detached.lock().unwrap();
        if detached.len() == SHARED_MAX {
            detached.remove(0);
        }
        detached.push((key, token));
    }

    fn reattach(&mut self) {
        let detached = self.shared.detached.lock().unwrap();
        if detached.is_empty() {
            return;
        }
        let (number, token) = detached[self.random.index(detached.len())];
        drop(detached);
        let lease_ms = self.manner.lease_ms[0];
        let guard = self.log.invoke(Some(number), |_| Call::Reattach { token, lease_ms });
        let (key, told) = (key(number), Token::from_u64(token));
        match heard!(self, self.store, reattach or reattach_async(&key, told)) {
            None => self.log.answer(Answer::Unheard),
            Some(Ok(reservation)) => {
                self.log.answer(Answer::Done);
                self.keep(Hold { key: number, token, guard, lease_ms, release_on_drop: false }, reservation);
            }
            Some(Err(NotReattached::InFlight)) => self.log.answer(Answer::Held),
            Some(Err(NotReattached::Superseded)) => self.log.answer(Answer::Superseded),
            Some(Err(NotReattached::Store(error))) => panic!("{error}"),
        }
    }

    fn take_over(&mut self) {
        let (number, Asked { ask, release_on_drop }, handle) = self.a_handle();
        let token = handle.token.to_u64();
        // The handle names the attempt; what it asks beyond that takes nothing over.
        let ask = Ask { policy: Policy::Surface, waits: false, ..ask };
        let guard = self.log.invoke(Some(number), |_| Call::TakeOver { token, ask });
        let answer = heard!(self, handle, take_over or take_over_async());
        self.told(number, guard, Asked { ask, release_on_drop }, answer);
    }

    fn resolve(&mut self) {
        let (number, _, handle) = self.a_handle();
        let token = handle.token.to_u64();
        let body = self.log.invoke(Some(number), |id| Call::Resolve { token, body: id });
        let done = heard!(self, handle, resolve or resolve_async(&bytes_of(body)));
        self.log.answer(completion(done.map(Result::unwrap)));
    }

    fn release_interrupted(&mut self) {
        let (number, _, handle) = self.a_handle();
        let token = handle.token.to_u64();
        self.log.invoke(Some(number), |_| Call::ReleaseInterrupted { token });
        let done = heard!(self, handle, release or release_async());
        self.log.answer(completion(done.map(Result::unwrap)));
    }

    fn peek(&mut self, number: u64) {
        self.log.invoke(Some(number), |_| Call::Peek);
        let key = key(number);
        let info = heard!(self, self.store, peek or peek_async(&key)).map(Result::unwrap);
        self.log.answer(match info {
            None => Answer::Unheard,
            Some(None) => Answer::Unknown,
            Some(Some(info)) => Answer::Known {
                request: request_of(info.fingerprint),
                name: name_of(info.state),
                shown: shown_of_info(&info),
                cause: info.cause.map(cause_of),
            },
        });
    }

    fn forget(&mut self, number: u64) {
        self.log.invoke(Some(number), |_| Call::Forget);
        let key = key(number);
        let known = heard!(self, self.store, forget or forget_async(&key, "a history")).map(Result::unwrap);
        self.log.answer(match known {
            None => Answer::Unheard,
            Some(true) => Answer::Done,
            Some(false) => Answer::Unknown,
        });
    }
}

fn completion(told: Option<Completion>) -> Answer {
    match told {
        None => Answer::Unheard,
        Some(Completion::Done) => Answer::Done,
        Some(Completion::Superseded) => Answer::Superseded,
    }
}

fn shown_of(reservation: &Reservation) -> Shown {
    Shown {
        token: reservation.token().to_u64(),
        attempt: u64::from(reservation.attempt()),
        checkpoint: number_of(reservation.checkpoint()),
    }
}

fn shown_of_info(info: &KeyInfo) -> Shown {
    Shown { token: info.token.to_u64(), attempt: u64::from(info.attempt), checkpoint: number_of(&info.checkpoint) }
}

fn name_of(state: KeyState) -> Name {
    match state {
        KeyState::InFlight => Name::InFlight,
        KeyState::Interrupted => Name::Interrupted,
        KeyState::Done => Name::Done,
        other => panic!("the contract has no state {other:?}"),
    }
}

fn cause_of(cause: keyonce::Cause) -> Cause {
    match cause {
        keyonce::Cause::Crash => Cause::Crash,
        keyonce::Cause::Dropped => Cause::Dropped,
        keyonce::Cause::LeaseLapsed => Cause::LeaseLapsed,
        other => panic!("the contract has no cause {other:?}"),
    }
}
