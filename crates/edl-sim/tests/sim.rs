// SPDX-License-Identifier: Apache-2.0
//! Simulated jobs by seed. A failure prints how to replay it: `make sim SEED=…`.
//! `SIM_SEEDS=…` sets the number of seeds, `SIM_FIRST=…` the first one.

#![allow(clippy::print_stdout, reason = "a failure prints how to replay it")]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use edl_core::spec::{JobSpec, Strategy};
use edl_sim::{Outcome, Scenario, Site};

const N_SEEDS: u64 = 2000;

/// What some job must meet, or the simulation proves little: faults, and how machines answer.
const MET: [&str; 55] = [
    "all connections broken",
    "all workers dismissed",
    "checkpoint",
    "checkpoint spoiled",
    "checkpoint_bad",
    "checkpoint_failed",
    "connection broken",
    "crashes",
    "disconnected from each other",
    "disconnected from the master",
    "disk full",
    "evaluations",
    "everything killed",
    "everything killed, store lost",
    "failed steps",
    "furthest worker killed",
    "isolated",
    "late orders",
    "lower terms refused",
    "master died in its effects",
    "master frozen",
    "master killed",
    "named failures",
    "nonfinite",
    "peer_lost",
    "ps_lost",
    "restored",
    "replaced servers refused",
    "resumed",
    "resumed by the user",
    "scaled",
    "scaled by the user",
    "script left its loop",
    "server frozen",
    "server killed",
    "server started twice",
    "servers resized",
    "stop in time requested",
    "stop requested",
    "stopped because of a loss",
    "stopped by the user",
    "stopping",
    "stuck",
    "torn writes",
    "two masters at once",
    "waits for room on the disk",
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

/// Runs a scenario; prints how to replay it if that fails.
fn run(scenario: Scenario) -> Outcome {
    let seed = scenario.seed;
    let mut site = Site::new(scenario);
    let is_replay = number("SIM_SEED").is_some();
    if is_replay {
        site.log_all();
    }
    let result = catch_unwind(AssertUnwindSafe(|| site.run()));
    if result.is_err() || is_replay {
        site.log().for_each(|line| println!("{line}"));
        println!("{:?}", site.scenario);
    }
    result.unwrap_or_else(|panic| {
        println!("at the end: {}", site.state());
        println!("replay: make sim SEED={seed}");
        std::panic::resume_unwind(panic)
    })
}

/// What all jobs of a run met.
#[derive(Default)]
struct Sum {
    counts: BTreeMap<&'static str, u64>,
    times: Vec<(Duration, u64)>,
    n_actions: u64,
}

impl Sum {
    fn add(&mut self, seed: u64, outcome: Outcome) {
        self.times.push((outcome.time, seed));
        self.n_actions += outcome.n_actions;
        for (kind, n) in outcome.counts {
            *self.counts.entry(kind).or_default() += n;
        }
    }
}

/// Runs seeds on all cores, until one fails.
fn run_all(seeds: std::ops::Range<u64>, scenario: fn(u64) -> Scenario) -> Sum {
    let (next, has_failed) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let sum = Mutex::new(Sum::default());
    let n_threads = thread::available_parallelism().map_or(1, usize::from);
    let work = || {
        while !has_failed.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            match catch_unwind(|| run(scenario(seed))) {
                Ok(outcome) => sum.lock().expect("no thread panics").add(seed, outcome),
                Err(_) => has_failed.store(true, Ordering::Relaxed),
            }
        }
    };
    thread::scope(|scope| (0..n_threads).for_each(|_| drop(scope.spawn(work))));
    assert!(!has_failed.into_inner(), "a seed failed; see above");
    sum.into_inner().expect("no thread panics")
}

