// SPDX-License-Identifier: Apache-2.0
//! `elasticdl explain` after scripted faults: it must name the cause and the advice for each. The
//! confusion matrix of all faults is part of the documentation.
//! `tests/python/test_explain.py` adds faults in Python code.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;

use crate::disk::Mounted;
use crate::harness::{
    Home, PATIENCE, Running, free_port, has_checkpoint, print_note, shipped, shipped_as, signal,
    try_signal,
};

/// Creates a job and injects the fault.
type Inject = fn(&Home) -> Scene;

/// A job after its fault.
enum Scene {
    Over,
    Running(Running),
    OnFullDisk(Running, #[expect(dead_code, reason = "held until it is dropped")] Mounted),
    /// The fault cannot be injected on this machine.
    Impossible,
}

struct Fault {
    what: &'static str,
    inject: Inject,
    cause: &'static str,
    advice: &'static str,
    /// Further text that the answer must contain.
    words: &'static [&'static str],
}

const fn fault(
    what: &'static str,
    inject: Inject,
    (cause, advice): (&'static str, &'static str),
    words: &'static [&'static str],
) -> Fault {
    Fault { what, inject, cause, advice, words }
}

const NONE: &str = "none";
const RESTART: &str = "restart";
const CODE: &str = "fix_code";
const DATA: &str = "fix_data";
const CLUSTER: &str = "fix_cluster";
const ADVICE: [&str; 5] = [NONE, RESTART, CODE, DATA, CLUSTER];

/// The name of every job.
const JOB: &str = "x";
const SUCCEEDED: (&str, &str) = ("succeeded", NONE);
const POISON: &[&str] = &["777", "worker-"];

