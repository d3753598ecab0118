//! How long the slow ones take: quantiles of single pairs while segments roll and are used again.
//!
//! ```text
//! cargo bench --bench latency
//! KEYONCE_BENCH_ROUNDS=9 KEYONCE_BENCH_SECONDS=4 cargo bench --bench latency    # longer
//! KEYONCE_BENCH_DIR=/mnt/disk cargo bench --bench latency
//! chrt -r 1 PROGRAM --bench    # on a machine on which others are at work: they do not count
//! ```
//!
//! A pair of the reference work is timed as a whole, each on its own. Stores remember for so short a time that the ring
//! turns: what a round measures begins after some windows, when files are used again and no more are made.
//!
//! - Every segment is of the same size, so a token says in which segment its pair began. *At a boundary* are the last
//!   pair of a caller in a segment and its first in another: one of the two met the roll. All others are *within*.
//! - The loop is **closed**: a caller begins the next pair when the last one has ended, so a caller that is held up
//!   does not begin those that would have come meanwhile, and they are missing in the quantiles (coordinated
//!   omission). These figures say what one call costs, not what a queue in front of the store would see.
//! - At ProcessCrash it writes as fast as it can, which is more than most disks take: then the log waits for the disk
//!   at a boundary, and the figures there are the disk's. The rate is in the table.
//! - *Spin* is a checksum in memory that takes about as long as a pair, timed in the same way: what the machine itself
//!   does to a thread that asks for nothing, when others want its processors. *Spin beside a writer* is the same while
//!   another thread writes segments' worth of bytes to a file, and syncs: interrupts of the disk come on top.
//! - *Sync*, writing 512 bytes into written blocks and `fdatasync`, is taken in turn with the pairs of PowerLoss.
//!
//! Quantiles are medians over the rounds, in brackets the least of any round; the maximum is that of all rounds. The
//! rows of a round follow each other, so that all meet the same machine.

mod sync;
mod work;

use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use keyonce::{Durability, Options, Retention, Store};
use tempfile::TempDir;

use sync::{Yardstick, written_file};
use work::{RESPONSE, directory, key, load, median, now, pair, setting, verdict};

const SEGMENT_BYTES: u64 = 4 << 20;
/// The smallest there is, so that a caller who waits for the disk meets boundaries often enough to count.
const SEGMENT_BYTES_POWER_LOSS: u64 = 192 << 10;
const WINDOW: Duration = Duration::from_millis(250);
const PAIRS_PER_SECOND: f64 = 1_000_000.0;
/// What comes before a round's measurement: it fills some windows.
const WARM_UP: Duration = Duration::from_millis(1_000);
const ROUNDS: u64 = 5;
const SECONDS: u64 = 2;
/// Bytes whose checksum takes about as long as a pair.
const SPIN_BYTES: usize = 48 << 10;
/// The file over which the writer beside the spin goes, again and again.
const WRITER_BYTES: u64 = 16 * SEGMENT_BYTES;
const QUANTILES: [f64; 4] = [0.5, 0.99, 0.999, 0.9999];
const P999_NS_MAX: f64 = 20_000.0;
const P99_TO_P50_MAX: f64 = 3.0;

fn main() {
    // Without this word it is a test that asks whether the bench runs.
    let measures = std::env::args().any(|argument| argument == "--bench");
    let rounds = if measures { setting("KEYONCE_BENCH_ROUNDS", ROUNDS) } else { 1 };
    let seconds = if measures { setting("KEYONCE_BENCH_SECONDS", SECONDS) } else { 1 };
    let lasts = Duration::from_secs(seconds);
    println!("{}", load());
    let mut rows = Rows::default();
    let process_crash = Bench::open(Durability::ProcessCrash, SEGMENT_BYTES);
    let power_loss = Bench::open(Durability::PowerLoss, SEGMENT_BYTES_POWER_LOSS);
    for _ in 0..rounds {
        rows.add("spin", None, vec![spin(lasts)]);
        rows.add("spin beside a writer", None, vec![spin_beside_writer(lasts)]);
        for threads in [1, 2] {
            let files_before = process_crash.warm_up(threads);
            let watches = process_crash.callers(threads, lasts);
            rows.add_watches(&format!("ProcessCrash, {threads} thread(s)"), Some(lasts), watches);
            process_crash.tell_files(files_before);
        }
        let files_before = power_loss.warm_up(1);
        let (syncs, watch) = power_loss.lone_caller(lasts);
        rows.add("sync", None, vec![syncs]);
        rows.add_watches("PowerLoss, lone caller", None, vec![watch]);
        power_loss.tell_files(files_before);
    }
    rows.print();
}

