//! Lists of keys that hold nothing between two items.
//!
//! A shard at a time, when the list reaches it: under the lock, the addresses of its live slots are copied, a slot a
//! key, so that no key comes twice however the shard grows afterwards. Outside the lock the keys are read at those
//! addresses: a record never changes while its segment is alive. If a segment was given up meanwhile, a key may have
//! moved on out of it, and the shard is begun again. From then on the list goes by keys and not by places. A few at a
//! time are looked up under the lock, as any caller would; so each is told as it was at one moment, no caller waits
//! for more than a few looks, and what has gone is passed over. An item is told when what it rests on is durable.

use std::collections::VecDeque;
use std::fmt;
use std::iter::FusedIterator;
use std::sync::Arc;
use std::vec;

use super::{Engine, RestsOn, SHARDS};
use crate::error::Error;
use crate::format::{StateKind, StateRecord};
use crate::index::Address;
use crate::key::Key;
use crate::state::State;
use crate::wait::{Caller, now};

/// How many keys are looked up, or records read, before the lock is free again.
const LOOKS_AT_ONCE: usize = 64;

/// How often a shard is begun again before it is read with its lock held, under which no segment is given up.
const TRIES_MAX: u32 = 2;

/// Which keys a list is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// All that are known.
    Known,
    /// Those that are interrupted.
    Interrupted,
}

/// A key, as it was at one moment.
pub(crate) struct Listed {
    pub(crate) key: Key,
    /// Never [`State::Absent`].
    pub(crate) state: State,
    /// The checkpoint of an unfinished key.
    pub(crate) checkpoint: Arc<[u8]>,
    /// What must be durable before this may be told.
    rests_on: Option<RestsOn>,
}

/// A list of keys that is being told.
pub(crate) struct Listing {
    engine: Arc<Engine>,
    wanted: Wanted,
    /// The number of the shard that the list is in; that of the next one when `to_look_up` is empty.
    shard: usize,
    /// Keys of the shard, and records of it that could not be read.
    to_look_up: vec::IntoIter<Result<Key, Error>>,
    to_tell: VecDeque<Result<Listed, Error>>,
    over: bool,
}

impl Listing {
    pub(crate) fn new(engine: &Arc<Engine>, wanted: Wanted) -> Self {
        Self {
            engine: Arc::clone(engine),
            wanted,
            shard: 0,
            to_look_up: Vec::new().into_iter(),
            to_tell: VecDeque::new(),
            over: false,
        }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Looks up the next few keys, reading the next shard first if this one is done. `false`: there are no more.
    fn go_on(&mut self) -> Result<bool, Error> {
        if self.to_look_up.len() == 0 {
            if self.shard == SHARDS {
                return Ok(false);
            }
            self.to_look_up = self.engine.keys_of_shard(self.shard, self.wanted)?.into_iter();
            self.shard += 1;
        }
        if self.to_look_up.len() == 0 {
            return Ok(true);
        }
        let some = self.to_look_up.by_ref().take(LOOKS_AT_ONCE);
        self.to_tell.extend(self.engine.look_up_listed(self.shard - 1, self.wanted, some)?);
        Ok(true)
    }
}

impl Iterator for Listing {
    type Item = Result<Listed, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.over {
            let gone_on = match self.engine.refuse_closed() {
                Ok(()) => match self.to_tell.pop_front() {
                    Some(item) => return Some(item.and_then(|listed| self.engine.settle_listed(listed))),
                    None => self.go_on(),
                },
                Err(closed) => Err(closed),
            };
            match gone_on {
                Ok(more) => self.over = !more,
                Err(closed) => {
                    self.over = true;
                    return Some(Err(closed));
                }
            }
        }
        None
    }
}

impl FusedIterator for Listing {}

impl fmt::Debug for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listing").field("wanted", &self.wanted).field("over", &self.over).finish_non_exhaustive()
    }
}