/// The faults, longest first.
const FAULTS: &[Fault] = &[
    fault("the master is killed again and again", killed_master, ("killed", CLUSTER), &["master"]),
    fault(
        "the model hangs, and the job still waits for it",
        |home| {
            let mut job = start(home, &["--model_params=hang_record=777"]);
            job.wait_until("a stall", |status| has_text(status, "without progress"));
            Scene::Running(job)
        },
        ("hang", CODE),
        &["training for", "compute: waiting", "worker-", "(records "],
    ),
    fault(
        "the model hangs at a record",
        |home| {
            let limits = ["--task_timeout_secs=1", "--max_batch_failures=2"];
            failed(home, &[&["--model_params=hang_record=777"][..], &limits].concat())
        },
        ("hang", CODE),
        &["no progress for 1s while training", "compute: waiting", "worker-", "(records "],
    ),
    fault(
        "a step hangs on one of two workers",
        |home| {
            let steps = ["--distribution_strategy=HybridStrategy", "--lanes=2"];
            let limits = ["--task_timeout_secs=2", "--max_batch_failures=1"];
            let hang = ["--model_params=hang_record=777"];
            failed(home, &[&hang[..], &steps, &limits].concat())
        },
        ("hang", CODE),
        &["no progress for 2s while training", "(records "],
    ),
    fault(
        "a record makes the model panic",
        |home| failed(home, &["--model_params=panic_record=777"]),
        ("panic", CODE),
        &["makes record 777 panic", "edl_zoo::count", "worker-", "(records "],
    ),
    fault(
        "a record aborts the process",
        |home| failed(home, &["--model_params=crash_record=777", "--minibatch_size=8"]),
        ("crash", CODE),
        &["killed by signal 6", "777", "worker-"],
    ),
    fault(
        "the loss is not a number",
        |home| failed(home, &["--model_params=nan_record=777"]),
        ("nonfinite", CODE),
        &["--on_nonfinite=skip", "worker-", "(records "],
    ),
    fault(
        "the learning rate is far too high",
        |home| failed(home, &["--model_def=mnist_mlp", "--learning_rate=1e30"]),
        ("nonfinite", CODE),
        &["--learning_rate"],
    ),
    fault(
        "the model rejects a record",
        |home| failed(home, &["--model_params=fail_record=777"]),
        ("bad_data", DATA),
        POISON,
    ),
    fault("a chunk of the data is damaged", damaged_data, ("bad_data", DATA), &["chunk 0"]),
    fault(
        "a label is out of range",
        |home| bad_record(home, r#"{"image": IMAGE, "label": 99}"#),
        ("bad_data", DATA),
        &["record 350", "`label` is 99"],
    ),
    fault(
        "a record has another shape",
        |home| bad_record(home, r#"{"image": [1, 2], "label": 1}"#),
        ("bad_data", DATA),
        &["line 351", "28×28"],
    ),
    fault("a data file is removed", removed_data, ("data_changed", DATA), &["1000 records"]),
    fault("the data changes between two runs", changed_data, ("data_changed", DATA), &["restore"]),
    fault("the disk is full", full_disk, ("disk_full", CLUSTER), &["No space left"]),
    fault("a port is taken", taken_port, ("port_in_use", CLUSTER), &["master", "ddress"]),
    fault(
        "workers are killed again and again",
        killed_workers,
        ("killed", CLUSTER),
        &["SIGKILL", "worker-"],
    ),
    fault("the result cannot be written", blocked_output, ("no_access", CLUSTER), &["result"]),
    fault(
        "the job folder cannot be used",
        |home| {
            killed(home, &[]);
            let store = home.job_dir(JOB).join("master.redb");
            fs::remove_file(&store).expect("a store");
            fs::create_dir(&store).expect("a folder");
            resumed(home)
        },
        ("no_access", CLUSTER),
        &["master.redb"],
    ),
    fault(
        "every checkpoint is damaged",
        damaged_checkpoints,
        ("damaged_checkpoint", CLUSTER),
        &["checksum"],
    ),
    fault(
        "all processes are killed at once",
        |home| killed(home, &[]),
        ("interrupted", RESTART),
        &["elasticdl train --resume x"],
    ),
    fault(
        "the user stops the job",
        |home| {
            let mut job = training(home, &[]);
            home.stdout(&["stop", JOB]);
            job.wait();
            Scene::Over
        },
        ("stopped", RESTART),
        &["elasticdl stop", "elasticdl train --resume x"],
    ),
    fault(
        "a parameter server is killed",
        |home| {
            let job = training(home, &["--num_epochs=1", "--model_params=sleep_ms=5"]);
            kill_one(&job, "ps");
            succeeded(job)
        },
        SUCCEEDED,
        &["1 process was lost and replaced"],
    ),
    fault(
        "the time limit is reached",
        |home| succeeded(start(home, &["--max_time=1s", "--num_epochs=0"])),
        SUCCEEDED,
        &[],
    ),
    fault(
        "the job trains",
        |home| Scene::Running(training(home, &["--num_epochs=0"])),
        ("healthy", NONE),
        &["elasticdl attach x"],
    ),
];

/// The number of jobs at a time: most of them wait.
const AT_ONCE: usize = 4;

#[test]
fn the_root_cause_of_every_fault_is_found_with_the_right_advice() {
    let (left, found) = (Mutex::new(FAULTS.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(fault) = { left.lock().expect("a list").next() } {
                    let answer = explain(fault);
                    found.lock().expect("a list").push((fault, answer));
                }
            });
        }
    });
    let found = found.into_inner().expect("a list");
    let mut matrix: BTreeMap<(&str, String), u32> = BTreeMap::new();
    for (fault, answer) in &found {
        let Some((answer, _)) = answer else { continue };
        let advice = answer["advice"].as_str().expect("an advice").to_owned();
        *matrix.entry((fault.advice, advice)).or_default() += 1;
    }
    let matrix = table(&matrix);
    print_note(&matrix);
    let wrong: Vec<String> =
        found.iter().filter_map(|(fault, answer)| mistake(fault, answer)).collect();
    assert!(wrong.is_empty(), "{matrix}\n{}", wrong.join("\n\n"));
    if found.iter().all(|(_, answer)| answer.is_some()) {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/troubleshooting.md");
        let page = fs::read_to_string(page).expect("the documentation");
        assert!(
            page.contains(&matrix),
            "docs/troubleshooting.md has a different matrix:\n{matrix}"
        );
        for fault in FAULTS {
            let row = format!("| {} | `{}` | `{}` |", fault.what, fault.cause, fault.advice);
            assert!(page.contains(&row), "docs/troubleshooting.md is missing the row\n{row}");
        }
    }
}

/// Injects a fault and explains the job, as JSON and as text.
fn explain(fault: &Fault) -> Option<(Value, String)> {
    let home = Home::new();
    let scene = (fault.inject)(&home);
    if let Scene::Impossible = scene {
        print_note("skipped: mounting a small disk needs root");
        return None;
    }
    let json = home.stdout(&["explain", JOB, "--json"]);
    let text = home.stdout(&["explain", JOB]);
    // A full disk is unmounted after its job has ended.
    if let Scene::Running(mut job) | Scene::OnFullDisk(mut job, _) = scene {
        job.kill_all();
    }
    Some((serde_json::from_str(&json).expect("JSON"), text))
}

