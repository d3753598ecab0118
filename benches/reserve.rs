//! What a call costs: fresh pairs, replays, and the two answers that stop a caller.
//!
//! ```text
//! cargo bench --bench reserve                          # all, with a table at the end
//! cargo bench --bench reserve -- replay                # some
//! KEYONCE_BENCH_KEYS=1000000 cargo bench --bench reserve -- random
//! KEYONCE_BENCH_DIR=/mnt/disk cargo bench --bench reserve
//! ```
//!
//! The reference work: an id of 36 bytes, a scope of 8, a fingerprint of 16, a response of 200. Keys are made outside
//! the clock. A **pair** is one reserve that is told Fresh and the completion of it.
//!
//! Figures are medians. Calls of less than a microsecond are timed in runs of [`RUN`], syncs one by one. The yardstick
//! of PowerLoss, *sync*, is writing 512 bytes into written blocks of a file and `fdatasync`; it is taken in turn with
//! the pairs, so that both meet the same disk.
//!
//! Stores that are written to remember for [`WINDOW`] only, so that after one window the log overwrites segments that
//! it has used before, as it does in a service.

use std::collections::BTreeMap;
use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use keyonce::{AppendMode, Completion, Durability, Fingerprint, Key, Options, Reservation, Reserve, Retention, Store};
use tempfile::TempDir;

/// Calls that are timed in one: enough to make the clock's own cost vanish, few enough for a median to mean something.
const RUN: u64 = 64;
/// How long keys are remembered where pairs are written as fast as can be.
const WINDOW: Duration = Duration::from_millis(250);
/// The rate for which those stores are planned.
const PAIRS_PER_SECOND: f64 = 1_500_000.0;
/// Keys in the store from which is replayed at random, unless `KEYONCE_BENCH_KEYS` says how many.
const KEYS: u64 = 100_000;
const SCOPE: &str = "charges!";
const RESPONSE: [u8; 200] = [0x5a; 200];
const YARDSTICK_BYTES: usize = 512;
const YARDSTICK_FILE_BYTES: usize = 1 << 20;

/// Samples by name: nanoseconds for one call.
type Samples = BTreeMap<&'static str, Vec<f64>>;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3))
        .configure_from_args();
    let mut samples = Samples::new();
    replays(&mut criterion, &mut samples);
    pairs_process_crash(&mut criterion, &mut samples);
    pairs_power_loss(&mut criterion, &mut samples);
    criterion.final_summary();
    print_table(&samples);
}

/// A name in the table and in criterion's reports.
const fn pair_name(threads: usize, append_mode: AppendMode) -> &'static str {
    match (threads, append_mode) {
        (1, AppendMode::Mapped) => "fresh pair, ProcessCrash, mapped, 1 thread",
        (1, AppendMode::Positioned) => "fresh pair, ProcessCrash, positioned, 1 thread",
        (_, AppendMode::Mapped) => "fresh pair, ProcessCrash, mapped, 2 threads",
        (_, AppendMode::Positioned) => "fresh pair, ProcessCrash, positioned, 2 threads",
    }
}

const PAIR_POWER_LOSS: &str = "fresh pair, PowerLoss, lone caller";
const SYNC: &str = "sync (512 bytes and fdatasync)";
const REPLAY_HOT: &str = "replay, hot key";
const REPLAY_RANDOM: &str = "replay, random keys";
const MISMATCH: &str = "mismatch";
const IN_FLIGHT: &str = "in flight";

fn print_table(samples: &Samples) {
    let figures: BTreeMap<_, _> = samples.iter().map(|(name, taken)| (*name, quantile(taken, 0.5))).collect();
    println!("\n{:<52} {:>10} {:>10} {:>10}", "", "p50", "p99", "samples");
    for (name, taken) in samples {
        println!(
            "{name:<52} {:>10} {:>10} {:>10}",
            shown(quantile(taken, 0.5)),
            shown(quantile(taken, 0.99)),
            taken.len()
        );
    }
    println!();
    let below = |name: &str, ns_max: f64| {
        if let Some(ns) = figures.get(name) {
            println!("{name}: {} of {} wanted: {}", shown(*ns), shown(ns_max), verdict(*ns < ns_max));
        }
    };
    below(pair_name(1, AppendMode::Mapped), 1_000.0);
    below(REPLAY_HOT, 200.0);
    if let (Some(pair), Some(sync)) = (figures.get(PAIR_POWER_LOSS), figures.get(SYNC)) {
        let ratio = pair / sync;
        println!("{PAIR_POWER_LOSS}: {ratio:.2} syncs of 2.60 wanted: {}", verdict(ratio < 2.6));
    }
}

