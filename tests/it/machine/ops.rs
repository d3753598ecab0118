//! What callers of a store do, one act after the other: what proptest makes from a seed, and a fuzzer from bytes.

use std::time::Duration;

use keyonce::testing::{EIO, ENOSPC};
use keyonce::{Durability, OnInterrupted};

use super::driver::{KEYS, NOTE_BYTES_MAX, RESPONSE_BYTES_MAX, WINDOW_MS};
use super::input::Input;

/// What a caller does. `pick` chooses among what callers hold; with nothing to choose from, nothing is done.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Reserve {
        key: u8,
        request: u8,
        with: With,
    },
    Complete {
        pick: u8,
        bytes: usize,
    },
    CompleteWithoutBody {
        pick: u8,
        bytes: usize,
    },
    Release {
        pick: u8,
    },
    Drop {
        pick: u8,
    },
    Interrupt {
        pick: u8,
    },
    Renew {
        pick: u8,
        lease_ms: u64,
        by_view: bool,
    },
    SaveCheckpoint {
        pick: u8,
        bytes: usize,
        by_view: bool,
    },
    Detach {
        pick: u8,
        lease_ms: u64,
    },
    Reattach {
        pick: u8,
    },
    TakeOver {
        pick: u8,
    },
    Resolve {
        pick: u8,
        bytes: usize,
    },
    ReleaseInterrupted {
        pick: u8,
    },
    AskAgain {
        pick: u8,
    },
    DropHandle {
        pick: u8,
    },
    /// A future that waits for the key, polled for the first time.
    Wait {
        key: u8,
        request: u8,
        with: With,
        wait_ms: u64,
    },
    /// The same, by the handle of an answer.
    WaitAgain {
        pick: u8,
        wait_ms: u64,
    },
    Poll {
        pick: u8,
    },
    /// Drops a future that waits.
    GiveUp {
        pick: u8,
    },
    ReserveBatch {
        asks: [(u8, u8, With); 3],
        waits: u8,
    },
    CompleteBatch {
        pick: u8,
        bytes: usize,
    },
    Once {
        key: u8,
        request: u8,
        work: Work,
    },
    Forget {
        key: u8,
        bytes: usize,
    },
    Peek {
        key: u8,
    },
    PeekAll,
    Sync,
    /// To a moment at which something changes by itself, a millisecond before it or after it.
    AdvanceTo {
        pick: u8,
        offset: i8,
    },
    Advance {
        ms: u64,
    },
    Reopen(Reopen, Reboot),
    /// A step of the disk will fail, so many steps from now. Once a call was refused for it, and nobody can know what
    /// became of the call, the store ends in this way and is opened again.
    Fail {
        after: u64,
        fault: Fault,
        then: Reopen,
    },
    /// Nothing fails any more, and a second passes.
    Heal,
}

/// What fails, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) raw_os_error: i32,
    /// All later steps fail, too.
    pub(crate) lasts: bool,
}

/// What a reserve asks for beyond the store's options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct With {
    pub(crate) durability: Option<Durability>,
    pub(crate) lease_ms: Option<u64>,
    pub(crate) retention_ms: Option<u64>,
    pub(crate) on_interrupted: Option<OnInterrupted>,
    pub(crate) releases_on_drop: Option<bool>,
    /// The request was issued a retention ago, and so much later.
    pub(crate) issued_offset_ms: Option<i8>,
}

/// What the work of a `once` comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Responds { bytes: usize },
    NothingHappened,
    Unknown,
    Panics,
}

