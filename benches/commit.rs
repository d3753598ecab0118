//! What a pair costs that survives power loss: a lone caller, 64 tasks, 64 threads.
//!
//! ```text
//! cargo bench --bench commit
//! cargo bench --bench commit -- threads                      # those whose name holds the word
//! KEYONCE_BENCH_ROUNDS=15 KEYONCE_BENCH_SECONDS=2 cargo bench --bench commit
//! KEYONCE_BENCH_DIR=/mnt/disk cargo bench --bench commit
//! chrt -r 1 PROGRAM --bench    # on a machine on which others are at work: they do not count
//! ```
//!
//! On the back of an envelope: a lone caller's pair is two device syncs and nothing else that counts. Many callers
//! share them: of 64, one half waits for the sync in flight and the other for the next, so a sync serves 32 appends,
//! which are 16 pairs; what is left is what appending, sleeping and waking cost on the processors that there are.
//!
//! - *Sync* is writing 512 bytes into written blocks of a file and `fdatasync`, in turn with the lone caller's pairs.
//! - *Tasks* run on executors of one thread each, as small as can be.
//! - The *bare log* is a log with group commit and nothing else (see `bare.rs`), to which a pair is two appends of as
//!   many bytes as the store's two records have. Of its kinds the best is the yardstick. That of which *each append is
//!   written* at once promises what the store promises of a killed process; the others lose what is not synced then.
//!
//! One round takes every row in turn, for [`SECONDS`] each; figures are medians over the rounds, ratios medians of the
//! ratios within each round. The rate of a lone caller counts its own time alone, not that of the yardstick.
//!
//! How many syncs there are is the store's own count and the bench's. That the kernel sees no more of them:
//!
//! ```text
//! cargo bench --bench commit --no-run    # says where the program is
//! KEYONCE_BENCH_ROUNDS=1 strace -f -c -e trace=fdatasync,fsync,msync PROGRAM --bench "pair, lone"
//! ```
//!
//! There each round of the loop is three: two of a pair and the yardstick's; those of segments that are made come on
//! top.

mod bare;
mod sync;
mod tasks;
mod work;

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use keyonce::{Completion, Options, Reserve, Retention, Store};
use tempfile::TempDir;

use bare::{BareLog, Kind};
use sync::Yardstick;
use tasks::{Task, run_all};
use work::{RESPONSE, directory, key, load, median, now, pair, request, setting, verdict};

const CALLERS: usize = 64;
const ROUNDS: u64 = 7;
const SECONDS: u64 = 1;
const WINDOW: Duration = Duration::from_secs(2);
const PAIRS_PER_SECOND: f64 = 50_000.0;
/// The bytes of a Reserved and of a Done of the reference work.
const RESERVED_BYTES: usize = 120;
const DONE_BYTES: usize = 320;

const SYNC: &str = "sync, lone";
const LONE: &str = "pair, lone caller";
const TASKS_1: &str = "pairs, 64 tasks on 1 thread";
const TASKS_2: &str = "pairs, 64 tasks on 2 threads";
const THREADS: &str = "pairs, 64 threads";
const BARE_ALL: &str = "bare log, 64 threads, all woken";
const BARE_EACH: &str = "bare log, 64 threads, each woken";
const BARE_WRITTEN: &str = "bare log, 64 threads, each append written";
const BARE_LONE: &str = "bare log, lone caller";

/// What one row came to in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    per_second: f64,
    /// Of one pair or sync, for a lone caller.
    p50_us: f64,
    /// Pairs, or syncs of the yardstick.
    count: u64,
    syncs: u64,
}

