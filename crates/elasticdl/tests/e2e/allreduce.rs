// SPDX-License-Identifier: Apache-2.0
//! AllReduce: the weights are bit-identical for any number of workers, with and without faults.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::harness::{
    Home, Instance, N_RECORDS, PATIENCE, Running, instances, n_running, shared, shipped_as, signal,
    stderr, try_signal,
};

/// 2,000 records in steps of 4 × 16: 32 steps per epoch, and the last one is short.
const STEPS: u64 = 64;

/// The job whose weights are compared. Its model has batch norm and dropout.
pub(crate) fn job(home: &Home, name: &str, workers: u32, more: &[&str]) -> Running {
    let (name_flag, workers) = (format!("--job_name={name}"), format!("--num_workers={workers}"));
    let data = shipped_as("training_data", "test");
    let mut args = vec![
        "train",
        "--distribution_strategy=AllreduceStrategy",
        "--model_def=mnist_cnn",
        "--lanes=4",
        "--minibatch_size=16",
        "--num_epochs=2",
        "--seed=7",
        "--checkpoint_secs=1",
        &name_flag,
        &workers,
        &data,
    ];
    args.extend(more);
    home.start(name, &args)
}

/// The exported weights of a job that succeeded and trained every record twice.
pub(crate) fn weights(home: &Home, name: &str) -> String {
    audit(home, name, N_RECORDS);
    exported(home, name)
}

/// The audit of a job that trained each of `n_records` once in every epoch.
pub(crate) fn audit(home: &Home, name: &str, n_records: u64) -> Value {
    let audit: Value =
        serde_json::from_str(&home.stdout(&["audit", name, "--json"])).expect("JSON");
    for epoch in audit["epochs"].as_array().expect("epochs") {
        let found = (&epoch["records"], &epoch["missing"], &epoch["duplicated"]);
        assert_eq!(found, (&n_records.into(), &0.into(), &0.into()), "{audit:#}");
    }
    audit
}

