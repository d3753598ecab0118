//! What every storage promises, on each of them; then what the real one alone does.

use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::testing::SimDisk;

const MODES: [AppendMode; 2] = [AppendMode::Mapped, AppendMode::Positioned];

fn panics(f: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(f)).is_err()
}

fn open(directory: &Path, append_mode: AppendMode) -> FileStorage {
    FileStorage::open(directory, append_mode, true).unwrap()
}

/// Every kind of storage, for promises that all of them keep.
fn for_every_storage(check: impl Fn(&dyn Storage)) {
    for mode in MODES {
        let directory = tempfile::tempdir().unwrap();
        check(&open(directory.path(), mode));
    }
    check(&SimDisk::new());
}

fn kind<T>(result: io::Result<T>) -> Option<io::ErrorKind> {
    result.err().map(|error| error.kind())
}

#[test]
fn what_a_life_writes_is_seen_by_view_and_read_and_by_who_opens_it_later() {
    for_every_storage(|storage| {
        let lock = storage.lock().unwrap().unwrap();
        let life = storage.create_segment("one", 65_536).unwrap();
        assert_eq!(life.len(), 65_536);
        life.populate(0, 65_536).unwrap();
        life.write_at(0, b"first").unwrap();
        life.write_at(4_096, b"second").unwrap();
        life.sync().unwrap();
        assert_eq!((life.view(0, 5), life.view(4_096, 6)), (&b"first"[..], &b"second"[..]));
        assert_eq!(life.view(5, 4_091), [0; 4_091]);
        let mut read = [1; 8];
        assert_eq!(life.read_at(4_096, &mut read).unwrap(), 8);
        assert_eq!(&read, b"second\0\0");
        drop(life);

        let finished = storage.open_segment("one", Access::Read).unwrap();
        assert_eq!(finished.view(0, 65_536).len(), 65_536);
        assert_eq!(finished.view(4_096, 6), b"second");
        assert_eq!(finished.read_at(65_530, &mut read).unwrap(), 6, "short only at the end");
        assert_eq!(finished.read_at(65_536, &mut read).unwrap(), 0);
        drop(finished);

        let life = storage.open_segment("one", Access::NewLife).unwrap();
        assert!(panics(|| drop(life.view(0, 1).to_vec())), "an earlier life is not shown");
        assert_eq!(life.read_at(4_096, &mut read).unwrap(), 8);
        assert_eq!(&read, b"second\0\0", "but may be read");
        life.write_at(0, b"again").unwrap();
        assert_eq!(life.view(0, 5), b"again");
        drop((life, lock));
    });
}

#[test]
fn a_life_is_written_forwards_once_and_within_the_file() {
    for_every_storage(|storage| {
        let _lock = storage.lock().unwrap().unwrap();
        let life = storage.create_segment("one", 65_536).unwrap();
        life.write_at(0, &[1; 100]).unwrap();
        for (offset, len) in [(0, 1), (99, 1), (65_536, 1), (65_000, 1_000), (u64::MAX, 1)] {
            assert!(panics(|| life.write_at(offset, &vec![2; len]).unwrap()), "{offset} {len}");
        }
        let mut read = [0; 101];
        life.read_at(0, &mut read).unwrap();
        assert_eq!((&read[..100], read[100]), (&[1; 100][..], 0), "a refused write changes nothing");
        life.write_at(65_536 - 8, &[3; 8]).unwrap();
        drop(life);
        let finished = storage.open_segment("one", Access::Read).unwrap();
        assert!(panics(|| finished.write_at(0, &[2]).unwrap()));
    });
}

