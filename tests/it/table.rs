//! The state table, as it is written, held against what the store does.
//!
//! The table stands at the head of `src/state.rs` and in the docs of `Reserve`. Each cell is read as the answers it
//! names (in backticks) and the states it names (as plain words), and each is driven through the public interface, in
//! every variant that the cell tells of: together they must give just those answers and just those states. So a word
//! changed in the table fails here, and so does a cell that the store no longer keeps.

use std::cell::Cell as Counter;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use keyonce::{
    Completion, ErrorKind, Interrupted, Key, KeyState, NotReattached, OnInterrupted, Reservation, Reserve,
    ReserveOptions, Store, Token,
};

use crate::place::{
    LEASE, MS, Place, WINDOW, as_fresh, everywhere, fresh, interrupted, key, other_request, request, state,
};

const HEADER: &str = "| event | Absent | InFlight | Interrupted | Done |";
const COLUMNS: [&str; 4] = ["Absent", "InFlight", "Interrupted", "Done"];
const ANSWERS: [&str; 7] = ["Fresh", "Replay", "InFlight", "Interrupted", "Mismatch", "TooOld", "Superseded"];

/// The tables in the sources: where each stands, and its rows.
fn tables() -> Vec<(PathBuf, Vec<String>)> {
    let mut found = Vec::new();
    let mut open = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let source = fs::read_to_string(&path).unwrap();
        let text = |line: &str| line.trim_start_matches(['/', '!', ' ']).trim_end().to_owned();
        let mut lines = source.lines().map(text).skip_while(|line| line != HEADER).skip(2).peekable();
        if lines.peek().is_some() {
            found.push((path, lines.take_while(|line| line.starts_with('|')).collect()));
        }
    }
    found.sort();
    found
}

#[test]
fn the_table_in_the_public_docs_is_that_of_the_state_machine() {
    let tables = tables();
    let [(first, rows), (second, others)] = &tables[..] else { panic!("in {tables:#?}") };
    assert!([first, second].iter().any(|path| path.ends_with("src/state.rs")), "{first:?} {second:?}");
    assert!([first, second].iter().any(|path| path.to_string_lossy().contains("src/store")), "{first:?} {second:?}");
    assert_eq!(rows, others, "{first:?} {second:?}");
    assert_eq!(rows.len(), 12);
}

/// What a cell says: the answers it names, and the states that a key may have afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Said {
    answers: BTreeSet<&'static str>,
    states: BTreeSet<&'static str>,
}

impl Said {
    /// Reads a cell. `above` and `left` are what its neighbours say.
    fn read(cell: &str, column: &'static str, above: Option<&Said>, left: Option<&Said>) -> Self {
        match cell {
            "as above" => return above.expect("there is a row above").clone(),
            "the same" => return left.expect("there is a column to the left").clone(),
            _ => {}
        }
        let mut said = Self::default();
        for clause in cell.split(';') {
            let mut states = BTreeSet::new();
            for (at, part) in clause.split('`').enumerate() {
                if at % 2 == 1 {
                    said.answers.extend(ANSWERS.into_iter().filter(|answer| *answer == part));
                    continue;
                }
                let words: Vec<_> = part.split(|letter: char| !letter.is_alphanumeric()).collect();
                states.extend(COLUMNS.into_iter().filter(|state| words.contains(state)));
                if words.contains(&"acts") {
                    said.answers.insert("Fresh");
                    states.extend(["InFlight", "Done"]);
                }
                if words.contains(&"owns") {
                    states.insert("InFlight");
                }
                if ["stays", "never", "unless"].iter().any(|word| words.contains(word)) {
                    states.insert(column);
                }
            }
            // A clause that names no state leaves the key as it is.
            said.states.extend(if states.is_empty() { BTreeSet::from([column]) } else { states });
        }
        said
    }
}

/// The rows of the table: the event, and what its four cells say.
fn rows() -> Vec<(String, [(String, Said); 4])> {
    let tables = tables();
    let (_, table) = tables.iter().find(|(path, _)| path.ends_with("src/state.rs")).unwrap();
    let mut rows: Vec<(String, [(String, Said); 4])> = Vec::new();
    for line in table {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
        let [event, cells @ ..] = &cells[..] else { panic!("{line}") };
        assert_eq!(cells.len(), 4, "{line}");
        let mut said: Vec<(String, Said)> = Vec::new();
        for (at, cell) in cells.iter().enumerate() {
            let above = rows.last().map(|(_, said)| &said[at].1);
            let read = Said::read(cell, COLUMNS[at], above, said.last().map(|(_, said)| said));
            said.push((cell.clone(), read));
        }
        rows.push((event.clone(), said.try_into().unwrap()));
    }
    rows
}

