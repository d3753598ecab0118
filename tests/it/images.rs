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
//! | variable | makes `images::a_crash_at_any_moment` check |
//! |---|---|
//! | `KEYONCE_IMAGES=n` | at least `n` images, of the workloads of the seeds 1, 2, 3 and so on |
//! | `KEYONCE_IMAGES_SECONDS=n` | as many as `n` seconds allow |
//! | `KEYONCE_IMAGES_SEED=n` | from seed `n` on |
//! | `KEYONCE_CAMPAIGN=from..to` | the seeds of that range, and write down the result: see [`campaign`] |
//!
//! [`sequences`] looks at all short sequences instead of some long ones.

mod campaign;
mod sequences;

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use keyonce::testing::{self, Access, ManualClock, Segment, SimDisk, Storage, Tear};
use keyonce::{Clock, Completion, Error, Options, Reserve, Store};

use self::campaign::Campaign;
use super::clients::Clients;
use super::examine::{Check, Plan, Tally, caught, in_parallel, in_threads, number};
use super::oracle::{fingerprint, key};
use super::tasks::machine_now;
use super::workload::{Mount, Op, Random, Settings, With, plainly};

/// How many images an ordinary run checks.
const IMAGES: u64 = 6_000;

/// What is rare in a workload and must not be missing in many.
const MET: [&str; 11] = [
    "batches completed",
    "batches reserved",
    "disks with segments that grew",
    "once: failures",
    "once: responses",
    "owners who never knew",
    "steps of the wall clock",
    "syncs by interval",
    "waiters made owners",
    "waiters told a response",
    "waiters told otherwise",
];

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
    if let Some(campaign) = Campaign::asked_for() {
        return campaign.run(|seed| check_workload(plainly, seed, plan_of(seed)));
    }
    let began = machine_now();
    let seconds = number("KEYONCE_IMAGES_SECONDS");
    let images = number("KEYONCE_IMAGES").unwrap_or(if seconds.is_some() { 0 } else { IMAGES });
    let first_seed = number("KEYONCE_IMAGES_SEED").unwrap_or(1);
    let next = AtomicU64::new(first_seed);
    let (total, result) = in_threads(|so_far| {
        let goes_on = so_far.images() < images || seconds.is_some_and(|most| began.elapsed().as_secs() < most);
        let seed = goes_on.then(|| next.fetch_add(1, Ordering::Relaxed))?;
        Some(move || check_workload(plainly, seed, plan_of(seed)))
    });
    let seeds = first_seed..next.into_inner();
    println!("crash images: {} of seeds {seeds:?} in {:.1?}: {total:?}", total.images(), began.elapsed());
    result.unwrap_or_else(|why| panic!("{why}"));
    assert!(total.images() >= images);
    assert!(total.torn > 0 && total.copied > 0, "no image was torn");
    for state in
        ["absent", "in flight", "done", "interrupted by a crash", "interrupted by a drop", "interrupted by a lapse"]
    {
        assert!(total.states.contains_key(state), "no image had a key that was {state}");
    }
    // A few workloads do not meet all of this.
    for what in MET.into_iter().filter(|_| first_seed == 1 && total.workloads >= 30) {
        assert!(total.met.contains_key(what), "no client met {what}: {:?}", total.met);
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

/// Where the wall clock was set back while the machine was down, store time stands still, and the marks of two boots
/// tell the same time. Taking that of the earlier boot is to follow the wall clock within one boot: somebody sets it
/// right again, and a live key is forgotten.
#[test]
fn after_a_boot_at_which_store_time_stood_still_it_follows_the_boot_clock() {
    let (disk, clock, settings) = (SimDisk::new(), ManualClock::default(), Settings::plain());
    for seed in 0..2 {
        testing::open(disk.clone(), settings.options(&clock), seed).unwrap().close(Duration::ZERO).unwrap();
    }
    let wall_ms = clock.wall_ms();
    clock.set_wall_ms(wall_ms - 3_600_000);
    clock.reboot();
    let store = testing::open(disk.clone(), settings.options(&clock), 2).unwrap();
    let Ok(Reserve::Fresh(reservation)) = store.reserve(&key(1), fingerprint(1, 0)) else { panic!("a new key") };
    assert_eq!(reservation.complete(b"paid").unwrap(), Completion::Done);
    let killed = disk.kill();
    clock.set_wall_ms(wall_ms + 3_600_000);
    let store = testing::open(killed, settings.options(&clock), 3).unwrap();
    let answer = store.reserve(&key(1), fingerprint(1, 0));
    assert!(matches!(answer, Ok(Reserve::Replay(_))), "a key completed at this very moment is answered {answer:?}");
}

/// The header of a segment that was made ready and the end mark of its run tell the same time, and other readings of the
/// wall clock, which somebody set right in between.
#[test]
fn an_end_mark_is_later_than_the_header_of_a_segment_that_was_made_ready() {
    let (disk, clock, settings) = (SimDisk::new(), ManualClock::default(), Settings::plain());
    let wall_ms = clock.wall_ms();
    let store = testing::open(disk.clone(), settings.options(&clock), 1).unwrap();
    clock.set_wall_ms(wall_ms - 3_600_000);
    for at in 1..4 {
        let Ok(Reserve::Fresh(reservation)) = store.reserve(&key(at), fingerprint(at, 0)) else { panic!("a new key") };
        assert_eq!(reservation.complete(&[7; 40_000]).unwrap(), Completion::Done);
    }
    assert!(disk.list().unwrap().contains(&"segment-00000002.keyonce".to_owned()), "none was made ready");
    clock.set_wall_ms(wall_ms);
    store.close(Duration::ZERO).unwrap();
    clock.reboot();
    let store = testing::open(disk.kill(), settings.options(&clock), 2).unwrap();
    let answer = store.reserve(&key(1), fingerprint(1, 0));
    assert!(matches!(answer, Ok(Reserve::Replay(_))), "a key completed at this very moment is answered {answer:?}");
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
