// SPDX-License-Identifier: Apache-2.0
//! Jobs that are killed as a whole and resumed: no record is lost or trained twice.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::harness::{Home, PATIENCE, assert_exactly_once, is_alive, shipped, signal};

fn train_args<'a>(name: &'a str, data: &'a str) -> Vec<&'a str> {
    vec![
        "train",
        "--model_def=count",
        "--model_params=sleep_ms=10",
        name,
        data,
        "--num_epochs=2",
        "--num_ps_pods=2",
        "--minibatch_size=10",
        "--num_minibatches_per_task=4",
        "--checkpoint_steps=20",
    ]
}

#[test]
fn a_job_resumes_with_a_different_number_of_servers_after_all_processes_are_killed() {
    let home = Home::new();
    let data = format!("--training_data={}", shipped("test"));
    let mut job = home.start("killed", &train_args("--job_name=killed", &data));
    job.wait_until("a checkpoint", |s| {
        s["last_checkpoint"].as_str().is_some_and(|c| !c.is_empty())
    });
    let pids: Vec<i32> = job.instances().iter().map(|instance| instance.pid).collect();
    job.kill_all();
    assert!(pids.iter().all(|pid| wait_gone(*pid)), "a process outlived the job");
    let mut resumed = home.start("killed", &["train", "--resume", "killed", "--num_ps_pods=3"]);
    resumed.wait_for_success();
    assert_exactly_once(&home, "killed", 2, 1);
}

/// The Unix sockets in a job's folder.
fn sockets(home: &Home, name: &str) -> Vec<String> {
    let entries = std::fs::read_dir(home.job_dir(name).join("run")).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn the_sockets_of_a_job_are_removed_at_its_end_and_those_of_killed_processes_too() {
    let home = Home::new();
    let data = format!("--training_data={}", shipped("test"));
    let mut job = home.start("sockets", &train_args("--job_name=sockets", &data));
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    assert_eq!(sockets(&home, "sockets").len(), 2, "one for each server");
    job.kill_all();
    // One server less: the socket of the other one is not replaced.
    let mut resumed = home.start("sockets", &["train", "--resume", "sockets", "--num_ps_pods=1"]);
    resumed.wait_for_success();
    assert_eq!(sockets(&home, "sockets"), [""; 0]);
}

#[test]
fn a_job_killed_before_its_first_checkpoint_resumes_from_its_start() {
    let home = Home::new();
    let data = format!("--training_data={}", shipped("test"));
    let mut args = train_args("--job_name=early", &data);
    args.retain(|arg| !arg.starts_with("--checkpoint"));
    let mut job = home.start("early", &args);
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    job.kill_all();
    let mut resumed = home.start("early", &["train", "--resume", "early"]);
    resumed.wait_for_success();
    assert_exactly_once(&home, "early", 2, 1);
}

#[test]
fn a_job_of_an_earlier_version_resumes_with_its_own_order_of_records() {
    let home = Home::new();
    let config = home.path().join("old.yaml");
    std::fs::write(&config, "batch_plan: 1\n").unwrap();
    let config = format!("--config={}", config.display());
    let data = format!("--training_data={}", shipped("test"));
    let mut args = train_args("--job_name=old", &data);
    // The last round of an epoch is short, so the result depends on the order of the records.
    args.retain(|arg| !arg.starts_with("--minibatch_size"));
    args.extend(["--minibatch_size=15", "--grads_to_wait=3", "--num_workers=1", &config]);
    let mut job = home.start("old", &args);
    job.wait_until("a checkpoint", |s| {
        s["last_checkpoint"].as_str().is_some_and(|c| !c.is_empty())
    });
    job.kill_all();
    let file = home.job_dir("old").join("job.json");
    let mut spec: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let version = spec.as_object_mut().unwrap().remove("batch_plan");
    assert_eq!(version, Some(1.into()), "earlier versions did not write this field");
    std::fs::write(&file, spec.to_string()).unwrap();
    let mut resumed = home.start("old", &["train", "--resume", "old"]);
    resumed.wait_for_success();
    assert_exactly_once(&home, "old", 2, 3);
}

#[test]
fn children_exit_within_two_seconds_of_their_supervisor_even_if_one_is_frozen() {
    let home = Home::new();
    let data = format!("--training_data={}", shipped("test"));
    let mut job = home.start("orphans", &train_args("--job_name=orphans", &data));
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    let instances = job.instances();
    let worker = instances.iter().find(|i| i.role == "worker").expect("a worker");
    signal(worker.pid, Signal::STOP);
    signal(job.pid(), Signal::KILL);
    job.wait();
    for instance in &instances {
        assert!(wait_gone(instance.pid), "{instance:?} outlived its supervisor");
    }
}

#[test]
fn an_interrupt_saves_a_checkpoint_stops_all_processes_and_leaves_a_resumable_job() {
    let home = Home::new();
    let data = format!("--training_data={}", shipped("test"));
    let mut args = train_args("--job_name=interrupted", &data);
    args.retain(|arg| !arg.starts_with("--checkpoint"));
    args.push("--checkpoint_secs=0");
    let mut job = home.start("interrupted", &args);
    job.wait_until("some training", |status| status["step"].as_u64() > Some(50));
    let instances = job.instances();
    signal(job.pid(), Signal::INT);
    assert_eq!(job.wait().code(), Some(130));
    let saved = home.status("interrupted")["last_checkpoint"].as_str().unwrap().to_owned();
    let version = saved.rsplit_once("/version-").and_then(|(_, name)| name.split('.').next());
    let step: u64 = version.and_then(|version| version.parse().ok()).expect("a checkpoint");
    assert!(step > 50, "{saved}");
    for instance in &instances {
        assert!(wait_gone(instance.pid), "{instance:?} outlived the interrupt");
    }
    let stderr = home.path().join("interrupted.stderr");
    let n_before = std::fs::read_to_string(&stderr).unwrap().lines().count();
    let mut resumed = home.start("interrupted", &["train", "--resume", "interrupted"]);
    resumed.wait_for_success();
    assert_exactly_once(&home, "interrupted", 2, 1);
    let printed = std::fs::read_to_string(stderr).unwrap();
    assert_eq!(printed.lines().nth(n_before), Some(&*format!("resumed at step {step}")));
}

fn wait_gone(pid: i32) -> bool {
    let start = Instant::now();
    while is_alive(pid) {
        if start.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}
