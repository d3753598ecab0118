//! The main job in one breath.

use keyonce::testing::{self, SimDisk};
use keyonce::{Body, Completion, Fingerprint, Key, Options, Reserve};

#[test]
fn what_was_completed_is_replayed_after_a_reopen() {
    let disk = SimDisk::new();
    let key = Key::new("charges", "order-17").unwrap();
    let request = Fingerprint::of("9.99 EUR");
    {
        let store = testing::open(disk.clone(), Options::default(), 1).unwrap();
        let Reserve::Fresh(reservation) = store.reserve(&key, request).unwrap() else { panic!("nobody reserved it") };
        assert_eq!(reservation.complete(b"paid").unwrap(), Completion::Done);
    }
    let store = testing::open(disk, Options::default(), 2).unwrap();
    assert!(store.opened().clean);
    let Reserve::Replay(response) = store.reserve(&key, request).unwrap() else { panic!("it was completed") };
    assert_eq!(response.body(), Body::Kept(b"paid"));
    assert!(matches!(store.reserve(&key, Fingerprint::of("10.00 EUR")).unwrap(), Reserve::Mismatch(_)));
}
