//! P9 and P10: what is remembered, how long, and what is said when it cannot be.

use std::time::Duration;

use keyonce::{Completion, Durability, ErrorKind, Fingerprint, Key, Reserve, ReserveOptions, Store};

use crate::place::{
    EVERYWHERE, LEASE, MS, Place, RESPONSE_BYTES_MAX, WINDOW, as_fresh, everywhere, fresh, interrupted, key, replays,
    request, reserve, state,
};

// P9: no live key is forgotten.

#[test]
fn p9_no_live_key_is_forgotten_and_expiry_comes_at_its_millisecond() {
    let short = WINDOW / 4;
    everywhere(|place| {
        let store = place.open();
        let with = ReserveOptions::new().retention(short);
        let owner = as_fresh(store.reserve_with(&key("short"), request(), &with).unwrap());
        assert_eq!(owner.complete(b"short").unwrap(), Completion::Done);
        assert_eq!(fresh(&store, &key("long")).complete(b"long").unwrap(), Completion::Done);
        for (id, retention) in [("short", short), ("long", WINDOW - short - MS)] {
            place.clock.advance(retention - MS);
            replays(&store, &key(id), id.as_bytes());
            replays(&place.open_after_kill(), &key(id), id.as_bytes());
            place.clock.advance(MS);
            assert_eq!(state(&store, &key(id)), None, "{id} at the end of its retention");
            assert_eq!(state(&place.open_after_kill(), &key(id)), None);
            place.clock.advance(MS);
            assert_eq!(state(&store, &key(id)), None);
        }
    });
}

#[test]
fn p9_a_duplicate_does_not_extend_the_retention() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        assert_eq!(fresh(&store, &key).complete(b"paid").unwrap(), Completion::Done);
        let expires_at = replays(&store, &key, b"paid").expires_at();
        let mut runs = 1;
        for _ in 0..10 {
            place.clock.advance(WINDOW / 5 * 4);
            match reserve(&store, &key) {
                Reserve::Replay(response) => {
                    assert!(runs > 1 || response.expires_at() == expires_at);
                }
                Reserve::Fresh(owner) => {
                    runs += 1;
                    assert_eq!(owner.complete(b"paid").unwrap(), Completion::Done);
                }
                other => panic!("{other:?}"),
            }
        }
        // Told and forgotten in turn: 0.8 of the retention is a replay, 1.6 is not.
        assert_eq!(runs, 6);
    });
}

#[test]
fn p9_duplicates_are_answered_by_their_age() {
    everywhere(|place| {
        let store = place.open();
        let issued_at = ReserveOptions::new()
            .issued_at(std::time::UNIX_EPOCH + Duration::from_millis(keyonce::Clock::wall_ms(&place.clock)));
        let keys: Vec<_> = ["half", "nine tenths", "one", "more", "more, dated"].map(key).into();
        for key in &keys {
            assert_eq!(fresh(&store, key).complete(b"paid").unwrap(), Completion::Done);
        }
        place.clock.advance(WINDOW / 2);
        replays(&store, &keys[0], b"paid");
        place.clock.advance(WINDOW / 10 * 4);
        replays(&store, &keys[1], b"paid");
        place.clock.advance(WINDOW / 10);
        assert_eq!(fresh(&store, &keys[2]).release().unwrap(), Completion::Done);
        place.clock.advance(WINDOW / 10);
        assert_eq!(fresh(&store, &keys[3]).release().unwrap(), Completion::Done);
        let Reserve::TooOld(too_old) = store.reserve_with(&keys[4], request(), &issued_at).unwrap() else {
            panic!("it may have been forgotten")
        };
        assert_eq!(too_old.retention, WINDOW);
        assert_eq!(state(&store, &keys[4]), None);
    });
}

/// Held far beyond its retention and then killed: a held key never expires.
#[test]
fn p9_a_held_key_never_expires() {
    everywhere(|place| {
        let store = place.open();
        let key = key("a");
        let owner = fresh(&store, &key);
        for _ in 0..5 {
            assert_eq!(owner.renew(WINDOW).unwrap(), Completion::Done);
            place.clock.advance(WINDOW - MS);
            assert!(matches!(reserve(&store, &key), Reserve::InFlight(_)));
        }
        assert_eq!(interrupted(&place.open_after_kill(), &key).token, owner.token());
        // Also when nobody renews: interrupted, as long as the guard lives.
        place.clock.advance(10 * WINDOW);
        assert_eq!(interrupted(&store, &key).token, owner.token());
        assert_eq!(owner.complete(b"at last").unwrap(), Completion::Done);
        replays(&store, &key, b"at last");
    });
}

