// SPDX-License-Identifier: Apache-2.0
//! A deterministic simulation of whole jobs: the real machine of the master and real partitions,
//! among simulated workers, servers, connections, disks and a great deal of bad luck.
//!
//! Whatever happens, a job must end well, and its model must count every record once per epoch.
//! A failure prints how to replay it: `SIM_SEED=… cargo test --release -p edl-master --test
//! simulation`. `SIM_SEEDS=…` raises the number of seeds.

#![allow(
    clippy::print_stdout,
    clippy::wildcard_enum_match_arm,
    reason = "a harness that prints seeds and cares for a few messages of each kind"
)]

mod counter;
mod disk;
mod faults;
mod interleavings;
mod kernel;
mod master;
mod message;
mod process;
mod scenario;
mod server;
mod site;
mod worker;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use scenario::Scenario;
use world::{Outcome, World};

const N_SEEDS: u64 = 200;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

/// Runs a seed; tells how to replay it if that fails.
fn run(seed: u64) -> Outcome {
    let mut world = World::new(Scenario::new(seed));
    if number("SIM_SEED").is_some() {
        world.kernel.log_lines = usize::MAX;
    }
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    if result.is_err() || number("SIM_SEED").is_some() {
        world.kernel.log.iter().for_each(|line| println!("{line}"));
        println!("{:?}", world.scenario);
    }
    result.unwrap_or_else(|panic| {
        println!("at the end: {}", world.state());
        println!("replay: SIM_SEED={seed} cargo test --release -p edl-master --test simulation");
        std::panic::resume_unwind(panic)
    })
}

#[test]
fn every_job_ends_well_and_counts_every_record_once_whatever_dies() {
    if let Some(seed) = number("SIM_SEED") {
        let outcome = run(seed);
        println!("{outcome:#?}");
        return;
    }
    let n_seeds = number("SIM_SEEDS").unwrap_or(N_SEEDS);
    let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut times = Vec::new();
    for seed in 0..n_seeds {
        let outcome = run(seed);
        times.push((outcome.time, seed));
        for (kind, n) in outcome.counts {
            *counts.entry(kind).or_default() += n;
        }
    }
    times.sort_unstable();
    let slowest: Vec<_> = times.iter().rev().take(5).collect();
    println!("{n_seeds} jobs: {counts:?}; the slowest: {slowest:?}");
    // A simulation that never meets what it is made for proves nothing.
    for kind in [
        "checkpoint",
        "checkpoint_bad",
        "checkpoint_failed",
        "fault",
        "ps_lost",
        "restored",
        "resumed",
        "scaled",
        "work_failed",
        "worker_crashed",
        "worker_killed",
        "worker_left",
        "worker_silent",
    ] {
        assert!(n_seeds < N_SEEDS || counts.contains_key(kind), "no job met `{kind}`");
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 0..8 {
        assert_eq!(run(seed), run(seed));
    }
    assert_ne!(run(0).trace, run(1).trace);
}
