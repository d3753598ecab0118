//! A store that was dropped leaves its directory free, also while another thread of the process starts programs.
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use keyonce::{Options, Store};

#[test]
fn a_dropped_store_is_free_while_another_thread_starts_programs() {
    let dir = tempfile::tempdir().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    assert!(Command::new("true").status().unwrap().success());
                }
            });
        }
        let failed = (0..100)
            .find_map(|round| Store::open(dir.path().join("s"), Options::new()).err().map(|error| (round, error)));
        over.store(true, Ordering::Relaxed);
        assert!(failed.is_none(), "{failed:?}");
    });
}