/// The log goes through many segments and several windows: what is live is there, what is over is gone, and what is
/// unfinished is carried along.
#[test]
fn p9_no_live_key_is_forgotten_while_segments_roll_and_retire() {
    let body = [9; 2000];
    for setting in EVERYWHERE {
        let place = Place::new(setting);
        let store = place.open();
        let held = fresh(&store, &key("held"));
        // A lease of seven windows, which nobody renews.
        let with = ReserveOptions::new().lease(7 * WINDOW);
        let leased = as_fresh(store.reserve_with(&key("leased"), request(), &with).unwrap());
        let with = ReserveOptions::new().durability(Durability::ProcessCrash);
        let step = WINDOW / 200;
        let mut most = 0;
        for at in 0..600_u32 {
            let owner = as_fresh(store.reserve_with(&key(at.to_string()), request(), &with).unwrap());
            assert_eq!(owner.complete(&body).unwrap(), Completion::Done);
            place.clock.advance(step);
            most = most.max(store.stats().segments);
            // The oldest that is still within the window, and the youngest that is not.
            if at >= 199 {
                assert_eq!(state(&store, &key((at - 199).to_string())), None, "at {at}");
            }
            if at >= 198 {
                replays(&store, &key((at - 198).to_string()), &body);
            }
            assert_eq!(held.renew(LEASE).unwrap(), Completion::Done);
        }
        assert!(most < 8, "{most} segments for a window that fills three");
        let killed = place.open_after_kill();
        for at in 402..600_u32 {
            replays(&killed, &key(at.to_string()), &body);
        }
        assert_eq!(interrupted(&killed, &key("held")).token, held.token());
        assert_eq!(interrupted(&killed, &key("leased")).token, leased.token());
        assert_eq!(held.complete(b"held").unwrap(), Completion::Done);
        assert!(matches!(reserve(&store, &key("leased")), Reserve::InFlight(_)));
        assert_eq!(leased.complete(b"leased").unwrap(), Completion::Done);
        replays(&store, &key("leased"), b"leased");
    }
}

// P10: damage is told.

#[test]
fn p10_damage_is_told_and_no_byte_changes() {
    everywhere(|place| {
        let store = place.open();
        let tokens: Vec<_> = (0..4)
            .map(|at| {
                let owner = fresh(&store, &key(at.to_string()));
                let token = owner.token().to_u64();
                assert_eq!(owner.complete(b"a response that is damaged").unwrap(), Completion::Done);
                token
            })
            .collect();
        store.close(Duration::ZERO).unwrap();
        drop(store);
        // In the first segment the token of a reservation is the place of its record.
        let segment = std::fs::read_dir(place.dir()).unwrap().map(|entry| entry.unwrap().path());
        let segment = segment.filter(|path| path.to_string_lossy().contains("segment-")).min().unwrap();
        let name = segment.file_name().unwrap().to_str().unwrap().to_owned();
        let whole = std::fs::read(&segment).unwrap();
        for (at, token) in tokens.iter().enumerate() {
            let mut damaged = whole.clone();
            damaged[usize::try_from(*token).unwrap() + 40] ^= 1;
            std::fs::write(&segment, &damaged).unwrap();
            let before = crate::place::tree(&place.dir());
            let error = Store::open(place.dir(), place.options()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "record {at}");
            let told = error.to_string();
            assert!(told.contains(&name) && told.contains(&format!("byte {token}:")), "{told}");
            assert!(crate::place::tree(&place.dir()) == before, "bytes changed");
        }
        std::fs::write(&segment, &whole).unwrap();
        for at in 0..4 {
            replays(&place.open(), &key(at.to_string()), b"a response that is damaged");
        }
    });
}

#[test]
fn p10_a_torn_tail_is_skipped_and_reported() {
    everywhere(|place| {
        let store = place.open();
        assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
        let torn = fresh(&store, &key("b"));
        let at = usize::try_from(torn.token().to_u64()).unwrap();
        let dir = place.root().join("torn");
        crate::place::copy_files(&place.dir(), &dir);
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.to_string_lossy().contains("segment-") {
                let mut bytes = std::fs::read(&path).unwrap();
                bytes[at + 20] ^= 0xff;
                std::fs::write(&path, bytes).unwrap();
            }
        }
        let after = Store::open(&dir, place.options()).unwrap();
        assert_eq!((after.opened().clean, after.opened().torn), (false, 1));
        replays(&after, &key("a"), b"paid");
        assert_eq!(state(&after, &key("b")), None);
        assert!(fresh(&after, &key("b")).token() > torn.token());
        drop(after);
        let again = Store::open(&dir, place.options()).unwrap();
        assert_eq!((again.opened().clean, again.opened().torn), (true, 0), "the decision was made once");
    });
}

#[test]
fn p10_fingerprints_and_keys_never_stand_in_an_error() {
    let place = Place::new(EVERYWHERE[0]);
    let store = place.open();
    let secret = Key::new("secret-scope", "secret-id").unwrap();
    let owner = as_fresh(store.reserve(&secret, Fingerprint::of("secret-body")).unwrap());
    let shown = format!("{owner:?} {:?} {store:?}", owner.attempt_view());
    let not_stored = owner.complete(&[0; RESPONSE_BYTES_MAX + 1]).unwrap_err();
    let shown = format!("{shown} {not_stored} {not_stored:?}");
    assert!(!shown.contains("secret"), "{shown}");
}