/// What was seen of one variant of a cell.
struct Seen {
    variant: String,
    /// The answer's word; `None` when the act took effect, or nobody is told.
    answer: Option<&'static str>,
    state: &'static str,
}

/// A store in which keys are brought into the state of a column.
struct Rig<'a> {
    place: &'a Place,
    store: Store,
    keys: Counter<u32>,
}

fn name(state: Option<KeyState>) -> &'static str {
    match state {
        None => "Absent",
        Some(KeyState::InFlight) => "InFlight",
        Some(KeyState::Interrupted) => "Interrupted",
        Some(KeyState::Done) => "Done",
        Some(state) => panic!("{state:?} is in no column"),
    }
}

fn of_reserve(answer: &Reserve) -> &'static str {
    match answer {
        Reserve::Fresh(_) => "Fresh",
        Reserve::Replay(_) => "Replay",
        Reserve::InFlight(_) => "InFlight",
        Reserve::Interrupted(_) => "Interrupted",
        Reserve::Mismatch(_) => "Mismatch",
        Reserve::TooOld(_) => "TooOld",
    }
}

fn of_completion(completion: Completion) -> Option<&'static str> {
    match completion {
        Completion::Done => None,
        Completion::Superseded => Some("Superseded"),
    }
}

fn of_reattach(reattached: &Result<Reservation, NotReattached>) -> Option<&'static str> {
    match reattached {
        Ok(_) => None,
        Err(NotReattached::InFlight) => Some("InFlight"),
        Err(NotReattached::Superseded) => Some("Superseded"),
        Err(error) => panic!("{error:?}"),
    }
}