#[test]
fn every_job_ends_well_and_trains_every_record_once_no_matter_what_fails() {
    if let Some(seed) = number("SIM_SEED") {
        let outcome = run(Scenario::new(seed));
        println!("{outcome:#?}");
        return;
    }
    let first = number("SIM_FIRST").unwrap_or(0);
    let n_seeds = number("SIM_SEEDS").unwrap_or(N_SEEDS);
    let mut sum = run_all(first..first + n_seeds, Scenario::new);
    sum.times.sort_unstable();
    let slowest: Vec<_> = sum.times.iter().rev().take(5).collect();
    let n_actions = sum.n_actions;
    println!("{n_seeds} jobs, {n_actions} actions: {:#?}; slowest {slowest:?}", sum.counts);
    for kind in MET {
        assert!(n_seeds < N_SEEDS || sum.counts.contains_key(kind), "no job met `{kind}`");
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 0..12 {
        assert_eq!(run(Scenario::new(seed)), run(Scenario::new(seed)));
    }
    assert_ne!(run(Scenario::new(0)).trace, run(Scenario::new(1)).trace);
}

#[test]
fn nothing_is_lost_or_repeated_without_faults() {
    for seed in 0..50 {
        let outcome = run(Scenario::new(seed).undisturbed());
        for kind in ["restored", "peer_lost", "work_failed", "checkpoint_failed", "stuck"] {
            assert!(!outcome.counts.contains_key(kind), "seed {seed} met `{kind}`");
        }
    }
}

/// The judge compares what is computed.
#[test]
fn nothing_is_computed_twice_when_a_job_is_stopped_in_time_and_resumed() {
    let stopped = |seed| Scenario { n_stops: 3, ..Scenario::new(seed).undisturbed() };
    let sum = run_all(0..200, stopped);
    let n_stops = sum.counts.get("stopped by the user").copied().unwrap_or(0);
    assert!(n_stops > 200, "{n_stops} stops");
}

/// A checkpoint is ordered for a step that is eight steps ahead. Its time limit begins when that
/// step is trained: the only worker was replaced as too slow, and its state was lost.
#[test]
fn a_checkpoint_of_a_far_step_is_not_late() {
    let mut scenario = Scenario::new(4695).undisturbed();
    scenario.spec = JobSpec {
        job_name: "simulation".into(),
        distribution_strategy: Strategy::Allreduce,
        num_workers: 1,
        num_ps_pods: 0,
        partitions: 4,
        lanes: Some(5),
        minibatch_size: 1,
        num_epochs: 1,
        checkpoint_steps: 3,
        task_timeout_secs: 8,
        ..JobSpec::default()
    };
    (scenario.n_records, scenario.step_ms) = (120, 1000);
    assert!(run(scenario).counts["checkpoint"] > 2);
}

/// A job without faults whose lanes take from 1 ms to 3 s: more than five times the median, and more
/// than the least time after which a worker counts as frozen.
fn noisy(seed: u64) -> Scenario {
    const N_STEPS: u64 = 1000;
    let mut scenario = Scenario::new(seed).undisturbed();
    scenario.spec = JobSpec {
        job_name: "simulation".into(),
        distribution_strategy: Strategy::Allreduce,
        num_ps_pods: 0,
        num_workers: 3,
        lanes: Some(3),
        minibatch_size: 1,
        partitions: 1,
        checkpoint_secs: 0,
        evaluation_epochs: false,
        seed,
        ..JobSpec::default()
    };
    (scenario.n_records, scenario.n_validation_records) = (3 * N_STEPS, 0);
    (scenario.step_ms, scenario.hiccups) = (4, 10);
    scenario
}

/// 100,000 steps in all.
#[test]
fn no_worker_counts_as_frozen_because_it_computes_for_long() {
    let sum = run_all(0..100, noisy);
    let slowest = sum.times.iter().max().expect("some jobs").0;
    assert!(slowest > Duration::from_secs(20), "lanes were slow at times: {slowest:?}");
    for kind in ["stuck", "peer_lost", "worker_silent", "work_failed"] {
        assert_eq!(sum.counts.get(kind), None, "some job met `{kind}`");
    }
}

#[test]
fn a_job_of_one_record_is_trained_by_three_workers() {
    for strategy in [Strategy::ParameterServer, Strategy::Allreduce, Strategy::Hybrid] {
        let mut scenario = Scenario::new(3).undisturbed();
        scenario.spec = JobSpec {
            job_name: "simulation".into(),
            distribution_strategy: strategy,
            num_workers: 3,
            num_ps_pods: u32::from(strategy != Strategy::Allreduce),
            partitions: 4,
            num_epochs: 2,
            lanes: (strategy != Strategy::ParameterServer).then_some(4),
            ..JobSpec::default()
        };
        (scenario.n_records, scenario.n_validation_records) = (1, 1);
        run(scenario);
    }
}
