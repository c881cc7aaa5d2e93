// SPDX-License-Identifier: Apache-2.0
//! Chaos actions that end by themselves: processes are disconnected and slowed down.

use serde_json::Value;

use crate::allreduce::weights;
use crate::harness::{Home, Running, assert_exactly_once, shipped_as, stderr};

/// Longer than any of these jobs: a process that is disconnected for this long is declared lost.
const FOR_GOOD: &str = "--secs=600";

fn notes(home: &Home, job: &str, kind: &str) -> Vec<String> {
    let events = std::fs::read_to_string(home.job_dir(job).join("events.jsonl")).expect("events");
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let matching = events.filter(|event| event["kind"] == kind);
    matching.map(|event| event["text"].as_str().expect("a text").to_owned()).collect()
}

fn allreduce(home: &Home, name: &str, workers: u32) -> Running {
    let (name_flag, workers) = (format!("--job_name={name}"), format!("--num_workers={workers}"));
    home.start(
        name,
        &[
            "train",
            "--distribution_strategy=AllreduceStrategy",
            "--model_def=mnist_cnn",
            "--lanes=2",
            "--minibatch_size=16",
            "--num_epochs=2",
            "--seed=5",
            "--heartbeat_timeout_secs=1.5",
            "--allow_chaos",
            &name_flag,
            &workers,
            &shipped_as("training_data", "test"),
        ],
    )
}

#[test]
fn disconnected_and_slowed_workers_do_not_change_the_result() {
    let home = Home::new();
    allreduce(&home, "undisturbed", 1).wait_for_success();
    let mut job = allreduce(&home, "disturbed", 2);
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    let nonsense = home.run(&["chaos", "disturbed", "kill", "--secs=3"]);
    assert_eq!(nonsense.status.code(), Some(2));
    assert!(stderr(&nonsense).contains("kill takes no duration"), "{}", stderr(&nonsense));

    home.stdout(&["chaos", "disturbed", "slow", "--worker=0", "--factor=5", "--secs=1"]);
    let printed = home.stdout(&["chaos", "disturbed", "partition", "--worker=1", FOR_GOOD]);
    assert_eq!(printed, "worker-1: partition\n");
    job.wait_for_success();
    assert_eq!(weights(&home, "disturbed"), weights(&home, "undisturbed"));
    assert_eq!(
        notes(&home, "disturbed", "chaos"),
        [
            "worker-0 runs 5 times slower for 1 s (chaos)",
            "worker-1 is disconnected from the others for 600 s (chaos)",
        ]
    );
    // It ran until the end, but the master did not hear from it.
    let silent = notes(&home, "disturbed", "worker_silent");
    assert!(silent.iter().any(|text| text.starts_with("worker-1 ")), "{silent:?}");
}

#[test]
fn every_record_is_trained_once_when_workers_are_disconnected_from_servers() {
    let home = Home::new();
    let mut job = home.start(
        "served",
        &[
            "train",
            "--job_name=served",
            "--model_def=count",
            "--model_params=sleep_ms=10",
            "--num_epochs=3",
            "--num_workers=2",
            "--num_ps_pods=2",
            "--minibatch_size=10",
            "--num_minibatches_per_task=4",
            "--checkpoint_steps=40",
            "--heartbeat_timeout_secs=1.5",
            "--allow_chaos",
            &shipped_as("training_data", "test"),
        ],
    );
    job.wait_until("some training", |status| status["step"].as_u64() > Some(20));
    // Too short for the process to be declared lost: it continues where it was.
    home.stdout(&["chaos", "served", "partition", "--worker=0", "--secs=0.4"]);
    home.stdout(&["chaos", "served", "slow", "--ps=1", "--secs=1"]);
    home.stdout(&["chaos", "served", "partition", "--ps=0", FOR_GOOD, "--at_step=100"]);
    let lost = |status: &Value| status["generation"].as_u64() > Some(1);
    job.wait_until("the loss of the server", lost);
    home.stdout(&["chaos", "served", "partition", "--worker=1", FOR_GOOD]);
    job.wait_for_success();
    assert_exactly_once(&home, "served", 3, 1);
    assert_eq!(notes(&home, "served", "chaos").len(), 4);
    assert!(!notes(&home, "served", "ps_lost").is_empty());
}

#[test]
fn a_chaos_action_right_after_a_detached_start_waits_for_its_target() {
    let home = Home::new();
    home.stdout(&[
        "train",
        "--detach",
        "--job_name=new",
        "--model_def=count",
        "--model_params=sleep_ms=10",
        "--minibatch_size=10",
        "--num_epochs=2",
        "--allow_chaos",
        &shipped_as("training_data", "test"),
    ]);
    let printed = home.stdout(&["chaos", "new", "kill"]);
    assert!(printed.starts_with("worker-") && printed.ends_with(": kill\n"), "{printed}");
    home.wait_until("new", "its end", |status| status["state"] == "succeeded");
    assert_eq!(notes(&home, "new", "chaos").len(), 1);
    assert_exactly_once(&home, "new", 2, 1);
}
