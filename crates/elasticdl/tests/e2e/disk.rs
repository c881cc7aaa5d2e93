// SPDX-License-Identifier: Apache-2.0
//! A disk that cannot store a checkpoint: the job reports this, keeps the previous checkpoint and
//! continues.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{
    Home, PATIENCE, Running, assert_exactly_once, has_checkpoint, print_note, shipped_as, signal,
};

fn start(home: &Home, name: &str, checkpoint_dir: &Path) -> Running {
    let (name_flag, data) = (format!("--job_name={name}"), shipped_as("training_data", "test"));
    let checkpoints = format!("--checkpoint_dir={}", checkpoint_dir.display());
    home.start(
        name,
        &[
            "train",
            "--model_def=count",
            "--model_params=sleep_ms=15",
            &name_flag,
            &data,
            &checkpoints,
            "--num_epochs=2",
            "--minibatch_size=10",
            "--checkpoint_steps=20",
        ],
    )
}

fn n_events(status: &Value, kind: &str) -> usize {
    let events = status["events"].as_array().into_iter().flatten();
    events.filter(|event| event["kind"] == kind).count()
}

/// Breaks the disk after the first checkpoint, and repairs it after the first failure.
fn survives(mut job: Running, break_disk: impl FnOnce(), repair: impl FnOnce()) {
    job.wait_until("a checkpoint", has_checkpoint);
    break_disk();
    let status =
        job.wait_until("a failed checkpoint", |status| n_events(status, "checkpoint_failed") > 0);
    let before = status["step"].as_u64();
    assert!(has_checkpoint(&status), "the previous checkpoint is kept: {status:#}");
    job.wait_until("more training", |status| status["step"].as_u64() > before);
    repair();
    job.wait_for_success();
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_reported_and_training_continues() {
    let home = Home::new();
    let (folder, away) = (home.path().join("checkpoints"), home.path().join("away"));
    let job = start(&home, "blocked", &folder);
    survives(
        job,
        || {
            fs::rename(&folder, &away).expect("a folder");
            fs::write(&folder, "in the way").expect("a file");
        },
        || {
            fs::remove_file(&folder).expect("a file");
            fs::rename(&away, &folder).expect("a folder");
        },
    );
    assert_exactly_once(&home, "blocked", 2, 1);
    let status = home.status("blocked");
    let last = status["last_checkpoint"].as_str().expect("a checkpoint");
    assert!(Path::new(last).join("manifest.json").is_file(), "{status:#}");
}

#[test]
fn a_full_disk_is_reported_and_training_continues() {
    let home = Home::new();
    let disk = home.path().join("disk");
    fs::create_dir(&disk).expect("a folder");
    let Some(mounted) = Mounted::new(&disk) else {
        print_note("skipped: mounting a small disk needs root");
        return;
    };
    let job = start(&home, "full", &mounted.path().join("checkpoints"));
    let filler = mounted.path().join("filler");
    survives(
        job,
        || {
            // The write fails when the disk is full.
            let _full = fs::write(&filler, vec![0; 64 << 20]);
        },
        || fs::remove_file(&filler).expect("a file"),
    );
    assert_exactly_once(&home, "full", 2, 1);
}

/// Starts a job with its folder on a separate small disk, if one can be mounted.
fn start_on_small_disk(
    home: &Home,
    jobs: &Path,
    name: &str,
    more: &[&str],
) -> Option<(Mounted, Running)> {
    fs::create_dir(jobs).expect("a folder");
    let Some(mounted) = Mounted::new(jobs) else {
        print_note("skipped: mounting a small disk needs root");
        return None;
    };
    let (name_flag, data) = (format!("--job_name={name}"), shipped_as("training_data", "test"));
    let mut args = vec!["train", "--model_def=count", &name_flag, &data, "--minibatch_size=10"];
    args.extend(more);
    let job = home.start(name, &args);
    Some((mounted, job))
}

fn reason(status: &Value) -> String {
    status["reason"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_job_on_a_full_disk_reports_it_and_continues_when_space_is_free() {
    let home = Home::new();
    let jobs = home.path().join("jobs");
    let more = ["--model_params=sleep_ms=15", "--num_epochs=3", "--checkpoint_steps=20"];
    let Some((mounted, mut job)) = start_on_small_disk(&home, &jobs, "tight", &more) else {
        return;
    };
    job.wait_until("a checkpoint", has_checkpoint);
    let filler = mounted.path().join("filler");
    let _full = fs::write(&filler, vec![0; 64 << 20]);
    job.wait_until("a failed checkpoint", |status| reason(status).contains("No space left"));
    let lost = job.instances().into_iter().find(|i| i.role == "ps").expect("a server");
    signal(lost.pid, Signal::KILL);
    job.wait_until("a new server", |status| {
        status["generation"].as_u64() == Some(2) && status["state"] == "running"
            || reason(status).contains("cannot save the job's state")
    });
    fs::remove_file(&filler).expect("a file");
    let status = job.wait_until("a checkpoint", |status| {
        reason(status).is_empty() && status["generation"].as_u64() == Some(2)
    });
    assert_eq!(status["term"], 1, "the master did not restart");
    job.wait_for_success();
    assert_exactly_once(&home, "tight", 3, 1);
}

#[test]
fn a_job_that_starts_on_a_full_disk_continues_when_space_is_free() {
    let home = Home::new();
    let jobs = home.path().join("jobs");
    let more = ["--num_epochs=1"];
    let Some((mounted, mut job)) = start_on_small_disk(&home, &jobs, "early", &more) else {
        return;
    };
    let start = std::time::Instant::now();
    while !jobs.join("early/supervisor.json").exists() && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    let filler = mounted.path().join("filler");
    let _full = fs::write(&filler, vec![0; 64 << 20]);
    // If the master could not wait, it would crash several times in this time.
    std::thread::sleep(Duration::from_secs(3));
    assert!(job.is_running(), "{}", job.log());
    fs::remove_file(&filler).expect("a file");
    job.wait_for_success();
    assert_exactly_once(&home, "early", 1, 1);
    assert_eq!(home.status("early")["term"], 1, "the master did not restart");
}

#[test]
fn a_job_that_ends_on_a_full_disk_waits_for_free_space() {
    let home = Home::new();
    let jobs = home.path().join("jobs");
    let more = ["--model_params=sleep_ms=5", "--num_epochs=1", "--checkpoint_secs=0"];
    let Some((mounted, mut job)) = start_on_small_disk(&home, &jobs, "last", &more) else { return };
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    let filler = mounted.path().join("filler");
    let _full = fs::write(&filler, vec![0; 64 << 20]);
    let status = job.wait_until("a job that waits to finish", |status| {
        status["state"] == "finishing" && !reason(status).is_empty()
    });
    assert!(reason(&status).contains("No space left"), "{status:#}");
    fs::remove_file(&filler).expect("a file");
    job.wait_for_success();
    assert_exactly_once(&home, "last", 1, 1);
}

#[test]
fn predictions_that_do_not_fit_on_the_disk_wait_for_free_space() {
    let home = Home::new();
    let trained = ["train", "--model_def=count", "--job_name=trained", "--minibatch_size=10"];
    home.stdout(&[&trained[..], &[&shipped_as("training_data", "test")]].concat());
    let disk = home.path().join("disk");
    fs::create_dir(&disk).expect("a folder");
    let Some(mounted) = Mounted::new(&disk) else {
        print_note("skipped: mounting a small disk needs root");
        return;
    };
    let filler = mounted.path().join("filler");
    let _full = fs::write(&filler, vec![0; 64 << 20]);
    let from =
        format!("--checkpoint_dir_for_init={}/checkpoints", home.job_dir("trained").display());
    let (output, data) = (mounted.path().join("answers"), shipped_as("prediction_data", "test"));
    let output_flag = format!("--output={}", output.display());
    let mut job = home.start(
        "predicted",
        &["predict", "--job_name=predicted", &from, &data, &output_flag, "--minibatch_size=10"],
    );
    let status = job.wait_until("a reason", |status| reason(status).contains("No space left"));
    assert_eq!(status["state"], "running", "{status:#}");
    fs::remove_file(&filler).expect("a file");
    job.wait_until("a part", |status| reason(status).is_empty());
    job.wait_for_success();
    let predictions = fs::read_to_string(output.join("predictions.jsonl")).expect("a file");
    let records = predictions.lines().map(|line| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        line["record"].as_u64().expect("a number")
    });
    assert!(records.eq(0..2_000), "each record once, in order");
    let left: Vec<_> = fs::read_dir(&output).expect("a folder").flatten().collect();
    assert_eq!(left.len(), 1, "no part is left: {left:?}");
}

/// A disk of a few megabytes in memory.
pub(crate) struct Mounted(PathBuf);

impl Mounted {
    pub(crate) fn new(path: &Path) -> Option<Self> {
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
            .arg(path)
            .output()
            .ok()?;
        mount.status.success().then(|| Self(path.to_owned()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazy unmount: a process of a failed test may still use the disk.
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}
