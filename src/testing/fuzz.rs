//! Opening a directory whose files may hold anything: what the fuzzer drives, and a test replays.

mod base;
mod damage;
mod input;
mod repair;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::base::{Base, Files, options};
use self::damage::Damage;
use self::input::Input;
use self::repair::{Repair, header};
use super::disk::{Disk, SimFile};
use super::model::{Expected, Known};
use super::{ManualClock, SimDisk};
use crate::error::{Error, ErrorKind};
use crate::key::{Fingerprint, Key};
use crate::store::{Reserve, Store};
use crate::{hint, segment};

/// What opening may take beyond the files: the index as planned, a segment to write and the page cache's copy of it.
const PEAK_BYTES_FIXED: u64 = 4 << 20;
/// What it may take for each byte of the files.
const PEAK_BYTES_PER_BYTE: u64 = 4;

/// The variable of the environment that has every directory told before it is opened.
const TELL: &str = "KEYONCE_FUZZ_TELL";

/// Opens directories that hold sound stores, damaged in every way that the bytes of an input choose.
///
/// The first byte chooses a store, the second one which checks (of the store file, of headers, of records, of the seals
/// of recoveries, of hints) are made to hold again after the damage, and the rest is a list of what is done to the
/// files: bytes overwritten, files cut, removed, swapped, copied, fields set, stale pieces put back. With the variable
/// `KEYONCE_FUZZ_TELL` set, each directory is told before it is opened.
#[derive(Debug)]
pub struct RecoveryCases {
    bases: Vec<Base>,
}

/// A key as an opening shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Shown {
    known: Known,
    /// What a reserve of a key that is done is answered.
    replay: Option<Expected>,
}

/// A scope and an id.
type Name = (Vec<u8>, Vec<u8>);

/// Everything that an opening shows.
#[derive(Debug, Default, PartialEq, Eq)]
struct AllShown {
    keys: BTreeMap<Name, Shown>,
    /// How many records a hint has named that fail their check: each is told in the place of its key.
    corrupt: u64,
    /// How many keys are listed more than once.
    twice: u64,
}

impl RecoveryCases {
    /// Makes the stores that are to be damaged.
    #[must_use]
    pub fn new() -> Self {
        Self { bases: Base::all() }
    }

    /// Opens one directory, and checks what opening promises.
    ///
    /// `peak_bytes` calls what it is given, once, and says how many more bytes were allocated at the most meanwhile
    /// than when it began. Where nobody counts, it says 0.
    ///
    /// # Panics
    ///
    /// If opening panics, or takes more memory than a few times what the files hold; if the same bytes open in two
    /// ways; if a refused directory has changed; if a key of an opened store cannot be asked for, is another one after
    /// the next opening, or was never as it is shown (when no check was made to hold); if a token comes twice.
    pub fn exercise(&self, bytes: &[u8], peak_bytes: impl FnOnce(&mut dyn FnMut()) -> u64) {
        let mut input = Input::new(bytes);
        let Some(base) = self.bases.get(input.index(self.bases.len())) else { return };
        let flags = input.u8();
        let flag = |bit: u8| flags & 1 << bit != 0;
        let repair = Repair { store_file: flag(0), headers: flag(1), records: flag(2), seals: flag(3), hints: flag(6) };
        let closes = flag(4);
        let repairs = flags & 0x4F != 0;
        let noise = (!repairs).then(|| u64::from(crc32fast::hash(bytes)));
        let mut damage = Damage::new(base, noise);
        damage.run(&mut input);
        let mut files = damage.files;
        repair.apply(&mut files);
        if std::env::var_os(TELL).is_some() {
            eprintln!("{repair:?}, closes: {closes}\n{}", repair::told(&files));
        }

        let disk = disk_of(&files);
        let mut opened = None;
        let peak = peak_bytes(&mut || opened = Some(open(&disk, &base.clock(), 1)));
        let total = files.values().map(|bytes| bytes.len() as u64).sum::<u64>();
        let peak_max = PEAK_BYTES_FIXED + PEAK_BYTES_PER_BYTE * total;
        assert!(peak <= peak_max, "opening {total} bytes took {peak} bytes of memory");
        let opened = opened.expect("what is to be measured is called");
        if flag(5) {
            opens_the_same(&opened, &disk, base, &files);
        }
        match opened {
            Err(error) => refused(&error, &disk, &files),
            Ok(store) => {
                let known = (!repairs).then_some(&base.known);
                // A hint speaks of records as they were written, under the seed of then; who changes these and has all
                // checks hold has made up the hint.
                let forges_hints = repairs && files.keys().any(|name| hint::file_index(name).is_some());
                Opened { base, files: &files, disk, store }.check(known, closes, forges_hints);
            }
        }
    }
}

