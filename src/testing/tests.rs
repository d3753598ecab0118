//! What the simulated disk promises to those who test with it. (What it has in common with the real one is tested in
//! `storage.rs`.)

use std::collections::BTreeSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::*;
use crate::sync::UnmodelledMutex;

const PAGE: u64 = 4096;

/// A disk with a synced segment `log` of four pages of zeros, and its lock.
fn disk_with_log() -> (SimDisk, Box<dyn std::any::Any + Send + Sync>, Arc<dyn Segment>) {
    let disk = SimDisk::new();
    let lock = disk.lock().unwrap().unwrap();
    let log = disk.create_segment("log", 4 * PAGE).unwrap();
    (disk, lock, log)
}

fn log_of(disk: &SimDisk) -> Vec<u8> {
    disk.read("log", 1 << 20).unwrap()
}

/// All that can be seen of a disk.
fn seen(disk: &SimDisk) -> Vec<(String, Vec<u8>)> {
    let names = disk.list().unwrap();
    names.into_iter().map(|name| (name.clone(), disk.read(&name, 1 << 20).unwrap())).collect()
}

fn raw<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
fn each_unsynced_page_is_old_or_new_in_every_combination() {
    let (disk, _lock, log) = disk_with_log();
    log.write_at(0, b"a").unwrap();
    log.write_at(PAGE, b"b").unwrap();
    log.write_at(2 * PAGE, b"c").unwrap();
    let crashes = disk.crashes();
    assert_eq!(crashes.count(), Some(8));
    let pages = |image: SimDisk| {
        let log = log_of(&image);
        (log[0], log[4096], log[8192], log[12_288])
    };
    let found: BTreeSet<_> = crashes.images(8).map(pages).collect();
    assert_eq!(found.len(), 8);
    assert!(
        found
            .iter()
            .all(|(a, b, c, d)| [0, b'a'].contains(a) && [0, b'b'].contains(b) && [0, b'c'].contains(c) && *d == 0)
    );
    assert_eq!(pages(disk.crash_all_old()), (0, 0, 0, 0));
    assert_eq!(pages(disk.crash_all_new()), (b'a', b'b', b'c', 0));
}

#[test]
fn a_page_written_twice_may_be_found_as_it_was_in_between() {
    let (disk, _lock, log) = disk_with_log();
    log.write_at(0, b"one").unwrap();
    log.write_at(3, b"two").unwrap();
    let found: BTreeSet<_> = disk.images(100).map(|image| log_of(&image)[..6].to_vec()).collect();
    let versions = [&b"\0\0\0\0\0\0"[..], b"one\0\0\0", b"onetwo"];
    assert_eq!(found, versions.map(<[u8]>::to_vec).into());
}

#[test]
fn a_write_over_two_pages_is_torn_between_them_and_over_two_sectors_only_when_asked_for() {
    for (unit, count) in [(Tear::Page, 4), (Tear::Sector, 16)] {
        let disk = SimDisk::new().tearing(unit);
        let _lock = disk.lock().unwrap().unwrap();
        let log = disk.create_segment("log", 4 * PAGE).unwrap();
        log.write_at(PAGE - 600, &[1; 1200]).unwrap();
        let found: BTreeSet<_> = disk.images(100).map(|image| log_of(&image)).collect();
        assert_eq!(found.len(), count, "{unit:?}");
        assert_eq!(disk.crashes().count(), Some(count as u64));
    }
}

#[test]
fn what_was_synced_is_in_every_image() {
    let (disk, _lock, log) = disk_with_log();
    log.write_at(0, b"synced").unwrap();
    log.sync().unwrap();
    log.write_at(6, b"not").unwrap();
    log.write_at(PAGE, b"not").unwrap();
    for image in disk.images(100).chain((0..100).map(|seed| disk.crash_image(seed))) {
        assert_eq!(log_of(&image)[..6], *b"synced");
    }
    log.sync().unwrap();
    assert_eq!(disk.crashes().count(), Some(1));
    assert_eq!(seen(&disk.crash_all_old()), seen(&disk));
}

