//! Crash images of the whole store: after a crash at any moment, at any step, an opening finds what clients were told.
//!
//! A workload of seeded random calls runs once on a recording [`SimDisk`]. Then every moment of the disk is gone back
//! to, and from each one images are built: what a killed process leaves, and what a power loss may leave, with each
//! unsynced page old, new or in between, and each new file and length there or not. Every image is opened and held
//! against the oracle; some are crashed once more after they have answered, and of some the recovery is crashed at one
//! of its steps, and that of what is left then, and so on.
//!
//! A failure prints `KEYONCE_IMAGE=seed:phase:step:limit:image`. With that variable set,
//! `cargo test --test it images::a_crash_at_any_moment` replays that one image, with all that can follow from it.
//!
//! `KEYONCE_IMAGES=n` has the campaign check at least `n` images, and `KEYONCE_IMAGES_SEED=n` begins with another seed.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use keyonce::testing::{self, Access, Segment, SimDisk, Storage, Tear};
use keyonce::{Durability, Error, Options, Store};

use super::clients::Clients;
use super::examine::{Check, Plan, Tally, caught, in_parallel, in_threads, number};
use super::workload::{Mount, Op, Random, Settings, With, plainly};

/// What the clients of a seed's workload did.
fn workload(mount: Mount, seed: u64) -> (Settings, Clients) {
    let mut random = Random(seed);
    let settings = Settings::by_chance(&mut random).with_more(&mut random);
    let mut clients = Clients::new(mount, settings, seed);
    for _ in 0..settings.kind.ops(&mut random) {
        let op = clients.usable(Op::by_chance(&mut random, &settings));
        clients.run(op);
    }
    clients.finish();
    (settings, clients)
}

/// Runs the workload of a seed and looks at each of its moments.
fn check_workload(mount: Mount, seed: u64, plan: Plan) -> (Tally, Result<(), String>) {
    let (settings, mut clients) = match caught(|| Ok(workload(mount, seed))) {
        Ok(ran) => ran,
        Err(why) => {
            return (Tally::default(), Err(format!("the workload of seed {seed}, before any crash: {why}")));
        }
    };
    let mut check =
        Check { name: "KEYONCE_IMAGE", settings: &settings, seed, plan, only: None, tally: Tally::default() };
    let phases = std::mem::take(&mut clients.phases);
    check.tally.workloads = 1;
    check.tally.calls = phases.last().map_or(0, |phase| phase.oracle.calls() as u64);
    check.tally.met = std::mem::take(&mut clients.met);
    let result = (0..).zip(phases).try_for_each(|(number, phase)| check.phase(number, phase));
    let ran = clients.wrong.take().map_or(Ok(()), Err);
    let ran = ran.map_err(|why| format!("the workload of seed {seed}, before any crash: {why}"));
    (check.tally, result.and(ran))
}

/// How many images are looked at for each moment of a seed's workload: few, so that many workloads are met, or many.
fn plan_of(seed: u64) -> Plan {
    let limit = [1, 2, 3, 8][usize::try_from(seed % 4).unwrap()];
    Plan { limit, again_one_in: 6, deep_one_in: 8 }
}

#[test]
fn a_crash_at_any_moment_loses_nothing_that_was_told() {
    if let Ok(image) = std::env::var("KEYONCE_IMAGE") {
        return replay(&image);
    }
    let images = number("KEYONCE_IMAGES").unwrap_or(6_000);
    let first_seed = number("KEYONCE_IMAGES_SEED").unwrap_or(1);
    let next = AtomicU64::new(first_seed);
    let (total, result) = in_threads(|so_far| {
        let seed = (so_far.images() < images).then(|| next.fetch_add(1, Ordering::Relaxed))?;
        Some(move || check_workload(plainly, seed, plan_of(seed)))
    });
    let seeds = first_seed..next.into_inner();
    println!("crash images: {} of seeds {seeds:?}: {total:?}", total.images());
    result.unwrap_or_else(|why| panic!("{why}"));
    assert!(total.images() >= images);
    assert!(total.torn > 0 && total.copied > 0, "no image was torn");
    for state in
        ["absent", "in flight", "done", "interrupted by a crash", "interrupted by a drop", "interrupted by a lapse"]
    {
        assert!(total.states.contains_key(state), "no image had a key that was {state}");
    }
}

fn replay(image: &str) {
    let numbers: Vec<u64> = image.split(':').map(|number| number.parse().unwrap()).collect();
    let &[seed, phase, step, limit, image] = numbers.as_slice() else {
        panic!("KEYONCE_IMAGE is seed:phase:step:limit:image, not {image:?}")
    };
    let (settings, clients) = workload(plainly, seed);
    let phases = clients.phases;
    println!("{settings:?}");
    let plan = Plan { limit, ..plan_of(seed) };
    let mut check = Check {
        name: "KEYONCE_IMAGE",
        settings: &settings,
        seed,
        plan,
        only: Some((step, image)),
        tally: Tally::default(),
    };
    let phases = (0..).zip(phases).filter(|(number, _)| *number == phase);
    for (number, phase) in phases {
        check.phase(number, phase).unwrap_or_else(|why| panic!("{why}"));
    }
    assert!(check.tally.images() > 0, "there is no such image");
    println!("{:?}", check.tally);
}

/// What clients may do in one go, for the exhaustive test.
fn small_acts(key: usize) -> Vec<Vec<Op>> {
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
    ]
}

fn small_moves() -> Vec<Vec<Op>> {
    vec![vec![Op::Sync], vec![Op::Close], vec![Op::Advance { ms: 61_000 }]]
}