fn verdict(reached: bool) -> &'static str {
    if reached { "reached" } else { "MISSED" }
}

fn shown(ns: f64) -> String {
    if ns < 10_000.0 { format!("{ns:.0} ns") } else { format!("{:.1} us", ns / 1_000.0) }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a length")]
fn quantile(samples: &[f64], part: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() as f64 * part) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

#[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
fn now() -> Instant {
    Instant::now()
}

fn nanoseconds(taken: Duration, calls: u64) -> f64 {
    taken.as_secs_f64() * 1e9 / calls as f64
}

/// Does `call` `iterations` times in runs of [`RUN`], with fresh input for each from `prepare`, which is not timed.
fn timed<T>(
    iterations: u64,
    taken: &mut Vec<f64>,
    mut prepare: impl FnMut() -> T,
    mut call: impl FnMut(&T),
) -> Duration {
    let mut total = Duration::ZERO;
    let mut left = iterations;
    while left > 0 {
        let calls = left.min(RUN);
        let inputs: Vec<T> = (0..calls).map(|_| prepare()).collect();
        let start = now();
        for input in &inputs {
            call(input);
        }
        let elapsed = start.elapsed();
        if calls == RUN {
            taken.push(nanoseconds(elapsed, calls));
        }
        total += elapsed;
        left -= calls;
    }
    total
}

fn directory() -> TempDir {
    let parent = std::env::var_os("KEYONCE_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    tempfile::tempdir_in(parent).expect("a directory for the bench")
}

fn open(directory: &TempDir, options: Options) -> Store {
    Store::open(directory.path().join("store"), options.response_bytes(RESPONSE.len())).expect("a new store")
}

/// The key of that number: 36 bytes, like a UUID.
fn key(number: u64) -> Key {
    let id = format!("{:08x}-7a4c-4e01-9b55-{:012x}", number.wrapping_mul(0x9e37_79b9) & 0xffff_ffff, number);
    Key::new(SCOPE, &id).expect("a key of 36 bytes")
}

fn request() -> Fingerprint {
    Fingerprint::from_bytes([0x17; 16])
}

fn reserve_fresh(store: &Store, key: &Key) -> Reservation {
    match store.reserve(key, request()).expect("a sound store") {
        Reserve::Fresh(reservation) => reservation,
        other => panic!("a key that nobody has used: {other:?}"),
    }
}

fn pair(store: &Store, key: &Key) {
    let completed = reserve_fresh(store, key).complete(&RESPONSE).expect("a sound store");
    assert_eq!(completed, Completion::Done);
}

fn pairs_process_crash(criterion: &mut Criterion, samples: &mut Samples) {
    let mut group = criterion.benchmark_group("pair");
    group.throughput(Throughput::Elements(1));
    for append_mode in [AppendMode::Mapped, AppendMode::Positioned] {
        for threads in [1, 2] {
            let name = pair_name(threads, append_mode);
            let directory = directory();
            let options = Options::default()
                .durability(Durability::ProcessCrash)
                .append_mode(append_mode)
                .retention(Retention::new(WINDOW, PAIRS_PER_SECOND));
            let store = open(&directory, options);
            let mut used = 0;
            // Criterion calls the closure once for each of its samples: they share one store.
            group.bench_function(name, |bencher| {
                let taken = samples.entry(name).or_default();
                bencher.iter_custom(|iterations| {
                    let each = iterations.div_ceil(threads as u64);
                    let start = Barrier::new(threads);
                    let times = std::thread::scope(|scope| {
                        let workers: Vec<_> = (0..threads as u64)
                            .map(|worker| {
                                let (store, start) = (&store, &start);
                                scope.spawn(move || {
                                    let mut number = used + worker * each;
                                    let prepare = || {
                                        number += 1;
                                        key(number)
                                    };
                                    let mut taken = Vec::new();
                                    start.wait();
                                    let total = timed(each, &mut taken, prepare, |key| pair(store, key));
                                    (total, taken)
                                })
                            })
                            .collect();
                        workers
                            .into_iter()
                            .map(|worker| worker.join().expect("the worker ended well"))
                            .collect::<Vec<_>>()
                    });
                    used += each * threads as u64;
                    let mut longest = Duration::ZERO;
                    for (total, runs) in times {
                        longest = longest.max(total);
                        taken.extend(runs);
                    }
                    longest
                });
            });
        }
    }
    group.finish();
}

fn pairs_power_loss(criterion: &mut Criterion, samples: &mut Samples) {
    let mut group = criterion.benchmark_group("pair");
    group.throughput(Throughput::Elements(1));
    let directory = directory();
    let store = open(&directory, Options::default());
    let file = yardstick_file(&directory);
    let mut number = 0_u64;
    for (name, is_pair) in [(SYNC, false), (PAIR_POWER_LOSS, true)] {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                for _ in 0..iterations {
                    number += 1;
                    let key = key(number);
                    let start = now();
                    sync_once(&file, number);
                    let sync = start.elapsed();
                    let start = now();
                    pair(&store, &key);
                    let pair = start.elapsed();
                    samples.entry(SYNC).or_default().push(nanoseconds(sync, 1));
                    samples.entry(PAIR_POWER_LOSS).or_default().push(nanoseconds(pair, 1));
                    total += if is_pair { pair } else { sync };
                }
                total
            });
        });
    }
    group.finish();
}

