//! Campaigns: many seeds, shared out among processes and days, whose results stand in `tests/campaigns.md`.
//!
//! `KEYONCE_CAMPAIGN=from..to` names the seeds (`to` is not among them), and `KEYONCE_CAMPAIGN_PART=n/m` takes the
//! `n`-th of `m` equal parts of them, `n` from 1 on. The result, also that of a campaign that has found something, is
//! one more row of the table at the end of that file.

use std::fs::OpenOptions;
use std::io::Write;
use std::ops::Range;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::machine_now;
use crate::examine::{Tally, in_threads};

const LOG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/campaigns.md");

/// After so many workloads there is a sign of life.
const TOLD_EVERY: u64 = 1_000;

/// Which seeds are looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Campaign {
    seeds: Range<u64>,
    /// This one of so many parts.
    part: (u64, u64),
}

impl Campaign {
    pub(super) fn asked_for() -> Option<Self> {
        let seeds = std::env::var("KEYONCE_CAMPAIGN").ok()?;
        let part = std::env::var("KEYONCE_CAMPAIGN_PART").unwrap_or_else(|_| "1/1".to_owned());
        Some(Self::parsed(&seeds, &part).unwrap_or_else(|| {
            panic!("KEYONCE_CAMPAIGN is from..to, not {seeds:?}; KEYONCE_CAMPAIGN_PART is n/m, not {part:?}")
        }))
    }

    fn parsed(seeds: &str, part: &str) -> Option<Self> {
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let (from, to) = seeds.split_once("..")?;
        let (this, of) = part.split_once('/')?;
        let (seeds, part) = (number(from)?..number(to)?, (number(this)?, number(of)?));
        ((1..=part.1).contains(&part.0) && !seeds.is_empty()).then_some(Self { seeds, part })
    }

    fn seeds(&self) -> impl Iterator<Item = u64> + use<> {
        let (this, of) = self.part;
        self.seeds.clone().skip(usize::try_from(this - 1).unwrap()).step_by(usize::try_from(of).unwrap())
    }

    /// Looks at every seed; the first failure ends the campaign.
    pub(super) fn run(&self, check: impl Fn(u64) -> (Tally, Result<(), String>) + Sync) {
        let began = machine_now();
        let seeds: Vec<u64> = self.seeds().collect();
        let next = AtomicU64::new(0);
        let (total, result) = in_threads(|so_far| {
            if so_far.workloads > 0 && so_far.workloads.is_multiple_of(TOLD_EVERY) {
                let (images, took) = (so_far.images(), began.elapsed());
                println!("{} of {} seeds, {images} images in {took:.0?}", so_far.workloads, seeds.len());
            }
            let seed = *seeds.get(usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap())?;
            let check = &check;
            Some(move || check(seed))
        });
        let row = self.row(&total, began.elapsed(), &result);
        println!("{row}\n{total:?}");
        let written = OpenOptions::new().append(true).open(LOG).and_then(|mut log| writeln!(log, "{row}"));
        written.unwrap_or_else(|error| panic!("{LOG}: {error}"));
        result.unwrap_or_else(|why| panic!("{why}"));
    }

    fn row(&self, total: &Tally, took: Duration, result: &Result<(), String>) -> String {
        let Range { start, end } = self.seeds;
        let (this, of) = self.part;
        let images = total.images();
        let rate = images as f64 / took.as_secs_f64();
        let found = match result {
            Ok(()) => "nothing".to_owned(),
            Err(why) => format!("`{}`", why.lines().next().unwrap_or_default().replace('|', "/")),
        };
        format!(
            "| {} | {start}..{end} | {this}/{of} | {} | {images} | {} | {} | {rate:.0} | {found} | {} |",
            said(Command::new("date").args(["-u", "+%F"])),
            total.workloads,
            total.crashed_recoveries,
            total.crashed_deeper,
            version()
        )
    }
}

/// The version of the crate and, in a clone of its repository, the commit.
fn version() -> String {
    let git = ["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty", "--abbrev=10"];
    format!("{} {}", env!("CARGO_PKG_VERSION"), said(Command::new("git").args(git))).trim_end().to_owned()
}

/// What a program says, or nothing if it cannot.
fn said(command: &mut Command) -> String {
    let output = command.output().ok().filter(|output| output.status.success());
    output.map_or_else(String::new, |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[test]
fn the_parts_of_a_campaign_are_the_whole_and_share_nothing() {
    let mut all: Vec<u64> = (1..=3)
        .flat_map(|part| Campaign::parsed("10..31", &format!("{part}/3")).unwrap().seeds().collect::<Vec<_>>())
        .collect();
    all.sort_unstable();
    assert_eq!(all, (10..31).collect::<Vec<_>>());
    for (seeds, part) in
        [("1..1", "1/1"), ("2..1", "1/1"), ("1..9", "0/2"), ("1..9", "3/2"), ("1", "1/1"), ("1..9", "")]
    {
        assert_eq!(Campaign::parsed(seeds, part), None, "{seeds} {part}");
    }
}
