// SPDX-License-Identifier: Apache-2.0
//! Time accounting: the recorded times add up to the elapsed time, and the number of repeated
//! batches matches the applied batches that the servers recorded.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{Home, Running, shipped_as, signal};

const WORKERS: f64 = 3.0;

#[test]
fn every_second_of_a_chaotic_job_is_accounted_for() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let mut job = home.start(
        "accounted",
        &[
            "train",
            "--model_def=count",
            "--model_params=sleep_ms=10",
            "--job_name=accounted",
            &data,
            "--num_epochs=16",
            "--num_workers=3",
            "--minibatch_size=10",
            "--num_minibatches_per_task=4",
            "--checkpoint_steps=0",
            "--checkpoint_secs=0",
            "--heartbeat_timeout_secs=2",
            "--allow_chaos",
        ],
    );
    let at = |step: u64| move |status: &Value| status["step"].as_u64() > Some(step);
    job.wait_until("some training", at(60));
    // There is no checkpoint, so everything is trained again.
    chaos(&home, &mut job, "ps", "--ps=0", "kill");
    job.wait_until("the same training", at(100));
    chaos(&home, &mut job, "worker", "--worker=0", "kill");
    job.wait_until("more training", at(200));
    let stopped = pid_of(&mut job, "worker");
    signal(stopped, Signal::STOP);
    wait_for_end(&mut job, stopped);
    // The next master continues from the last saved history.
    let seen = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64();
    job.wait_until("the saved history", |_| history(&home)["saved_at"].as_f64() > Some(seen));
    let master = pid_of(&mut job, "master");
    signal(master, Signal::KILL);
    job.wait_for_success();

    let status = home.status("accounted");
    let history = history(&home);
    let samples = history["samples"]["points"].as_array().expect("points");
    let spent = |sample: &Value| -> f64 {
        sample["spent"].as_array().expect("kinds").iter().filter_map(Value::as_f64).sum()
    };
    let first = samples.iter().find(|sample| spent(sample) > 0.0).expect("a start");
    // At the end, the workers leave one by one.
    let last = samples.iter().rfind(|sample| sample["workers"] == 3).expect("three workers");
    let secs = |sample: &Value| sample["at_secs"].as_f64().expect("a time");
    let passed = WORKERS * (secs(last) - secs(first));
    let recorded = spent(last) - spent(first);
    assert!((recorded - passed).abs() <= 0.01 * passed, "{recorded} s of {passed} s are recorded");

    let goodput = &status["goodput"];
    let number = |name: &str| goodput[name].as_u64().expect(name);
    let audit: Value =
        serde_json::from_str(&home.stdout(&["audit", "accounted", "--json"])).expect("JSON");
    for partition in audit["partitions"].as_array().expect("partitions") {
        let applied = partition["applied"].as_u64().expect("a number");
        assert_eq!(number("trained") - number("repeated"), applied, "{goodput:#}");
    }
    assert!(number("repeated") >= 60, "{goodput:#}");
    let workers = &goodput["workers"];
    let secs = |kind: &str| workers[kind].as_f64().expect(kind);
    for kind in ["compute", "redo", "heal", "down"] {
        assert!(secs(kind) > 0.0, "{kind} in {workers:#}");
    }
    // Every batch takes the same time, so shares of time are shares of batches.
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let share = number("repeated") as f64 / number("trained") as f64;
    let recorded = secs("redo") / (secs("redo") + secs("compute"));
    assert!((recorded - share).abs() < 0.1, "{recorded} of the time, {share} of the batches");
}

/// The job ends before the second heartbeat, so workers report their time only when they leave.
#[test]
fn a_short_job_shows_what_its_workers_did() {
    let home = Home::new();
    let model = ["--model_def=count", "--model_params=sleep_ms=10", "--num_workers=1"];
    // Delays of reports can cost a little of 0.3 s: the time is that of the master's clock.
    let data = ["--training_data=range:300", "--minibatch_size=10"];
    home.train("short", &[&model[..], &data[..]].concat());
    let workers = &home.status("short")["goodput"]["workers"];
    assert!(workers["compute"].as_f64() >= Some(0.2), "30 batches of 10 ms: {workers:#}");
}

/// Injects a fault with the `chaos` command.
fn chaos(home: &Home, job: &mut Running, role: &str, target: &str, action: &str) {
    let pid = pid_of(job, role);
    home.stdout(&["chaos", "accounted", action, target]);
    wait_for_end(job, pid);
}

fn wait_for_end(job: &mut Running, pid: i32) {
    job.wait_until("its exit", |status| {
        status["instances"].as_array().is_some_and(|all| all.iter().all(|i| i["pid"] != pid))
    });
}

/// The history of the job, as last saved.
fn history(home: &Home) -> Value {
    let text = std::fs::read(home.job_dir("accounted").join("history.json")).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// The PID of a process with this role.
fn pid_of(job: &mut Running, role: &str) -> i32 {
    let found = job.instances().into_iter().find(|instance| instance.role == role);
    found.expect(role).pid
}
