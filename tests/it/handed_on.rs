//! A detachment whose future is dropped before it is ready must not end the reservation of whoever reattached since.

use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use keyonce::{Durability, Fingerprint, Key, KeyState, OnDrop, Options, Reserve, ReserveOptions, Retention, Store};

/// What the key is after somebody reattached while the future of the detachment was not ready, and that was dropped.
fn after_the_drop(on_drop: OnDrop) -> Option<KeyState> {
    let dir = tempfile::tempdir().unwrap();
    let retention = Retention::new(Duration::from_secs(3600), 0.1);
    let options = Options::new().durability(Durability::PowerLoss).retention(retention).response_bytes_max(1500);
    let store = Store::open(dir.path().join("store"), options).unwrap();
    for round in 0..1000 {
        let key = Key::new("found", format!("{round}")).unwrap();
        let with = ReserveOptions::new().on_drop(on_drop);
        let Reserve::Fresh(reservation) = store.reserve_with(&key, Fingerprint::of("a"), &with).unwrap() else {
            panic!("a new key")
        };
        let token = reservation.token();
        let mut held = None;
        {
            let mut detaching = pin!(reservation.detach_async(Duration::from_secs(60)));
            if detaching.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                held = Some(store.reattach(&key, token).expect("it is detached, as the log says durably"));
            }
        }
        if let Some(held) = held {
            let state = store.peek(&key).unwrap().map(|info| info.state);
            drop(held);
            return state;
        }
    }
    panic!("a detachment never waits for its sync");
}

#[test]
fn a_detachment_that_is_dropped_does_not_interrupt_who_reattached() {
    assert_eq!(after_the_drop(OnDrop::Interrupt), Some(KeyState::InFlight));
}

#[test]
fn a_detachment_that_is_dropped_does_not_free_the_key_of_who_reattached() {
    assert_eq!(after_the_drop(OnDrop::Release), Some(KeyState::InFlight));
}
