//! Who runs the command of a key, and whether it still does: what the checkpoint of a detached reservation says.
//!
//! A process id alone names nobody: it is given again, counted anew in every pid namespace and after every boot. So a
//! runner is named by boot id, pid namespace, pid and the moment at which the process began, all from `/proc`. Where
//! that cannot be read, or the runner lives in another pid namespace, nothing can be said, and its lease decides.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// The first line of a checkpoint; the number is the version.
const TITLE: &str = "keyonce-run 1";
/// The fields of `/proc/PID/stat` behind the name of the program: the state comes first, the start time twentieth.
const STAT_START: usize = 19;

/// Whether a process still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// It does.
    Running,
    /// It does not.
    Ended,
    /// That cannot be seen from here.
    Unknown,
}

/// One process of the runner's namespace and boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// Its process id.
    pub(crate) pid: u32,
    /// When it began, in ticks since the boot; 0 when that could not be read.
    start: u64,
}

impl Process {
    /// Names a living process by its id.
    pub(crate) fn of(pid: u32) -> Self {
        Self { pid, start: read_stat(pid).ok().flatten().map_or(0, |stat| stat.start) }
    }

    /// Whether it runs, if it is of this namespace and this boot.
    fn life(self) -> Life {
        match read_stat(self.pid) {
            Ok(Some(stat)) if stat.ended => Life::Ended,
            Ok(Some(stat)) if self.start == 0 || stat.start == 0 => Life::Unknown,
            Ok(Some(stat)) if stat.start == self.start => Life::Running,
            Ok(Some(_)) => Life::Ended,
            // The process may be hidden from this user: then it can still be asked for.
            Ok(None) => match i32::try_from(self.pid).ok().and_then(Pid::from_raw).map(test_kill_process) {
                Some(Err(Errno::SRCH)) => Life::Ended,
                _ => Life::Unknown,
            },
            Err(_) => Life::Unknown,
        }
    }
}

/// The `keyonce run` that owns a key, and its command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Runner {
    place: Place,
    /// Which attempt of the key it makes.
    pub(crate) attempt: u32,
    /// The process of `keyonce run`.
    pub(crate) process: Process,
    /// The process of the command, once it is known.
    pub(crate) command: Option<Process>,
}

impl Runner {
    /// This process, which makes this attempt and has not started its command.
    pub(crate) fn this(attempt: u32) -> Self {
        Self { place: Place::here(), attempt, process: Process::of(std::process::id()), command: None }
    }

    /// The same, with the command it started.
    pub(crate) fn with_command(self, pid: u32) -> Self {
        Self { command: Some(Process::of(pid)), ..self }
    }

    /// The bytes of a checkpoint.
    pub(crate) fn to_checkpoint(&self) -> Vec<u8> {
        let Self { place, attempt, process, command } = self;
        let mut text = format!("{TITLE}\nattempt {attempt}\nboot {}\nnamespace {}\n", place.boot, place.namespace);
        let named = [("runner", Some(process)), ("command", command.as_ref())];
        for (name, process) in named.into_iter().filter_map(|(name, process)| Some((name, process?))) {
            writeln!(text, "{name} {} {}", process.pid, process.start)
                .expect("a string takes whatever is written to it");
        }
        text.into_bytes()
    }

    /// Reads a checkpoint; `None` if it is none of ours.
    pub(crate) fn of_checkpoint(bytes: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?.split('\n');
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
        if field("keyonce-run")? != "1" {
            return None;
        }
        let attempt = field("attempt")?.parse().ok()?;
        let place = Place { boot: field("boot")?.to_owned(), namespace: field("namespace")?.parse().ok()? };
        let process = read_process(field("runner")?)?;
        let command = match lines.next() {
            Some(line) => Some(read_process(line.strip_prefix("command ")?)?),
            None => None,
        };
        lines.next().is_none().then_some(Self { place, attempt, process, command })
    }

    /// Whether `keyonce run` still runs.
    pub(crate) fn life(&self) -> Life {
        self.life_of(self.process)
    }

    /// Whether the command still runs, if its process is known.
    pub(crate) fn command_life(&self) -> Option<Life> {
        self.command.map(|command| self.life_of(command))
    }

