//! The stage of an act: a client, the link, and the process of a payment service with its directory.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fs, io};

use super::Result;
use super::client::Client;
use super::ledger;
use super::link::{Cue, Link};
use super::service::{CHARGED, Habits};

/// A client and a payment service, and all that lies between them.
pub(super) struct Shop {
    dir: PathBuf,
    /// How the service works that the shop opened with.
    pub(super) habits: Habits,
    client: Client,
    link: Link,
    service: Process,
}

impl Shop {
    /// Opens a shop in a directory of its own, with nothing charged yet.
    pub(super) fn open(dir: PathBuf, habits: Habits) -> Result<Self> {
        fs::create_dir(&dir)?;
        let (client, client_end) = Client::new()?;
        let (service, service_end) = Process::start(&dir, habits)?;
        let link = Link { client: client_end, service: service_end, late: Vec::new() };
        Ok(Self { dir, habits, client, link, service })
    }

    /// Ends the service process and starts another one on the same directory.
    pub(super) fn restart(&mut self, habits: Habits) -> Result<()> {
        self.service.kill()?;
        (self.service, self.link.service) = Process::start(&self.dir, habits)?;
        Ok(())
    }

    /// The client pays, and after a time-out tries again while tries are left. A try is the key that it bears, and what
    /// the link does to it.
    pub(super) fn pay(&mut self, amount: &str, tries: &[(&str, Cue)]) -> Result<()> {
        self.ask("pay", amount, tries)
    }

    /// As [`pay`](Self::pay), but an interrupted payment is taken over.
    pub(super) fn take_over(&mut self, amount: &str, tries: &[(&str, Cue)]) -> Result<()> {
        self.ask("take over", amount, tries)
    }

    fn ask(&mut self, verb: &str, amount: &str, tries: &[(&str, Cue)]) -> Result<()> {
        for (key, cue) in tries {
            let id = self.client.ask(format!("{verb}\t{amount}\t{key}"))?;
            self.link.carry(*cue)?;
            if *cue == Cue::KillService {
                self.service.kill_once_charged()?;
            }
            if self.client.is_answered(id)? {
                break;
            }
        }
        Ok(())
    }

    /// Everything the client saw.
    pub(super) fn client_saw(&self) -> String {
        self.client.saw()
    }

    /// The amounts that were charged, read from the ledger's file.
    pub(super) fn charges(&self) -> Result<Vec<String>> {
        Ok(ledger::amounts(&self.dir)?)
    }
}

/// A payment service: this program once more, in a process that can be killed. It ends with its handle.
struct Process(Child);

impl Process {
    /// Starts a service, and returns the link's end of the socket to it.
    fn start(dir: &Path, habits: Habits) -> io::Result<(Self, UnixStream)> {
        let (link_end, service_end) = UnixStream::pair()?;
        let mut command = Command::new(env::current_exe()?);
        command.args(["demo", "--serve"]).arg(dir);
        command.args(habits.ignore_keys.then_some("--ignore-keys"));
        command.args(habits.send_key_on.then_some("--send-key-on"));
        command.args(habits.stall_after_charge.then_some("--stall-after-charge"));
        let child = command.stdin(OwnedFd::from(service_end)).stdout(Stdio::piped()).spawn()?;
        Ok((Self(child), link_end))
    }

    /// Kills the service between charge and completion: it says when it is there, and goes no further.
    fn kill_once_charged(&mut self) -> Result<()> {
        let mut said = String::new();
        let stdout = self.0.stdout.as_mut().ok_or("the standard output of the service is not ours")?;
        BufReader::new(stdout).read_line(&mut said)?;
        if said != CHARGED {
            return Err("the service ended before it had charged".into());
        }
        Ok(self.kill()?)
    }

    /// SIGKILL: no handler runs, nothing is tidied up. Does nothing if the process has ended.
    fn kill(&mut self) -> io::Result<()> {
        self.0.kill()?;
        self.0.wait().map(drop)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("keyonce demo: the payment service could not be ended: {error}");
        }
    }
}