#[test]
fn the_lock_is_one_and_outlived_by_no_segment() {
    for_every_storage(|storage| {
        let lock = storage.lock().unwrap().unwrap();
        assert!(storage.lock().unwrap().is_none());
        let life = storage.create_segment("one", 65_536).unwrap();
        drop(lock);
        assert!(storage.lock().unwrap().is_none(), "a segment that is open may still be written");
        drop(life);
        let lock = storage.lock().unwrap().unwrap();
        let finished = storage.open_segment("one", Access::Read).unwrap();
        drop(lock);
        assert!(storage.lock().unwrap().is_none(), "a view may still be read");
        drop(finished);
        assert!(storage.lock().unwrap().is_some());
    });
}

#[test]
fn two_handles_of_one_directory_exclude_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (open(directory.path(), MODES[0]), open(directory.path(), MODES[1]));
    let lock = one.lock().unwrap().unwrap();
    assert!(two.lock().unwrap().is_none());
    drop(lock);
    let lock = two.lock().unwrap().unwrap();
    assert!(one.lock().unwrap().is_none());
    drop(lock);
    assert_eq!(one.list().unwrap(), [LOCK_FILE], "the file stays");
}

#[test]
fn without_the_lock_a_segment_is_read_by_read_at_alone() {
    for_every_storage(|storage| {
        let lock = storage.lock().unwrap().unwrap();
        drop(storage.create_segment("one", 65_536).unwrap());
        drop(lock);
        let beside = storage.open_segment("one", Access::Read).unwrap();
        assert_eq!(beside.read_at(0, &mut [0; 10]).unwrap(), 10);
        assert_eq!(beside.len(), 65_536);
        assert!(panics(|| drop(beside.view(0, 1).to_vec())));
        drop(beside);
        assert_eq!(kind(storage.open_segment("one", Access::NewLife)), Some(io::ErrorKind::Other));
        assert_eq!(kind(storage.create_segment("two", 65_536)), Some(io::ErrorKind::Other));
        assert!(!storage.list().unwrap().contains(&"two".to_owned()));
    });
}

#[test]
fn a_new_life_begins_only_when_nothing_of_the_old_one_is_open() {
    for_every_storage(|storage| {
        let _lock = storage.lock().unwrap().unwrap();
        let busy = Some(io::ErrorKind::ResourceBusy);
        let life = storage.create_segment("one", 65_536).unwrap();
        assert_eq!(kind(storage.open_segment("one", Access::NewLife)), busy);
        assert_eq!(kind(storage.open_segment("one", Access::Read)), busy);
        drop(life);
        let readers = [(); 2].map(|()| storage.open_segment("one", Access::Read).unwrap());
        assert_eq!(kind(storage.open_segment("one", Access::NewLife)), busy);
        drop(readers);
        drop(storage.open_segment("one", Access::NewLife).unwrap());
    });
}

#[test]
fn opening_never_makes_a_file_and_making_never_takes_one_that_is_there() {
    for_every_storage(|storage| {
        let _lock = storage.lock().unwrap().unwrap();
        for access in [Access::Read, Access::NewLife] {
            assert_eq!(kind(storage.open_segment("one", access)), Some(io::ErrorKind::NotFound));
        }
        assert_eq!(kind(storage.read("one", 10)), Some(io::ErrorKind::NotFound));
        assert_eq!(kind(storage.remove("one")), Some(io::ErrorKind::NotFound));
        storage.publish("one", b"somebody's").unwrap();
        assert_eq!(kind(storage.create_segment("one", 65_536)), Some(io::ErrorKind::AlreadyExists));
        assert_eq!(storage.read("one", 10).unwrap(), b"somebody's");
    });
}

#[test]
fn a_small_file_is_published_whole_and_read_up_to_its_limit() {
    for_every_storage(|storage| {
        storage.publish("small", b"0123456789").unwrap();
        storage.publish("small", b"abcde").unwrap();
        assert_eq!(storage.read("small", 5).unwrap(), b"abcde");
        assert_eq!(kind(storage.read("small", 4)), Some(io::ErrorKind::FileTooLarge));
        assert_eq!(storage.list().unwrap(), ["small"], "nothing else is left");
        storage.publish("empty", b"").unwrap();
        assert_eq!(storage.read("empty", 0).unwrap(), b"");
        storage.remove("empty").unwrap();
        storage.sync_directory().unwrap();
        assert_eq!(storage.list().unwrap(), ["small"]);
    });
}

