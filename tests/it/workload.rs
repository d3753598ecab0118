//! What the clients of a workload do, by chance or by a list, and how their store is opened.

use std::sync::Arc;
use std::time::Duration;

use keyonce::testing::{self, ManualClock, SimDisk, Tear};
use keyonce::{AppendMode, Durability, Error, Options, Retention, Store};

/// The smallest segment that a store may have, so that segments roll often.
pub(crate) const SEGMENT_BYTES: u64 = 192 << 10;
pub(crate) const RETENTION_MS: u64 = 60_000;
pub(crate) const LEASE_MS: u64 = 30_000;
/// How often a store syncs of which nothing else is asked.
pub(crate) const INTERVAL: Duration = Duration::from_secs(2);
/// By how much somebody sets the wall clock: mostly not at all, else by less or by more than the store follows.
pub(crate) const WALL_STEPS_MS: [i64; 8] =
    [0, 0, 0, -HOUR_MS, -HOUR_MS, HOUR_MS, 30 * 24 * HOUR_MS, -30 * 24 * HOUR_MS];
const HOUR_MS: i64 = 60 * 60 * 1000;
/// Large enough that a few bodies fill a segment, and that one body lies in many pages.
const BODY_BYTES_MAX: usize = 64 << 10;
const BODY_BYTES_LARGE: [usize; 5] = [200, 20_000, 45_000, 60_000, BODY_BYTES_MAX];
const BODY_BYTES: [usize; 10] = [0, 1, 60, 200, 200, 4095, 4096, 9000, 33_000, BODY_BYTES_MAX];

/// How the store under test lies on its disk.
pub(crate) type Mount = fn(SimDisk, Options, u64) -> Result<Store, Error>;

/// As it should.
pub(crate) fn plainly(disk: SimDisk, options: Options, seed: u64) -> Result<Store, Error> {
    testing::open(disk, options, seed)
}

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap()
    }

    pub(crate) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }
}

/// A number that depends on all of `parts` alone.
pub(crate) fn mixed(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |mixed, part| Random(mixed ^ part.wrapping_mul(0x2545_f491_4f6c_dd1d)).next())
}

/// Bytes that no other call of the workload stores.
pub(crate) fn body(key: usize, call: usize, bytes: usize) -> Vec<u8> {
    let mut random = Random(mixed(&[key as u64, call as u64]));
    let mut body = Vec::with_capacity(bytes + 8);
    while body.len() < bytes {
        body.extend(random.next().to_le_bytes());
    }
    body.truncate(bytes);
    body
}

/// What a client does. An act for which the client holds nothing is left out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Reserve {
        key: usize,
        request: u8,
        with: With,
    },
    Complete {
        key: usize,
        bytes: usize,
    },
    CompleteWithoutBody {
        key: usize,
        bytes: usize,
    },
    Release {
        key: usize,
    },
    Drop {
        key: usize,
    },
    Interrupt {
        key: usize,
    },
    SaveCheckpoint {
        key: usize,
        bytes: usize,
    },
    Renew {
        key: usize,
        lease_ms: u64,
    },
    Detach {
        key: usize,
        lease_ms: u64,
    },
    Reattach {
        key: usize,
    },
    TakeOver {
        key: usize,
    },
    Resolve {
        key: usize,
        bytes: usize,
    },
    ReleaseInterrupted {
        key: usize,
    },
    Peek {
        key: usize,
    },
    Sync,
    /// Closes the store and opens it again.
    Close,
    /// Drops the last handle and opens the store again.
    DropStore,
    Advance {
        ms: u64,
    },
    /// Closes the store, starts the machine again with the wall clock set by so much, and opens the store.
    Reboot {
        step_ms: i64,
    },
    /// Somebody sets the wall clock.
    StepWall {
        step_ms: i64,
    },
    /// Reserves the key, does the work and stores its response, in one call.
    Once {
        key: usize,
        with: With,
        work: Work,
    },
    /// Asks for the key, and waits for it while others go on.
    Wait {
        key: usize,
        with: With,
        wait_ms: u64,
    },
    /// The first who waits for the key goes away.
    Leave {
        key: usize,
    },
    /// Releases the key, and whoever waits for it goes away before it is told that it is the owner now.
    ReleaseUnseen {
        key: usize,
    },
    /// Reserves several keys in one call, one of them perhaps twice.
    ReserveBatch {
        seed: u64,
    },
    /// Completes up to `count` reservations in one call.
    CompleteBatch {
        count: usize,
        bytes: usize,
    },
    /// The process is killed; another one opens the store.
    Kill,
    /// The power fails, and what it leaves is chosen by the seed.
    LosePower {
        seed: u64,
    },
}

