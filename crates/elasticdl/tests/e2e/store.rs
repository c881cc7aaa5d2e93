// SPDX-License-Identifier: Apache-2.0
//! Damaged or incomplete job folders: a job recovers from its checkpoints.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{
    Home, Running, assert_exactly_once, has_checkpoint, instances, shipped_as, signal, stderr,
    try_signal,
};

fn start(home: &Home, name: &str, more: &[&str]) -> Running {
    let (name_flag, data) = (format!("--job_name={name}"), shipped_as("training_data", "test"));
    let mut args = vec![
        "train",
        "--model_def=count",
        "--model_params=sleep_ms=10",
        &name_flag,
        &data,
        "--minibatch_size=10",
    ];
    let or_default = |flag: &'static str, value: &'static str| {
        (!more.iter().any(|given| given.starts_with(flag))).then_some(value)
    };
    args.extend(or_default("--num_epochs", "--num_epochs=2"));
    args.extend(or_default("--checkpoint_steps", "--checkpoint_steps=20"));
    args.extend(more);
    home.start(name, &args)
}

/// The subfolders of a checkpoint folder: those with a manifest, and the others.
fn folders(checkpoints: &Path) -> (BTreeSet<String>, BTreeSet<String>) {
    let entries = fs::read_dir(checkpoints).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.partition(|name| checkpoints.join(name).join("manifest.json").is_file())
}

fn events(home: &Home, name: &str, kind: &str) -> Vec<String> {
    let text = fs::read_to_string(home.job_dir(name).join("events.jsonl")).expect("events");
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let of_kind = events.filter(|event| event["kind"] == kind);
    of_kind.map(|event| event["text"].as_str().expect("text").to_owned()).collect()
}

/// Kills a job after its first checkpoint, damages its store, and resumes it.
fn resumes_after(name: &str, damage: impl FnOnce(&Path)) {
    let home = Home::new();
    let mut job = start(&home, name, &[]);
    job.wait_until("a checkpoint", has_checkpoint);
    job.kill_all();
    let checkpoints = home.job_dir(name).join("checkpoints");
    let (complete, _) = folders(&checkpoints);
    damage(&home.job_dir(name).join("master.redb"));
    let mut resumed = home.start(name, &["train", "--resume", name]);
    resumed.wait_until("training under another master", |status| {
        status["state"] == "running" && status["term"].as_u64() > Some(1)
    });
    let resumed_at = events(&home, name, "resumed");
    assert!(!resumed_at.is_empty(), "the job started from the beginning:\n{}", resumed.log());
    let newest = |names: &BTreeSet<String>| names.iter().filter_map(|name| version(name)).max();
    assert!(newest(&folders(&checkpoints).0) >= newest(&complete), "a checkpoint was deleted");
    resumed.wait_for_success();
    assert_exactly_once(&home, name, 2, 1);
}

fn version(folder: &str) -> Option<u64> {
    folder.strip_prefix("version-")?.split('.').next()?.parse().ok()
}

#[test]
fn a_job_whose_store_is_lost_resumes_from_its_checkpoints() {
    resumes_after("lost", |store| fs::remove_file(store).expect("a store"));
}

#[test]
fn a_job_whose_store_is_damaged_resumes_from_its_checkpoints() {
    resumes_after("damaged", |store| fs::write(store, "half a store").expect("a store"));
}

#[test]
fn a_job_whose_store_is_lost_keeps_its_evaluations_and_its_best_model() {
    let home = Home::new();
    let validation = shipped_as("validation_data", "test");
    let mut job = start(&home, "judged", &[&validation, "--evaluation_steps=40"]);
    let before = job.wait_until("a best model", |status| {
        status["best_checkpoint"].as_str().is_some_and(|path| !path.is_empty())
    });
    job.kill_all();
    fs::remove_file(home.job_dir("judged").join("master.redb")).expect("a store");
    let mut resumed = home.start("judged", &["train", "--resume", "judged"]);
    let after = resumed.wait_until("training", |status| status["state"] == "running");
    let evaluations =
        |status: &Value| status["evaluations"].as_array().cloned().unwrap_or_default();
    assert_eq!(evaluations(&after).first(), evaluations(&before).first(), "{after:#}");
    assert!(!after["best_checkpoint"].as_str().unwrap_or_default().is_empty(), "{after:#}");
    resumed.wait_for_success();
}

