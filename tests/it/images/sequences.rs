//! All short sequences of acts: whatever up to three acts can bring about, some image of it is looked at.
//!
//! An act is what one client does with one key, from its reservation to some end, or something that befalls the store:
//! a sync, a closing, a kill, time. Every sequence of up to `KEYONCE_SEQUENCES` acts over two keys is carried out, and
//! after each step of its last act, every image of that moment is opened, as long as there are not more of them than
//! [`IMAGES_MAX`] (the steps before belong to the shorter sequence).

use keyonce::Durability;

use crate::clients::Clients;
use crate::examine::{Check, Plan, Tally, in_parallel, number};
use crate::workload::{Op, Settings, With, Work, plainly};

/// How many images of one moment are looked at.
const IMAGES_MAX: u64 = 64;

/// How many acts a sequence has, unless `KEYONCE_SEQUENCES` says so.
const ACTS: u64 = 2;

/// What a client may do with a key.
fn acts(key: usize) -> Vec<Vec<Op>> {
    let plain = With::default();
    let reserve = |with| Op::Reserve { key, request: 0, with };
    let unsynced = With { durability: Some(Durability::ProcessCrash), ..plain };
    vec![
        vec![reserve(plain)],
        vec![reserve(plain), Op::Complete { key, bytes: 200 }],
        vec![reserve(plain), Op::Complete { key, bytes: 9_000 }],
        vec![reserve(plain), Op::Release { key }],
        vec![reserve(plain), Op::Drop { key }],
        vec![reserve(plain), Op::SaveCheckpoint { key, bytes: 3_000 }],
        vec![reserve(plain), Op::SaveCheckpoint { key, bytes: 10 }, Op::Interrupt { key }],
        vec![reserve(plain), Op::Detach { key, lease_ms: 45_000 }],
        vec![reserve(unsynced), Op::CompleteWithoutBody { key, bytes: 60 }],
        vec![reserve(With { take_over: true, ..plain })],
        vec![Op::Wait { key, with: plain, wait_ms: 20_000 }],
        vec![Op::Once { key, with: unsynced, work: Work::Responds { bytes: 300 } }],
    ]
}

/// What may befall the store.
fn moves() -> Vec<Vec<Op>> {
    vec![vec![Op::Sync], vec![Op::Close], vec![Op::Kill], vec![Op::Advance { ms: 61_000 }]]
}

/// Every sequence of so many acts. The first key named is always key 0: the other sequences are the same with the names
/// exchanged.
fn sequences(count: u64) -> Vec<Vec<Vec<Op>>> {
    let first: Vec<_> = acts(0).into_iter().chain(moves()).collect();
    let later: Vec<_> = first.iter().cloned().chain(acts(1)).collect();
    (1..count).fold(first.into_iter().map(|act| vec![act]).collect(), |shorter: Vec<Vec<Vec<Op>>>, _| {
        let longer = |sequence: &Vec<Vec<Op>>| {
            let sequence = sequence.clone();
            later.iter().map(move |act| [sequence.as_slice(), std::slice::from_ref(act)].concat()).collect::<Vec<_>>()
        };
        shorter.iter().flat_map(longer).collect()
    })
}

fn check(number: u64, sequence: &[Vec<Op>]) -> (Tally, Result<(), String>) {
    let settings = Settings { keys: 2, ..Settings::plain() };
    let mut clients = Clients::new(plainly, settings, number);
    clients.open();
    let (last, before) = sequence.split_last().unwrap();
    before.iter().flatten().for_each(|op| clients.run(*op));
    clients.phases.clear();
    clients.record_from_now();
    last.iter().for_each(|op| clients.run(*op));
    clients.finish();
    let plan = Plan { limit: IMAGES_MAX, again_one_in: 40, deep_one_in: 20 };
    let mut check =
        Check { name: "image", settings: &settings, seed: number, plan, only: None, tally: Tally::default() };
    let result = (0..).zip(clients.phases).try_for_each(|(number, phase)| check.phase(number, phase));
    (check.tally, result.map_err(|why| format!("{sequence:?}: {why}")))
}

#[test]
fn after_every_short_sequence_every_image_shows_what_was_told() {
    for count in 1..=number("KEYONCE_SEQUENCES").unwrap_or(ACTS) {
        let sequences = sequences(count);
        let total =
            in_parallel(sequences.len() as u64, |number| check(number, &sequences[usize::try_from(number).unwrap()]));
        let (all, images) = (sequences.len(), total.images());
        println!(
            "crash images of all {all} sequences of {count} acts: {images}, at {} of {} moments every one: {total:?}",
            total.exhausted, total.moments
        );
        assert!(total.exhausted * 10 >= total.moments * 9, "most moments have more images than are looked at");
    }
}