#[test]
fn a_sync_covers_only_what_was_written_before_it_began() {
    let (disk, _lock, log) = disk_with_log();
    log.write_at(0, b"before").unwrap();
    let during = Arc::new(UnmodelledMutex::new(Some(log.clone())));
    disk.on_step(move |step| {
        if step == Step::Sync
            && let Some(log) = during.lock().take()
        {
            log.write_at(6, b"during").unwrap();
        }
    });
    log.sync().unwrap();
    assert_eq!(log_of(&disk)[..12], *b"beforeduring");
    assert_eq!(log_of(&disk.crash_all_old())[..12], *b"before\0\0\0\0\0\0");
    log.sync().unwrap();
    assert_eq!(log_of(&disk.crash_all_old())[..12], *b"beforeduring");
}

#[test]
fn a_failed_sync_is_followed_by_one_that_says_ok_and_lies() {
    let (disk, lock, log) = disk_with_log();
    log.write_at(0, b"lost").unwrap();
    log.write_at(PAGE, b"lost").unwrap();
    disk.fail_at(disk.steps(), EIO);
    assert_eq!(raw(log.sync()), Some(EIO));
    log.sync().unwrap();
    // Seen all the same, also by a new process, whose own sync says Ok as well.
    drop((log, lock));
    let disk = disk.kill();
    let _lock = disk.lock().unwrap().unwrap();
    let log = disk.open_segment("log", Access::Read).unwrap();
    assert_eq!((log.view(0, 4), log.view(PAGE, 4)), (&b"lost"[..], &b"lost"[..]));
    log.sync().unwrap();
    drop(log);
    assert_eq!(log_of(&disk.crash_all_old()), [0; 4 * 4096]);
    assert_eq!(disk.crashes().count(), Some(4), "each page may have got through by itself before the sync failed");

    // A page that is written again is written back whole; the other one is still forsaken.
    let log = disk.open_segment("log", Access::NewLife).unwrap();
    log.write_at(4, b"again").unwrap();
    log.sync().unwrap();
    let old = log_of(&disk.crash_all_old());
    assert_eq!((&old[..9], &old[4096..4100]), (&b"lostagain"[..], &[0; 4][..]));
    assert_eq!(log_of(&disk)[4096..4100], *b"lost");
    assert_eq!(disk.crashes().count(), Some(2));
}

#[test]
fn a_failing_write_leaves_half_of_it_unpublished() {
    let (disk, _lock, log) = disk_with_log();
    disk.fail_at(disk.steps(), ENOSPC);
    assert_eq!(raw(log.write_at(0, b"12345678")), Some(ENOSPC));
    assert_eq!(log_of(&disk)[..8], *b"1234\0\0\0\0");
    assert!(catch_unwind(AssertUnwindSafe(|| log.view(0, 1).to_vec())).is_err());
    log.write_at(0, b"12345678").unwrap();
    assert_eq!(log.view(0, 8), b"12345678");
}

#[test]
fn faults_hit_the_steps_they_are_for_until_they_are_healed() {
    let (disk, _lock, log) = disk_with_log();
    disk.fail_at(disk.steps() + 1, EIO);
    log.write_at(0, b"a").unwrap();
    assert_eq!(raw(log.sync()), Some(EIO));
    log.write_at(1, b"b").unwrap();
    disk.fail_from(disk.steps(), EDQUOT);
    for _ in 0..3 {
        assert_eq!(raw(log.write_at(2, b"c")), Some(EDQUOT));
        assert_eq!(raw(disk.sync_directory()), Some(EDQUOT));
    }
    let steps = disk.steps();
    disk.heal();
    log.write_at(2, b"c").unwrap();
    assert_eq!(disk.steps(), steps + 1);
    disk.fail_reads_from(disk.reads() + 1, EIO);
    log.read_at(0, &mut [0]).unwrap();
    assert_eq!(raw(log.read_at(0, &mut [0])), Some(EIO));
    assert_eq!(raw(disk.read("log", 1 << 20)), Some(EIO));
    assert_eq!(raw(disk.list()), Some(EIO));
    assert_eq!(raw(disk.open_segment("log", Access::Read)), Some(EIO));
    assert_eq!(disk.crash_all_old().list().unwrap(), ["log"], "a crash takes no fault along");
    disk.heal();
    disk.fail_read_at(disk.reads() + 1, EMFILE);
    disk.list().unwrap();
    assert_eq!(raw(disk.read("log", 1 << 20)), Some(EMFILE));
    disk.read("log", 1 << 20).unwrap();
}

