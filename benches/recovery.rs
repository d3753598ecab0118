//! What opening costs, by the number of keys: after a clean close, and after a kill.
//!
//! ```text
//! cargo bench --bench recovery                                    # 10 k, 100 k and 1 M keys; a table at the end
//! cargo bench --bench recovery -- killed                          # some
//! KEYONCE_BENCH_KEYS_MAX=10000000 cargo bench --bench recovery    # 10 M as well: takes 10 GB of disk
//! KEYONCE_BENCH_DIR=/mnt/disk cargo bench --bench recovery
//! RUSTFLAGS=-Cforce-frame-pointers=yes cargo bench --bench recovery --no-run     # says where the program is
//! perf record -g PROGRAM --bench --profile-time 10 clean/1000000
//! chrt -r 1 PROGRAM --bench    # on a machine on which others are at work: they do not count
//! ```
//!
//! Every key is done, with the reference work. The stores are of level ProcessCrash, built once a run by a child
//! process.
//!
//! - **clean**: the store is closed, and opened and closed again, over and over.
//! - **killed**: the child process that built the store is killed with its last pair just answered, so that everything
//!   since the last rolled segment stands in the page cache alone, and opening must copy it. How much that is depends
//!   on where in its segment the child was; the column *copied* says it. Each opening gets a synced copy of what was
//!   left, since it changes what it opens.
//!
//! Either way the page cache is warm, as after a restart of a service. An opening is timed from the call to the store;
//! what it may have put off shows in the column *replay*: the median of the first [`REPLAYS`] random replays behind it.
//!
//! The yardsticks are taken in turn with the openings: *read* is reading every byte of the same segment files once, by
//! positioned reads of 1 MiB into one buffer; *crc* is crc32fast over each buffer just read. Both are of one thread.
//! Figures are medians, ratios medians of the ratios of each round.

mod work;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput};
use keyonce::{Ask, Completion, Durability, OpenReport, Options, Reserve, Retention, Store};
use tempfile::TempDir;

use work::{RESPONSE, directory, key, load, median, now, pair, request, setting, verdict};

/// Numbers of keys, as far as `KEYONCE_BENCH_KEYS_MAX` lets them go.
const KEYS: [u64; 4] = [10_000, 100_000, 1_000_000, 10_000_000];
const KEYS_MAX: u64 = 1_000_000;
/// What is wanted for a million keys, and in proportion for more.
const CLEAN_MS_MAX: f64 = 60.0;
const KILLED_MS_MAX: f64 = 200.0;
/// Pairs in a batch while a store is built.
const BATCH: u64 = 1_000;
/// Replays after an opening.
const REPLAYS: u64 = 1_000;
const READ_BYTES: usize = 1 << 20;
/// Set in a child process: the directory in which it builds a store, to be killed or to close it.
const CHILD: &str = "KEYONCE_BENCH_CHILD";
const WINDOW: Duration = Duration::from_secs(24 * 60 * 60);

/// How the store came to its last end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Clean,
    Killed,
}

impl End {
    const fn name(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Killed => "killed",
        }
    }
}

/// What was measured of one kind of opening, in milliseconds, a value a round.
#[derive(Debug, Default)]
struct Measured {
    open: Vec<f64>,
    read: Vec<f64>,
    crc: Vec<f64>,
    close: Vec<f64>,
    replay: Vec<f64>,
    bytes: u64,
    report: OpenReport,
}

type Rounds = BTreeMap<(End, u64), Measured>;

fn main() {
    let keys_max = setting("KEYONCE_BENCH_KEYS_MAX", KEYS_MAX);
    if let Some(directory) = std::env::var_os(CHILD) {
        return build_in_child(&PathBuf::from(directory), keys_max);
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(1))
        .measurement_time(Duration::from_millis(200))
        .configure_from_args();
    let mut rounds = Rounds::new();
    println!("{}", load());
    for end in [End::Clean, End::Killed] {
        let mut group = criterion.benchmark_group(end.name());
        group.sampling_mode(SamplingMode::Flat);
        for keys in KEYS.into_iter().filter(|keys| *keys <= keys_max) {
            bench(&mut group, end, keys, &mut rounds);
        }
        group.finish();
    }
    criterion.final_summary();
    print_table(&rounds);
}

