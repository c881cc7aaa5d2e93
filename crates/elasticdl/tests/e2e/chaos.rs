// SPDX-License-Identifier: Apache-2.0
//! Kills and freezes processes at random times: every record must still be trained exactly once.
//!
//! A seed determines the faults, their targets and the pauses between them. `CHAOS_SEEDS=20` runs
//! more seeds, `CHAOS_SEED=7` runs one.

use std::time::{Duration, Instant};

use edl_core::rng::Rng;
use rustix::process::Signal;

use crate::harness::{Home, Running, assert_exactly_once, shipped, signal, try_signal};

const EPOCHS: u32 = 3;
const FAULTS: u64 = 8;
/// No faults are injected after this time, so the test ends on a slow machine, too.
const FAULT_TIME: Duration = Duration::from_secs(40);

pub(crate) fn seeds(default: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("CHAOS_SEED") {
        return vec![seed];
    }
    (0..number("CHAOS_SEEDS").unwrap_or(default)).collect()
}

#[test]
fn asynchronous_training_is_exactly_once_when_processes_are_killed() {
    for seed in seeds(3) {
        survive(&format!("async-{seed}"), seed, 1, &[]);
    }
}

#[test]
fn synchronous_training_is_exactly_once_when_processes_are_killed() {
    for seed in seeds(2) {
        survive(&format!("sync-{seed}"), 1000 + seed, 3, &["--grads_to_wait=3"]);
    }
}

/// With one bit per batch, the applied sets of the partitions alone would take 16 GB.
#[test]
fn a_master_restart_with_a_billion_batches_loses_no_server() {
    let home = Home::new();
    let mut job = home.start(
        "large",
        &[
            "train",
            "--model_def=count",
            "--job_name=large",
            "--training_data=range:1000000000",
            "--minibatch_size=1",
            "--num_ps_pods=4",
            "--partitions=128",
            "--heartbeat_timeout_secs=2",
        ],
    );
    let before = job.wait_until("some training", |status| status["step"].as_u64() > Some(100));
    let master = job.instances().into_iter().find(|i| i.role == "master").expect("a master");
    signal(master.pid, Signal::KILL);
    let after = job.wait_until("training under the next master", |status| {
        status["term"].as_u64() > before["term"].as_u64()
            && status["step"].as_u64() > before["step"].as_u64()
    });
    assert_eq!(after["generation"], before["generation"], "no server had to reload");
    let audit = home.stdout(&["audit", "large"]);
    assert!(audit.contains("128 partitions checked: every record"), "{audit}");
    job.kill_all();
}

fn survive(name: &str, seed: u64, round: usize, more: &[&str]) {
    let home = Home::new();
    let (job_name, data) =
        (format!("--job_name={name}"), format!("--training_data={}", shipped("test")));
    let mut args = vec![
        "train",
        "--model_def=count",
        "--model_params=sleep_ms=25",
        &job_name,
        &data,
        "--num_epochs=3",
        "--num_workers=3",
        "--num_ps_pods=2",
        "--minibatch_size=10",
        "--num_minibatches_per_task=4",
        "--checkpoint_steps=40",
        "--checkpoint_secs=2",
        "--heartbeat_timeout_secs=1.5",
    ];
    args.extend(more);
    let mut job = home.start(name, &args);
    let mut rng = Rng::new(seed);
    job.wait_until("the first process", |status| {
        status["instances"].as_array().is_some_and(|i| i.len() > 2)
    });
    let start = Instant::now();
    let mut done = Vec::new();
    while (done.len() as u64) < FAULTS && start.elapsed() < FAULT_TIME && job.is_running() {
        std::thread::sleep(Duration::from_millis(50 + rng.below(700)));
        done.extend(inject_fault(&mut job, &mut rng));
    }
    let status = job.wait();
    assert!(status.success(), "seed {seed}: {status} after {done:#?}\n{}", job.log());
    assert!(done.len() as u64 >= FAULTS / 2, "the job ended after {done:#?}");
    assert_exactly_once(&home, name, EPOCHS, round);
}

/// Injects a random fault into a random process; returns a description of the fault. None if the
/// process exited before it.
pub(crate) fn inject_fault(job: &mut Running, rng: &mut Rng) -> Option<String> {
    let instances = job.instances();
    if instances.is_empty() {
        return None;
    }
    let target = &instances[usize::try_from(rng.below(instances.len() as u64)).expect("small")];
    let action = rng.below(4);
    let pause = Duration::from_millis(200 + rng.below(2500));
    let (sent, what) = match (target.role.as_str(), action) {
        (_, 0) => (Signal::STOP, "froze and resumed"),
        // Not the master: a master that is frozen forever is not replaced.
        ("ps" | "worker", 1) => (Signal::STOP, "froze for good"),
        _ => (Signal::KILL, "killed"),
    };
    let is_hit = try_signal(target.pid, sent);
    if is_hit && action == 0 {
        std::thread::sleep(pause);
        // By now, it may have been replaced.
        try_signal(target.pid, Signal::CONT);
    }
    is_hit.then(|| format!("{what} {target:?}"))
}