impl Default for RecoveryCases {
    fn default() -> Self {
        Self::new()
    }
}

/// The same bytes, opened once more elsewhere, come to the same.
fn opens_the_same(opened: &Result<Store, Error>, disk: &SimDisk, base: &Base, files: &Files) {
    let twin = disk_of(files);
    match (opened, &open(&twin, &base.clock(), 1)) {
        (Err(error), Err(other)) => assert_eq!(error.to_string(), other.to_string(), "the same bytes"),
        (Ok(store), Ok(other)) => {
            assert!(base::files(disk) == base::files(&twin), "the same bytes become the same bytes");
            same(&shown(store), &shown(other));
        }
        (Ok(_), Err(error)) | (Err(error), Ok(_)) => panic!("the same bytes open once, and once not: {error}"),
    }
}

/// What follows from a refusal.
fn refused(error: &Error, disk: &SimDisk, files: &Files) {
    let kinds = [ErrorKind::Corrupt, ErrorKind::ForeignDirectory, ErrorKind::UnsupportedFormat];
    assert!(kinds.contains(&error.kind()), "a sound disk gives no other error: {error:?}");
    assert_eq!(disk.steps(), 0, "who refuses has written nothing: {error}");
    assert!(base::files(disk) == *files, "who refuses changes no byte: {error}");
}

/// A directory that was opened.
struct Opened<'a> {
    base: &'a Base,
    files: &'a Files,
    disk: SimDisk,
    store: Store,
}

impl Opened<'_> {
    /// Everything is asked, something is done, and the next opening says the same.
    fn check(self, known: Option<&BTreeMap<Name, Vec<Shown>>>, closes: bool, forges_hints: bool) {
        let Self { base, files, disk, store } = self;
        let shown_first = shown(&store);
        assert!(forges_hints || shown_first.twice == 0, "a key is listed once");
        if let Some(known) = known {
            for (key, shown) in &shown_first.keys {
                let allowed = known.get(key).is_some_and(|all| all.contains(shown));
                assert!(allowed, "a key that was never so: {shown:?}");
            }
        }
        for (scope, id) in base.known.keys() {
            let key = Key::new(scope, id).expect("it was a key before");
            let peeked = match store.peek(&key) {
                Ok(peeked) => peeked.map(|info| Known::from(&info)),
                Err(error) if error.kind() == ErrorKind::Corrupt && shown_first.corrupt > 0 => continue,
                Err(error) => panic!("every key can be asked for: {error:?}"),
            };
            let listed = shown_first.keys.get(&(scope.clone(), id.clone())).map(|shown| shown.known.clone());
            assert!(forges_hints || peeked == listed, "a key is listed as it is: {peeked:?}, {listed:?}");
        }
        let (created, token) = (store.opened().created, probe(&store, "probe"));
        if let Some(token) = token {
            // What a creation left half made is not gone on from.
            let segments = files.iter().filter(|(name, _)| segment::file_index(name).is_some() && !created);
            for header in segments.filter_map(|(_, bytes)| header(bytes)) {
                assert!(token >= header.first_lsn + header.segment_bytes, "token {token} is not beyond {header:?}");
            }
            let tokens = shown_first.keys.values().map(|shown| shown.known.token.to_u64());
            assert!(tokens.into_iter().all(|earlier| earlier < token), "{token} is beyond every token that is shown");
        }
        let before = shown(&store);
        let next = if closes {
            store.close(std::time::Duration::ZERO).expect("a store on a sound disk closes");
            disk
        } else {
            disk.kill()
        };
        drop(store);
        let store = open(&next, &base.clock(), 2).expect("what was opened once opens again");
        // Whoever makes up a hint decides which records are found by it, until it is written anew.
        if !forges_hints {
            same(&before, &shown(&store));
        }
        if let (Some(first), Some(second)) = (token, probe(&store, "another probe")) {
            assert!(first < second, "no token comes twice");
        }
    }
}