/// An act by which an owner is told apart from one that is superseded.
type Act = fn(&Rig<'_>, Reservation) -> Option<&'static str>;

const COMPLETES: [(&str, Act); 2] = [
    ("complete", |_, owner| of_completion(owner.complete(b"paid").unwrap())),
    ("complete_without_body", |_, owner| of_completion(owner.complete_without_body(b"").unwrap())),
];

/// The guard is left behind: it lives, as the row wants it.
const GOES_ON: [(&str, Act); 5] = [
    ("save_checkpoint", |_, owner| of_completion(left(owner, |owner| owner.save_checkpoint(b"half").unwrap()))),
    ("renew", |_, owner| of_completion(left(owner, |owner| owner.renew(LEASE).unwrap()))),
    ("Attempt::save_checkpoint", |_, owner| {
        of_completion(left(owner, |owner| owner.attempt_view().save_checkpoint(b"half").unwrap()))
    }),
    ("Attempt::renew", |_, owner| of_completion(left(owner, |owner| owner.attempt_view().renew(LEASE).unwrap()))),
    ("detach", |_, owner| match owner.detach(LEASE) {
        Ok(_) => None,
        Err(refused) => {
            assert_eq!(refused.error.kind(), ErrorKind::Superseded);
            Some("Superseded")
        }
    }),
];

const RELEASE: (&str, Act) = ("release", |_, owner| of_completion(owner.release().unwrap()));

/// Nobody is told what came of a drop; the counters know.
const STOPS: [(&str, Act); 2] = [
    ("interrupt", |rig, owner| rig.counts_superseded(|| owner.interrupt())),
    ("drop", |rig, owner| rig.counts_superseded(|| drop(owner))),
];

fn left<T>(owner: Reservation, act: impl FnOnce(&Reservation) -> T) -> T {
    let told = act(&owner);
    std::mem::forget(owner);
    told
}

impl Rig<'_> {
    fn key(&self) -> Key {
        self.keys.set(self.keys.get() + 1);
        key(self.keys.get().to_string())
    }

    fn seen(&self, variant: impl Into<String>, key: &Key, answer: Option<&'static str>) -> Seen {
        Seen { variant: variant.into(), answer, state: name(state(&self.store, key)) }
    }

    fn counts_superseded(&self, act: impl FnOnce()) -> Option<&'static str> {
        let before = self.store.stats().superseded;
        act();
        (self.store.stats().superseded > before).then_some("Superseded")
    }

    /// Brings the key of an owner, which lives on, into the state of a column.
    fn bring(&self, column: &str, owner: &Reservation, key: &Key) {
        match column {
            "Absent" => assert!(self.store.forget(key, "a test").unwrap()),
            "InFlight" => {}
            "Interrupted" => self.place.clock.advance(LEASE),
            "Done" => {
                self.place.clock.advance(LEASE);
                assert_eq!(interrupted(&self.store, key).resolve(b"found out").unwrap(), Completion::Done);
            }
            column => panic!("there is no column {column}"),
        }
        assert_eq!(name(state(&self.store, key)), column, "attempt {}", owner.attempt());
    }

    /// The latest owner of a key in the state of a column.
    fn owner(&self, column: &str) -> (Key, Reservation) {
        let key = self.key();
        let owner = fresh(&self.store, &key);
        self.bring(column, &owner, &key);
        (key, owner)
    }

    /// The same at the second attempt.
    fn later_owner(&self, column: &str) -> (Key, Reservation) {
        let key = self.key();
        drop(fresh(&self.store, &key));
        let owner = as_fresh(interrupted(&self.store, &key).take_over().unwrap());
        self.bring(column, &owner, &key);
        (key, owner)
    }

    /// An owner whose key somebody else has taken over and brought into the state of a column.
    fn superseded_owner(&self, column: &str) -> (Key, Reservation) {
        let key = self.key();
        let old = fresh(&self.store, &key);
        self.place.clock.advance(LEASE);
        let next = as_fresh(interrupted(&self.store, &key).take_over().unwrap());
        self.bring(column, &next, &key);
        std::mem::forget(next);
        (key, old)
    }

    /// A handle of an interruption, whose key came into the state of a column since.
    fn handle(&self, column: &str) -> (Key, Interrupted) {
        let key = self.key();
        let owner = fresh(&self.store, &key);
        self.place.clock.advance(LEASE);
        let handle = interrupted(&self.store, &key);
        match column {
            "Absent" => assert!(self.store.forget(&key, "a test").unwrap()),
            "InFlight" => assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done),
            "Interrupted" => {}
            "Done" => assert_eq!(interrupted(&self.store, &key).resolve(b"").unwrap(), Completion::Done),
            column => panic!("there is no column {column}"),
        }
        assert_eq!(name(state(&self.store, &key)), column);
        std::mem::forget(owner);
        (key, handle)
    }

    fn acts(&self, acts: &[(&str, Act)], owner: impl Fn() -> (Key, Reservation)) -> Vec<Seen> {
        let act = |(name, act): &(&str, Act)| {
            let (key, owner) = owner();
            let answer = act(self, owner);
            self.seen(*name, &key, answer)
        };
        acts.iter().map(act).collect()
    }

    fn reserves(&self, column: &str, same: bool) -> Vec<Seen> {
        let wall_ms = keyonce::Clock::wall_ms(&self.place.clock);
        let two_windows_ago = std::time::UNIX_EPOCH + Duration::from_millis(wall_ms) - 2 * WINDOW;
        let plain = ReserveOptions::new();
        let variants = [
            ("plainly", plain.clone()),
            ("issued two windows ago", plain.clone().issued_at(two_windows_ago)),
            ("taking over", plain.clone().on_interrupted(OnInterrupted::TakeOver)),
            ("taking over lapsed ones, too", plain.clone().on_interrupted(OnInterrupted::TakeOverLapsed)),
            ("held", plain.clone().on_interrupted(OnInterrupted::Hold(LEASE))),
            ("no longer held", plain.clone().on_interrupted(OnInterrupted::Hold(MS))),
        ];
        let mut seen = Vec::new();
        for (variant, with) in variants {
            let key = self.key();
            let owner = fresh(&self.store, &key);
            let before = owner.token();
            match column {
                // A policy takes over from an owner that is known to be gone; only where it says so, from another.
                "Interrupted" if variant == "taking over lapsed ones, too" => {
                    self.bring(column, &owner, &key);
                    std::mem::forget(owner);
                }
                "Interrupted" => {
                    drop(owner);
                    self.place.clock.advance(MS);
                }
                column => {
                    self.bring(column, &owner, &key);
                    std::mem::forget(owner);
                }
            }
            let fingerprint = if same { request() } else { other_request() };
            let answer = self.store.reserve_with(&key, fingerprint, &with).unwrap();
            if let Reserve::Fresh(next) = &answer {
                assert_eq!(next.attempt(), if column == "Absent" { 1 } else { 2 }, "{variant}");
                assert!(next.token() > before, "{variant}");
            }
            if same && column == "Interrupted" {
                let expected = match variant {
                    "taking over" | "taking over lapsed ones, too" => "Fresh",
                    "held" => "InFlight",
                    _ => "Interrupted",
                };
                assert_eq!(of_reserve(&answer), expected, "{variant}");
            }
            seen.push(self.seen(variant, &key, Some(of_reserve(&answer))));
            std::mem::forget(answer);
        }
        seen
    }

    fn releases(&self, column: &str) -> Vec<Seen> {
        let mut seen = self.acts(&[RELEASE], || self.owner(column));
        seen.extend(self.acts(&[RELEASE], || self.later_owner(column)));
        if ["InFlight", "Interrupted"].contains(&column) {
            seen.push(self.releases_to_a_waiter(column));
        }
        seen
    }

    fn releases_to_a_waiter(&self, column: &str) -> Seen {
        let (key, owner) = self.owner(column);
        let with = ReserveOptions::new().on_interrupted(OnInterrupted::Hold(2 * LEASE)).wait(LEASE);
        let mut waiter = Box::pin(self.store.reserve_with_async(&key, request(), &with));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiter.as_mut().poll(&mut context).is_pending());
        let answer = of_completion(owner.release().unwrap());
        let seen = self.seen("release to a waiter", &key, answer);
        assert!(matches!(waiter.as_mut().poll(&mut context), Poll::Ready(Ok(Reserve::Fresh(_)))));
        seen
    }

    fn reattaches(&self, column: &str) -> Vec<Seen> {
        let detached = |key: &Key| -> Token { fresh(&self.store, key).detach(LEASE).unwrap() };
        let mut seen = Vec::new();
        for guard_lives in [false, true] {
            let key = self.key();
            let token = detached(&key);
            match column {
                "Absent" => assert!(self.store.forget(&key, "a test").unwrap()),
                "InFlight" if guard_lives => std::mem::forget(self.store.reattach(&key, token).unwrap()),
                "InFlight" => {}
                "Interrupted" => self.place.clock.advance(LEASE),
                _ => {
                    let holder = self.store.reattach(&key, token).unwrap();
                    assert_eq!(holder.complete(b"").unwrap(), Completion::Done);
                }
            }
            assert_eq!(name(state(&self.store, &key)), column);
            let answer = self.store.reattach(&key, token);
            seen.push(self.seen(format!("a guard lives: {guard_lives}"), &key, of_reattach(&answer)));
            std::mem::forget(answer);
        }
        seen
    }

    /// Every act with a token that is not, or no longer, the key's.
    fn acts_of_another_token(&self, column: &str) -> Vec<Seen> {
        let mut seen = Vec::new();
        for acts in [&COMPLETES[..], &GOES_ON, &[RELEASE], &STOPS] {
            seen.extend(self.acts(acts, || self.superseded_owner(column)));
        }
        for (variant, token) in [("an earlier token", -8), ("a later token", 8)] {
            let (key, owner) = self.owner(column);
            let token = Token::from_u64(owner.token().to_u64().checked_add_signed(token).unwrap());
            let answer = self.store.reattach(&key, token);
            seen.push(self.seen(variant, &key, of_reattach(&answer)));
            std::mem::forget(owner);
        }
        seen
    }

    fn acts_of_a_handle(&self, column: &str) -> Vec<Seen> {
        let (taken, handle) = self.handle(column);
        let answer = handle.take_over().unwrap();
        let took_over = matches!(&answer, Reserve::Fresh(next) if next.attempt() == 2);
        // What a handle can no longer take over it asks for anew, and says what the key is now.
        let (now, asked_anew) = match &answer {
            Reserve::Fresh(next) if next.attempt() == 1 => ("Absent", column == "Absent"),
            Reserve::InFlight(_) => ("InFlight", column == "InFlight"),
            Reserve::Replay(_) => ("Done", column == "Done"),
            _ => (name(state(&self.store, &taken)), false),
        };
        assert!(took_over || asked_anew, "{answer:?} in {column}");
        let told = if took_over { "Fresh" } else { "Superseded" };
        let mut seen = vec![Seen { variant: "take over".to_owned(), answer: Some(told), state: now }];
        std::mem::forget(answer);
        let (resolved, handle) = self.handle(column);
        let answer = of_completion(handle.resolve(b"found out").unwrap());
        seen.push(self.seen("resolve", &resolved, answer));
        let (released, handle) = self.handle(column);
        let answer = of_completion(handle.release().unwrap());
        seen.push(self.seen("release", &released, answer));
        seen
    }

    fn forgets(&self, column: &str) -> Vec<Seen> {
        let (key, owner) = self.owner(column);
        assert_eq!(self.store.forget(&key, "a test").unwrap(), column != "Absent");
        let seen = self.seen("forget", &key, None);
        assert_eq!(owner.complete(b"late").unwrap(), Completion::Superseded, "the owner is superseded");
        vec![seen]
    }

    fn lapses(&self, column: &str) -> Vec<Seen> {
        let (lapsed, owner) = self.owner(column);
        self.place.clock.advance(LEASE);
        let mut seen = vec![self.seen("the lease lapses", &lapsed, None)];
        drop(owner);
        let (gone, owner) = self.owner(column);
        let killed = self.place.open_after_kill();
        let after = name(state(&killed, &gone));
        seen.push(Seen { variant: "the process is gone".to_owned(), answer: None, state: after });
        std::mem::forget(owner);
        seen
    }

    fn expires(&self, column: &str) -> Vec<Seen> {
        let mut seen = Vec::new();
        for guard_lives in [true, false] {
            if column == "InFlight" && !guard_lives {
                continue;
            }
            let (key, owner) = self.owner(column);
            let owner = if guard_lives || column != "Interrupted" {
                Some(owner)
            } else {
                drop(owner);
                None
            };
            if let Some(info) = self.store.peek(&key).unwrap() {
                let wall_ms = keyonce::Clock::wall_ms(&self.place.clock);
                let until = info.kept_until.duration_since(std::time::UNIX_EPOCH).unwrap();
                self.place.clock.advance(until - Duration::from_millis(wall_ms));
            }
            if let ("InFlight", Some(owner)) = (column, &owner) {
                assert_eq!(owner.renew(LEASE).unwrap(), Completion::Done);
            }
            seen.push(self.seen(format!("a guard lives: {guard_lives}"), &key, None));
        }
        seen
    }

    /// Drives the event of a row on keys in the state of a column.
    fn drive(&self, event: &str, column: &str) -> Vec<Seen> {
        match event {
            "reserve, same fingerprint" => self.reserves(column, true),
            "reserve, other fingerprint" => self.reserves(column, false),
            "complete, latest token" => self.acts(&COMPLETES, || self.owner(column)),
            "save checkpoint / renew / detach, latest token" => self.acts(&GOES_ON, || self.owner(column)),
            "release, latest token" => self.releases(column),
            "interrupt / drop, latest token" => self.acts(&STOPS, || self.owner(column)),
            "reattach, latest token of a detached reservation" => self.reattaches(column),
            "any of these, any other token" => self.acts_of_another_token(column),
            "take over, resolve, release by an `Interrupted` handle" => self.acts_of_a_handle(column),
            "forget" => self.forgets(column),
            "lease lapses / holder gone (observed)" => self.lapses(column),
            "`kept_until` passes (observed)" => self.expires(column),
            event => panic!("nobody drives the row `{event}`"),
        }
    }
}