/// How a store ends before it is opened again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reopen {
    Close,
    DropStore,
    Kill,
    /// What was not synced is lost, all of it.
    LosePower,
    /// Of what was not synced, something is lost.
    LoseSome {
        seed: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reboot {
    Yes,
    No,
}

/// As many acts are read at most.
const OPS_MAX: usize = 400;

/// Reads acts to the end of the input.
pub(crate) fn read_all(input: &mut Input<'_>) -> Vec<Op> {
    let mut ops = Vec::new();
    while !input.is_empty() && ops.len() < OPS_MAX {
        ops.push(read(input));
    }
    ops
}

/// Reads one act: a byte for what it is, then what it needs.
fn read(input: &mut Input<'_>) -> Op {
    match input.u8() % 64 {
        0..12 => Op::Reserve { key: key(input), request: request(input), with: with(input) },
        12..18 => Op::Complete { pick: input.u8(), bytes: response_bytes(input) },
        18 => Op::CompleteWithoutBody { pick: input.u8(), bytes: response_bytes(input) },
        19..21 => Op::Release { pick: input.u8() },
        21..23 => Op::Drop { pick: input.u8() },
        23 => Op::Interrupt { pick: input.u8() },
        24..26 => Op::Renew { pick: input.u8(), lease_ms: lease_ms(input), by_view: input.below(2) == 1 },
        26..28 => Op::SaveCheckpoint { pick: input.u8(), bytes: note_bytes(input), by_view: input.below(2) == 1 },
        28..30 => Op::Detach { pick: input.u8(), lease_ms: lease_ms(input) },
        30..32 => Op::Reattach { pick: input.u8() },
        32..34 => Op::TakeOver { pick: input.u8() },
        34 => Op::Resolve { pick: input.u8(), bytes: response_bytes(input) },
        35 => Op::ReleaseInterrupted { pick: input.u8() },
        36 => Op::AskAgain { pick: input.u8() },
        37 => Op::DropHandle { pick: input.u8() },
        38..40 => Op::Wait { key: key(input), request: request(input), with: with(input), wait_ms: wait_ms(input) },
        40 => Op::WaitAgain { pick: input.u8(), wait_ms: wait_ms(input) },
        41..44 => Op::Poll { pick: input.u8() },
        44 => Op::GiveUp { pick: input.u8() },
        45 => Op::ReserveBatch {
            asks: [(); 3].map(|()| (key(input), request(input), with(input))),
            waits: input.u8() % 16,
        },
        46 => Op::CompleteBatch { pick: input.u8(), bytes: response_bytes(input) },
        // A panic is the end of a fuzzer.
        47 => Op::Once {
            key: key(input),
            request: request(input),
            work: match input.below(4) {
                0 => Work::NothingHappened,
                1 => Work::Unknown,
                _ => Work::Responds { bytes: response_bytes(input) },
            },
        },
        48 => Op::Forget { key: key(input), bytes: note_bytes(input) },
        49 => Op::Peek { key: key(input) },
        50 => Op::PeekAll,
        51 => Op::Sync,
        52..55 => Op::AdvanceTo { pick: input.u8(), offset: one_off(input) },
        55 => Op::Advance { ms: of(input, &[1, 1_000, 9_999, 70_000]) },
        56..60 => {
            let way = reopen(input);
            Op::Reopen(way, of(input, &[Reboot::No, Reboot::Yes]))
        }
        60..63 => Op::Fail {
            after: input.below(24),
            fault: Fault { raw_os_error: of(input, &[EIO, ENOSPC]), lasts: input.below(2) == 1 },
            then: reopen(input),
        },
        _ => Op::Heal,
    }
}

fn of<T: Copy>(input: &mut Input<'_>, choices: &[T]) -> T {
    choices[input.index(choices.len())]
}

fn key(input: &mut Input<'_>) -> u8 {
    input.u8() % KEYS
}

fn request(input: &mut Input<'_>) -> u8 {
    u8::from(input.u8().is_multiple_of(6))
}

fn with(input: &mut Input<'_>) -> With {
    let plain = input.u8();
    let mut with = With {
        durability: None,
        lease_ms: None,
        retention_ms: None,
        on_interrupted: None,
        releases_on_drop: None,
        issued_offset_ms: None,
    };
    if plain & 1 != 0 {
        with.durability = Some(of(input, &[Durability::PowerLoss, Durability::ProcessCrash]));
    }
    if plain & 2 != 0 {
        with.lease_ms = Some(lease_ms(input));
    }
    if plain & 4 != 0 {
        with.retention_ms = Some(of(input, &[20_000, WINDOW_MS, 1, WINDOW_MS + 1, 0]));
    }
    if plain & 8 != 0 {
        with.on_interrupted = Some(of(
            input,
            &[
                OnInterrupted::Surface,
                OnInterrupted::TakeOver,
                OnInterrupted::TakeOverLapsed,
                OnInterrupted::Hold(Duration::from_millis(1)),
                OnInterrupted::Hold(Duration::from_secs(15)),
                OnInterrupted::Hold(Duration::from_secs(90)),
            ],
        ));
    }
    if plain & 16 != 0 {
        with.releases_on_drop = Some(input.below(2) == 1);
    }
    if plain & 224 == 224 {
        with.issued_offset_ms = Some(one_off(input));
    }
    with
}

fn one_off(input: &mut Input<'_>) -> i8 {
    of(input, &[0, -1, 1])
}

fn lease_ms(input: &mut Input<'_>) -> u64 {
    of(input, &[5_000, 1, 20_000, WINDOW_MS, 100_000, 250_000, 0])
}

fn wait_ms(input: &mut Input<'_>) -> u64 {
    of(input, &[10_000, 0, 1, 45_000, 500_000])
}

fn response_bytes(input: &mut Input<'_>) -> usize {
    match input.u8() {
        bytes @ 0..200 => bytes.into(),
        bytes @ 200..250 => usize::from(bytes) * 20,
        250..253 => RESPONSE_BYTES_MAX,
        _ => RESPONSE_BYTES_MAX + 1,
    }
}

/// As long as notes are that make segments roll. Of longer ones two may not fit what is left of a segment, and a
/// hand-over that comes by itself then waits until its waiter asks.
const LARGE_NOTE_BYTES: usize = 40 << 10;

/// Notes are large now and then, so that segments roll.
fn note_bytes(input: &mut Input<'_>) -> usize {
    match input.u8() {
        bytes @ 0..160 => bytes.into(),
        160..250 => LARGE_NOTE_BYTES,
        _ => NOTE_BYTES_MAX + 1,
    }
}

fn reopen(input: &mut Input<'_>) -> Reopen {
    match input.u8() % 8 {
        0 | 1 => Reopen::Kill,
        2 => Reopen::Close,
        3 => Reopen::DropStore,
        4 => Reopen::LosePower,
        _ => Reopen::LoseSome { seed: input.u8().into() },
    }
}