/// Describes what is wrong with an answer.
fn mistake(fault: &Fault, answer: &Option<(Value, String)>) -> Option<String> {
    let (json, text) = answer.as_ref()?;
    let is_right = json["cause"] == fault.cause && json["advice"] == fault.advice;
    let missing: Vec<&&str> = fault.words.iter().filter(|word| !text.contains(**word)).collect();
    let Fault { what, cause, advice, .. } = fault;
    (!is_right || !missing.is_empty()).then(|| {
        format!("{what}: expected {cause}, {advice}; missing {missing:?}: {json:#}\n{text}")
    })
}

/// The confusion matrix as in the documentation: rows are expected advice, columns actual advice.
fn table(matrix: &BTreeMap<(&str, String), u32>) -> String {
    let mut text = format!("| expected \\ actual | `{}` |\n|---|", ADVICE.join("` | `"));
    text += &"---|".repeat(ADVICE.len());
    for expected in ADVICE {
        let counts = ADVICE.map(|answer| {
            let n = matrix.get(&(expected, answer.to_owned())).copied().unwrap_or(0);
            n.to_string()
        });
        text += &format!("\n| `{expected}` | {} |", counts.join(" | "));
    }
    text
}

fn has_text(status: &Value, text: &str) -> bool {
    status.to_string().contains(text)
}

/// Starts a small job; it has the `count` model unless `more` overrides it.
fn start(home: &Home, more: &[&str]) -> Running {
    let given = |flag: &str| more.iter().any(|arg| arg.starts_with(flag));
    let data = shipped_as("training_data", "test");
    let name = format!("--job_name={JOB}");
    let mut args = vec!["train", name.as_str()];
    let defaults = ["--model_def=count", "--minibatch_size=10", "--num_epochs=2", &data];
    args.extend(defaults.into_iter().filter(|arg| !given(arg.split('=').next().expect("a flag"))));
    args.extend(more);
    home.start(JOB, &args)
}

/// A job that trains slowly enough to inject a fault.
fn training(home: &Home, more: &[&str]) -> Running {
    let mut more = more.to_vec();
    if !more.iter().any(|arg| arg.starts_with("--model_params")) {
        more.push("--model_params=sleep_ms=10");
    }
    let mut job = start(home, &more);
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    job
}

fn failed(home: &Home, more: &[&str]) -> Scene {
    let mut job = start(home, more);
    assert_eq!(job.wait().code(), Some(1), "{more:?}: {}", job.log());
    Scene::Over
}

fn succeeded(mut job: Running) -> Scene {
    job.wait_for_success();
    Scene::Over
}

fn killed(home: &Home, more: &[&str]) -> Scene {
    training(home, more).kill_all();
    Scene::Over
}

/// Resumes a job that cannot be resumed.
fn resumed(home: &Home) -> Scene {
    let mut job = home.start(JOB, &["train", "--resume", JOB]);
    assert_eq!(job.wait().code(), Some(1), "{}", job.log());
    Scene::Over
}

fn kill_one(job: &Running, role: &str) -> bool {
    let all = job.instances();
    all.iter().any(|instance| instance.role == role && try_signal(instance.pid, Signal::KILL))
}

/// A copy of the shipped data.
fn copied(home: &Home) -> PathBuf {
    let copy = home.path().join("data");
    fs::create_dir(&copy).expect("a folder");
    for name in ["data-00000.recordio", "data-00001.recordio"] {
        fs::copy(format!("{}/{name}", shipped("test")), copy.join(name)).expect("a copy");
    }
    copy
}

fn as_data(path: &Path) -> String {
    format!("--training_data={}", path.display())
}

/// Changes a byte in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(path, bytes).expect("a file");
}

fn damaged_data(home: &Home) -> Scene {
    let copy = copied(home);
    damage(&copy.join("data-00001.recordio"));
    failed(home, &["--model_def=mnist_mlp", &as_data(&copy)])
}

