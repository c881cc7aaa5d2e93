// SPDX-License-Identifier: Apache-2.0
//! Nobody without the job's key gets in, and nobody is disturbed by who tries.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::Value;

use crate::harness::{Home, assert_exactly_once, shipped_as, stderr};

#[test]
fn processes_with_the_key_of_another_job_are_refused_and_the_job_continues() {
    let (home, elsewhere) = (Home::new(), Home::new());
    let data = shipped_as("training_data", "test");
    elsewhere.train("other", &["--model_def=count", &data, "--max_step=1", "--num_workers=1"]);
    let mut job = home.start(
        "target",
        &[
            "train",
            "--job_name=target",
            "--model_def=count",
            "--model_params=sleep_ms=15",
            &data,
            "--minibatch_size=10",
        ],
    );
    let status = job.wait_until("some training", |status| status["step"].as_u64() > Some(2));
    let address = format!("--master_addr={}", status["master_address"].as_str().expect("text"));
    let key = format!("--job_key_file={}", elsewhere.job_dir("other").join("job.key").display());
    for role in [["worker", "--worker_id=9"], ["ps", "--ps_id=9"]] {
        let refused = elsewhere.run(&[role.as_slice(), &[&address, &key]].concat());
        let said = stderr(&refused);
        assert_eq!(refused.status.code(), Some(1), "{role:?}: {said}");
        assert!(said.contains("another job's key"), "{role:?}: {said}");
        assert!(!said.contains("panicked"), "{role:?}: {said}");
    }
    assert!(job.is_running(), "the job ended while it was attacked:\n{}", job.log());
    job.wait_for_success();
    assert_exactly_once(&home, "target", 1, 1);
    let status = home.status("target");
    let is_intruder = |instance: &Value| instance["id"] == 9;
    assert!(!status["instances"].as_array().expect("instances").iter().any(is_intruder));
    assert_eq!((&status["generation"], &status["term"]), (&1.into(), &1.into()), "undisturbed");
    let text = status["events"].to_string();
    assert!(!text.contains("worker-9") && !text.contains("ps-9"), "{text}");
}

#[test]
fn the_folder_of_a_job_and_its_key_are_the_owners_alone() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    home.train("private", &["--model_def=count", &data, "--max_step=1", "--num_workers=1"]);
    let mode = |path: &std::path::Path| {
        std::fs::metadata(path).expect("it is there").permissions().mode() & 0o777
    };
    let folder = home.job_dir("private");
    assert_eq!(mode(&folder), 0o700);
    assert_eq!(mode(&folder.join("job.key")), 0o600);
    assert_eq!(mode(&folder.join("logs")), 0o700);
}