fn bench(group: &mut BenchmarkGroup<'_, WallTime>, end: End, keys: u64, rounds: &mut Rounds) {
    group.throughput(Throughput::Elements(keys));
    // Criterion calls the closure once for each of its samples, and not at all when it was told to leave it out.
    let mut left = None;
    group.bench_function(keys.to_string(), |bencher| {
        let left: &Left = left.get_or_insert_with(|| Left::make(end, keys));
        let measured = rounds.entry((end, keys)).or_default();
        bencher.iter_custom(|iterations| {
            let before = measured.open.len();
            (0..iterations).for_each(|_| left.round(keys, measured));
            let ms: f64 = measured.open.iter().skip(before).sum();
            Duration::from_secs_f64(ms / 1e3)
        });
    });
}

/// A store that nobody has open.
#[derive(Debug)]
struct Left {
    directory: TempDir,
    end: End,
}

impl Left {
    fn make(end: End, keys: u64) -> Self {
        let left = Self { directory: directory(), end };
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program)
            .env(CHILD, left.directory.path().join("store"))
            .env("KEYONCE_BENCH_KEYS_MAX", keys.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child process");
        let mut said = String::new();
        let heard = BufReader::new(child.stdout.take().expect("its output")).read_line(&mut said);
        assert!(heard.is_ok() && said == "built\n", "the child built its store");
        match end {
            End::Clean => drop(child.stdin.take()),
            End::Killed => child.kill().expect("a child that lives"),
        }
        let ended = child.wait().expect("a child that ends");
        assert_eq!(ended.success(), end == End::Clean, "it ended as it was to: {ended}");
        left
    }

    /// One opening, with the yardsticks before it.
    fn round(&self, keys: u64, measured: &mut Measured) {
        let built = self.directory.path().join("store");
        let path = match self.end {
            End::Clean => built,
            End::Killed => {
                let copy = self.directory.path().join("copy");
                copy_synced(&built, &copy);
                copy
            }
        };
        let (read, crc, bytes) = read_once(&path);
        let start = now();
        let store = Store::open(&path, options(keys)).expect("a store that opens");
        let open = start.elapsed();
        let report = store.opened().clone();
        assert_eq!((report.clean, report.keys), (self.end == End::Clean, keys), "the store as it was left");
        measured.open.push(milliseconds(open));
        measured.read.push(milliseconds(read));
        measured.crc.push(milliseconds(crc));
        measured.replay.push(first_replays(&store, keys));
        (measured.bytes, measured.report) = (bytes, report);
        let start = now();
        assert!(store.close(Duration::ZERO).is_ok(), "it closes well");
        measured.close.push(milliseconds(start.elapsed()));
    }
}

/// What the child does: it closes its store when nobody holds its input any more, unless it is killed before.
fn build_in_child(path: &Path, keys: u64) {
    let store = build(path, keys);
    println!("built");
    let mut word = String::new();
    std::io::stdin().read_line(&mut word).expect("an input that ends");
    assert!(store.close(Duration::ZERO).is_ok(), "it closes well");
}

fn options(keys: u64) -> Options {
    Options::default()
        .durability(Durability::ProcessCrash)
        .retention(Retention::new(WINDOW, keys as f64 / WINDOW.as_secs_f64()))
        .response_bytes(RESPONSE.len())
}

/// A store with so many done keys.
fn build(path: &Path, keys: u64) -> Store {
    let store = Store::open(path, options(keys)).expect("a new store");
    let mut number = 0;
    while number + 1 < keys {
        let end = (number + BATCH).min(keys - 1);
        let asks: Vec<_> = (number..end).map(|number| Ask::new(&key(number), request())).collect();
        let reserved = store.reserve_batch(&asks).expect("an open store").into_iter().map(|answer| match answer {
            Ok(Reserve::Fresh(reservation)) => (reservation, RESPONSE.to_vec()),
            other => panic!("a key that nobody has used: {other:?}"),
        });
        for completed in store.complete_batch(reserved) {
            assert_eq!(completed.expect("a sound store"), Completion::Done);
        }
        number = end;
    }
    pair(&store, &key(number));
    store
}