/// A store and what its callers share.
struct Bench {
    directory: TempDir,
    store: Store,
    segment_bytes: u64,
    used: AtomicU64,
}

impl Bench {
    fn open(durability: Durability, segment_bytes: u64) -> Self {
        let directory = directory();
        let options = Options::default()
            .durability(durability)
            .retention(Retention::new(WINDOW, PAIRS_PER_SECOND))
            .response_bytes(RESPONSE.len())
            .response_bytes_max(RESPONSE.len())
            .segment_bytes(segment_bytes);
        let store = Store::open(directory.path().join("store"), options).expect("a new store");
        Self { directory, store, segment_bytes, used: AtomicU64::new(0) }
    }

    /// Pairs that are not measured; says how many files there are then.
    fn warm_up(&self, threads: usize) -> usize {
        drop(self.callers(threads, WARM_UP));
        self.files()
    }

    fn files(&self) -> usize {
        std::fs::read_dir(self.directory.path().join("store")).expect("the store's directory").count()
    }

    fn tell_files(&self, before: usize) {
        let now = self.files();
        if now != before {
            println!("the ring was not steady: {before} files before this round, {now} after it");
        }
    }

    fn callers(&self, threads: usize, lasts: Duration) -> Vec<Watch> {
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..threads).map(|_| scope.spawn(|| self.caller(lasts))).collect();
            callers.into_iter().map(|caller| caller.join().expect("a caller that ended well")).collect()
        })
    }

    fn caller(&self, lasts: Duration) -> Watch {
        let mut watch = Watch::new(self.segment_bytes);
        let end = now() + lasts;
        loop {
            let start = self.timed_pair(&mut watch);
            if start > end {
                return watch;
            }
        }
    }

    /// Says when it began.
    fn timed_pair(&self, watch: &mut Watch) -> std::time::Instant {
        let key = key(self.used.fetch_add(1, Ordering::Relaxed));
        let start = now();
        let token = pair(&self.store, &key);
        watch.note(start.elapsed(), token);
        start
    }

    fn lone_caller(&self, lasts: Duration) -> (Histogram<u64>, Watch) {
        let mut yardstick = Yardstick::new(&self.directory);
        let (mut syncs, mut watch) = (histogram(), Watch::new(self.segment_bytes));
        let end = now() + lasts;
        while now() < end {
            record(&mut syncs, yardstick.once());
            self.timed_pair(&mut watch);
        }
        (syncs, watch)
    }
}

/// The pairs of one caller, told apart by where they stood.
struct Watch {
    segment_bytes: u64,
    within: Histogram<u64>,
    at_boundary: Histogram<u64>,
    /// The pair before, of which it is not known yet whether it was its segment's last.
    last: Option<Pair>,
}

#[derive(Clone, Copy)]
struct Pair {
    taken: Duration,
    segment: u64,
    /// The caller's first in its segment.
    first: bool,
}

impl Watch {
    fn new(segment_bytes: u64) -> Self {
        Self { segment_bytes, within: histogram(), at_boundary: histogram(), last: None }
    }

    fn note(&mut self, taken: Duration, token: u64) {
        let segment = token / self.segment_bytes;
        let Some(last) = self.last.replace(Pair { taken, segment, first: false }) else { return };
        let crossed = last.segment != segment;
        self.last = Some(Pair { taken, segment, first: crossed });
        record(if crossed || last.first { &mut self.at_boundary } else { &mut self.within }, last.taken);
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds in order")
}

fn record(histogram: &mut Histogram<u64>, taken: Duration) {
    histogram.saturating_record(u64::try_from(taken.as_nanos()).unwrap_or(u64::MAX).max(1));
}

fn spin(lasts: Duration) -> Histogram<u64> {
    let bytes = vec![0x5a; SPIN_BYTES];
    let mut histogram = histogram();
    let end = now() + lasts;
    loop {
        let start = now();
        black_box(crc32fast::hash(black_box(&bytes)));
        record(&mut histogram, start.elapsed());
        if start > end {
            return histogram;
        }
    }
}

fn spin_beside_writer(lasts: Duration) -> Histogram<u64> {
    let directory = directory();
    let file = written_file(&directory, WRITER_BYTES);
    let piece = vec![0x5a; usize::try_from(SEGMENT_BYTES).expect("a segment fits the address space")];
    let end = now() + lasts;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for offset in (0..WRITER_BYTES).step_by(piece.len()).cycle().take_while(|_| now() < end) {
                file.write_all_at(&piece, offset).expect("written blocks");
                file.sync_data().expect("a disk that syncs");
            }
        });
        spin(lasts)
    })
}