#[test]
fn each_cell_of_the_table_is_what_the_store_does() {
    everywhere(|place| {
        let rig = Rig { place, store: place.open(), keys: Counter::new(0) };
        let (mut cells, mut variants, mut wrong) = (0, 0, Vec::new());
        for (event, said) in rows() {
            for (column, (cell, said)) in COLUMNS.into_iter().zip(&said) {
                let seen = rig.drive(&event, column);
                let as_seen = Said {
                    answers: seen.iter().filter_map(|seen| seen.answer).collect(),
                    states: seen.iter().map(|seen| seen.state).collect(),
                };
                if as_seen != *said {
                    let seen: Vec<_> = seen.iter().map(|seen| (&*seen.variant, seen.answer, seen.state)).collect();
                    wrong.push(format!("{event} in {column}: `{cell}` reads {said:?}, but {seen:?}"));
                }
                (cells, variants) = (cells + 1, variants + seen.len());
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
        println!("{cells} cells in {variants} variants at {:?}", place.setting);
        assert_eq!(cells, 12 * 4);
    });
}

#[test]
fn a_cell_is_read_by_its_words() {
    let said = |answers: &[&'static str], states: &[&'static str]| Said {
        answers: answers.iter().copied().collect(),
        states: states.iter().copied().collect(),
    };
    let read = |cell, column| Said::read(cell, column, None, None);
    assert_eq!(read("InFlight: `Fresh`; or `TooOld`", "Absent"), said(&["Fresh", "TooOld"], &["Absent", "InFlight"]));
    assert_eq!(read("`Replay`", "Done"), said(&["Replay"], &["Done"]));
    assert_eq!(read("attempt 1: Absent; later: Interrupted", "InFlight"), said(&[], &["Absent", "Interrupted"]));
    assert_eq!(read("Absent, unless a guard lives", "Interrupted"), said(&[], &["Absent", "Interrupted"]));
    assert_eq!(read("-", "Done"), said(&[], &["Done"]));
    let first = said(&["Mismatch"], &["Done"]);
    assert_eq!(Said::read("as above", "Done", Some(&first), None), first);
    assert_eq!(Said::read("the same", "Done", None, Some(&first)), first);
}
