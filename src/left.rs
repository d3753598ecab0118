//! What a store had to leave unsaid when it ended, for the next opening in this process.
//!
//! A store that can write no more, since a sync has failed, cannot say that some of its reservations are still held.
//! Their holders live on in this process, and may be at work, so the next opening must not take them for victims of a
//! crash. Another process knows nothing of them, and needs to know nothing: there, their holders are gone.

use std::collections::BTreeMap;

use crate::key::Key;
use crate::sync::UnmodelledMutex;

/// The storage's number in this process, and the id of the store on it.
pub(crate) type Whose = (u64, [u8; 16]);

/// Reservations by key and token.
pub(crate) type Left = Vec<(Key, u64)>;

/// One of the two things that outlive a store in its process; the other is the lock of its directory.
static LEFT: UnmodelledMutex<BTreeMap<Whose, Left>> = UnmodelledMutex::new(BTreeMap::new());

/// Remembers reservations that are held beyond the end of their store.
pub(crate) fn leave(whose: Whose, left: Left) {
    if !left.is_empty() {
        LEFT.lock().entry(whose).or_default().extend(left);
    }
}

/// Takes what was left, to be said now.
pub(crate) fn take(whose: Whose) -> Left {
    LEFT.lock().remove(&whose).unwrap_or_default()
}
