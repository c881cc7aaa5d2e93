// SPDX-License-Identifier: Apache-2.0
//! Master and worker started in two shells, as in ElasticDL's developer guide.

use serde_json::Value;

use crate::harness::{
    Home, N_RECORDS, assert_exactly_once, free_port, shipped, shipped_as, stderr,
};

#[test]
fn a_manually_started_master_and_worker_succeed() {
    let home = Home::new();
    let training = format!("--training_data_dir={}", shipped("test"));
    let evaluation = format!("--evaluation_data_dir={}", shipped("test"));
    let port = free_port();
    let port_flag = format!("--port={port}");
    let mut master = home.start(
        "test",
        &[
            "master",
            "--model_def=mnist_mlp",
            "--job_name=test",
            &training,
            &evaluation,
            "--records_per_task=100",
            "--num_epochs=2",
            "--grads_to_wait=2",
            "--minibatch_size=10",
            "--checkpoint_steps=2",
            "--log_level=INFO",
            &port_flag,
        ],
    );
    // Started at the same time: the worker waits for its master, and finds the key by the port.
    let address = format!("--master_addr=localhost:{port}");
    let worker = home.run(&[
        "worker",
        "--worker_id=1",
        "--model_def=mnist_mlp",
        "--minibatch_size=10",
        &address,
        "--log_level=INFO",
    ]);
    let printed = stderr(&worker);
    assert!(worker.status.success(), "{printed}\n{}", master.log());
    assert!(printed.contains("Loss = ") && printed.contains("steps = 1"), "{printed}");
    master.wait_for_success();
    // Printed to the shell and written to the job folder.
    let output = std::fs::read_to_string(home.path().join("test.stderr")).expect("its output");
    for log in [output, home.stdout(&["logs", "test", "--master"])] {
        for line in [
            "Evaluation service started",
            "Evaluation metrics[v=200]: {",
            "Evaluation service stopped",
        ] {
            assert!(log.contains(line), "`{line}` in {log}");
        }
    }
    let status = home.status("test");
    assert_eq!((&status["state"], &status["step"]), (&"succeeded".into(), &200.into()));
    assert_eq!(status["evaluations"].as_array().map(Vec::len), Some(2));
    assert!(home.job_dir("test").join("output/model.safetensors").is_file());
    let audit: Value =
        serde_json::from_str(&home.stdout(&["audit", "test", "--json"])).expect("JSON");
    for epoch in audit["epochs"].as_array().expect("epochs") {
        let found = (&epoch["records"], &epoch["missing"], &epoch["duplicated"]);
        assert_eq!(found, (&N_RECORDS.into(), &0.into(), &0.into()), "{audit:#}");
    }
}

#[test]
fn a_worker_from_another_home_joins_with_the_key_alone() {
    let (home, elsewhere) = (Home::new(), Home::new());
    let data = shipped_as("training_data", "test");
    let port = free_port();
    let port_flag = format!("--port={port}");
    let mut master = home.start(
        "shared",
        &[
            "master",
            "--job_name=shared",
            "--model_def=count",
            &data,
            "--minibatch_size=10",
            &port_flag,
        ],
    );
    master.wait_until("a server", |status| crate::harness::n_running(status, "ps") == 1);
    let key = format!("--job_key_file={}", home.job_dir("shared").join("job.key").display());
    let address = format!("--master_addr=127.0.0.1:{port}");
    let worker = elsewhere.run(&["worker", "--worker_id=7", &address, &key]);
    assert!(worker.status.success(), "{}\n{}", stderr(&worker), master.log());
    master.wait_for_success();
    assert_exactly_once(&home, "shared", 1, 1);
    assert_eq!(elsewhere.jobs(), [""; 0]);
}

#[test]
fn a_worker_whose_flags_differ_from_the_job_uses_the_values_of_the_job() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let port = free_port();
    let port_flag = format!("--port={port}");
    let mut master = home.start(
        "mine",
        &[
            "master",
            "--job_name=mine",
            "--model_def=count",
            &data,
            "--minibatch_size=50",
            &port_flag,
        ],
    );
    master.wait_until("a server", |status| crate::harness::n_running(status, "ps") == 1);
    let address = format!("--master_addr=localhost:{port}");
    let flags = ["--model_def=mnist_mlp", "--minibatch_size=64", "--codec_type=tf_example"];
    let worker = home.run(&[&["worker", &address], &flags[..]].concat());
    assert!(worker.status.success(), "{}", stderr(&worker));
    let note = "ignoring --minibatch_size, --model_def: job `mine` has other values, which take \
                precedence";
    assert!(stderr(&worker).contains(note), "{}", stderr(&worker));
    master.wait_for_success();
    assert_exactly_once(&home, "mine", 1, 1);
}
