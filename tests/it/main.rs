//! The crate's promises, kept through its public interface. One binary, so that it links once.
#![cfg(not(loom))]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on should panic")]

mod bounds;
mod cli_demo;
mod cli_run;
mod clients;
mod corners;
mod damage;
mod directory;
mod docs;
mod examine;
mod examples;
mod faults;
mod forge;
mod fork;
mod full;
mod fuzzed;
mod handed_on;
mod hints;
mod history;
mod http;
mod images;
mod kill;
mod kinds;
mod limits;
mod linear;
mod listing;
mod lock;
mod machine;
mod measured;
mod network;
mod oracle;
mod place;
mod promises;
mod ring;
mod rows;
mod smoke;
mod strays;
mod system;
mod table;
mod tasks;
mod verdicts;
mod waits;
mod windows;
mod workload;