/// The rows, each with a figure a round.
struct Rows(Vec<(&'static str, Vec<Figures>)>);

fn main() {
    // Without this word it is a test that asks whether the bench runs.
    let measures = std::env::args().any(|argument| argument == "--bench");
    let rounds = if measures { setting("KEYONCE_BENCH_ROUNDS", ROUNDS) } else { 1 };
    let lasts = Duration::from_secs(setting("KEYONCE_BENCH_SECONDS", SECONDS));
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let named = |names: &[&str]| names.iter().any(|name| name.contains(&wanted));
    let bench = Bench::new();
    let bare = [(BARE_ALL, Kind::AllWoken), (BARE_EACH, Kind::EachWoken), (BARE_WRITTEN, Kind::EachWritten)]
        .map(|(name, kind)| (name, BareLog::new(&bench.directory, kind)));
    println!("{}", load());
    if named(&[TASKS_1, TASKS_2, THREADS]) {
        bench.warm_up();
    }
    let mut rows = Rows(
        [SYNC, LONE, TASKS_1, TASKS_2, THREADS, BARE_ALL, BARE_EACH, BARE_WRITTEN, BARE_LONE]
            .map(|name| (name, Vec::new()))
            .into(),
    );
    for _ in 0..rounds {
        if named(&[SYNC, LONE]) {
            let (sync, pair) = bench.lone(lasts);
            rows.add(SYNC, sync);
            rows.add(LONE, pair);
        }
        for (name, threads) in [(TASKS_1, 1), (TASKS_2, 2)] {
            if named(&[name]) {
                rows.add(name, bench.tasks(threads, lasts));
            }
        }
        if named(&[THREADS]) {
            rows.add(THREADS, bench.threads(lasts));
        }
        for (name, log) in &bare {
            if named(&[name]) {
                rows.add(name, bare_pairs(log, CALLERS, lasts));
            }
        }
        if let (true, Some((_, log))) = (named(&[BARE_LONE]), bare.last()) {
            rows.add(BARE_LONE, bare_pairs(log, 1, lasts));
        }
    }
    rows.print();
}

struct Bench {
    directory: TempDir,
    store: Store,
    used: AtomicU64,
}

impl Bench {
    fn new() -> Self {
        let directory = directory();
        let options = Options::default()
            .retention(Retention::new(WINDOW, PAIRS_PER_SECOND))
            .response_bytes(RESPONSE.len())
            .response_bytes_max(RESPONSE.len());
        let store = Store::open(directory.path().join("store"), options).expect("a new store");
        Self { directory, store, used: AtomicU64::new(0) }
    }

    /// Makes the ring as long as it will be.
    fn warm_up(&self) {
        self.tasks(1, 3 * WINDOW / 2);
    }

    fn next_key(&self) -> keyonce::Key {
        key(self.used.fetch_add(1, Ordering::Relaxed))
    }

    fn lone(&self, lasts: Duration) -> (Figures, Figures) {
        let mut yardstick = Yardstick::new(&self.directory);
        let (mut syncs, mut pairs) = (Vec::new(), Vec::new());
        let syncs_before = self.store.stats().syncs;
        let end = now() + lasts;
        while now() < end {
            syncs.push(yardstick.once().as_secs_f64());
            let key = self.next_key();
            let start = now();
            pair(&self.store, &key);
            pairs.push(start.elapsed().as_secs_f64());
        }
        let counted = self.store.stats().syncs - syncs_before;
        let figures = |taken: &[f64], syncs| Figures {
            per_second: taken.len() as f64 / taken.iter().sum::<f64>(),
            p50_us: median(taken) * 1e6,
            count: taken.len() as u64,
            syncs,
        };
        (figures(&syncs, syncs.len() as u64), figures(&pairs, counted))
    }

    fn tasks(&self, threads: usize, lasts: Duration) -> Figures {
        self.counted(|| {
            at_once(threads, |_| {
                let end = now() + lasts;
                let tasks = (0..CALLERS / threads).map(|_| Box::pin(self.task(end)) as Task<'_, u64>).collect();
                run_all(tasks).into_iter().sum()
            })
        })
    }

    async fn task(&self, end: std::time::Instant) -> u64 {
        let mut pairs = 0;
        while now() < end {
            let reservation = match self.store.reserve_async(&self.next_key(), request()).await {
                Ok(Reserve::Fresh(reservation)) => reservation,
                other => panic!("a key that nobody has used: {other:?}"),
            };
            let completed = reservation.complete_async(&RESPONSE).await.expect("a sound store");
            assert_eq!(completed, Completion::Done);
            pairs += 1;
        }
        pairs
    }

    fn threads(&self, lasts: Duration) -> Figures {
        self.counted(|| {
            at_once(CALLERS, |_| {
                let end = now() + lasts;
                let mut pairs = 0;
                while now() < end {
                    pair(&self.store, &self.next_key());
                    pairs += 1;
                }
                pairs
            })
        })
    }

    fn counted(&self, what: impl FnOnce() -> u64) -> Figures {
        counted(|| self.store.stats().syncs, what)
    }
}

fn bare_pairs(log: &BareLog, threads: usize, lasts: Duration) -> Figures {
    counted(
        || log.syncs(),
        || {
            at_once(threads, |caller| {
                let bytes = [u8::try_from(caller).unwrap_or(u8::MAX); DONE_BYTES];
                let reserved = bytes.get(..RESERVED_BYTES).expect("the shorter of the two");
                let end = now() + lasts;
                let mut pairs = 0;
                while now() < end {
                    log.append(reserved);
                    log.append(&bytes);
                    pairs += 1;
                }
                pairs
            })
        },
    )
}

fn counted(syncs: impl Fn() -> u64, what: impl FnOnce() -> u64) -> Figures {
    let (before, start) = (syncs(), now());
    let count = what();
    let seconds = start.elapsed().as_secs_f64();
    Figures { per_second: count as f64 / seconds, p50_us: f64::NAN, count, syncs: syncs() - before }
}

/// The sum of what so many threads say that begin together.
fn at_once(threads: usize, what: impl Fn(usize) -> u64 + Sync) -> u64 {
    let start = Barrier::new(threads);
    std::thread::scope(|scope| {
        let (start, what) = (&start, &what);
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    start.wait();
                    what(thread)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a caller that ended well")).sum()
    })
}

impl Rows {
    fn add(&mut self, name: &str, figures: Figures) {
        if let Some((_, row)) = self.0.iter_mut().find(|(other, _)| *other == name) {
            row.push(figures);
        }
    }

    fn row(&self, name: &str) -> &[Figures] {
        self.0.iter().find(|(other, _)| *other == name).map_or(&[], |(_, row)| row)
    }

    fn print(&self) {
        println!("\n{}; medians of the rounds", load());
        println!(
            "{:<42} {:>9} {:>19} {:>9} {:>10} {:>11} {:>7}",
            "", "per s", "least..most", "p50 us", "syncs each", "each a sync", "rounds"
        );
        for (name, row) in self.0.iter().filter(|(_, row)| !row.is_empty()) {
            let of = |figure: fn(&Figures) -> f64| median(&row.iter().map(figure).collect::<Vec<_>>());
            let rates = row.iter().map(|figures| figures.per_second);
            let (least, most) = rates.fold((f64::MAX, 0.0_f64), |(a, b), rate| (a.min(rate), b.max(rate)));
            println!(
                "{name:<42} {:>9.0} {:>19} {:>9.1} {:>10.3} {:>11.1} {:>7}",
                of(|figures| figures.per_second),
                format!("{least:.0}..{most:.0}"),
                of(|figures| figures.p50_us),
                of(|figures| figures.syncs as f64 / figures.count as f64),
                of(|figures| figures.count as f64 / figures.syncs as f64),
                row.len(),
            );
        }
        let pair = self.ratio(LONE, SYNC, |figures| figures.p50_us);
        tell("a lone caller's pair, in syncs", pair, "2.30 at most", pair <= 2.3);
        for tasks in [TASKS_1, TASKS_2] {
            let ratio = self.ratio(tasks, LONE, |figures| figures.per_second);
            tell(&format!("{tasks}, in lone callers"), ratio, "20 at least", ratio >= 20.0);
        }
        let bare = |bare| self.ratio(THREADS, bare, |figures| figures.per_second);
        let ratio = [BARE_ALL, BARE_EACH, BARE_WRITTEN].map(bare).into_iter().fold(f64::INFINITY, f64::min);
        tell("64 threads, in bare logs of the best kind", ratio, "1 at least", ratio >= 1.0);
        let ratio = bare(BARE_WRITTEN);
        tell("64 threads, in bare logs that write each append", ratio, "1 at least", ratio >= 1.0);
    }

    /// The median of the ratios within each round.
    fn ratio(&self, of: &str, to: &str, figure: fn(&Figures) -> f64) -> f64 {
        let pairs = self.row(of).iter().zip(self.row(to));
        median(&pairs.map(|(of, to)| figure(of) / figure(to)).collect::<Vec<_>>())
    }
}

fn tell(what: &str, ratio: f64, wanted: &str, reached: bool) {
    if ratio.is_finite() {
        println!("{what}: {ratio:.2} ({wanted}): {}", verdict(reached));
    }
}
