//! `keyonce run`, as a user meets it: the real program, real commands, a real directory.
//!
//! Commands that must be caught half-way wait at a gate, a FIFO that the test holds open: they go on when the test
//! writes a line to it, and end when the test ends, however it does. That a command has come so far is seen by what it
//! says, which `keyonce run` passes on as it comes.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use keyonce::{Completion, Fingerprint, Key, KeyState, Options, Reservation, Reserve, Store};
use tempfile::TempDir;

/// What a run waits for the directory when it may meet another one's calls, or a program that another test of this
/// process starts: until that has begun, it holds whatever files this process had open when it was made.
const LOCK_WAIT: [&str; 2] = ["--lock-wait", "60s"];

struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A `keyonce run` in the bench's directory, but for the command.
    fn run<S: AsRef<OsStr>>(&self, key: impl AsRef<OsStr>, options: impl IntoIterator<Item = S>) -> Command {
        let mut keyonce = Command::new(env!("CARGO_BIN_EXE_keyonce"));
        keyonce.current_dir(self.dir.path()).stdin(Stdio::null());
        keyonce.args(["run", "--dir", "store", "--scope", "jobs", "--key"]).arg(key).args(options).arg("--");
        keyonce
    }

    /// Runs a shell script under a key, to its end.
    fn sh(&self, key: &str, options: &[&str], script: &str) -> Output {
        self.run(key, options).args(["sh", "-c", script]).output().unwrap()
    }

    /// Runs a shell script under a key, with this standard input.
    fn sh_with_input(&self, key: &str, options: &[&str], script: &str, input: &[u8]) -> Output {
        fs::write(self.path("input"), input).unwrap();
        let input = File::open(self.path("input")).unwrap();
        self.run(key, options).args(["sh", "-c", script]).stdin(input).output().unwrap()
    }

    /// Starts a shell script under a key, and reads the first line that it says.
    fn start(&self, key: &str, options: &[&str], script: &str) -> Started {
        let mut keyonce = self.run(key, options);
        let mut child =
            keyonce.args(["sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        Started { child, stdout, line: line.trim_end().to_owned() }
    }

    /// How often the scripts of this bench had their effect, which is to add a line to `ledger`.
    fn effects(&self) -> usize {
        fs::read_to_string(self.path("ledger")).unwrap_or_default().lines().count()
    }

    /// Makes the FIFO at which scripts wait by `read line <gate`.
    fn gate(&self) -> File {
        assert!(Command::new("mkfifo").arg(self.path("gate")).status().unwrap().success());
        OpenOptions::new().read(true).write(true).open(self.path("gate")).unwrap()
    }

    /// Opens the store as another process would.
    fn store(&self) -> Store {
        Store::open(self.path("store"), Options::new().lock_wait(Duration::from_secs(60))).unwrap()
    }

    /// Reserves a key for the same script as [`Bench::sh`] would.
    fn reserve(&self, store: &Store, key: &str, script: &str) -> Reservation {
        let request = Fingerprint::of_parts(["keyonce run 1", "no input", "sh", "-c", script]);
        match store.reserve(&Key::new("jobs", key).unwrap(), request).unwrap() {
            Reserve::Fresh(reservation) => reservation,
            other => panic!("nobody reserved it: {other:?}"),
        }
    }
}

/// A run that is under way.
struct Started {
    child: Child,
    stdout: BufReader<ChildStdout>,
    line: String,
}

impl Started {
    /// The run's end, with what it said after the first line.
    fn end(mut self) -> Output {
        let mut stdout = Vec::new();
        self.stdout.read_to_end(&mut stdout).unwrap();
        Output { stdout, ..self.child.wait_with_output().unwrap() }
    }
}

fn status(output: &Output) -> i32 {
    output.status.code().expect("keyonce exits by itself")
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn same(first: &Output, again: &Output) -> bool {
    first.status == again.status && first.stdout == again.stdout && first.stderr == again.stderr
}

/// How a repeat of an interrupted key ends: with what to do about it.
const FIND_OUT: &str = "find out what it did, then run it again with --on-interrupted take-over";

#[test]
fn a_command_runs_once_and_its_binary_output_is_replayed_byte_for_byte() {
    let bench = Bench::new();
    let out: Vec<u8> = (0..1 << 20).map(|at: u32| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let err: Vec<u8> = (0..=255).rev().collect();
    fs::write(bench.path("out"), &out).unwrap();
    fs::write(bench.path("err"), &err).unwrap();
    let script = "echo x >>ledger; cat out; cat err >&2; printf '\\n\\0end'";
    let first = bench.sh("k", &["--output-max", "2MiB"], script);
    assert_eq!(status(&first), 0);
    assert!(first.stdout == [&out[..], b"\n\0end"].concat() && first.stderr == err);
    for _ in 0..2 {
        assert!(same(&first, &bench.sh("k", &["--output-max", "2MiB"], script)));
    }
    assert_eq!(bench.effects(), 1);
}

#[test]
fn every_exit_status_is_passed_on_and_replayed() {
    let bench = Bench::new();
    for (number, wanted) in [0, 1, 3, 119, 121, 125, 126, 127, 255].into_iter().enumerate() {
        let script = format!("echo x >>ledger; echo out; echo err >&2; exit {wanted}");
        let first = bench.sh(&format!("k{wanted}"), &[], &script);
        assert_eq!(status(&first), wanted);
        assert_eq!((&first.stdout[..], &first.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
        assert!(same(&first, &bench.sh(&format!("k{wanted}"), &[], &script)));
        assert_eq!(bench.effects(), number + 1);
    }
}

#[test]
fn a_signal_that_ended_the_command_is_128_more_and_replayed() {
    let bench = Bench::new();
    for (number, signal) in [9, 15, 11].into_iter().enumerate() {
        let script = format!("echo x >>ledger; echo half; kill -{signal} $$; echo never");
        let first = bench.sh(&format!("k{signal}"), &[], &script);
        assert_eq!((status(&first), &first.stdout[..]), (128 + signal, &b"half\n"[..]));
        assert!(same(&first, &bench.sh(&format!("k{signal}"), &[], &script)));
        assert_eq!(bench.effects(), number + 1);
    }
}

#[test]
fn a_command_that_says_nothing_is_replayed_as_nothing() {
    let bench = Bench::new();
    let first = bench.sh("k", &["--output-max", "0"], "echo x >>ledger");
    assert!(status(&first) == 0 && first.stdout.is_empty() && first.stderr.is_empty());
    assert!(same(&first, &bench.sh("k", &[], "echo x >>ledger")));
    assert_eq!(bench.effects(), 1);
}

#[test]
fn a_command_that_cannot_be_started_leaves_its_key_free() {
    let bench = Bench::new();
    fs::write(bench.path("no-program"), "text").unwrap();
    fs::set_permissions(bench.path("no-program"), fs::Permissions::from_mode(0o644)).unwrap();
    for (program, wanted) in [("./not-there", 127), ("keyonce-not-on-the-path", 127), ("./no-program", 126), ("/", 126)]
    {
        let tried = bench.run("k", [""; 0]).arg(program).output().unwrap();
        assert_eq!(status(&tried), wanted, "{program}");
        assert!(said(&tried).starts_with("keyonce: the command cannot be started: "), "{}", said(&tried));
    }
    assert_eq!(status(&bench.sh("k", &[], "echo x >>ledger")), 0);
    assert_eq!(bench.effects(), 1);
}

#[test]
fn another_command_line_or_input_under_the_key_is_refused() {
    let bench = Bench::new();
    let script = "echo x >>ledger; cat";
    let first = bench.sh_with_input("k", &["--stdin"], script, b"9.99 EUR\0");
    assert_eq!((status(&first), &first.stdout[..]), (0, &b"9.99 EUR\0"[..]));
    assert!(same(&first, &bench.sh_with_input("k", &["--stdin"], script, b"9.99 EUR\0")));
    let others = [
        bench.sh_with_input("k", &["--stdin"], script, b"9.98 EUR\0"),
        bench.sh_with_input("k", &["--stdin"], script, b""),
        bench.sh_with_input("k", &[], script, b"9.99 EUR\0"),
        bench.sh_with_input("k", &["--stdin"], "echo x >>ledger; cat ", b"9.99 EUR\0"),
        bench.run("k", ["--stdin"]).args(["sh", "-c", script, ""]).output().unwrap(),
    ];
    for (number, other) in others.iter().enumerate() {
        assert_eq!(status(other), 122, "{number}: {}", said(other));
        assert!(other.stdout.is_empty());
        assert!(
            said(other).starts_with("keyonce: the key stands for another command line or other standard input since 2")
        );
    }
    assert_eq!(bench.effects(), 1);
}

#[test]
fn without_being_told_to_the_command_reads_no_input() {
    let bench = Bench::new();
    let first = bench.sh_with_input("k", &[], "cat; echo end", b"unread");
    assert_eq!((status(&first), &first.stdout[..]), (0, &b"end\n"[..]));
    assert!(same(&first, &bench.sh_with_input("k", &[], "cat; echo end", b"unread")));
}

#[test]
fn input_beyond_its_cap_is_refused_before_anything_is_reserved() {
    let bench = Bench::new();
    fs::write(bench.path("input"), vec![b'x'; (16 << 20) + 1]).unwrap();
    let mut keyonce = bench.run("k", ["--stdin"]);
    let refused = keyonce.arg("cat").stdin(File::open(bench.path("input")).unwrap()).output().unwrap();
    assert_eq!(status(&refused), 125);
    assert_eq!(said(&refused), "keyonce: standard input has more than 16777216 bytes, the most that --stdin takes\n");
    assert!(!bench.path("store").exists());
}

#[test]
fn input_that_the_command_does_not_read_is_no_failure() {
    let bench = Bench::new();
    let input = vec![b'x'; 1 << 20];
    let first = bench.sh_with_input("k", &["--stdin"], "echo done", &input);
    assert_eq!((status(&first), &first.stdout[..]), (0, &b"done\n"[..]));
}

#[test]
fn another_key_runs_while_the_first_is_under_way() {
    let bench = Bench::new();
    let mut gate = bench.gate();
    let first = bench.start("one", &LOCK_WAIT, "echo begun; read line <gate; echo x >>ledger; echo $line");
    assert_eq!(first.line, "begun");
    let second = bench.sh("two", &LOCK_WAIT, "echo x >>ledger; echo second");
    assert_eq!((status(&second), &second.stdout[..]), (0, &b"second\n"[..]));
    assert_eq!(bench.effects(), 1);
    gate.write_all(b"go\n").unwrap();
    let first = first.end();
    assert_eq!((status(&first), &first.stdout[..]), (0, &b"go\n"[..]));
    let again = bench.sh("one", &[], "echo begun; read line <gate; echo x >>ledger; echo $line");
    assert_eq!((status(&again), &again.stdout[..]), (0, &b"begun\ngo\n"[..]));
    assert_eq!(bench.effects(), 2);
}

#[test]
fn a_repeat_while_the_first_runs_is_told_so_and_who_runs_it() {
    let bench = Bench::new();
    let mut gate = bench.gate();
    let script = "echo $$; read line <gate; echo x >>ledger";
    let first = bench.start("k", &[], script);
    for options in [&LOCK_WAIT[..], &["--lock-wait", "60s", "--on-interrupted", "take-over"]] {
        let repeat = bench.sh("k", options, script);
        assert_eq!(status(&repeat), 119);
        let (command, runner) = (&first.line, first.child.id());
        let wanted =
            format!("keyonce: the command is still running with pid {command}, under the keyonce with pid {runner}\n");
        assert_eq!(said(&repeat), wanted);
    }
    let other = bench.sh("k", &LOCK_WAIT, "echo other");
    assert_eq!(status(&other), 122, "{}", said(&other));
    gate.write_all(b"go\n").unwrap();
    assert_eq!(status(&first.end()), 0);
    assert_eq!(bench.effects(), 1);
}

#[test]
fn a_killed_run_is_interrupted_names_its_command_and_can_be_taken_over() {
    let bench = Bench::new();
    let gate = bench.gate();
    let script = "test -e open; closed=$?; echo $KEYONCE_ATTEMPT $KEYONCE_DOWNSTREAM_KEY >>ledger; echo $$; \
                  test $closed = 0 || read line <gate; echo end";
    let mut first = bench.start("k", &[], script);
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    fs::write(bench.path("open"), "").unwrap();
    for _ in 0..2 {
        let repeat = bench.sh("k", &[], script);
        assert_eq!(status(&repeat), 121, "{}", said(&repeat));
        assert!(repeat.stdout.is_empty());
        let wanted = format!(
            "keyonce: interrupted: attempt 1 did not finish, and its outcome is unknown; \
             the command may still be running with pid {}; {FIND_OUT}\n",
            first.line
        );
        assert_eq!(said(&repeat), wanted);
    }
    assert_eq!(status(&bench.sh("k", &["--on-interrupted", "take-over"], "echo other")), 122);
    let taken = bench.sh("k", &["--on-interrupted", "take-over"], script);
    assert_eq!(status(&taken), 0, "{}", said(&taken));
    let notice = format!(
        "keyonce: taking over from attempt 1, which was interrupted; the command may still be running with pid {}\n",
        first.line
    );
    assert_eq!(said(&taken), notice);
    assert!(taken.stdout.ends_with(b"\nend\n"));
    let again = bench.sh("k", &[], script);
    assert!(status(&again) == 0 && again.stdout == taken.stdout && again.stderr.is_empty());
    let downstream = Key::new("jobs", "k").unwrap().downstream_key("keyonce run");
    assert_eq!(fs::read_to_string(bench.path("ledger")).unwrap(), format!("1 {downstream}\n2 {downstream}\n"));
    drop(gate);
}

#[test]
fn a_killed_run_whose_command_has_ended_says_so() {
    let bench = Bench::new();
    let mut gate = bench.gate();
    let script = "echo $$; test -e open || read line <gate; exec >/dev/null; exec sh -c 'echo x >>ledger'";
    let mut first = bench.start("k", &[], script);
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    fs::write(bench.path("open"), "").unwrap();
    gate.write_all(b"go\n").unwrap();
    let pid = rustix::process::Pid::from_raw(first.line.parse().unwrap()).unwrap();
    let ended = |stat: String| stat.contains(") Z ");
    while rustix::process::test_kill_process(pid).is_ok()
        && !fs::read_to_string(format!("/proc/{}/stat", first.line)).is_ok_and(ended)
    {
        std::thread::yield_now();
    }
    let repeat = bench.sh("k", &[], script);
    assert_eq!(status(&repeat), 121);
    assert!(
        said(&repeat).ends_with(&format!(
            "the command had pid {} and has ended, but what it started may still be running; {FIND_OUT}\n",
            first.line
        )),
        "{}",
        said(&repeat)
    );
    assert_eq!(bench.effects(), 1);
}

#[test]
fn a_run_that_ended_before_it_started_the_command_is_interrupted_too() {
    let bench = Bench::new();
    drop(bench.reserve(&bench.store(), "k", "echo x >>ledger"));
    let repeat = bench.sh("k", &LOCK_WAIT, "echo x >>ledger");
    assert_eq!(status(&repeat), 121);
    assert!(
        said(&repeat).ends_with(&format!("; it ended before it started the command; {FIND_OUT}\n")),
        "{}",
        said(&repeat)
    );
    assert_eq!(bench.effects(), 0);
    assert_eq!(status(&bench.sh("k", &["--on-interrupted", "take-over"], "echo x >>ledger")), 0);
    assert_eq!(bench.effects(), 1);
}

#[test]
fn a_checkpoint_of_another_program_is_not_taken_for_a_runner() {
    let bench = Bench::new();
    let store = bench.store();
    let reservation = bench.reserve(&store, "k", "echo x >>ledger");
    assert_eq!(reservation.save_checkpoint(b"page 3").unwrap(), Completion::Done);
    drop((reservation, store));
    let repeat = bench.sh("k", &LOCK_WAIT, "echo x >>ledger");
    assert_eq!((status(&repeat), bench.effects()), (121, 0));
    let wanted = format!("; its checkpoint is none of `keyonce run`, so what it did cannot be told; {FIND_OUT}\n");
    assert!(said(&repeat).ends_with(&wanted), "{}", said(&repeat));
}

/// Detaches a key under a runner that is made up.
fn detach(bench: &Bench, key: &str, place: &str, lease: Duration) {
    let store = bench.store();
    let reservation = bench.reserve(&store, key, "echo x >>ledger");
    let checkpoint = format!("keyonce-run 1\nattempt 1\n{place}\nrunner 1 1\ncommand 4711 1\n");
    assert_eq!(reservation.save_checkpoint(checkpoint.as_bytes()).unwrap(), Completion::Done);
    reservation.detach(lease).unwrap();
}

#[test]
fn a_runner_of_an_earlier_boot_is_gone_and_one_out_of_sight_counts_until_its_lease_lapses() {
    let bench = Bench::new();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let boot = boot.trim();
    let week = Duration::from_secs(7 * 24 * 60 * 60);
    detach(&bench, "earlier boot", "boot earlier\nnamespace 1", week);
    detach(&bench, "other namespace", &format!("boot {boot}\nnamespace 1"), week);
    detach(&bench, "lapsed", &format!("boot {boot}\nnamespace 1"), Duration::from_millis(1));
    let earlier = bench.sh("earlier boot", &LOCK_WAIT, "echo x >>ledger");
    assert_eq!(status(&earlier), 121);
    assert!(said(&earlier).contains("the command had pid 4711 and has ended"), "{}", said(&earlier));
    for options in [&[][..], &["--on-interrupted", "take-over"]] {
        let other = bench.sh("other namespace", options, "echo x >>ledger");
        assert_eq!(status(&other), 119);
        let wanted = "keyonce: the command is still running with pid 4711, under the keyonce with pid 1, \
                      as far as can be told from here, and counts as such until 2";
        assert!(said(&other).starts_with(wanted), "{}", said(&other));
    }
    let lapsed = bench.sh("lapsed", &[], "echo x >>ledger");
    assert_eq!(status(&lapsed), 121);
    assert!(
        said(&lapsed).ends_with(&format!("the command may still be running with pid 4711; {FIND_OUT}\n")),
        "{}",
        said(&lapsed)
    );
    assert_eq!(bench.effects(), 0);
    assert_eq!(status(&bench.sh("lapsed", &["--on-interrupted", "take-over"], "echo x >>ledger")), 0);
    assert_eq!(bench.effects(), 1);
}

#[test]
fn a_directory_that_is_open_elsewhere_is_locked() {
    let bench = Bench::new();
    let store = bench.store();
    let locked = bench.sh("k", &[], "echo x >>ledger");
    assert_eq!(status(&locked), 120);
    assert_eq!(said(&locked), "keyonce: another process has the directory open; waited 0s, as --lock-wait says\n");
    assert_eq!(status(&bench.sh("k", &["--lock-wait", "20ms"], "echo x >>ledger")), 120);
    drop(store);
    assert_eq!(status(&bench.sh("k", &LOCK_WAIT, "echo x >>ledger")), 0);
    assert_eq!(bench.effects(), 1);
}

#[test]
fn a_command_that_has_ended_waits_for_the_directory_and_its_answer_is_stored() {
    let bench = Bench::new();
    let mut gate = bench.gate();
    let script = "echo $$; read line <gate; echo x >>ledger";
    let first = bench.start("k", &[], script);
    let store = bench.store();
    gate.write_all(b"go\n").unwrap();
    let pid = rustix::process::Pid::from_raw(first.line.parse().unwrap()).unwrap();
    while rustix::process::test_kill_process(pid).is_ok() {
        std::thread::yield_now();
    }
    // The runner wants the directory now, while another key's work goes on in it for some hundred syncs.
    for number in 0..200 {
        let key = Key::new("other", format!("{number}")).unwrap();
        let Reserve::Fresh(reservation) = store.reserve(&key, Fingerprint::of("")).unwrap() else {
            panic!("nobody did")
        };
        assert_eq!(reservation.complete(b"").unwrap(), Completion::Done);
    }
    assert_eq!(store.peek(&Key::new("jobs", "k").unwrap()).unwrap().unwrap().state, KeyState::InFlight);
    store.close(Duration::ZERO).unwrap();
    let first = first.end();
    assert_eq!(status(&first), 0, "{}", said(&first));
    assert_eq!(status(&bench.sh("k", &[], script)), 0);
    assert_eq!(bench.effects(), 1);
}

#[test]
fn output_beyond_the_cap_is_passed_on_and_the_repeat_is_told_that_it_was_not_kept() {
    let bench = Bench::new();
    let script = "echo x >>ledger; head -c 1048553 /dev/zero; exit 3";
    let first = bench.sh("over", &[], script);
    assert_eq!((status(&first), first.stdout.len()), (3, 1_048_553));
    let again = bench.sh("over", &[], script);
    assert!(status(&again) == 124 && again.stdout.is_empty());
    assert_eq!(said(&again), "keyonce: the command ran before and ended with status 3, but its output was not kept\n");
    let script = "echo x >>ledger; head -c 1048552 /dev/zero; exit 3";
    let first = bench.sh("just fits", &[], script);
    assert!(same(&first, &bench.sh("just fits", &[], script)));
    assert_eq!(bench.effects(), 2);
}

#[test]
fn the_largest_cap_keeps_sixteen_mebibytes_and_smaller_ones_still_read_them() {
    let bench = Bench::new();
    let script = "echo x >>ledger; head -c 16777192 /dev/zero";
    let first = bench.sh("k", &["--output-max", "16MiB"], script);
    assert_eq!((status(&first), first.stdout.len()), (0, 16_777_192));
    assert!(same(&first, &bench.sh("k", &["--output-max", "16MiB"], script)));
    for _ in 0..3 {
        assert!(same(&first, &bench.sh("k", &[], script)));
    }
    assert_eq!(bench.effects(), 1);
    let refused = bench.sh("k2", &["--output-max", "16777217"], script);
    assert_eq!(status(&refused), 125);
    assert!(said(&refused).contains("--output-max"), "{}", said(&refused));
}

#[test]
fn a_reader_that_leaves_early_does_not_stop_the_command_or_its_record() {
    let bench = Bench::new();
    let mut gate = bench.gate();
    let script = "echo begun; read line <gate; head -c 300000 /dev/zero; echo x >>ledger";
    let Started { mut child, stdout, line } = bench.start("k", &[], script);
    assert_eq!(line, "begun");
    drop(stdout);
    gate.write_all(b"go\n").unwrap();
    assert!(child.wait().unwrap().success());
    let again = bench.sh("k", &[], script);
    assert_eq!((status(&again), again.stdout.len()), (0, 300_006));
    assert_eq!(bench.effects(), 1);
}

#[test]
fn scopes_and_keys_are_any_bytes_and_are_never_told() {
    let bench = Bench::new();
    let odd: Vec<OsString> =
        [&b"\xff\xfe"[..], b"two\nlines", b" k ", b"k", "\u{e9}".as_bytes(), b"e\xcc\x81", &[b'k'; 255]]
            .into_iter()
            .map(|bytes| OsString::from_vec(bytes.to_vec()))
            .collect();
    for (number, key) in odd.iter().enumerate() {
        for _ in 0..2 {
            let output = bench.run(key, [""; 0]).args(["sh", "-c", "echo x >>ledger"]).output().unwrap();
            assert_eq!(status(&output), 0, "{key:?}");
        }
        assert_eq!(bench.effects(), number + 1, "{key:?}");
    }
    let too_long = "secret".repeat(43);
    let told = [
        bench.sh("secret", &[], "exit 0"),
        bench.sh("secret", &[], "exit 1"),
        bench.sh(&too_long, &[], "exit 0"),
        bench.sh("", &[], "exit 0"),
        bench.sh("secret", &["--retention", "9000000000h"], "exit 0"),
    ];
    assert_eq!(told.iter().map(status).collect::<Vec<_>>(), [0, 122, 125, 125, 125]);
    for output in told {
        assert!(!said(&output).contains("secret"), "{}", said(&output));
    }
}

#[test]
fn durations_out_of_range_are_refused_by_name() {
    let bench = Bench::new();
    for (options, wanted) in [
        (["--retention", "876001h"], "the option `retention` must not be longer than 100 years"),
        (["--retention", "0s"], "the option `retention`"),
        (
            ["--retention", "2y"],
            "'--retention <DURATION>': a duration is told in weeks, days, hours, minutes and seconds",
        ),
        (["--retention", "soon"], "'--retention <DURATION>'"),
        (["--lock-wait", "1 month"], "'--lock-wait <DURATION>'"),
        (["--lease", "0s"], "the option `lease`"),
    ] {
        let refused = bench.sh("k", &options, "echo x >>ledger");
        assert_eq!(status(&refused), 125, "{options:?}: {}", said(&refused));
        assert!(said(&refused).contains(wanted), "{options:?}: {}", said(&refused));
    }
    assert_eq!(bench.effects(), 0);
    assert_eq!(status(&bench.sh("k", &["--retention", "876000h"], "echo x >>ledger")), 0);
}

#[test]
fn a_key_from_before_its_retention_is_too_old() {
    let bench = Bench::new();
    let old = bench.sh("k", &["--issued-at", "2020-01-01T00:00:00Z"], "echo x >>ledger");
    assert_eq!(status(&old), 123);
    assert!(said(&old).starts_with("keyonce: the key was made longer ago than the retention"), "{}", said(&old));
    assert_eq!(bench.effects(), 0);
}

#[test]
fn what_another_program_stored_under_the_key_is_not_taken_for_an_output() {
    let bench = Bench::new();
    let store = bench.store();
    assert_eq!(bench.reserve(&store, "k", "echo x >>ledger").complete(b"paid").unwrap(), Completion::Done);
    drop(store);
    let foreign = bench.sh("k", &LOCK_WAIT, "echo x >>ledger");
    assert_eq!((status(&foreign), bench.effects()), (125, 0));
    assert_eq!(said(&foreign), "keyonce: what is stored under the key was not written by `keyonce run`\n");
}

#[test]
fn a_failure_tells_the_whole_chain_of_causes() {
    let bench = Bench::new();
    fs::write(bench.path("store"), "a file").unwrap();
    let failed = bench.sh("k", &[], "echo x >>ledger");
    assert_eq!((status(&failed), bench.effects()), (125, 0));
    let wanted =
        "keyonce: the store in store cannot be opened: the path of the store is not a directory: Not a directory";
    assert!(said(&failed).starts_with(wanted) && said(&failed).lines().count() == 1, "{}", said(&failed));
}

#[test]
fn a_wrong_command_line_is_keyonces_own_failure_and_help_is_none() {
    let run = |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_keyonce")).args(arguments).output().unwrap();
    for wrong in [&["run"][..], &["walk"], &[], &["run", "--dir", "d", "--scope", "s", "--key", "k"]] {
        assert_eq!(status(&run(wrong)), 125, "{wrong:?}");
    }
    let help = run(&["run", "--help"]);
    assert_eq!(status(&help), 0);
    let help = String::from_utf8(help.stdout).unwrap();
    for wanted in ["119", "127", "KEYONCE_DOWNSTREAM_KEY", "KEYONCE_ATTEMPT", "16 MiB", "1MiB", "Ctrl-C", "Examples:"] {
        assert!(help.contains(wanted), "{wanted} is told");
    }
}
