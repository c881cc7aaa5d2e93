// SPDX-License-Identifier: Apache-2.0
//! Kills and stops everything at random moments: every record must still be trained exactly once.
//!
//! A seed fixes what is done to whom and after which pause. `CHAOS_SEEDS=20` tries more of them,
//! `CHAOS_SEED=7` one.

use std::time::{Duration, Instant};

use edl_core::rng::Rng;
use rustix::process::Signal;

use crate::harness::{Home, Running, assert_exactly_once, shipped, signal};

const EPOCHS: u32 = 3;
const ATTACKS: u64 = 8;
/// Attacks end after this long, so a slow machine is not attacked for ever.
const ATTACK_TIME: Duration = Duration::from_secs(40);

pub(crate) fn seeds(default: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("CHAOS_SEED") {
        return vec![seed];
    }
    (0..number("CHAOS_SEEDS").unwrap_or(default)).collect()
}

#[test]
fn every_record_is_trained_once_whatever_is_killed_asynchronously() {
    for seed in seeds(3) {
        survive(&format!("async-{seed}"), seed, 1, &[]);
    }
}

#[test]
fn every_record_is_trained_once_whatever_is_killed_in_rounds() {
    for seed in seeds(2) {
        survive(&format!("sync-{seed}"), 1000 + seed, 3, &["--grads_to_wait=3"]);
    }
}

/// With one bit per batch, the sets of its partitions alone would take 16 GB.
#[test]
fn a_master_that_restarts_over_a_billion_batches_loses_no_server() {
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
    assert_eq!(after["generation"], before["generation"], "no server had to load again");
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
    while (done.len() as u64) < ATTACKS && start.elapsed() < ATTACK_TIME && job.is_running() {
        std::thread::sleep(Duration::from_millis(50 + rng.below(700)));
        done.extend(attack(&mut job, &mut rng));
    }
    let status = job.wait();
    assert!(status.success(), "seed {seed}: {status} after {done:#?}\n{}", job.log());
    assert!(done.len() as u64 >= ATTACKS / 2, "the job was over after {done:#?}");
    assert_exactly_once(&home, name, EPOCHS, round);
}

/// Does something bad to somebody; what it did.
pub(crate) fn attack(job: &mut Running, rng: &mut Rng) -> Option<String> {
    let instances = job.instances();
    if instances.is_empty() {
        return None;
    }
    let victim = &instances[usize::try_from(rng.below(instances.len() as u64)).expect("small")];
    let action = rng.below(4);
    let pause = Duration::from_millis(200 + rng.below(2500));
    match (victim.role.as_str(), action) {
        (_, 0) => {
            signal(victim.pid, Signal::STOP);
            std::thread::sleep(pause);
            signal(victim.pid, Signal::CONT);
            Some(format!("stopped and woke {victim:?}"))
        }
        // Not the master: nobody replaces one that is stopped for good.
        ("ps" | "worker", 1) => {
            signal(victim.pid, Signal::STOP);
            Some(format!("stopped for good {victim:?}"))
        }
        _ => {
            signal(victim.pid, Signal::KILL);
            Some(format!("killed {victim:?}"))
        }
    }
}
