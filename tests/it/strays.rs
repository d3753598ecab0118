//! Files that look like a store's and are none are left as they are, and what nobody resolves is counted.

use std::fs;

use keyonce::{Completion, ErrorKind, Store};

use crate::place::{EVERYWHERE, Place, WINDOW, fresh, key, tree};

#[test]
fn an_interrupted_key_that_expires_is_counted_when_its_key_is_asked_for_again() {
    let place = Place::new(EVERYWHERE[2]);
    let store = place.open();
    drop(fresh(&store, &key("a")));
    place.clock.advance(3 * WINDOW);
    assert_eq!(fresh(&store, &key("a")).release().unwrap(), Completion::Done);
    assert_eq!(store.stats().expired_unresolved, 1);
}

#[test]
fn somebody_elses_store_file_is_refused_before_a_lock_file_is_made() {
    let place = Place::new(EVERYWHERE[2]);
    let dir = place.root().join("x");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("keyonce.store"), "something else").unwrap();
    let before = tree(&dir);
    assert_eq!(Store::open(&dir, place.options()).unwrap_err().kind(), ErrorKind::ForeignDirectory);
    assert!(tree(&dir) == before, "{:?}", tree(&dir));
}

#[test]
fn garbage_under_a_segments_name_is_left_alone() {
    for bytes in [vec![1_u8], vec![1; 300], vec![1; 9_000], vec![1; 200_000]] {
        let place = Place::new(EVERYWHERE[2]);
        let store = place.open();
        assert_eq!(fresh(&store, &key("a")).complete(b"paid").unwrap(), Completion::Done);
        drop(store);
        let stray = place.dir().join("segment-000000aa.keyonce");
        fs::write(&stray, &bytes).unwrap();
        for _ in 0..3 {
            let store = place.open();
            assert!(store.peek(&key("a")).unwrap().is_some());
        }
        assert!(fs::read(&stray).unwrap() == bytes, "{} bytes", bytes.len());
    }
}
