//! Calls that do several things: once, and batches.

use keyonce::{Ask, Cause, Completion, Failed, OnceError, Outcome, Reservation, Reserve};

use super::acts::{done, given_back};
use super::{Clients, Guard, attached};
use crate::oracle::{Fate, fingerprint, key};
use crate::workload::{Random, With, Work, body};

impl Clients {
    pub(super) fn once(&mut self, number: usize, with: With, work: Work) {
        let (asked, options) = self.asking(0, with);
        let next = self.next_owner(number, asked, with.take_over);
        let bytes = match work {
            Work::Responds { bytes } => body(number, self.oracle.calls(), bytes),
            Work::NothingHappened | Work::Unknown => Vec::new(),
        };
        let mut token = None;
        let store = self.store().clone();
        let outcome = store.once_with(&key(number), fingerprint(number, 0), &options, |attempt| {
            token = Some(attempt.token());
            self.owns(number, asked, attempt, next.clone());
            // Whoever works was told so: what comes now is another call.
            self.oracle.end(self.disk.steps(), self.hands());
            self.oracle.begin(self.disk.steps(), self.hands());
            match work {
                Work::Responds { .. } => Ok(bytes.clone()),
                Work::NothingHappened => Err(Failed::NothingHappened(())),
                Work::Unknown => Err(Failed::Unknown(())),
            }
        });
        let now_ms = self.now_ms();
        let latest = token.and_then(|token| self.latest(number, token));
        let answer = match outcome {
            Ok(Outcome::Ran(response)) => {
                assert_eq!(response, bytes, "key {number}");
                self.meet("once: responses");
                return self.acted(number, Completion::Done, latest, |owner| done(owner, bytes, true, now_ms));
            }
            Err(OnceError::Work(())) => {
                self.meet("once: failures");
                let unknown = matches!(work, Work::Unknown);
                return self.acted(number, Completion::Done, latest, |owner| match unknown {
                    true => Fate::Stopped { owner: attached(owner), cause: Cause::Dropped, since_ms: now_ms },
                    false => given_back(owner, now_ms),
                });
            }
            Ok(Outcome::Replayed(response)) => Reserve::Replay(response),
            Err(OnceError::InFlight(in_flight)) => Reserve::InFlight(in_flight),
            Err(OnceError::Interrupted(interrupted)) => Reserve::Interrupted(interrupted),
            Err(OnceError::Mismatch(mismatch)) => Reserve::Mismatch(mismatch),
            Err(OnceError::TooOld(too_old)) => Reserve::TooOld(too_old),
            Err(error) => panic!("key {number}, on a sound disk: {error:?}"),
        };
        self.answered(number, asked, answer, next);
    }

    pub(super) fn reserve_batch(&mut self, seed: u64) {
        let mut random = Random(seed);
        let asks: Vec<_> = (0..2 + random.index(3))
            .map(|_| {
                let number = random.index(self.settings.keys);
                let (request, with) = (u8::from(random.one_in(6)), With::by_chance(&mut random));
                let (asked, options) = self.asking(request, with);
                let ask = Ask::new(&key(number), fingerprint(number, request)).options(options);
                (ask, number, asked, with)
            })
            .collect();
        let words: Vec<Ask> = asks.iter().map(|(ask, ..)| ask.clone()).collect();
        let answers = self.store().reserve_batch(&words).unwrap();
        assert_eq!(answers.len(), asks.len());
        for ((_, number, asked, with), answer) in asks.into_iter().zip(answers) {
            // As if one after another.
            let next = self.next_owner(number, asked, with.take_over);
            self.answered(number, asked, answer.unwrap(), next);
        }
        self.meet("batches reserved");
    }

    pub(super) fn complete_batch(&mut self, count: usize, bytes: usize) {
        let guards = self.guards.split_off(self.guards.len().saturating_sub(count));
        let (mut asked, mut items): (Vec<_>, Vec<(Reservation, Vec<u8>)>) = (Vec::new(), Vec::new());
        for (number, Guard { key, reservation, .. }) in guards.into_iter().enumerate() {
            let bytes = body(key, self.oracle.calls() * 100 + number, bytes);
            asked.push((key, reservation.token(), bytes.clone()));
            items.push((reservation, bytes));
        }
        if items.len() > 1 {
            self.meet("batches completed");
        }
        let now_ms = self.now_ms();
        for ((key, token, bytes), completion) in asked.into_iter().zip(self.store().complete_batch(items)) {
            let latest = self.latest(key, token);
            self.acted(key, completion.unwrap(), latest, |owner| done(owner, bytes, true, now_ms));
        }
    }
}