    fn life_of(&self, process: Process) -> Life {
        let here = Place::here();
        if self.place.boot.is_empty() || here.boot.is_empty() {
            Life::Unknown
        } else if self.place.boot != here.boot {
            Life::Ended
        } else if self.place.namespace == 0 || self.place.namespace != here.namespace {
            Life::Unknown
        } else {
            process.life()
        }
    }
}

/// Where a process id means something.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    /// The boot id; empty when it could not be read.
    boot: String,
    /// The inode of the pid namespace; 0 when it could not be read.
    namespace: u64,
}

impl Place {
    fn here() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
        Self { boot: boot.trim().to_owned(), namespace }
    }
}

/// What `/proc/PID/stat` says.
struct Stat {
    /// It is dead already, and waits for its parent to notice.
    ended: bool,
    start: u64,
}

/// `None` when there is no such process to be seen.
fn read_stat(pid: u32) -> io::Result<Option<Stat>> {
    let text = match fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // The process ended between opening the file and reading it.
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return Ok(None),
        Err(error) => return Err(error),
    };
    let unreadable = || io::Error::other("the status of a process cannot be read");
    // The name of the program stands in parentheses, and may hold some itself.
    let behind =
        text.iter().rposition(|byte| *byte == b')').and_then(|at| text.get(at + 1..)).ok_or_else(unreadable)?;
    let behind = std::str::from_utf8(behind).map_err(|_| unreadable())?;
    let mut fields = behind.split_ascii_whitespace();
    let ended = matches!(fields.clone().next(), Some("Z" | "X" | "x"));
    let start = fields.nth(STAT_START).and_then(|start| start.parse().ok()).ok_or_else(unreadable)?;
    Ok(Some(Stat { ended, start }))
}

fn read_process(text: &str) -> Option<Process> {
    let (pid, start) = text.split_once(' ')?;
    Some(Process { pid: pid.parse().ok()?, start: start.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_reads_back_as_it_was_written() {
        let runner = Runner::this(3);
        assert_eq!(Runner::of_checkpoint(&runner.to_checkpoint()), Some(runner.clone()));
        let runner = runner.with_command(std::process::id());
        assert_eq!(Runner::of_checkpoint(&runner.to_checkpoint()), Some(runner));
    }

    #[test]
    fn what_is_no_checkpoint_of_a_runner_is_not_read_as_one() {
        let whole = Runner::this(1).with_command(1).to_checkpoint();
        for bytes in [&b""[..], b"half", b"keyonce-run 2\n", &whole[..whole.len() - 1], &[&whole[..], b"x\n"].concat()]
        {
            assert_eq!(Runner::of_checkpoint(bytes), None, "{}", bytes.escape_ascii());
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_is_told_from_a_later_one_of_the_same_number() {
        let this = Runner::this(1);
        assert_eq!(this.life(), Life::Running);
        let process = Process { start: this.process.start + 1, ..this.process };
        assert_eq!(Runner { process, ..this }.life(), Life::Ended);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_dead_process_is_ended_also_while_its_parent_has_not_noticed() {
        // It ends with this test, however that ends: its input is closed then.
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let runner = Runner::this(1).with_command(child.id());
        assert_eq!(runner.command_life(), Some(Life::Running));
        child.kill().unwrap();
        while fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap().split(' ').nth(2) != Some("Z") {
            std::thread::yield_now();
        }
        assert_eq!(runner.command_life(), Some(Life::Ended));
        child.wait().unwrap();
        assert_eq!(runner.command_life(), Some(Life::Ended));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_earlier_boot_is_over_and_another_namespace_cannot_be_seen() {
        let this = Runner::this(1);
        let boot = Place { boot: "another".to_owned(), ..this.place.clone() };
        assert_eq!(Runner { place: boot, ..this.clone() }.life(), Life::Ended);
        let namespace = Place { namespace: this.place.namespace + 1, ..this.place.clone() };
        assert_eq!(Runner { place: namespace, ..this.clone() }.life(), Life::Unknown);
        let nowhere = Place { boot: String::new(), namespace: 0 };
        assert_eq!(Runner { place: nowhere, ..this }.life(), Life::Unknown);
    }
}
