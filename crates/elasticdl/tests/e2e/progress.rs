// SPDX-License-Identifier: Apache-2.0
//! The job waits for slow workers, but not for frozen ones.

use std::cell::RefCell;

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{Home, instances, shipped_as, signal};

fn has_event(status: &Value, text: &str) -> bool {
    let events = status["events"].as_array().into_iter().flatten();
    events.filter_map(|event| event["text"].as_str()).any(|found| found.contains(text))
}

#[test]
fn a_round_longer_than_the_task_timeout_is_not_a_failure() {
    let home = Home::new();
    let sync = ["--grads_to_wait=40", "--minibatch_size=1", "--training_data=range:80"];
    let model = ["--model_def=count", "--model_params=sleep_ms=50"];
    let alone = ["--num_workers=1", "--task_timeout_secs=1", "--max_batch_failures=1"];
    home.train("alone", &[&sync[..], &model, &alone].concat());
    let status = home.status("alone");
    assert!(!has_event(&status, "no progress"), "{status:#}");
    assert_eq!(status["goodput"]["repeated"], 0, "nothing was computed twice: {status:#}");
}

#[test]
fn the_others_continue_before_the_heartbeat_timeout_of_a_frozen_worker() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let steps = ["--num_ps_pods=0", "--lanes=2", "--num_workers=2", "--num_epochs=0"];
    let args = ["train", "--job_name=a", "--model_def=mnist_mlp", "--heartbeat_timeout_secs=120"];
    let mut job = home.start("a", &[&args[..], &steps, &[&data]].concat());
    // Enough steps to measure their duration, which takes a fraction of a second.
    let is_training = |status: &Value| status["step"].as_u64() > Some(1000);
    job.wait_until("both workers", is_training);
    let all = job.instances();
    let worker = all.iter().find(|instance| instance.role == "worker").expect("a worker");
    signal(worker.pid, Signal::STOP);
    let status = job.wait_until("detection of the frozen worker", |status| {
        has_event(status, "did not respond for")
    });
    assert!(!has_event(&status, "sent no heartbeat"), "{status:#}");
    let step = status["step"].as_u64();
    job.wait_until("steps of the other worker", |status| {
        status["step"].as_u64() > step.map(|n| n + 50)
    });
    signal(worker.pid, Signal::CONT);
    let returned = format!("worker-{} ", worker.id);
    job.wait_until("the return of the worker", |status| {
        let last = status["events"].as_array().and_then(|events| {
            let mut texts = events.iter().filter_map(|event| event["text"].as_str());
            texts.rfind(|text| text.contains("continued after step"))
        });
        last.is_some_and(|text| text.contains(&returned))
    });
    job.kill_all();
}

#[test]
fn after_a_kill_the_status_shows_which_workers_train() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let steps = ["--num_ps_pods=0", "--lanes=3", "--num_workers=3", "--num_epochs=0"];
    let args = ["train", "--job_name=b", "--model_def=mnist_mlp"];
    let mut job = home.start("b", &[&args[..], &steps, &[&data]].concat());
    let n_working = |status: &Value| {
        let workers = instances(status).into_iter().filter(|instance| instance.role == "worker");
        workers.filter(|worker| worker.state == "working").count()
    };
    let is_training = |status: &Value| status["step"].as_u64() > Some(500);
    let before = job.wait_until("all workers", |s| is_training(s) && n_working(s) == 3);
    let worker = instances(&before).into_iter().find(|i| i.role == "worker").expect("a worker");
    signal(worker.pid, Signal::KILL);
    // While the replacement joins, the others continue.
    let seen = RefCell::new(Vec::new());
    let is_whole = |status: &Value| {
        seen.borrow_mut().push((status["step"].as_u64().unwrap_or(0), n_working(status)));
        n_working(status) == 3 && instances(status).iter().all(|i| i.pid != worker.pid)
    };
    job.wait_until("its replacement", is_whole);
    let seen = seen.into_inner();
    let is_wrong = |pair: &&[(u64, usize)]| pair[0].0 < pair[1].0 && pair[0].1 + pair[1].1 == 0;
    // A status may have been taken while a world was being formed.
    assert!(seen.windows(2).filter(is_wrong).count() < 2, "steps without workers: {seen:?}");
    job.kill_all();
}
