//! The machine around a simulated disk: its faults, its record, who has what open.

use std::io;
use std::sync::{Arc, Weak};

use super::disk::{Disk, Event, FileNumber};
use super::sim_disk::{ENOSPC, Look, Tear};
use super::sim_segment::SimSegment;
use crate::storage::Access;

/// All of the machine that a process does not take with it.
#[derive(Default)]
pub(super) struct Machine {
    pub(super) disk: Disk,
    pub(super) unit: Tear,
    pub(super) bytes_max: Option<u64>,
    /// The calls that change nothing: how many, and while the disk is recorded, what each did.
    pub(super) reads: u64,
    pub(super) looks: Vec<Look>,
    pub(super) fail_steps: Vec<Fault>,
    pub(super) fail_reads: Vec<Fault>,
    pub(super) lock: Weak<Held>,
    pub(super) open: Vec<Opened>,
    pub(super) recorded: Option<Recorded>,
}

/// The lock of the disk.
#[derive(Debug)]
pub(super) struct Held;

/// Operations `from .. until` fail.
#[derive(Clone, Copy)]
pub(super) struct Fault {
    pub(super) from: u64,
    pub(super) until: u64,
    pub(super) raw_os_error: i32,
}

/// A segment that was handed out, perhaps dropped since.
pub(super) struct Opened {
    pub(super) file: FileNumber,
    pub(super) access: Access,
    pub(super) segment: Weak<SimSegment>,
}

/// How the disk was, and all that happened since.
#[derive(Clone)]
pub(super) struct Recorded {
    pub(super) first: Disk,
    pub(super) events: Arc<Vec<Event>>,
}

impl Machine {
    /// Carries out the next step, or has it fail.
    pub(super) fn perform(&mut self, event: Event) -> io::Result<()> {
        let fault = Fault::at(&self.fail_steps, self.disk.steps);
        let event = match fault {
            None => event,
            Some(_) => event.failing(),
        };
        self.disk.apply(&event);
        let open = &self.open;
        self.disk
            .forget_nameless(|file| open.iter().any(|opened| opened.file == file && opened.segment.strong_count() > 0));
        if let Some(recorded) = &mut self.recorded {
            Arc::make_mut(&mut recorded.events).push(event);
        }
        fault.map_or(Ok(()), |fault| Err(fault.error()))
    }

    pub(super) fn has_room_for(&self, file: FileNumber, bytes: usize) -> io::Result<()> {
        let now = self.disk.files.get(&file).map_or(0, |file| file.bytes);
        let more = bytes.saturating_sub(now) as u64;
        match self.bytes_max {
            Some(max) if more > 0 && self.disk.bytes().saturating_add(more) > max => {
                Err(io::Error::from_raw_os_error(ENOSPC))
            }
            _ => Ok(()),
        }
    }

    /// Carries out the next call that changes nothing, or has it fail.
    pub(super) fn look(&mut self, look: Look) -> io::Result<()> {
        let fault = Fault::at(&self.fail_reads, self.reads);
        self.reads += 1;
        if self.recorded.is_some() {
            self.looks.push(look);
        }
        fault.map_or(Ok(()), |fault| Err(fault.error()))
    }
}

impl Fault {
    fn at(faults: &[Self], operation: u64) -> Option<Self> {
        faults.iter().find(|fault| (fault.from..fault.until).contains(&operation)).copied()
    }

    fn error(self) -> io::Error {
        io::Error::from_raw_os_error(self.raw_os_error)
    }
}
