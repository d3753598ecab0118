//! A store in a directory or on a simulated disk, at every level and append mode, and what its crashes leave.

use std::cell::Cell;

use keyonce::testing::{self, SimDisk};
use keyonce::{Durability, Options, Store};

use crate::place::{EVERYWHERE, Place};

/// Where a case is tried.
pub(super) struct Ground {
    pub(super) place: Place,
    /// `None`: a real directory.
    pub(super) disk: Option<SimDisk>,
    openings: Cell<u64>,
}

impl Ground {
    pub(super) fn options(&self) -> Options {
        self.place.options()
    }

    pub(super) fn open(&self) -> Store {
        self.open_as(self.options())
    }

    pub(super) fn open_as(&self, options: Options) -> Store {
        match &self.disk {
            None => self.place.open_as(options),
            Some(disk) => self.open_disk(disk.clone(), options),
        }
    }

    fn open_disk(&self, disk: SimDisk, options: Options) -> Store {
        self.openings.set(self.openings.get() + 1);
        testing::open(disk, options, self.openings.get()).unwrap()
    }

    /// What the next process finds after a kill and, where the level survives that, after a loss of power in which
    /// nothing, everything and a part of what was not synced has reached the disk.
    pub(super) fn after_crashes(&self) -> Vec<Store> {
        self.after_crashes_as(&self.options())
    }

    pub(super) fn after_crashes_as(&self, options: &Options) -> Vec<Store> {
        let Some(disk) = &self.disk else {
            return vec![self.place.open_after_kill_as(options.clone())];
        };
        let mut images = vec![disk.kill()];
        if self.place.setting.durability == Durability::PowerLoss {
            images.extend([disk.crash_all_old(), disk.crash_all_new()]);
            images.extend((0..4).map(|seed| disk.crash_image(seed)));
        }
        images.into_iter().map(|image| self.open_disk(image, options.clone())).collect()
    }
}

/// Names the ground on which a test failed.
struct Named(String);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("on {}", self.0);
        }
    }
}

/// Tries a case on every ground.
pub(super) fn on_every_ground(case: impl Fn(&Ground)) {
    for setting in EVERYWHERE {
        for disk in [None, Some(SimDisk::new())] {
            let what = if disk.is_none() { "a directory" } else { "a simulated disk" };
            let named = Named(format!("{what}, {setting:?}"));
            case(&Ground { place: Place::new(setting), disk, openings: Cell::new(0) });
            drop(named);
        }
    }
}