#[test]
fn a_left_over_of_a_publication_is_in_nobodys_way() {
    for_every_storage(|storage| {
        storage.publish("small.tmp", b"what a crash left, and longer").unwrap();
        storage.publish("small", b"whole").unwrap();
        assert_eq!(storage.read("small", 100).unwrap(), b"whole");
        assert_eq!(storage.list().unwrap(), ["small"]);
    });
}

#[test]
fn a_new_segment_has_real_blocks_of_zeros() {
    for mode in MODES {
        let directory = tempfile::tempdir().unwrap();
        let storage = open(directory.path(), mode);
        let _lock = storage.lock().unwrap().unwrap();
        for bytes in [4_096_u64, 65_536, 3 * 1_048_576 + 4_096] {
            let name = format!("of-{bytes}");
            let life = storage.create_segment(&name, bytes).unwrap();
            let found = fs::metadata(directory.path().join(&name)).unwrap();
            assert_eq!((found.len(), life.len()), (bytes, bytes));
            assert!(found.blocks() * 512 >= bytes, "{} blocks for {bytes} bytes", found.blocks());
            assert!(fs::read(directory.path().join(&name)).unwrap().iter().all(|byte| *byte == 0));
            // Blocks that are there and written: storing and syncing takes no more of them.
            life.write_at(0, &vec![1; usize::try_from(bytes).unwrap()]).unwrap();
            life.sync().unwrap();
            assert_eq!(fs::metadata(directory.path().join(&name)).unwrap().blocks(), found.blocks());
        }
    }
}

#[test]
fn a_segment_that_cannot_be_made_leaves_nothing_behind() {
    for mode in MODES {
        let directory = tempfile::tempdir().unwrap();
        let storage = open(directory.path(), mode);
        let _lock = storage.lock().unwrap().unwrap();
        assert!(storage.create_segment("too-large", 1 << 62).is_err());
        assert_eq!(storage.list().unwrap(), [LOCK_FILE]);
        storage.create_segment("too-large", 65_536).unwrap();
    }
}

#[test]
fn a_file_with_holes_gets_its_blocks_before_its_next_life() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("restored");
    fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let storage = open(directory.path(), AppendMode::Mapped);
    let _lock = storage.lock().unwrap().unwrap();
    drop(storage.open_segment("restored", Access::Read).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().blocks(), 0, "reading changes nothing");
    drop(storage.open_segment("restored", Access::NewLife).unwrap());
    let found = fs::metadata(&path).unwrap();
    assert!(found.blocks() * 512 >= 1 << 20);
    assert_eq!(found.len(), 1 << 20);
}

#[test]
fn foreign_files_are_listed_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("notes.txt"), "mine").unwrap();
    fs::create_dir(directory.path().join("folder")).unwrap();
    let storage = open(directory.path(), AppendMode::Positioned);
    let _lock = storage.lock().unwrap().unwrap();
    storage.create_segment("one", 65_536).unwrap();
    storage.publish("small", b"x").unwrap();
    storage.remove("one").unwrap();
    assert_eq!(storage.list().unwrap(), [LOCK_FILE, "folder", "notes.txt", "small"]);
    assert_eq!(fs::read(directory.path().join("notes.txt")).unwrap(), b"mine");
}