/// A job on images, one of which is invalid.
fn bad_record(home: &Home, bad: &str) -> Scene {
    let image = format!("[{}]", vec!["7"; 784].join(", "));
    let record = |n: usize| match n {
        350 => bad.replace("IMAGE", &image),
        n => format!(r#"{{"image": {image}, "label": {}}}"#, n % 10),
    };
    let path = home.path().join("data.jsonl");
    let lines: Vec<String> = (0..400).map(record).collect();
    fs::write(&path, lines.join("\n")).expect("a file");
    failed(home, &["--model_def=mnist_mlp", &as_data(&path)])
}

fn removed_data(home: &Home) -> Scene {
    let copy = copied(home);
    let more = [&as_data(&copy), "--model_def=mnist_mlp", "--num_workers=1", "--num_epochs=0"];
    let mut job = start(home, &more);
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    fs::remove_file(copy.join("data-00001.recordio")).expect("a file");
    // The next worker has to open the file again.
    kill_one(&job, "worker");
    assert_eq!(job.wait().code(), Some(1), "{}", job.log());
    Scene::Over
}

fn changed_data(home: &Home) -> Scene {
    let copy = copied(home);
    killed(home, &[&as_data(&copy)]);
    fs::remove_file(copy.join("data-00001.recordio")).expect("a file");
    resumed(home)
}

fn full_disk(home: &Home) -> Scene {
    let jobs = home.path().join("jobs");
    fs::create_dir(&jobs).expect("a folder");
    let Some(mounted) = Mounted::new(&jobs) else { return Scene::Impossible };
    let more = ["--model_params=sleep_ms=15", "--num_epochs=0", "--checkpoint_steps=20"];
    let mut job = start(home, &more);
    job.wait_until("a checkpoint", has_checkpoint);
    let _full = fs::write(mounted.path().join("filler"), vec![0; 64 << 20]);
    job.wait_until("a failed checkpoint", |status| has_text(status, "No space left"));
    Scene::OnFullDisk(job, mounted)
}

fn taken_port(home: &Home) -> Scene {
    let port = free_port();
    let mut job = training(home, &[&format!("--port={port}"), "--num_epochs=0"]);
    // Otherwise, the supervisor would start the next master at once.
    signal(job.pid(), Signal::STOP);
    assert!(kill_one(&job, "master"));
    let start = Instant::now();
    let listener = loop {
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(listener) => break listener,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
    };
    signal(job.pid(), Signal::CONT);
    assert_eq!(job.wait().code(), Some(1), "{}", job.log());
    drop(listener);
    Scene::Over
}

fn killed_workers(home: &Home) -> Scene {
    let mut job = training(home, &["--num_epochs=0"]);
    for n in 1..=3 {
        assert!(kill_one(&job, "worker"));
        job.wait_until("a replacement", |status| {
            let events = status["events"].as_array().expect("events");
            let is_kill = |event: &&Value| event["kind"] == "worker_killed";
            events.iter().filter(is_kill).count() >= n && has_text(status, "\"working\"")
        });
    }
    Scene::Running(job)
}

fn killed_master(home: &Home) -> Scene {
    let mut job = training(home, &["--num_epochs=0"]);
    let start = Instant::now();
    let mut last = 0;
    while job.is_running() {
        assert!(start.elapsed() < PATIENCE, "{}", job.log());
        let info = fs::read(home.job_dir(JOB).join("master.json")).unwrap_or_default();
        let info: Value = serde_json::from_slice(&info).unwrap_or_default();
        let pid = info["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).unwrap_or(last);
        if pid != last {
            try_signal(pid, Signal::KILL);
            last = pid;
        }
        std::thread::yield_now();
    }
    assert_eq!(job.wait().code(), Some(1), "{}", job.log());
    Scene::Over
}

fn blocked_output(home: &Home) -> Scene {
    let output = home.path().join("output");
    let flag = format!("--output={}", output.display());
    let mut job = training(home, &[&flag, "--num_epochs=1", "--model_params=sleep_ms=5"]);
    let _there = fs::remove_dir_all(&output);
    fs::write(&output, "in the way").expect("a file");
    assert_eq!(job.wait().code(), Some(1), "{}", job.log());
    Scene::Over
}

fn damaged_checkpoints(home: &Home) -> Scene {
    let mut job = training(home, &["--checkpoint_steps=20"]);
    job.wait_until("a checkpoint", has_checkpoint);
    job.kill_all();
    let folders = fs::read_dir(home.job_dir(JOB).join("checkpoints")).expect("checkpoints");
    for folder in folders.flatten() {
        for file in fs::read_dir(folder.path()).expect("a checkpoint").flatten() {
            if file.file_name() != "manifest.json" {
                damage(&file.path());
            }
        }
    }
    resumed(home)
}