/// A file all blocks of which are written.
fn yardstick_file(directory: &TempDir) -> File {
    let path = directory.path().join("yardstick");
    let file = File::options().create_new(true).read(true).write(true).open(path).expect("a new file");
    file.write_all_at(&vec![0; YARDSTICK_FILE_BYTES], 0).expect("room for the yardstick");
    file.sync_all().expect("a disk that syncs");
    file
}

fn sync_once(file: &File, number: u64) {
    let bytes = [0xa5; YARDSTICK_BYTES];
    let offset = number * YARDSTICK_BYTES as u64 % YARDSTICK_FILE_BYTES as u64;
    file.write_all_at(&bytes, offset).expect("a written block");
    file.sync_data().expect("a disk that syncs");
}

fn replays(criterion: &mut Criterion, samples: &mut Samples) {
    let keys = std::env::var("KEYONCE_BENCH_KEYS").map_or(KEYS, |keys| keys.parse().expect("a number of keys"));
    let directory = directory();
    let window = Duration::from_secs(24 * 60 * 60);
    let options = Options::default()
        .durability(Durability::ProcessCrash)
        .retention(Retention::new(window, keys as f64 / window.as_secs_f64()));
    let store = open(&directory, options);
    for number in 0..keys {
        pair(&store, &key(number));
    }
    let running = key(keys);
    let reservation = reserve_fresh(&store, &running);
    let hot = key(keys / 2);
    let mut group = criterion.benchmark_group("answer");
    group.throughput(Throughput::Elements(1));
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let any_key = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        key(random % keys)
    };
    let other_request = Fingerprint::from_bytes([0x18; 16]);
    bench_answer(
        &mut group,
        samples,
        REPLAY_HOT,
        || hot.clone(),
        |key| {
            assert!(matches!(black_box(store.reserve(key, request())), Ok(Reserve::Replay(_))));
        },
    );
    bench_answer(&mut group, samples, REPLAY_RANDOM, any_key, |key| {
        assert!(matches!(black_box(store.reserve(key, request())), Ok(Reserve::Replay(_))));
    });
    bench_answer(
        &mut group,
        samples,
        MISMATCH,
        || hot.clone(),
        |key| {
            assert!(matches!(black_box(store.reserve(key, other_request)), Ok(Reserve::Mismatch(_))));
        },
    );
    bench_answer(
        &mut group,
        samples,
        IN_FLIGHT,
        || running.clone(),
        |key| {
            assert!(matches!(black_box(store.reserve(key, request())), Ok(Reserve::InFlight(_))));
        },
    );
    group.finish();
    drop(reservation);
}

fn bench_answer(
    group: &mut criterion::BenchmarkGroup<'_, criterion::measurement::WallTime>,
    samples: &mut Samples,
    name: &'static str,
    mut prepare: impl FnMut() -> Key,
    mut ask: impl FnMut(&Key),
) {
    group.bench_function(name, |bencher| {
        let taken = samples.entry(name).or_default();
        bencher.iter_custom(|iterations| timed(iterations, taken, &mut prepare, &mut ask));
    });
}
