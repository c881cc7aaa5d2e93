// SPDX-License-Identifier: Apache-2.0
//! Records that cannot be trained: other workers try them first, then the job fails and names them.

use serde_json::Value;

use crate::harness::{Home, shipped, shipped_as};
use crate::oracle::RecordPlan;

/// Not the first record of its batch, and not in the first batch of a task.
const POISON: u64 = 777;

/// Runs a job that must fail; returns its status.
fn fail(home: &Home, name: &str, args: &[&str]) -> Value {
    let name_flag = format!("--job_name={name}");
    let output = home.run(&[&["train", &name_flag], args].concat());
    let summary = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{summary}");
    let status = home.status(name);
    assert_eq!(status["state"], "failed");
    let reason = status["reason"].as_str().expect("a reason");
    assert!(summary.contains(reason), "`{reason}` is missing in {summary}");
    assert!(summary.contains(&format!("elasticdl explain {name}")), "{summary}");
    status
}

fn reason(status: &Value) -> &str {
    status["reason"].as_str().expect("a reason")
}

/// The worker of each failure.
fn culprits(status: &Value) -> Vec<String> {
    let events = status["events"].as_array().expect("events").iter();
    let texts = events.filter(|event| event["kind"] == "work_failed").map(|event| &event["text"]);
    let worker = |text: &Value| {
        let (_, rest) = text.as_str()?.split_once(" failed on ")?;
        Some(rest.split(':').next()?.to_owned())
    };
    texts.filter_map(worker).collect()
}

#[test]
fn a_record_that_the_model_rejects_fails_the_job_and_is_named() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let params = format!("--model_params=fail_record={POISON}");
    let args = ["--model_def=count", &params, &data, "--minibatch_size=10"];
    let status = fail(&home, "refused", &args);
    let found = reason(&status);
    assert!(found.contains(&format!("record {POISON}: ")), "{found}");
    assert!(found.contains("data-00000.recordio") && found.contains("failed 3 times"), "{found}");
    let mut workers = culprits(&status);
    assert_eq!(workers.len(), 3, "{status:#}");
    workers.sort();
    workers.dedup();
    assert!(workers.len() > 1, "another worker tried it, too: {status:#}");
}

#[test]
fn a_record_that_crashes_workers_fails_the_job_and_its_batch_is_named() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let params = format!("--model_params=crash_record={POISON}");
    // Eight records: a reason lists at most eight.
    let args = ["--model_def=count", &params, &data, "--minibatch_size=8"];
    let status = fail(&home, "crashed", &args);
    let batches = RecordPlan::of(&home, "crashed", 1).batches(0);
    let index = batches.iter().position(|batch| batch.contains(&POISON)).expect("its batch");
    let found = reason(&status);
    assert!(found.starts_with(&format!("batch 0/{index} (records ")), "not 0/{index}: {found}");
    assert!(found.contains(&POISON.to_string()) && found.contains("signal 6"), "{found}");
}

/// Trains with `args` until the job fails because of a record that crashes workers. The job must
/// name its batch, and must not blame any other batch before that.
fn expect_crash_is_named(name: &str, n_lanes: usize, args: &[&str]) {
    let home = Home::new();
    let params = format!("--model_params=crash_record={POISON}");
    let common = ["--model_def=count", &params, "--training_data=range:2000", "--minibatch_size=8"];
    let status = fail(&home, name, &[&common, args].concat());
    let found = reason(&status);
    let batches = RecordPlan::of(&home, name, n_lanes).batches(0);
    let index = batches.iter().position(|batch| batch.contains(&POISON)).expect("its batch");
    let named = format!("batch 0/{index} (records ");
    assert!(found.starts_with(&named) && found.contains("signal 6"), "not 0/{index}: {found}");
    for event in status["events"].as_array().expect("events") {
        let text = event["text"].as_str().expect("text");
        let is_right = text.starts_with(&named) || text.starts_with("one of ");
        assert!(event["kind"] != "work_failed" || is_right, "healthy work is blamed: {text}");
    }
}

#[test]
fn a_record_that_crashes_workers_is_named_in_synchronous_mode() {
    expect_crash_is_named("rounds", 1, &["--grads_to_wait=4", "--num_workers=3"]);
}

#[test]
fn a_record_that_crashes_workers_is_named_when_they_train_in_steps() {
    let hybrid = "--distribution_strategy=HybridStrategy";
    expect_crash_is_named("alone", 1, &[hybrid, "--num_workers=1", "--lanes=1"]);
    expect_crash_is_named("together", 3, &[hybrid, "--num_workers=3", "--lanes=3"]);
}

#[test]
fn a_corrupt_chunk_fails_the_job_and_file_and_chunk_are_named() {
    let home = Home::new();
    let copy = home.path().join("data");
    std::fs::create_dir(&copy).expect("a folder");
    for name in ["data-00000.recordio", "data-00001.recordio"] {
        let mut bytes = std::fs::read(format!("{}/{name}", shipped("test"))).expect("shipped data");
        if name == "data-00001.recordio" {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
        }
        std::fs::write(copy.join(name), bytes).expect("a copy");
    }
    let data = format!("--training_data={}", copy.display());
    let status = fail(&home, "corrupt", &["--model_def=mnist_mlp", &data]);
    let found = reason(&status);
    for word in ["data-00001.recordio", "chunk 0", "checksum", "failed 3 times"] {
        assert!(found.contains(word), "`{word}` in {found}");
    }
}
