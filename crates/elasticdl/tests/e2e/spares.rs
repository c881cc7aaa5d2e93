// SPDX-License-Identifier: Apache-2.0
//! Spares: a worker that is killed is replaced by a process that was ready before.

use rustix::process::{Pid, Signal, getpriority_process};
use serde_json::Value;

use crate::allreduce::{SAME_BITS, at, job};
use crate::harness::{Home, Running, assert_exactly_once, instances, shipped, signal};

/// The numbers of the workers in this state.
fn workers(status: &Value, state: &str) -> Vec<u64> {
    let all = instances(status).into_iter();
    all.filter(|i| i.role == "worker" && i.state == state).map(|i| i.id).collect()
}

/// When an event with this text came; events are numbered.
fn number(status: &Value, text: &str) -> Option<u64> {
    let mut events = status["events"].as_array().expect("events").iter();
    let is_it = |event: &&Value| event["text"].as_str().is_some_and(|it| it.contains(text));
    events.find(is_it).and_then(|event| event["number"].as_u64())
}

/// Waits for two workers and a spare, then kills one of the workers.
fn kill_a_trainer(job: &mut Running) -> u64 {
    let is_ready =
        |status: &Value| workers(status, "working").len() == 2 && status["step"].as_u64() > Some(3);
    let status = job.wait_until("a spare", |s| is_ready(s) && workers(s, "spare").len() == 1);
    let all = instances(&status);
    let find =
        |state: &str| all.iter().find(|i| i.role == "worker" && i.state == state).expect(state);
    let (trainer, spare) = (find("working"), find("spare"));
    let priorities = [trainer, spare].map(|worker| getpriority_process(Pid::from_raw(worker.pid)));
    assert_eq!(priorities[0], priorities[1], "only its start has a low priority");
    signal(trainer.pid, Signal::KILL);
    spare.id
}

#[test]
fn with_servers_a_spare_takes_over_and_every_record_is_trained_once() {
    let home = Home::new();
    let data = format!("--training_data={}", shipped("test"));
    let args = [
        "train",
        "--model_def=count",
        "--model_params=sleep_ms=25",
        "--job_name=spares",
        &data,
        "--num_epochs=3",
        "--num_workers=2",
        "--spares=1",
        "--num_ps_pods=1",
        "--minibatch_size=10",
    ];
    let mut job = home.start("spares", &args);
    let spare = kill_a_trainer(&mut job);
    let trains = format!("worker-{spare} was a spare and is now training");
    let status = job.wait_until("the spare at work", |status| number(status, &trains).is_some());
    let joins = number(&status, "worker-3 joined");
    assert!(joins.is_none_or(|joins| joins > number(&status, &trains).unwrap()), "{status:#}");
    let is_whole = |s: &Value| workers(s, "working").contains(&spare) && workers(s, "spare") == [3];
    job.wait_until("the next spare", is_whole);
    job.wait_for_success();
    assert_exactly_once(&home, "spares", 3, 1);
}

#[test]
fn a_spare_is_in_the_next_world_and_the_weights_stay_bit_identical() {
    let home = Home::new();
    let mut job = job(&home, "spares", 2, &["--spares=1"]);
    let spare = kill_a_trainer(&mut job);
    // A world of two workers again, before the process that was started for the lost one is ready.
    let in_world = format!("worker-{spare} (lanes ");
    let status = job.wait_until("the next world", |status| number(status, &in_world).is_some());
    assert_eq!(workers(&status, "working").len(), 2, "{status:#}");
    let joins = number(&status, "worker-3 joined");
    assert!(joins.is_none_or(|joins| joins > number(&status, &in_world).unwrap()), "{status:#}");
    let was_killed = at(&mut job, 30, |job| {
        let trainer = job.instances().into_iter().find(|i| i.state == "working");
        signal(trainer.expect("a trainer").pid, Signal::KILL);
    });
    assert!(was_killed, "the job ended before step 30");
    SAME_BITS.assert(&home, "spares", job);
}