/// How the work of a [`Op::Once`] ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Responds { bytes: usize },
    NothingHappened,
    Unknown,
}

/// What a reserve asks for beyond the store's options.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct With {
    pub(crate) durability: Option<Durability>,
    pub(crate) lease_ms: Option<u64>,
    pub(crate) retention_ms: Option<u64>,
    pub(crate) take_over: bool,
    pub(crate) release_on_drop: bool,
}

impl With {
    pub(crate) fn by_chance(random: &mut Random) -> Self {
        Self {
            durability: random.of(&[None, None, Some(Durability::PowerLoss), Some(Durability::ProcessCrash)]),
            lease_ms: random.of(&[None, None, Some(5_000)]),
            retention_ms: random.of(&[None, None, Some(20_000)]),
            take_over: random.one_in(3),
            release_on_drop: random.one_in(4),
        }
    }
}

impl Op {
    pub(crate) fn by_chance(random: &mut Random, settings: &Settings) -> Self {
        let key = random.index(settings.keys);
        if settings.jumps && random.one_in(25) {
            let step_ms = random.of(&WALL_STEPS_MS);
            return if random.one_in(3) { Self::Reboot { step_ms } } else { Self::StepWall { step_ms } };
        }
        if settings.many && random.one_in(if settings.kind == Kind::Everything { 4 } else { 10 }) {
            return Self::of_many(random, key, settings.bodies());
        }
        if settings.kind == Kind::Ring && !random.one_in(10) {
            return Self::that_turns_the_ring(random, key);
        }
        let bodies = settings.bodies();
        let seldom_opened = settings.kind != Kind::Everything;
        match random.below(100) {
            // A store that is opened seldom fills its segments.
            84..88 | 98..100 if seldom_opened && !random.one_in(6) => Self::Complete { key, bytes: random.of(bodies) },
            0..30 => Self::Reserve { key, request: u8::from(random.one_in(4)), with: With::by_chance(random) },
            30..50 => Self::Complete { key, bytes: random.of(bodies) },
            50..53 => Self::CompleteWithoutBody { key, bytes: random.of(&[0, 30, 5_000]) },
            53..56 => Self::Release { key },
            56..58 => Self::Drop { key },
            58..59 => Self::Interrupt { key },
            59..65 => Self::SaveCheckpoint { key, bytes: random.of(&[0, 10, 3_000, 60_000]) },
            65..67 => Self::Renew { key, lease_ms: random.of(&[5_000, 40_000, 200_000]) },
            67..70 => Self::Detach { key, lease_ms: random.of(&[3_000, 45_000]) },
            70..72 => Self::Reattach { key },
            72..76 => Self::TakeOver { key },
            76..78 => Self::Resolve { key, bytes: random.of(bodies) },
            78..79 => Self::ReleaseInterrupted { key },
            79..82 => Self::Peek { key },
            82..84 => Self::Sync,
            84..86 => Self::Close,
            86..87 => Self::DropStore,
            87..88 => Self::Reboot { step_ms: 0 },
            88..98 => Self::Advance { ms: random.of(&[1, 1_000, 1_000, 10_000, 10_000, 31_000, 61_000, 150_000]) },
            98..99 => Self::Kill,
            _ => Self::LosePower { seed: random.next() },
        }
    }

    /// Calls that do several things, and callers who wait.
    fn of_many(random: &mut Random, key: usize, bodies: &[usize]) -> Self {
        match random.below(20) {
            0..5 => Self::Once {
                key,
                with: With::by_chance(random),
                work: match random.below(4) {
                    0 => Work::NothingHappened,
                    1 => Work::Unknown,
                    _ => Work::Responds { bytes: random.of(bodies) },
                },
            },
            5..10 => Self::Wait { key, with: With::by_chance(random), wait_ms: random.of(&[1_000, 20_000, 400_000]) },
            10..11 => Self::ReleaseUnseen { key },
            11..12 => Self::Leave { key },
            12..15 => Self::Release { key },
            15..17 => Self::ReserveBatch { seed: random.next() },
            _ => Self::CompleteBatch { count: 2 + random.index(3), bytes: random.of(bodies) },
        }
    }