#[test]
fn after_every_short_sequence_every_image_shows_what_was_told() {
    // The first key named is always key 0: the other sequences are the same with the names exchanged.
    let first: Vec<_> = small_acts(0).into_iter().chain(small_moves()).collect();
    let second: Vec<_> = first.iter().cloned().chain(small_acts(1)).collect();
    let pairs = first.iter().flat_map(|first| second.iter().map(move |second| [first.as_slice(), second].concat()));
    let sequences: Vec<Vec<Op>> = pairs.collect();
    let total = in_parallel(sequences.len() as u64, |number| {
        let settings = Settings { keys: 2, ..Settings::plain() };
        let mut clients = Clients::new(plainly, settings, number);
        clients.open();
        clients.record_from_now();
        let sequence = &sequences[usize::try_from(number).unwrap()];
        sequence.iter().for_each(|op| clients.run(*op));
        let plan = Plan { limit: 48, again_one_in: 40, deep_one_in: 20 };
        let mut check =
            Check { name: "image", settings: &settings, seed: number, plan, only: None, tally: Tally::default() };
        clients.finish();
        let result = check.phase(0, clients.phases.remove(0));
        (check.tally, result.map_err(|why| format!("{sequence:?}: {why}")))
    });
    println!("crash images of {} sequences: {}: {total:?}", sequences.len(), total.images());
}

#[test]
fn a_crash_at_any_step_of_creating_a_store_leaves_one_that_opens() {
    let total = in_parallel(8, |seed| {
        let tear = if seed.is_multiple_of(2) { Tear::Page } else { Tear::Sector };
        let settings = Settings { keys: 2, tear, ..Settings::plain() };
        let mut clients = Clients::new(plainly, settings, seed);
        clients.open();
        clients.run(Op::Reserve { key: 0, request: 0, with: With::default() });
        let plan = Plan { limit: 100, again_one_in: 2, deep_one_in: 1 };
        let mut check = Check { name: "image", settings: &settings, seed, plan, only: None, tally: Tally::default() };
        clients.finish();
        let result = check.phase(0, clients.phases.remove(0));
        (check.tally, result)
    });
    println!("crash images of a creation: {}: {total:?}", total.images());
}

/// A disk that forgets to sync. The checks must notice.
#[derive(Debug)]
struct Forgetful {
    disk: SimDisk,
    forgets: Forgets,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forgets {
    /// No segment is ever synced.
    Everything,
    /// The first sync of each life of a segment does nothing: that of its header.
    Headers,
    /// Every sync but the first of each life does nothing: those of its records.
    Records,
}

#[derive(Debug)]
struct ForgetfulSegment {
    segment: Arc<dyn Segment>,
    forgets: Forgets,
    synced: AtomicU64,
}

impl Forgetful {
    fn over(&self, segment: Arc<dyn Segment>) -> Arc<dyn Segment> {
        Arc::new(ForgetfulSegment { segment, forgets: self.forgets, synced: AtomicU64::new(0) })
    }
}

impl Storage for Forgetful {
    fn lock(&self) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        self.disk.lock()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }

    fn read(&self, name: &str, bytes_max: usize) -> io::Result<Vec<u8>> {
        self.disk.read(name, bytes_max)
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.disk.publish(name, bytes)
    }

    fn leave(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.disk.leave(name, bytes)
    }

    fn create_segment(&self, name: &str, bytes: u64) -> io::Result<Arc<dyn Segment>> {
        Ok(self.over(self.disk.create_segment(name, bytes)?))
    }

    fn open_segment(&self, name: &str, access: Access) -> io::Result<Arc<dyn Segment>> {
        Ok(self.over(self.disk.open_segment(name, access)?))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }

    fn sync_directory(&self) -> io::Result<()> {
        self.disk.sync_directory()
    }
}

impl Segment for ForgetfulSegment {
    fn len(&self) -> u64 {
        self.segment.len()
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.segment.write_at(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        // The two copies of its header are what a life syncs first.
        let header = self.synced.fetch_add(1, Ordering::Relaxed) < 2;
        match self.forgets {
            Forgets::Everything => Ok(()),
            Forgets::Headers if header => Ok(()),
            Forgets::Records if !header => Ok(()),
            Forgets::Headers | Forgets::Records => self.segment.sync(),
        }
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.segment.read_at(offset, into)
    }

    fn view(&self, offset: u64, len: usize) -> &[u8] {
        self.segment.view(offset, len)
    }

    fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.segment.populate(offset, len)
    }
}

fn on(forgets: Forgets, disk: SimDisk, options: Options, seed: u64) -> Result<Store, Error> {
    testing::open(Forgetful { disk, forgets }, options, seed)
}

#[test]
fn a_disk_that_forgets_to_sync_is_noticed() {
    let mounts: [(&str, Mount); 3] = [
        ("everything", |disk, options, seed| on(Forgets::Everything, disk, options, seed)),
        ("headers", |disk, options, seed| on(Forgets::Headers, disk, options, seed)),
        ("records", |disk, options, seed| on(Forgets::Records, disk, options, seed)),
    ];
    let plan = Plan { limit: 3, again_one_in: 10, deep_one_in: 20 };
    for (forgotten, mount) in mounts {
        let mut noticed = 0;
        for seed in 1..=8 {
            if let (_, Err(why)) = check_workload(mount, seed, plan) {
                noticed += 1;
                println!("forgetting {forgotten}: {}", why.lines().next().unwrap());
            }
        }
        assert!(noticed >= 6, "forgetting {forgotten} was noticed in {noticed} of 8 workloads");
    }
}