/// Nanoseconds of a replay of a random key, the median of the first ones after an opening.
fn first_replays(store: &Store, keys: u64) -> f64 {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let taken: Vec<_> = (0..REPLAYS)
        .map(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let key = key(random % keys);
            let start = now();
            let answer = store.reserve(&key, request());
            let elapsed = start.elapsed();
            assert!(matches!(answer, Ok(Reserve::Replay(_))), "a key that is done: {answer:?}");
            elapsed.as_secs_f64() * 1e9
        })
        .collect();
    median(&taken)
}

/// Copies a directory of files, and waits until the copy is on the disk: an opening syncs, and is not to wait for the
/// copy's bytes.
fn copy_synced(from: &Path, to: &Path) {
    if to.exists() {
        fs::remove_dir_all(to).expect("a copy to throw away");
    }
    fs::create_dir(to).expect("a directory for the copy");
    for entry in fs::read_dir(from).expect("a directory to copy") {
        let entry = entry.expect("a file to copy");
        let copy = to.join(entry.file_name());
        fs::copy(entry.path(), &copy).expect("room for a copy");
        File::open(copy).and_then(|copy| copy.sync_all()).expect("a disk that syncs");
    }
    File::open(to).and_then(|directory| directory.sync_all()).expect("a disk that syncs");
}

/// The yardsticks over the segment files of a store: the time to read them, the time of their checksum, their bytes.
fn read_once(path: &Path) -> (Duration, Duration, u64) {
    let (mut read, mut crc, mut bytes) = (Duration::ZERO, Duration::ZERO, 0);
    let mut buffer = vec![0; READ_BYTES];
    for entry in fs::read_dir(path).expect("the store's directory") {
        let entry = entry.expect("a file of the store");
        if !entry.file_name().to_string_lossy().starts_with("segment-") {
            continue;
        }
        let file = File::open(entry.path()).expect("a segment");
        let mut hasher = crc32fast::Hasher::new();
        let mut offset = 0;
        loop {
            let start = now();
            let count = file.read_at(&mut buffer, offset).expect("a disk that reads");
            let between = now();
            hasher.update(buffer.get(..count).expect("no more than was asked for"));
            read += between - start;
            crc += between.elapsed();
            offset += count as u64;
            if count == 0 {
                break;
            }
        }
        black_box(hasher.finalize());
        bytes += offset;
    }
    (read, crc, bytes)
}

fn milliseconds(taken: Duration) -> f64 {
    taken.as_secs_f64() * 1e3
}

fn print_table(rounds: &Rounds) {
    println!("\n{}; ms are medians, with the least and the most", load());
    println!(
        "{:<16} {:>9} {:>17} {:>8} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8} {:>7} {:>6}",
        "",
        "open ms",
        "",
        "M keys/s",
        "MB",
        "read ms",
        "crc ms",
        "/ read",
        "/ crc",
        "close ms",
        "copied",
        "replay",
        "rounds"
    );
    for ((end, keys), measured) in rounds {
        let open = median(&measured.open);
        let (least, most) = measured.open.iter().fold((f64::MAX, 0.0_f64), |(a, b), ms| (a.min(*ms), b.max(*ms)));
        println!(
            "{:<16} {open:>9.2} {:>17} {:>8.2} {:>7} {:>7.2} {:>7.2} {:>7.2} {:>8.2} {:>8.2} {:>8} {:>4.0} ns {:>6}",
            format!("{} {keys}", end.name()),
            format!("{least:.1}..{most:.1}"),
            *keys as f64 / open / 1e3,
            measured.bytes >> 20,
            median(&measured.read),
            median(&measured.crc),
            ratio(&measured.open, &measured.read),
            ratio(&measured.open, &measured.crc),
            median(&measured.close),
            measured.report.copied,
            median(&measured.replay),
            measured.open.len(),
        );
    }
    for ((end, keys), measured) in rounds.iter().filter(|((_, keys), _)| *keys >= KEYS_MAX) {
        let ms_max = match end {
            End::Clean => CLEAN_MS_MAX,
            End::Killed => KILLED_MS_MAX,
        } * (*keys as f64 / KEYS_MAX as f64);
        let open = median(&measured.open);
        println!("{} {keys}: {open:.1} ms of {ms_max:.0} ms wanted: {}", end.name(), verdict(open <= ms_max));
    }
}

fn ratio(of: &[f64], to: &[f64]) -> f64 {
    median(&of.iter().zip(to).map(|(of, to)| of / to).collect::<Vec<_>>())
}
