// SPDX-License-Identifier: Apache-2.0
//! A stop finishes what is computed: a job that is stopped and resumed computes every record once.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{
    Home, N_RECORDS, Running, assert_exactly_once, instances, is_alive, shipped_as, signal, stderr,
};

const COUNT: [&str; 3] =
    ["--model_def=count", "--model_params=sleep_ms=10", "--num_minibatches_per_task=8"];

/// A job that takes some seconds, and writes no checkpoint by itself.
fn start(home: &Home, name: &str, more: &[&str]) -> Running {
    let (name_flag, data) = (format!("--job_name={name}"), shipped_as("training_data", "test"));
    let common =
        ["--minibatch_size=10", "--num_epochs=2", "--num_workers=2", "--checkpoint_secs=0"];
    home.start(name, &[&["train", &name_flag, &data], &common[..], more].concat())
}

/// Another number in each run.
fn below(most: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    u64::from(now.subsec_nanos()) / 1000 % most
}

fn wait_for_step(job: &mut Running, step: u64) {
    job.wait_until("some training", |status| status["step"].as_u64() > Some(step));
}

fn n_computed(status: &Value) -> &Value {
    &status["goodput"]["records"]
}

/// Stops a job twice, at random moments, and resumes it.
fn check(name: &str, more: &[&str]) -> Home {
    let home = Home::new();
    let mut job = start(&home, name, more);
    wait_for_step(&mut job, below(25));
    let output = home.run(&["stop", name, "--within=15s"]);
    let said = stderr(&output);
    assert!(output.status.success() && !said.contains("not finished"), "{said}");
    job.wait();
    let first = home.status(name);
    assert_eq!(n_computed(&first), &first["records_done"], "{first:#}");
    let mut job = home.start(name, &["train", "--resume", name]);
    let step = first["step"].as_u64().max(Some(35 + below(15)));
    // Until its own master has written it, the status is that of the stopped one.
    job.wait_until("more training", |status| {
        status["term"].as_u64() > first["term"].as_u64() && status["step"].as_u64() > step
    });
    signal(job.pid(), Signal::TERM);
    assert_eq!(job.wait().code(), Some(130), "{}", job.log());
    let second = home.status(name);
    assert_eq!(n_computed(&second), &second["records_done"], "{second:#}");
    assert!(second["records_done"].as_u64() > first["records_done"].as_u64(), "{second:#}");
    home.start(name, &["train", "--resume", name]).wait_for_success();
    let end = home.status(name);
    assert_eq!(n_computed(&end), 2 * N_RECORDS, "{end:#}");
    home
}

#[test]
fn nothing_is_computed_again_after_a_stop_with_parameter_servers() {
    let home = check("async", &[&COUNT[..], &["--num_ps_pods=2"]].concat());
    assert_exactly_once(&home, "async", 2, 1);
}

#[test]
fn nothing_is_computed_again_after_a_stop_in_a_synchronous_round() {
    let home = check("sync", &[&COUNT[..], &["--num_ps_pods=2", "--grads_to_wait=4"]].concat());
    assert_exactly_once(&home, "sync", 2, 4);
}

#[test]
fn nothing_is_computed_again_after_a_stop_under_allreduce() {
    let strategy = ["--distribution_strategy=AllreduceStrategy", "--lanes=4"];
    check("allreduce", &[&["--model_def=mnist_cnn"][..], &strategy].concat());
}

#[test]
fn nothing_is_computed_again_after_a_stop_of_a_hybrid_job() {
    let strategy = ["--distribution_strategy=HybridStrategy", "--lanes=4", "--num_ps_pods=2"];
    check("hybrid", &[&COUNT[..], &strategy].concat());
}

/// As a machine that shuts down does it.
#[test]
fn nothing_is_computed_again_if_all_processes_are_asked_to_exit() {
    for (name, mode) in [("all", "--use_async=true"), ("all-sync", "--grads_to_wait=4")] {
        let home = Home::new();
        let mut job = start(&home, name, &[&COUNT[..], &["--num_ps_pods=2", mode]].concat());
        wait_for_step(&mut job, 20 + below(50));
        let all = job.instances();
        let mut pids: Vec<i32> = all.iter().map(|it| it.pid).chain([job.pid()]).collect();
        let n_first = usize::try_from(below(pids.len() as u64)).expect("few processes");
        pids.rotate_left(n_first);
        pids.into_iter().for_each(|pid| signal(pid, Signal::TERM));
        assert_eq!(job.wait().code(), Some(130), "{}", job.log());
        let first = home.status(name);
        assert_eq!(n_computed(&first), &first["records_done"], "{first:#}");
        home.start(name, &["train", "--resume", name]).wait_for_success();
        let end = home.status(name);
        assert_eq!(n_computed(&end), 2 * N_RECORDS, "{end:#}");
        assert_exactly_once(&home, name, 2, if name == "all" { 1 } else { 4 });
    }
}

#[test]
fn a_worker_that_is_asked_to_exit_wastes_nothing() {
    for (name, mode) in [("leave", "--use_async=true"), ("leave-sync", "--grads_to_wait=4")] {
        let home = Home::new();
        let mut job = start(&home, name, &[&COUNT[..], &["--num_ps_pods=1", mode]].concat());
        for step in [5, 20] {
            wait_for_step(&mut job, step + below(10));
            let all = job.instances();
            let worker = all.iter().find(|instance| instance.role == "worker").expect("a worker");
            signal(worker.pid, Signal::TERM);
            job.wait_until("it is gone", |status| {
                !instances(status).iter().any(|instance| instance.pid == worker.pid)
            });
        }
        job.wait_for_success();
        let status = home.status(name);
        assert_eq!(n_computed(&status), 2 * N_RECORDS, "{name}: {status:#}");
    }
}

#[test]
fn a_batch_that_takes_longer_than_a_stop_is_trained_again_and_reported() {
    let home = Home::new();
    let slow = ["--model_def=count", "--model_params=sleep_ms=3000", "--num_ps_pods=1"];
    let mut job = start(&home, "slow", &slow);
    wait_for_step(&mut job, 0);
    let output = home.run(&["stop", "slow", "--within=2s"]);
    let said = stderr(&output);
    assert!(said.contains("not finished in time and will be trained again"), "{said}");
    job.wait();
    let status = home.status("slow");
    assert!(status["last_checkpoint"].as_str().is_some_and(|path| !path.is_empty()), "{status:#}");
}

#[test]
fn a_second_interrupt_stops_at_once_without_a_checkpoint() {
    let home = Home::new();
    let slow = ["--model_def=count", "--model_params=sleep_ms=3000", "--num_ps_pods=1"];
    let mut job = start(&home, "twice", &slow);
    wait_for_step(&mut job, 0);
    let all = job.instances();
    // Of two kinds: two of one kind could arrive as one.
    signal(job.pid(), Signal::INT);
    signal(job.pid(), Signal::TERM);
    assert_eq!(job.wait().code(), Some(130), "{}", job.log());
    assert!(all.iter().all(|instance| !is_alive(instance.pid)), "{all:?}");
    let status = home.status("twice");
    assert!(status["last_checkpoint"].as_str().is_none_or(str::is_empty), "{status:#}");
}
