// SPDX-License-Identifier: Apache-2.0
//! Nobody without the job's key gets in, and nobody is disturbed by who tries.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::Value;

use crate::allreduce::exported;
use crate::harness::{Home, assert_exactly_once, ended, shipped_as, stderr};

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

/// Trains over TCP alone; the weights, and the logs of all processes.
fn train_by_tcp(home: &Home, name: &str, flags: &[&str]) -> (String, String) {
    let (name_flag, data) = (format!("--job_name={name}"), shipped_as("training_data", "test"));
    let common = [
        "train",
        "--model_def=mnist_mlp",
        "--minibatch_size=20",
        "--seed=3",
        "--log_level=DEBUG",
        &name_flag,
        &data,
    ];
    let mut command = home.command(&[&common, flags].concat());
    command.env("ELASTICDL_TRANSPORT", "tcp");
    let output = ended(command);
    assert!(output.status.success(), "{name}: {}", stderr(&output));
    let logs = std::fs::read_dir(home.job_dir(name).join("logs")).expect("logs");
    let logs = logs.map(|entry| std::fs::read(entry.expect("an entry").path()).expect("a log"));
    let logs = String::from_utf8_lossy(&logs.collect::<Vec<_>>().concat()).into_owned();
    (exported(home, name), logs)
}

#[test]
fn encryption_does_not_change_a_bit_of_the_result() {
    let home = Home::new();
    let allreduce: &[&str] = &["--num_ps_pods=0", "--num_workers=3", "--lanes=3"];
    let servers: &[&str] = &["--num_ps_pods=2", "--num_workers=1", "--grads_to_wait=1"];
    for (name, flags, plain_mark, encrypted_mark) in [
        ("members", allreduce, "transport=\"tcp\"", "transport=\"encrypted tcp\""),
        ("servers", servers, "is_encrypted=false", "is_encrypted=true"),
    ] {
        let train = |is_encrypted: &str| {
            let (name, flag) =
                (format!("{name}-{is_encrypted}"), format!("--encrypt_data={is_encrypted}"));
            let (weights, logs) = train_by_tcp(&home, &name, &[flags, &[&flag]].concat());
            (weights, logs.contains(plain_mark), logs.contains(encrypted_mark))
        };
        let (plain, encrypted) = (train("false"), train("true"));
        assert_eq!((plain.1, plain.2), (true, false), "{name}: {plain_mark}");
        assert_eq!((encrypted.1, encrypted.2), (false, true), "{name}: {encrypted_mark}");
        assert_eq!(plain.0, encrypted.0, "{name}");
    }
}
