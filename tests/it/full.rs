//! Row F1, of a disk that is full: live keys stay, new ones are told when to come back.

use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Storage as _};
use keyonce::{Body, Completion, ErrorKind, Reserve};

use crate::place::{EVERYWHERE, fresh, key, replays, request, reserve};

#[test]
fn on_a_disk_full_of_live_keys_new_ones_are_told_when_to_come_back_and_nothing_is_lost() {
    for setting in EVERYWHERE {
        let (disk, clock) = (SimDisk::new(), ManualClock::default());
        let options = || setting.options(&clock);
        let store = testing::open(disk.clone(), options(), 1).unwrap();
        let held: Vec<_> = (0..3).map(|at| fresh(&store, &key(format!("held {at}")))).collect();
        let names = disk.list().unwrap();
        let bytes: usize = names.iter().map(|name| disk.read(name, 1 << 20).unwrap().len()).sum();
        disk.limit_bytes(Some(bytes as u64 + (600 << 10)));
        let body = |at: usize| vec![u8::try_from(at % 251).unwrap(); 5000];
        // Of each key whether its response was stored.
        let mut stored = Vec::new();
        let refused = loop {
            let at = stored.len();
            match store.reserve(&key(at.to_string()), request()) {
                Ok(Reserve::Fresh(owner)) => match owner.complete(&body(at)) {
                    Ok(completion) => stored.push(completion == Completion::Done),
                    // The guard comes back, and its key is never free.
                    Err(not_stored) => {
                        assert!(matches!(not_stored.error.kind(), ErrorKind::Full { .. }), "{}", not_stored.error);
                        stored.push(false);
                    }
                },
                Ok(other) => panic!("{setting:?}: {at}: {other:?}"),
                Err(error) => break error,
            }
            assert!(at < 10_000, "{setting:?}: the disk is never full");
        };
        let ErrorKind::Full { retry_after } = refused.kind() else { panic!("{setting:?}: {refused}") };
        assert!(retry_after > Duration::ZERO && refused.is_transient(), "{setting:?}: {refused}");
        assert!(stored.iter().filter(|stored| **stored).count() > 50, "{setting:?}: {stored:?}");
        for (at, stored) in stored.into_iter().enumerate() {
            match reserve(&store, &key(at.to_string())) {
                Reserve::Replay(response) if stored => assert!(response.body() == Body::Kept(&body(at)), "{at}"),
                Reserve::Interrupted(_) if !stored => {}
                other => panic!("{setting:?}: {at}: {other:?}"),
            }
        }

        // Room again: what is held completes, what was refused is fresh, and a kill changes nothing of it.
        disk.limit_bytes(None);
        for owner in held {
            assert_eq!(owner.complete(b"late").unwrap(), Completion::Done);
        }
        assert_eq!(fresh(&store, &key("new")).complete(b"new").unwrap(), Completion::Done);
        let after = testing::open(disk.kill(), options(), 2).unwrap();
        for store in [&store, &after] {
            (0..3).for_each(|at| drop(replays(store, &key(format!("held {at}")), b"late")));
            replays(store, &key("new"), b"new");
            replays(store, &key("7"), &body(7));
        }
    }
}