impl Engine {
    /// The keys of a shard that may be wanted, oldest record first. A record that cannot be read is an error among
    /// them; `Err` when the store is closed.
    fn keys_of_shard(&self, number: usize, wanted: Wanted) -> Result<Vec<Result<Key, Error>>, Error> {
        let mut tries = 0;
        loop {
            let shard = self.shards.get(number).expect("a list ends behind the last shard").lock();
            self.refuse_closed()?;
            let mut addresses: Vec<_> = shard.index.addresses(self.log.oldest_live()).collect();
            // The lock is kept only when it must be.
            let kept = (tries == TRIES_MAX).then_some(shard);
            addresses.sort_unstable_by_key(|address| (address.segment, address.offset));
            if let Some(keys) = self.keys_at(&addresses, wanted) {
                return Ok(keys);
            }
            if kept.is_some() {
                // While the lock is held no segment goes: what the index names never came from this log.
                return Err(Error::corrupt("the index", 0, "it names a segment that is not alive"));
            }
            tries += 1;
        }
    }

    /// The keys of the records that stand there; `None` if a segment has been given up.
    fn keys_at(&self, addresses: &[Address], wanted: Wanted) -> Option<Vec<Result<Key, Error>>> {
        let mut keys = Vec::new();
        for some in addresses.chunks(LOOKS_AT_ONCE) {
            let now_ms = self.now_ms();
            // As long as this is held, no file is given another life.
            let live = self.log.live().read();
            for address in some {
                let key = match live.get(address.segment)?.checked_record(address.offset) {
                    Ok((record, _)) if !may_be_wanted(&record, wanted, now_ms) => continue,
                    Ok((record, _)) => Key::new(record.scope, record.id).map_err(Error::from),
                    Err(damage) => Err(damage),
                };
                keys.push(key);
            }
        }
        Some(keys)
    }

    /// Looks keys of one shard up, as they are at this moment.
    fn look_up_listed(
        &self,
        number: usize,
        wanted: Wanted,
        keys: impl Iterator<Item = Result<Key, Error>>,
    ) -> Result<Vec<Result<Listed, Error>>, Error> {
        let mut shard = self.shards.get(number).expect("a list ends behind the last shard").lock();
        self.refuse_closed()?;
        let live = self.log.live().read();
        let now_ms = self.now_ms();
        let listed = keys.filter_map(|key| {
            let looked = key.and_then(|key| {
                let look = self.look(&live, &mut shard, key.hash(&self.seed), &key, now_ms)?;
                let checkpoint = match look.state {
                    State::InFlight(_) | State::Interrupted(..) => look.payload(),
                    State::Absent | State::Done(_) => Arc::default(),
                };
                let rests_on = look.rests_on(self.options.durability);
                Ok(Listed { key, state: look.state, checkpoint, rests_on })
            });
            match looked {
                Ok(listed) => listed.is_wanted(wanted).then_some(Ok(listed)),
                Err(damage) => Some(Err(damage)),
            }
        });
        Ok(listed.collect())
    }

    fn settle_listed(&self, listed: Listed) -> Result<Listed, Error> {
        now(self.settle(listed.rests_on, Caller::Thread))?;
        Ok(listed)
    }
}

impl Listed {
    fn is_wanted(&self, wanted: Wanted) -> bool {
        match self.state {
            State::Absent => false,
            State::Interrupted(..) => true,
            State::InFlight(_) | State::Done(_) => wanted == Wanted::Known,
        }
    }
}

/// Whether the key of this record, which was the latest when its address was copied, may turn out to be wanted. A list
/// of a few keys copies only those few out of millions.
fn may_be_wanted(record: &StateRecord<'_>, wanted: Wanted, now_ms: u64) -> bool {
    match record.kind {
        // Whether one in flight is interrupted, or beyond its time, its guard says.
        StateKind::Reserved | StateKind::Interrupted => true,
        StateKind::Done => wanted == Wanted::Known && now_ms < record.kept_until_ms,
        StateKind::Released | StateKind::Forgotten => false,
    }
}