    /// Records that fill segments and are soon forgotten, nearly all unsynced; among them a few that must stay.
    fn that_turns_the_ring(random: &mut Random, key: usize) -> Self {
        let stays = key < 3;
        match random.below(20) {
            0..9 => Self::Reserve {
                key,
                request: 0,
                with: With {
                    durability: stays.then_some(Durability::PowerLoss),
                    lease_ms: stays.then_some(200_000),
                    retention_ms: (!stays).then_some(20_000),
                    take_over: !stays,
                    release_on_drop: false,
                },
            },
            9..17 if !stays || random.one_in(8) => Self::Complete { key, bytes: random.of(&BODY_BYTES_LARGE) },
            17 if stays => Self::Detach { key, lease_ms: 150_000 },
            _ => Self::Advance { ms: random.of(&[1_000, 3_000, 8_000, 25_000]) },
        }
    }
}

impl Kind {
    /// How many acts make a workload of this kind.
    pub(crate) fn ops(self, random: &mut Random) -> u64 {
        match self {
            Self::Everything => 40 + random.below(60),
            Self::LargeBodies | Self::Ring => 60 + random.below(140),
        }
    }
}

/// How a workload's store is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) durability: Durability,
    pub(crate) append_mode: AppendMode,
    pub(crate) tear: Tear,
    pub(crate) keys: usize,
    /// What its workload dwells on.
    pub(crate) kind: Kind,
    /// The first segments are small, and later ones double up to four times their size.
    pub(crate) growing: bool,
    /// Somebody sets the wall clock now and then.
    pub(crate) jumps: bool,
    /// There are calls that do several things, and callers who wait.
    pub(crate) many: bool,
}

/// What a workload dwells on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Every call there is, and many openings.
    Everything,
    /// Bodies are large and the store is seldom opened, so that segments roll.
    LargeBodies,
    /// Segments roll, retire and get new lives all the time, with few syncs but those that this takes.
    Ring,
}

impl Settings {
    /// What most users have.
    pub(crate) fn plain() -> Self {
        Self {
            durability: Durability::PowerLoss,
            append_mode: AppendMode::Positioned,
            tear: Tear::Page,
            keys: 5,
            kind: Kind::Everything,
            growing: false,
            jumps: false,
            many: false,
        }
    }

    pub(crate) fn by_chance(random: &mut Random) -> Self {
        let kind = random.of(&[Kind::Everything, Kind::LargeBodies, Kind::Ring]);
        Self {
            durability: match kind {
                Kind::Ring => Durability::ProcessCrash,
                _ => random.of(&[Durability::PowerLoss, Durability::PowerLoss, Durability::ProcessCrash]),
            },
            append_mode: random.of(&[AppendMode::Mapped, AppendMode::Positioned]),
            tear: random.of(&[Tear::Page, Tear::Sector]),
            keys: if kind == Kind::Everything { 5 } else { 10 },
            kind,
            ..Self::plain()
        }
    }

    /// The same, and by chance what only some stores meet.
    pub(crate) fn with_more(self, random: &mut Random) -> Self {
        let interval = self.durability == Durability::ProcessCrash && random.one_in(2);
        Self {
            durability: if interval { Durability::Interval(INTERVAL) } else { self.durability },
            growing: random.one_in(3),
            jumps: random.one_in(3),
            many: random.one_in(2),
            ..self
        }
    }

    /// The lengths of responses.
    pub(crate) fn bodies(&self) -> &'static [usize] {
        if self.kind == Kind::Everything { &BODY_BYTES } else { &BODY_BYTES_LARGE }
    }

    pub(crate) fn options(&self, clock: &ManualClock) -> Options {
        let options = Options::new()
            .durability(self.durability)
            .append_mode(self.append_mode)
            .lease(Duration::from_millis(LEASE_MS))
            .response_bytes_max(BODY_BYTES_MAX)
            .clock(Arc::new(clock.clone()));
        let retention = |keys_per_second| Retention::new(Duration::from_millis(RETENTION_MS), keys_per_second);
        if self.growing {
            // 720 keys of the largest body in a window, of which a segment is a 64th: 740 KiB.
            options.retention(retention(12.0)).response_bytes(BODY_BYTES_MAX)
        } else {
            options.retention(retention(1.0)).segment_bytes(SEGMENT_BYTES)
        }
    }
}