#[test]
fn every_call_that_changes_nothing_is_counted_and_told() {
    let disk = SimDisk::new();
    disk.record();
    let _lock = disk.lock().unwrap();
    disk.publish("small", b"bytes").unwrap();
    disk.read("small", 100).unwrap();
    let log = disk.create_segment("log", PAGE).unwrap();
    log.populate(0, PAGE).unwrap();
    log.read_at(0, &mut [0]).unwrap();
    drop(log);
    disk.list().unwrap();
    disk.open_segment("log", Access::Read).unwrap();
    let looks =
        [Look::Lock, Look::ReadFile, Look::Map, Look::Populate, Look::ReadSegment, Look::List, Look::Open, Look::Map];
    assert_eq!(disk.reads(), looks.len() as u64);
    assert_eq!((0..).zip(looks).find(|(read, look)| disk.look(*read) != *look), None);
}

#[test]
fn a_segment_that_fails_to_be_made_at_any_step_leaves_nothing_behind() {
    for step in 0..4 {
        let disk = SimDisk::new();
        let lock = disk.lock().unwrap();
        disk.fail_at(step, ENOSPC);
        assert_eq!(raw(disk.create_segment("log", PAGE)), Some(ENOSPC), "step {step}");
        assert_eq!(disk.list().unwrap(), [""; 0]);
        disk.create_segment("log", PAGE).unwrap();
        drop(lock);
    }
}

#[test]
fn a_small_file_that_fails_to_be_published_at_any_step_is_old_or_new() {
    for step in 0..5 {
        let disk = SimDisk::new();
        disk.publish("small", b"old").unwrap();
        disk.fail_at(disk.steps() + step, EIO);
        assert_eq!(raw(disk.publish("small", b"new")), Some(EIO), "step {step}");
        assert_eq!(disk.list().unwrap(), ["small"]);
        for image in disk.images(1000) {
            let found = image.read("small", 10).unwrap();
            assert!(found == b"old" || (step == 4 && found == b"new"), "step {step}: {found:?}");
        }
    }
}

#[test]
fn a_segment_is_there_for_good_when_it_was_made_and_whole_or_a_part_before() {
    let disk = SimDisk::new();
    let _lock = disk.lock().unwrap();
    disk.record();
    disk.create_segment("log", 2 * PAGE).unwrap();
    assert_eq!(disk.moments().count(), 5);
    let mut lengths = BTreeSet::new();
    for moment in disk.moments() {
        for image in moment.images(100) {
            match image.read("log", 1 << 20) {
                Ok(bytes) => {
                    assert!(bytes.iter().all(|byte| *byte == 0));
                    assert!(moment.steps() < 4 || bytes.len() == 8192);
                    lengths.insert(Some(bytes.len()));
                }
                Err(_) => {
                    assert!(moment.steps() < 4, "after {}", disk.describe(moment.steps() - 1));
                    lengths.insert(None);
                }
            }
        }
    }
    assert_eq!(lengths, [None, Some(0), Some(8192)].into());
}

#[test]
fn a_removal_may_be_undone_until_the_directory_is_synced() {
    let (disk, _lock, log) = disk_with_log();
    drop(log);
    disk.remove("log").unwrap();
    assert_eq!(disk.list().unwrap(), [""; 0]);
    let found: BTreeSet<_> = disk.images(100).map(|image| image.list().unwrap()).collect();
    assert_eq!(found, [vec![], vec!["log".to_owned()]].into());
    disk.sync_directory().unwrap();
    assert_eq!(disk.crash_all_old().list().unwrap(), [""; 0]);
    disk.create_segment("log", PAGE).unwrap();
    assert_eq!(log_of(&disk.crash_all_old()), [0; 4096], "another file of the same name");
}