/// Histograms by row, one a round.
#[derive(Default)]
struct Rows(Vec<Row>);

struct Row {
    name: String,
    per_second: Vec<f64>,
    rounds: Vec<Histogram<u64>>,
}

impl Rows {
    fn add(&mut self, name: &str, per_second: Option<f64>, parts: Vec<Histogram<u64>>) {
        let mut whole = histogram();
        for part in parts {
            whole.add(part).expect("bounds that are the same");
        }
        let at = self.0.iter().position(|row| row.name == name).unwrap_or_else(|| {
            self.0.push(Row { name: name.to_owned(), per_second: Vec::new(), rounds: Vec::new() });
            self.0.len() - 1
        });
        let row = self.0.get_mut(at).expect("a row that is there");
        row.per_second.extend(per_second);
        row.rounds.push(whole);
    }

    /// Three rows: all pairs, and the two kinds.
    fn add_watches(&mut self, name: &str, lasts: Option<Duration>, watches: Vec<Watch>) {
        let (within, at_boundary): (Vec<_>, Vec<_>) =
            watches.into_iter().map(|watch| (watch.within, watch.at_boundary)).unzip();
        let all: Vec<_> = within.iter().chain(&at_boundary).cloned().collect();
        let pairs: u64 = all.iter().map(Histogram::len).sum();
        self.add(name, lasts.map(|lasts| pairs as f64 / lasts.as_secs_f64()), all);
        self.add(&format!("{name}, within"), None, within);
        self.add(&format!("{name}, at a boundary"), None, at_boundary);
    }

    fn print(&self) {
        println!("\n{}; medians of the rounds, [least round], us; max of all", load());
        print!("{:<40} {:>10} {:>9}", "", "pairs", "per s");
        println!("{:>20} {:>20} {:>20} {:>20} {:>10}", "p50", "p99", "p99.9", "p99.99", "max");
        for row in &self.0 {
            let pairs: u64 = row.rounds.iter().map(Histogram::len).sum();
            let per_second =
                if row.per_second.is_empty() { "-".into() } else { format!("{:.0}", median(&row.per_second)) };
            print!("{:<40} {pairs:>10} {per_second:>9}", row.name);
            for quantile in QUANTILES {
                let ns = row.quantiles(quantile);
                let least = ns.iter().copied().fold(f64::MAX, f64::min);
                print!("{:>20}", format!("{:.2} [{:.2}]", median(&ns) / 1e3, least / 1e3));
            }
            let most = row.rounds.iter().map(Histogram::max).max().unwrap_or(0);
            println!(" {:>10.1}", most as f64 / 1e3);
        }
        for row in self.0.iter().filter(|row| row.name.ends_with("thread(s)")) {
            let ns = median(&row.quantiles(0.999));
            println!("{}: p99.9 {:.1} us of 20 us wanted: {}", row.name, ns / 1e3, verdict(ns <= P999_NS_MAX));
        }
        for row in self.0.iter().filter(|row| row.name == "sync" || row.name == "PowerLoss, lone caller") {
            let (p50, p99) = (row.quantiles(0.5), row.quantiles(0.99));
            let ratio = median(&p99.iter().zip(&p50).map(|(p99, p50)| p99 / p50).collect::<Vec<_>>());
            let wanted = if row.name == "sync" { "" } else { verdict(ratio <= P99_TO_P50_MAX) };
            println!("{}: p99 is {ratio:.2} times p50 (3 wanted of a pair) {wanted}", row.name);
        }
    }
}

impl Row {
    /// In nanoseconds, one for each round.
    fn quantiles(&self, quantile: f64) -> Vec<f64> {
        self.rounds.iter().map(|round| round.value_at_quantile(quantile) as f64).collect()
    }
}
