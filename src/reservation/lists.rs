//! Lists of keys, as an operator goes through them.

use std::iter::FusedIterator;
use std::sync::Arc;

use super::handles::{Interrupted, KeyInfo, Question};
use crate::engine::{Engine, Listed, Listing, Wanted};
use crate::error::Error;
use crate::key::Key;
use crate::options::Checked;
use crate::state::{Owned, Policy, State, Terms};

/// All keys that are known, in no order that means anything: made by [`Store::keys`](crate::Store::keys).
///
/// It holds no lock between two items, belongs to nobody's lifetime, and may be kept, sent to another thread and
/// dropped at any point, while others use the store. Each key is told as it was at one moment between the making of the
/// list and its item. A key that is known all the time is told exactly once; one that comes, goes or is reserved anew
/// meanwhile, at most once.
///
/// An item may wait for a sync, as any answer does: in asynchronous code, go through the list on a thread that may
/// block. It is `Err` where a record cannot be read, or cannot be made durable as its level asks for; the list goes on
/// after it. Once the store is closed, the list gives `Closed` once and ends.
#[derive(Debug)]
#[must_use = "a list does nothing until it is gone through"]
pub struct Keys {
    listing: Listing,
}

impl Keys {
    pub(crate) fn new(engine: &Arc<Engine>) -> Self {
        Self { listing: Listing::new(engine, Wanted::Known) }
    }
}

impl Iterator for Keys {
    type Item = Result<(Key, KeyInfo), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let told = self.listing.next()?.map(|Listed { key, state, checkpoint, .. }| {
            let info = KeyInfo::new(&state, checkpoint).expect("what is absent is not listed");
            (key, info)
        });
        Some(told)
    }
}

impl FusedIterator for Keys {}

/// All keys that are interrupted, ready to be resolved, released or taken over: made by
/// [`Store::interrupted`](crate::Store::interrupted).
///
/// It goes through the store as [`Keys`] does, and keeps the same promises: what stays interrupted is told exactly
/// once. Acting on an item, or on any other key, while going through the list is what it is for. A take-over from the
/// list has the store's own lease, level and meaning of a drop.
#[derive(Debug)]
#[must_use = "a list does nothing until it is gone through"]
pub struct InterruptedKeys {
    listing: Listing,
}

impl InterruptedKeys {
    pub(crate) fn new(engine: &Arc<Engine>) -> Self {
        Self { listing: Listing::new(engine, Wanted::Interrupted) }
    }
}

impl Iterator for InterruptedKeys {
    type Item = Result<Interrupted, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let listed = self.listing.next()?;
        let engine = self.listing.engine();
        Some(listed.map(|Listed { key, state, checkpoint, .. }| {
            let State::Interrupted(owned, stop) = state else { panic!("{state:?} was listed as interrupted") };
            let options = engine.options();
            let question =
                Question { engine, key: &key, terms: terms_again(options, &owned), on_drop: options.on_drop };
            Interrupted::new(question.keep(), &owned, stop, checkpoint)
        }))
    }
}

impl FusedIterator for InterruptedKeys {}

/// What a caller would ask who asked for the same request as the key stands for.
fn terms_again(options: &Checked, owned: &Owned) -> Terms {
    Terms {
        fingerprint: owned.fingerprint,
        retention_ms: owned.retention_ms.min(options.retention_ms),
        lease: options.lease,
        durability: options.durability,
        policy: Policy::Surface,
        too_old_from_ms: u64::MAX,
    }
}