/// Two openings show the same keys; tells the first that differs, and no more.
fn same(before: &AllShown, after: &AllShown) {
    for key in before.keys.keys().chain(after.keys.keys()) {
        let (one, other) = (before.keys.get(key), after.keys.get(key));
        let known = |shown: Option<&Shown>| shown.map(|shown| shown.known.clone());
        assert!(one == other, "the next opening shows {key:?} as {:?}, not {:?}", known(other), known(one));
    }
    assert_eq!(before.corrupt, after.corrupt, "the next opening tells as many corrupt records");
}

/// A key that nobody has is reserved and completed; gives its token. A store may be full.
fn probe(store: &Store, id: &str) -> Option<u64> {
    let key = Key::new("probes", id).expect("a short key is a key");
    let guard = match store.reserve(&key, Fingerprint::of(id)) {
        Ok(Reserve::Fresh(guard)) => guard,
        Ok(answer) => panic!("a key that nobody has is {answer:?}"),
        Err(error) => {
            let kind = error.kind();
            // The index may have sent the search to a record that is none.
            assert!(matches!(kind, ErrorKind::Full { .. } | ErrorKind::Corrupt), "a sound disk: {error:?}");
            return None;
        }
    };
    let token = guard.token().to_u64();
    match guard.complete(id.as_bytes()) {
        Ok(completion) => assert_eq!(completion, crate::reservation::Completion::Done, "nobody else has it"),
        Err(not_stored) => {
            let kind = not_stored.error.kind();
            assert!(matches!(kind, ErrorKind::Full { .. }), "a sound disk gives no other error: {kind:?}");
        }
    }
    Some(token)
}

/// Every key that a store knows, each as it is answered.
fn shown(store: &Store) -> AllShown {
    let mut all = AllShown::default();
    for listed in store.keys() {
        let (key, info) = match listed {
            Ok(listed) => listed,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "every key can be listed: {error}");
                assert!(store.opened().hints > 0, "every record was read: {error}");
                all.corrupt += 1;
                continue;
            }
        };
        let replay = (info.state == crate::reservation::KeyState::Done)
            .then(|| Expected::from(&store.reserve(&key, info.fingerprint)));
        let shown = Shown { known: Known::from(&info), replay };
        let twice = all.keys.insert((key.scope().to_vec(), key.id().to_vec()), shown);
        all.twice += u64::from(twice.is_some());
    }
    all
}

fn open(disk: &SimDisk, clock: &ManualClock, seed: u64) -> Result<Store, Error> {
    super::open(disk.clone(), options(clock), seed)
}

/// A disk that holds these files and nothing else, all of it durable.
fn disk_of(files: &Files) -> SimDisk {
    let names = files.keys().zip(1..).map(|(name, number)| (Arc::from(name.as_str()), number)).collect();
    let bytes =
        |bytes: &Vec<u8>| SimFile { platter: bytes.as_slice().into(), bytes: bytes.len(), ..SimFile::default() };
    let numbered = (1..).zip(files.values()).map(|(number, file)| (number, Arc::new(bytes(file)))).collect();
    SimDisk::new().sibling(Disk::on_platter(Arc::new(names), numbered))
}

/// SplitMix64: the next number of a sequence.
fn mixed(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
