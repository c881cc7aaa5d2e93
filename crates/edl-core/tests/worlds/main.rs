// SPDX-License-Identifier: Apache-2.0
//! A deterministic simulation of AllReduce jobs: the real machine of the master among simulated
//! workers, connections, disks and a great deal of bad luck.
//!
//! Whatever happens, a job must end well, with the state that one undisturbed worker would have
//! trained. A failure prints how to replay it: `SIM_SEED=… cargo test --release -p edl-core
//! --test worlds`. `SIM_SEEDS=…` raises the number of seeds.

#![allow(
    clippy::print_stdout,
    clippy::wildcard_enum_match_arm,
    reason = "a harness that prints seeds and cares for a few messages of each kind"
)]

mod disk;
mod faults;
mod history;
mod hybrid;
mod interleavings;
mod kernel;
mod master;
mod message;
mod scenario;
mod site;
mod table;
mod worker;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use scenario::Scenario;
use site::{Outcome, Site};

const N_SEEDS: u64 = 3000;

/// What must happen to some job: bad luck, and what the machine makes of it.
const MET: [&str; 36] = [
    "all workers dismissed",
    "checkpoint",
    "checkpoint spoiled",
    "checkpoint_bad",
    "checkpoint_failed",
    "connection broken",
    "crashes",
    "cut off from each other",
    "cut off from the master",
    "disk full",
    "early_stop",
    "evaluations",
    "everything killed",
    "failed steps",
    "furthest worker killed",
    "master died in its effects",
    "master frozen",
    "master killed",
    "named failures",
    "peer_lost",
    "restored",
    "resumed",
    "scaled by somebody",
    "stopping",
    "stuck",
    "torn steps",
    "two masters at once",
    "work_failed",
    "worker dismissed",
    "worker frozen",
    "worker killed",
    "worker stuck",
    "worker_crashed",
    "worker_left",
    "worker_silent",
    "zombies",
];

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

/// Runs a seed; tells how to replay it if that fails.
fn run(scenario: Scenario) -> Outcome {
    let seed = scenario.seed;
    let mut site = Site::new(scenario);
    if number("SIM_SEED").is_some() {
        site.kernel.log_lines = usize::MAX;
    }
    let result = catch_unwind(AssertUnwindSafe(|| site.run()));
    if result.is_err() || number("SIM_SEED").is_some() {
        site.kernel.log.iter().for_each(|line| println!("{line}"));
        println!("{:?}", site.scenario);
    }
    result.unwrap_or_else(|panic| {
        println!("at the end: {}", site.state());
        println!("replay: SIM_SEED={seed} cargo test --release -p edl-core --test worlds");
        std::panic::resume_unwind(panic)
    })
}

#[test]
fn every_job_ends_with_the_state_of_an_undisturbed_worker_whatever_dies() {
    if let Some(seed) = number("SIM_SEED") {
        let outcome = run(Scenario::new(seed));
        println!("{outcome:#?}");
        return;
    }
    let n_seeds = number("SIM_SEEDS").unwrap_or(N_SEEDS);
    let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut times = Vec::new();
    let mut n_actions = 0;
    for seed in 0..n_seeds {
        let outcome = run(Scenario::new(seed));
        times.push((outcome.time, seed));
        n_actions += outcome.n_actions;
        for (kind, n) in outcome.counts {
            *counts.entry(kind).or_default() += n;
        }
    }
    times.sort_unstable();
    let slowest: Vec<_> = times.iter().rev().take(5).collect();
    println!("{n_seeds} jobs, {n_actions} actions: {counts:#?}; the slowest: {slowest:?}");
    // A simulation that never meets what it is made for proves nothing.
    for kind in MET {
        assert!(n_seeds < N_SEEDS || counts.contains_key(kind), "no job met `{kind}`");
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 0..8 {
        assert_eq!(run(Scenario::new(seed)), run(Scenario::new(seed)));
    }
    assert_ne!(run(Scenario::new(0)).trace, run(Scenario::new(1)).trace);
}

#[test]
fn nothing_is_lost_or_repeated_where_nothing_goes_wrong() {
    for seed in 0..50 {
        let outcome = run(Scenario::new(seed).undisturbed());
        for kind in ["restored", "peer_lost", "work_failed", "checkpoint_failed", "stuck"] {
            assert!(!outcome.counts.contains_key(kind), "seed {seed} met `{kind}`");
        }
    }
}