#[test]
fn a_removed_segment_goes_on_being_written_by_who_has_it_open() {
    let (disk, _lock, log) = disk_with_log();
    disk.remove("log").unwrap();
    disk.sync_directory().unwrap();
    log.write_at(0, b"x").unwrap();
    log.sync().unwrap();
    let mut read = [0];
    log.read_at(0, &mut read).unwrap();
    assert_eq!((&read, log.view(0, 1)), (b"x", &b"x"[..]));
}

#[test]
fn the_same_seed_gives_the_same_image_and_other_seeds_give_others() {
    let (disk, _lock, log) = disk_with_log();
    for at in 0..1000 {
        log.write_at(at * 16, &at.to_le_bytes()).unwrap();
    }
    let crashes = disk.crashes();
    assert_eq!(crashes.count(), Some(257_u64.pow(3) * 233));
    let mut images = BTreeSet::new();
    for seed in 0..200 {
        let image = seen(&crashes.image(seed));
        assert_eq!(image, seen(&disk.crash_image(seed)));
        images.insert(image);
    }
    assert!(images.len() > 150, "only {} of 200", images.len());
}

#[test]
fn a_sample_has_the_telling_images_and_is_the_same_each_time() {
    let (disk, _lock, log) = disk_with_log();
    for at in 0..8 {
        log.write_at(at * 2048, &[1; 8]).unwrap();
    }
    assert_eq!(disk.crashes().count(), Some(81));
    let sample: Vec<_> = disk.images(80).map(|image| log_of(&image)).collect();
    assert_eq!(sample.len(), 80);
    assert_eq!(sample, disk.images(80).map(|image| log_of(&image)).collect::<Vec<_>>());
    assert!(sample.contains(&log_of(&disk.crash_all_old())));
    assert!(sample.contains(&log_of(&disk.crash_all_new())));
    let in_order = |count: u64| {
        let mut log = vec![0; 4 * 4096];
        (0..count).for_each(|at| log[usize::try_from(at).unwrap() * 2048..][..8].fill(1));
        log
    };
    for count in 0..=8 {
        assert!(sample.contains(&in_order(count)), "the first {count} writes");
    }
    assert_eq!(disk.images(81).map(|image| log_of(&image)).collect::<BTreeSet<_>>().len(), 81);
    assert_eq!(disk.images(0).count(), 0);
    assert_eq!(disk.images(1).map(|image| log_of(&image)).next().unwrap(), log_of(&disk.crash_all_old()));
}

#[test]
fn an_image_may_be_crashed_again() {
    let (disk, _lock, log) = disk_with_log();
    log.write_at(0, b"one").unwrap();
    for image in disk.images(10) {
        let _lock = image.lock().unwrap().expect("nobody holds a new disk");
        let first = log_of(&image);
        let log = image.open_segment("log", Access::NewLife).unwrap();
        log.write_at(PAGE, b"two").unwrap();
        let found: BTreeSet<_> = image.images(10).map(|again| log_of(&again)).collect();
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|log| log[..3] == first[..3]));
        log.sync().unwrap();
        assert_eq!(log_of(&image.crash_all_old())[4096..4099], *b"two");
    }
    assert_eq!(log_of(&disk)[4096..4099], [0; 3], "an image is a disk of its own");
}

#[test]
fn a_killed_process_leaves_all_it_wrote_and_nothing_more_durable() {
    let (disk, _lock, log) = disk_with_log();
    log.write_at(0, b"x").unwrap();
    let after = disk.kill();
    assert_eq!(seen(&after), seen(&disk));
    assert_eq!(after.crashes().count(), Some(2));
    let _lock = after.lock().unwrap().expect("the lock goes with its process");
    let log = after.open_segment("log", Access::NewLife).unwrap();
    log.write_at(PAGE, b"y").unwrap();
    log.sync().unwrap();
    assert_eq!(log_of(&after.crash_all_old())[0], b'x', "a sync covers what an earlier process wrote");
}