#[test]
fn names_stay_within_the_directory() {
    let outer = tempfile::tempdir().unwrap();
    fs::write(outer.path().join("x"), "outside").unwrap();
    let storage = open(&outer.path().join("store"), AppendMode::Positioned);
    let _lock = storage.lock().unwrap().unwrap();
    for name in ["", ".", "..", "../x", "/x", "a/b", "a\0b"] {
        let odd = Some(io::ErrorKind::InvalidInput);
        assert_eq!(kind(storage.read(name, 10)), odd, "{name:?}");
        assert_eq!(kind(storage.publish(name, b"")), odd, "{name:?}");
        assert_eq!(kind(storage.create_segment(name, 4_096)), odd, "{name:?}");
        assert_eq!(kind(storage.open_segment(name, Access::NewLife)), odd, "{name:?}");
        assert_eq!(kind(storage.remove(name)), odd, "{name:?}");
    }
    assert_eq!(fs::read(outer.path().join("x")).unwrap(), b"outside");
}

#[test]
fn a_missing_directory_is_made_only_when_asked_for() {
    let outer = tempfile::tempdir().unwrap();
    let deep = outer.path().join("a/b/c");
    let missing = FileStorage::open(&deep, AppendMode::Mapped, false);
    assert_eq!(kind(missing), Some(io::ErrorKind::NotFound));
    assert!(!outer.path().join("a").exists());
    assert_eq!(open(&deep, AppendMode::Mapped).list().unwrap(), [""; 0]);
    open(&deep, AppendMode::Mapped).lock().unwrap().unwrap();
    open(&deep, AppendMode::Mapped);
    fs::write(outer.path().join("file"), "").unwrap();
    assert!(FileStorage::open(&outer.path().join("file"), AppendMode::Mapped, true).is_err());
}

#[test]
fn a_directory_that_is_moved_is_still_the_same_one() {
    let outer = tempfile::tempdir().unwrap();
    let storage = open(&outer.path().join("here"), AppendMode::Positioned);
    fs::rename(outer.path().join("here"), outer.path().join("there")).unwrap();
    fs::create_dir(outer.path().join("here")).unwrap();
    storage.publish("small", b"x").unwrap();
    assert_eq!(fs::read(outer.path().join("there/small")).unwrap(), b"x");
    assert!(fs::read_dir(outer.path().join("here")).unwrap().next().is_none());
}

#[test]
fn a_short_file_is_mapped_as_far_as_it_goes() {
    let directory = tempfile::tempdir().unwrap();
    let storage = open(directory.path(), AppendMode::Mapped);
    let _lock = storage.lock().unwrap().unwrap();
    for bytes in [0_usize, 1, 5_000] {
        fs::write(directory.path().join("short"), vec![7; bytes]).unwrap();
        let finished = storage.open_segment("short", Access::Read).unwrap();
        assert_eq!(finished.len(), bytes as u64);
        assert_eq!(finished.view(0, bytes), vec![7; bytes]);
        assert!(panics(|| drop(finished.view(0, bytes + 1).to_vec())));
    }
}

#[test]
fn a_pipe_in_the_place_of_a_file_holds_nobody_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    let storage = open(directory.path(), AppendMode::Positioned);
    assert_eq!(storage.read("pipe", 10).unwrap(), b"");
    assert_eq!(kind(storage.open_segment("pipe", Access::Read)), Some(io::ErrorKind::InvalidInput));
    fs::create_dir(directory.path().join("folder")).unwrap();
    assert_eq!(kind(storage.open_segment("folder", Access::Read)), Some(io::ErrorKind::InvalidInput));
}

#[test]
fn an_open_segment_takes_one_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let storage = open(directory.path(), AppendMode::Mapped);
    let _lock = storage.lock().unwrap().unwrap();
    // Descriptors of this test's directory only: other tests run beside it.
    let descriptors = || {
        let all = fs::read_dir("/proc/self/fd").unwrap();
        let links = all.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
        links.filter(|target| target.starts_with(directory.path())).count()
    };
    let before = descriptors();
    let segments: Vec<_> =
        (0..10).map(|number| storage.create_segment(&format!("s{number}"), 4_096).unwrap()).collect();
    assert_eq!(descriptors(), before + 10);
    drop(segments);
    storage.publish("small", b"x").unwrap();
    storage.read("small", 1).unwrap();
    storage.list().unwrap();
    assert_eq!(descriptors(), before);
}
