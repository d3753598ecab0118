//! Models: every order in which two or three threads can meet in the store's own engine, explored by loom.
//!
//! Nothing here is a copy of the engine. The crate is built with `--cfg loom`, where `src/sync.rs` hands out the model
//! checker's locks, atomics and condition variables, and each model opens a store on a simulated disk, whose own lock
//! the checker does not see: it stands for the machine. Every execution begins with an empty disk.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 CARGO_TARGET_DIR=target/loom \
//!     cargo test --release --features testing --test loom
//! ```
//!
//! `LOOM_MAX_PREEMPTIONS` bounds how often a thread is stopped while it could go on. Each model prints how many
//! executions it explored. A thread that nobody wakes is found without a clock: loom fails as soon as no thread can
//! run.
//!
//! **Acknowledged before durable** is found so: the moment a thread is answered it takes the image that a power loss
//! would leave if nothing got through but what was synced. When all is explored, each image that was seen is opened,
//! and must hold what that thread was told.

#![cfg(loom)]

mod clocks;
mod rig;
mod segments;
mod tasks;
mod threads;
