// SPDX-License-Identifier: Apache-2.0
//! A disk that takes no checkpoint: the job says so, keeps the one before and goes on.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::harness::{Home, Running, assert_exactly_once, has_checkpoint, shipped_as, tell};

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

/// Breaks the disk after the first checkpoint, mends it after the first failure.
fn survives(mut job: Running, break_disk: impl FnOnce(), mend: impl FnOnce()) {
    job.wait_until("a checkpoint", has_checkpoint);
    break_disk();
    let status =
        job.wait_until("a failed checkpoint", |status| n_events(status, "checkpoint_failed") > 0);
    let before = status["step"].as_u64();
    assert!(has_checkpoint(&status), "the one before stays: {status:#}");
    job.wait_until("more training", |status| status["step"].as_u64() > before);
    mend();
    job.wait_for_success();
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_told_and_training_goes_on() {
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
fn a_full_disk_is_told_and_training_goes_on() {
    let home = Home::new();
    let disk = home.path().join("disk");
    fs::create_dir(&disk).expect("a folder");
    let Some(mounted) = Mounted::new(&disk) else {
        tell("skipped: a small disk cannot be mounted here; that needs root");
        return;
    };
    let job = start(&home, "full", &mounted.path().join("checkpoints"));
    let filler = mounted.path().join("filler");
    survives(
        job,
        || {
            // The write ends where the disk does.
            let _full = fs::write(&filler, vec![0; 64 << 20]);
        },
        || fs::remove_file(&filler).expect("a file"),
    );
    assert_exactly_once(&home, "full", 2, 1);
}

/// A disk of some megabytes in memory.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    fn new(path: &'a Path) -> Option<Self> {
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
            .arg(path)
            .output()
            .ok()?;
        mount.status.success().then_some(Self(path))
    }

    fn path(&self) -> &Path {
        self.0
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // Lazily: a process of a failed test may still look at it.
        let _ = Command::new("umount").arg("-l").arg(self.0).output();
    }
}