/// The hash of the weights that a job has exported.
pub(crate) fn exported(home: &Home, name: &str) -> String {
    let file = home.job_dir(name).join("output/model.safetensors");
    let bytes = std::fs::read(file).expect("an exported model");
    Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn step(status: &Value) -> u64 {
    status["step"].as_u64().unwrap_or(0)
}

fn workers(job: &Running) -> Vec<Instance> {
    let all = job.instances().into_iter();
    all.filter(|instance| instance.role == "worker" && instance.state == "working").collect()
}

/// Waits for a step, then calls `act`. Returns false if the job ended before that.
pub(crate) fn at(job: &mut Running, wanted: u64, act: impl FnOnce(&mut Running)) -> bool {
    let start = Instant::now();
    while job.is_running() {
        if job
            .status()
            .is_some_and(|status| step(&status) >= wanted && status["state"] == "running")
        {
            act(job);
            return true;
        }
        assert!(start.elapsed() < PATIENCE, "step {wanted} was not reached:\n{}", job.log());
        // With a longer pause, a short job would run past several kills.
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// A job whose weights do not depend on faults.
pub(crate) struct SameBits {
    /// The topic that its tests have in common.
    pub topic: &'static str,
    pub steps: u64,
    pub weights: fn(&Home, &str) -> String,
    /// Starts it with one worker under the name `undisturbed`, without faults.
    pub start: fn(&Home) -> Running,
}

impl SameBits {
    /// The weights of a job that succeeds.
    pub(crate) fn trained(&self, home: &Home, name: &str, mut job: Running) -> String {
        job.wait_for_success();
        assert_eq!(home.status(name)["step"], self.steps, "{name}");
        (self.weights)(home, name)
    }

    /// The weights of the job without faults; all tests share it.
    pub(crate) fn undisturbed(&self, home: &Home) -> String {
        shared(self.topic, || self.trained(home, "undisturbed", (self.start)(home)))
    }

    /// Compares a job with faults with one without.
    pub(crate) fn assert(&self, home: &Home, name: &str, disturbed: Running) {
        let found = self.trained(home, name, disturbed);
        assert_eq!(found, self.undisturbed(home), "{name}");
    }
}

pub(crate) const SAME_BITS: SameBits = SameBits {
    topic: "allreduce",
    steps: STEPS,
    weights,
    start: |home| job(home, "undisturbed", 1, &[]),
};

#[test]
fn weights_are_bit_identical_for_any_number_of_workers() {
    let home = Home::new();
    let expected = SAME_BITS.undisturbed(&home);
    let mut found: Vec<(String, String)> = Vec::new();
    for n in 2..=4 {
        let name = format!("workers-{n}");
        let more: &[&str] = if n == 3 { &["--lane_balance"] } else { &[] };
        let weights = SAME_BITS.trained(&home, &name, job(&home, &name, n, more));
        found.push((name, weights));
    }
    let data = shipped_as("training_data", "test");
    home.stdout(&[
        "train",
        "--distribution_strategy=Local",
        "--model_def=mnist_cnn",
        "--lanes=4",
        "--minibatch_size=16",
        "--num_epochs=2",
        "--seed=7",
        "--job_name=local",
        &data,
    ]);
    found.push(("local".into(), weights(&home, "local")));
    assert!(found.iter().all(|(_, weights)| *weights == expected), "not {expected}: {found:#?}");
}

#[test]
fn weights_are_bit_identical_when_workers_are_killed() {
    let home = Home::new();
    let mut killed = job(&home, "killed", 3, &[]);
    let mut n_killed = 0;
    for wanted in (4..STEPS).step_by(4) {
        at(&mut killed, wanted, |job| {
            if let Some(victim) = workers(job).first() {
                n_killed += usize::from(try_signal(victim.pid, Signal::KILL));
            }
        });
    }
    assert!(n_killed >= 3, "only {n_killed} workers were killed");
    SAME_BITS.assert(&home, "killed", killed);
}

#[test]
fn weights_are_bit_identical_when_a_worker_freezes_for_a_while() {
    let home = Home::new();
    let mut frozen = job(&home, "frozen", 2, &["--heartbeat_timeout_secs=10"]);
    let was_frozen = at(&mut frozen, 12, |job| {
        let victim = workers(job).first().expect("a worker").pid;
        signal(victim, Signal::STOP);
        job.wait_until("a world without it", |status| {
            let events = status["events"].as_array().into_iter().flatten();
            let mut texts = events.filter_map(|event| event["text"].as_str());
            texts.any(|text| text.contains("did not respond for"))
        });
        signal(victim, Signal::CONT);
    });
    assert!(was_frozen);
    SAME_BITS.assert(&home, "frozen", frozen);
}

#[test]
fn weights_are_bit_identical_when_a_worker_joins_and_another_leaves() {
    let home = Home::new();
    let mut joined = job(&home, "joined", 1, &[]);
    let scale = |_: &mut Running| drop(home.stdout(&["scale", "joined", "--workers", "2"]));
    assert!(at(&mut joined, 6, scale));
    let has_two = |status: &Value| n_working(status) == 2;
    joined.wait_until("the new worker", has_two);
    // A graceful exit: the platform asks one of the workers to leave.
    let leave = |job: &mut Running| signal(workers(job)[0].pid, Signal::TERM);
    assert!(at(&mut joined, 30, leave));
    SAME_BITS.assert(&home, "joined", joined);
}

#[test]
fn weights_are_bit_identical_when_masters_are_killed() {
    let home = Home::new();
    let mut no_master = job(&home, "no-master", 2, &[]);
    for wanted in [15, 35] {
        let was_killed = at(&mut no_master, wanted, |job| {
            let master = job.instances().into_iter().find(|i| i.role == "master").expect("it");
            signal(master.pid, Signal::KILL);
        });
        assert!(was_killed, "the job ended before step {wanted}");
    }
    SAME_BITS.assert(&home, "no-master", no_master);
    assert_eq!(home.status("no-master")["term"], 3, "the master was replaced twice");
}

#[test]
fn weights_are_bit_identical_when_everything_is_killed_and_resumed() {
    let home = Home::new();
    let mut dead = job(&home, "dead", 2, &[]);
    assert!(at(&mut dead, 30, Running::kill_all));
    let resumed = home.start("dead", &["train", "--resume", "dead", "--num_workers=3"]);
    SAME_BITS.assert(&home, "dead", resumed);
}

pub(crate) fn n_working(status: &Value) -> usize {
    let is_working = |i: &&Instance| i.role == "worker" && i.state == "working";
    instances(status).iter().filter(is_working).count()
}

/// A member dies during a collective operation, in each of its phases and on each transport.
#[test]
fn survivors_continue_no_matter_what_a_failed_member_was_sending() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let train = |name: &str, workers: u32, transport: &str, fault: &str| {
        let (name_flag, workers) =
            (format!("--job_name={name}"), format!("--num_workers={workers}"));
        let mut command = home.command(&[
            "train",
            "--num_ps_pods=0",
            "--model_def=mnist_mlp",
            "--lanes=5",
            "--minibatch_size=20",
            "--seed=3",
            &name_flag,
            &workers,
            &data,
        ]);
        command.env("ELASTICDL_TRANSPORT", transport);
        if !fault.is_empty() {
            command.env("ELASTICDL_FAULT", fault);
        }
        let output = crate::harness::ended(command);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        weights(&home, name)
    };
    let undisturbed = train("alone", 1, "shm", "");
    let phases = ["before_send", "half_sent", "reducing", "before_gather", "after"];
    let transports = ["shm", "unix", "tcp"].into_iter().cycle();
    for (number, (phase, transport)) in (0..).zip(phases.into_iter().zip(transports)) {
        let workers = 2 + number % 4;
        let name = format!("{}-{transport}-{workers}", phase.replace('_', "-"));
        let fault = format!("worker=1,step=7,phase={phase},action=kill");
        assert_eq!(train(&name, workers, transport, &fault), undisturbed, "{name}");
        let events = &home.status(&name)["events"];
        let was_killed = |event: &Value| event["kind"] == "worker_killed";
        assert!(events.as_array().expect("events").iter().any(was_killed), "{name}: {events:#}");
    }
}

#[test]
fn a_running_job_grows_to_four_workers_and_shrinks_to_one() {
    let home = Home::new();
    let (training, validation) =
        (shipped_as("training_data", "train"), shipped_as("validation_data", "test"));
    let mut job = home.start(
        "elastic",
        &[
            "train",
            "--distribution_strategy=AllreduceStrategy",
            "--model_def=mnist_cnn",
            "--job_name=elastic",
            "--num_workers=2",
            "--max_workers=4",
            "--minibatch_size=16",
            "--evaluation_steps=20",
            "--log_loss_steps=5",
            &training,
            &validation,
        ],
    );
    job.wait_until("two workers", |status| n_working(status) == 2);
    let refused = home.run(&["scale", "elastic", "--workers", "5"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("4 lanes"), "{}", stderr(&refused));
    home.stdout(&["scale", "elastic", "--workers", "4"]);
    job.wait_until("four workers", |status| n_working(status) == 4);
    let table = home.stdout(&["status", "elastic"]);
    assert!(table.contains("AllReduce over 4 lanes") && table.contains("lane 3"), "{table}");
    home.stdout(&["scale", "elastic", "--workers", "1"]);
    job.wait_until("one worker", |status| {
        n_working(status) == 1 && n_running(status, "worker") == 1
    });
    job.wait_until("an evaluation", |status| {
        status["evaluations"].as_array().is_some_and(|all| !all.is_empty())
    });
    home.stdout(&["stop", "elastic"]);
    job.wait();
    let logs = home.stdout(&["logs", "elastic"]);
    assert!(logs.contains("Loss = ") && logs.contains("steps = 1"), "{logs}");
    assert!(logs.contains("Evaluation metrics[v=20]: {'accuracy': "), "{logs}");
    // A stopped job resumes where it was.
    let at_stop = step(&home.status("elastic"));
    assert!(at_stop > 0);
    let mut resumed = home.start("elastic", &["train", "--resume", "elastic", "--max_step=400"]);
    resumed.wait_until("another step", |status| step(status) > at_stop);
}

#[test]
fn contradictory_numbers_of_workers_and_lanes_are_refused() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let refused = |args: &[&str]| {
        let output = home.run(&[&["train", "--num_ps_pods=0", &data], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        stderr(&output)
    };
    assert!(refused(&["--num_workers=4", "--lanes=2"]).contains("--lanes=2"));
    assert!(refused(&["--num_workers=2", "--min_workers=3"]).contains("--min_workers=3"));
    assert!(refused(&["--lanes=0"]).contains("at least 1"));
    assert_eq!(home.jobs(), [""; 0]);
}