#[test]
fn every_moment_can_be_gone_back_to() {
    let (disk, _lock, log) = disk_with_log();
    let first = disk.steps();
    disk.record();
    let mut known = vec![(seen(&disk), seen(&disk.crash_all_old()))];
    let mut note = || known.push((seen(&disk), seen(&disk.crash_all_old())));
    log.write_at(0, b"a").unwrap();
    note();
    disk.fail_at(disk.steps(), EIO);
    log.sync().unwrap_err();
    note();
    log.write_at(1, b"b").unwrap();
    note();
    log.sync().unwrap();
    note();
    drop(log);
    disk.remove("log").unwrap();
    note();
    disk.sync_directory().unwrap();
    note();
    for (moment, (now, old)) in disk.moments().zip(&known) {
        assert_eq!((&seen(&moment), &seen(&moment.crash_all_old())), (now, old), "{}", moment.steps());
        let again = disk.at(moment.steps());
        assert_eq!((&seen(&again), &seen(&again.crash_all_old())), (now, old), "{}", moment.steps());
    }
    assert_eq!(disk.moments().count(), known.len());
    let told: Vec<_> = (first..disk.steps()).map(|step| disk.describe(step)).collect();
    assert_eq!(
        told,
        [
            "write 1 bytes at 0 of log",
            "fail to sync log",
            "write 1 bytes at 1 of log",
            "sync log",
            "remove log",
            "sync the directory"
        ]
    );
}

#[test]
fn a_full_disk_refuses_what_grows_and_nothing_else() {
    let (disk, _lock, log) = disk_with_log();
    disk.limit_bytes(Some(4 * PAGE + 10));
    assert_eq!(raw(disk.create_segment("more", PAGE)), Some(ENOSPC));
    assert_eq!(raw(disk.publish("small", b"01234567890")), Some(ENOSPC));
    assert_eq!(disk.list().unwrap(), ["log"]);
    disk.publish("small", b"0123456789").unwrap();
    log.write_at(0, &[1; 4 * 4096]).unwrap();
    disk.limit_bytes(None);
    disk.create_segment("more", PAGE).unwrap();
}

#[test]
fn damage_is_durable_and_seen_by_who_opens_the_file_later() {
    let (disk, lock, log) = disk_with_log();
    log.write_at(0, b"good").unwrap();
    disk.damage("log", |bytes| {
        bytes[1] ^= 0x80;
        bytes.truncate(4096);
    });
    assert_eq!(log.view(0, 4), b"good");
    let image = disk.crash_all_old();
    assert_eq!(image.read("log", 5_000).unwrap()[..4], [b'g', b'o' ^ 0x80, b'o', b'd']);
    drop((lock, log));
}

/// What is seen is what a plain buffer would hold, whatever was synced, failed to sync, or was killed in between; and
/// everything that gets through is what is seen.
#[test]
fn what_is_seen_does_not_depend_on_syncs() {
    for seed in 0..300_u64 {
        let mut state = seed;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let (mut disk, mut lock, mut log) = disk_with_log();
        let mut plain = vec![0; 4 * 4096];
        let mut end = 0;
        for _ in 0..40 {
            match random(8) {
                0 => log.sync().unwrap(),
                1 => {
                    disk.fail_at(disk.steps(), EIO);
                    log.sync().unwrap_err();
                }
                2 => {
                    drop((lock, log));
                    disk = disk.kill();
                    lock = disk.lock().unwrap().unwrap();
                    log = disk.open_segment("log", Access::NewLife).unwrap();
                    end = 0;
                }
                _ => {
                    let start = (end + random(3) * 700).min(16_000);
                    let len = random(300).min(16_384 - start);
                    let bytes = vec![u8::try_from(random(256)).unwrap(); usize::try_from(len).unwrap()];
                    if start < end {
                        continue;
                    }
                    log.write_at(start, &bytes).unwrap();
                    let start = usize::try_from(start).unwrap();
                    plain[start..start + bytes.len()].copy_from_slice(&bytes);
                    end = (start + bytes.len()) as u64;
                    assert_eq!(log.view(0, start + bytes.len()), &plain[..start + bytes.len()], "seed {seed}");
                }
            }
            let mut read = vec![1; 5_000];
            let offset = random(16_384);
            let len = log.read_at(offset, &mut read).unwrap();
            assert_eq!(read[..len], plain[usize::try_from(offset).unwrap()..][..len], "seed {seed}");
            assert_eq!(log_of(&disk), plain, "seed {seed}");
            assert_eq!(log_of(&disk.crash_all_new()), plain, "seed {seed}");
        }
        drop((lock, log));
    }
}