#[test]
fn a_permanent_error_fails_the_job_at_once_with_its_cause() {
    let home = Home::new();
    let mut job = start(&home, "blocked", &[]);
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    job.kill_all();
    let store = home.job_dir("blocked").join("master.redb");
    fs::remove_file(&store).expect("a store");
    fs::create_dir(&store).expect("a folder");
    let output = home.run(&["train", "--resume", "blocked"]);
    let printed = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("cannot open") && printed.contains("master.redb"), "{printed}");
    assert!(!printed.contains("restarting it"), "{printed}");
}

#[test]
fn a_job_killed_at_any_moment_of_its_first_second_can_be_resumed() {
    let home = Home::new();
    for n in 0..6 {
        let name = format!("first-{n}");
        let job_dir = home.job_dir(&name);
        let mut job = start(&home, &name, &["--max_step=20"]);
        // The store is created early; some kills happen before that, some while it is written.
        while !job_dir.join("job.key").exists() && job.is_running() {
            std::thread::yield_now();
        }
        let after = std::time::Instant::now();
        while !job_dir.join("master.redb").exists() && after.elapsed().as_secs() < 20 {
            std::thread::yield_now();
        }
        for _ in 0..n * n * 2000 {
            std::hint::spin_loop();
        }
        signal(job.pid(), Signal::KILL);
        job.wait();
        let mut resumed = home.start(&name, &["train", "--resume", &name]);
        resumed.wait_for_success();
    }
}

#[test]
fn two_jobs_with_one_checkpoint_folder_do_not_interfere() {
    let home = Home::new();
    let folder = home.path().join("shared");
    let flag = format!("--checkpoint_dir={}", folder.display());
    let mut first = start(&home, "first", &[&flag]);
    let mut second = start(&home, "second", &[&flag]);
    first.wait_until("a checkpoint", has_checkpoint);
    second.wait_until("a checkpoint", has_checkpoint);
    first.kill_all();
    second.kill_all();
    let mut second = home.start("second", &["train", "--resume", "second"]);
    second.wait_for_success();
    assert_exactly_once(&home, "second", 2, 1);
    let mut first = home.start("first", &["train", "--resume", "first"]);
    first.wait_for_success();
    assert_exactly_once(&home, "first", 2, 1);
    assert_exactly_once(&home, "second", 2, 1);
    for job in ["first", "second"] {
        assert!(events(&home, job, "checkpoint_failed").is_empty(), "{job} was disturbed");
    }
    let from = format!("--checkpoint_dir_for_init={}", folder.display());
    let output =
        home.run(&["train", "--model_def=count", &from, &shipped_as("training_data", "test")]);
    let printed = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{printed}");
    assert!(printed.contains("`first`") && printed.contains("`second`"), "{printed}");
}

#[test]
fn a_job_whose_workers_die_while_they_write_leaves_only_complete_checkpoints() {
    let home = Home::new();
    let folder = home.path().join("checkpoints");
    let flag = format!("--checkpoint_dir={}", folder.display());
    let more = [
        "--distribution_strategy=HybridStrategy",
        "--num_workers=2",
        "--lanes=2",
        "--checkpoint_steps=5",
        "--num_epochs=4",
        &flag,
    ];
    let mut job = start(&home, "incomplete", &more);
    let mut n_killed = 0;
    for _ in 0..4 {
        job.wait_until("two workers", |status| {
            let all = instances(status);
            all.iter().filter(|i| i.role == "worker" && i.state == "working").count() == 2
        });
        let before = folders(&folder).1;
        // A folder without a manifest: a checkpoint is being written.
        let start = std::time::Instant::now();
        while folders(&folder).1.is_subset(&before) && start.elapsed().as_secs() < 20 {
            std::thread::yield_now();
        }
        let all = job.instances();
        let worker = all.iter().find(|i| i.role == "worker").expect("a worker");
        n_killed += u32::from(try_signal(worker.pid, Signal::KILL));
    }
    job.wait_for_success();
    assert!(n_killed >= 3, "only {n_killed} workers were killed");
    let (complete, incomplete) = folders(&folder);
    assert!(!complete.is_empty() && incomplete.is_empty(), "left behind: {incomplete:?}");
    let sockets =
        fs::read_dir(home.job_dir("incomplete").join("run")).into_iter().flatten().count();
    assert_eq!(sockets, 0, "sockets were left behind");
}
