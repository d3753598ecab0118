//! Calls that failed: nobody was told what became of them.

use super::history::Record;
use super::{History, Model};
use crate::key::{Key, Token};
use crate::reservation::KeyInfo;

impl Model {
    /// Calls may fail from now on, until the next opening: see [`lose_call`](Self::lose_call).
    pub fn expect_failures(&mut self) {
        self.expects_failures = true;
    }

    /// A call has failed, and the store is at its end: what the call would have changed may be found or not, and what no
    /// answer rests on, too. The model has made the call all the same; `before` is a clone of it from before, when it
    /// knew already that calls [may fail](Self::expect_failures).
    ///
    /// Then [`open`](Self::open) it, tell it what the opened store shows by [`learn_lost`](Self::learn_lost), and
    /// [`adopt`](Self::adopt) every key.
    pub fn lose_call(&mut self, before: &Self) {
        self.tick();
        self.durable = self.durable.min(before.durable);
        self.token_before = before.token_max;
        self.crash();
    }

    /// Tells which tokens a store shows that nobody was told: those of reserves that failed.
    pub fn learn_lost(&mut self, shown: &[(Key, Option<KeyInfo>)]) {
        let given = self.token_before;
        let lost = |(key, info): &(Key, Option<KeyInfo>)| Some((key.clone(), info.as_ref()?.token));
        for (key, token) in shown.iter().filter_map(lost).filter(|(_, token)| token.to_u64() > given) {
            if let Some(history) = self.keys.get_mut(&key) {
                name(history, token);
                self.token_max = self.token_max.max(token.to_u64());
            }
        }
    }
}

fn name(history: &mut History, token: Token) {
    for (_, record) in &mut history.records {
        match record {
            Record::Running(work) | Record::Stopped(work, ..) | Record::Done(work, _) if work.token == 0 => {
                work.token = token.to_u64();
            }
            Record::Gone(_) | Record::Running(_) | Record::Stopped(..) | Record::Done(..) => {}
        }
    }
}
