// SPDX-License-Identifier: Apache-2.0
//! Hybrid (dense parameters with AllReduce, embedding tables on servers): the weights are
//! bit-identical for any number of workers and servers, with and without faults.

use std::fmt::Write as _;
use std::time::Duration;

use edl_core::rng::Rng;
use rustix::process::Signal;

use crate::allreduce::{SameBits, at, audit, exported};
use crate::chaos::inject_fault;
use crate::harness::{Home, Running, shipped, signal, stderr, try_signal};
use crate::oracle;

/// 9,994 records in steps of 4 × 12: the last of an epoch has 10, the others 48.
const N_PEOPLE: u64 = 9_994;
const STEPS: u64 = 2 * 209;

/// Writes made-up records with the columns of the census data.
fn people(home: &Home) -> String {
    let mut rng = Rng::new(5);
    let mut text = String::from(
        "age,fnlwgt,education_num,capital_gain,capital_loss,hours_per_week,workclass,education,\
         marital_status,occupation,relationship,race,gender,native_country,label\n",
    );
    for _ in 0..N_PEOPLE {
        let [age, weight, years] = [17 + rng.below(60), 20_000 + rng.below(300_000), rng.below(16)];
        let [gain, loss, hours] = [rng.below(2) * 4_000, rng.below(3) * 900, 10 + rng.below(60)];
        let mut word = |kind: char, n: u64| format!("{kind}{}", rng.below(n));
        let words =
            [('w', 8), ('e', 16), ('m', 7), ('o', 14), ('r', 6), ('c', 5), ('g', 2), ('n', 41)];
        let words = words.map(|(kind, n)| word(kind, n)).join(",");
        let label = u64::from(age + hours + years > 85);
        writeln!(text, "{age},{weight},{years},{gain},{loss},{hours},{words},{label}")
            .expect("memory");
    }
    let path = home.path().join("people.csv");
    std::fs::write(&path, text).expect("a folder to write to");
    path.to_string_lossy().into_owned()
}

/// The job whose weights are compared.
fn job(home: &Home, name: &str, (workers, servers): (u32, u32), more: &[&str]) -> Running {
    let data = home.path().join("people.csv").to_string_lossy().into_owned();
    let flags = [
        format!("--job_name={name}"),
        format!("--num_workers={workers}"),
        format!("--num_ps_pods={servers}"),
        format!("--training_data={data}"),
    ];
    let mut args = vec![
        "train",
        "--distribution_strategy=HybridStrategy",
        "--model_def=deepfm",
        // Wide enough for a step to take milliseconds: the job must run until a fault is injected.
        "--model_params=hidden=768",
        "--lanes=4",
        "--minibatch_size=12",
        "--num_epochs=2",
        "--seed=7",
        "--clip_norm=5",
        "--checkpoint_secs=1",
    ];
    args.extend(flags.iter().map(String::as_str));
    args.extend(more);
    home.start(name, &args)
}

/// The exported weights of a job that trained every record twice.
fn weights(home: &Home, name: &str) -> String {
    let audit = audit(home, name, N_PEOPLE);
    let n_of = |key: &str| audit[key].as_array().map(Vec::len);
    assert_eq!(n_of("epochs"), Some(2), "{audit:#}");
    assert_eq!(n_of("partitions"), Some(64), "dense parameters and rows are both audited");
    exported(home, name)
}

const SAME_BITS: SameBits = SameBits {
    topic: "hybrid",
    steps: STEPS,
    weights,
    start: |home| job(home, "undisturbed", (1, 1), &[]),
};

fn pid_of(job: &Running, role: &str) -> Option<i32> {
    job.instances().into_iter().find(|instance| instance.role == role).map(|found| found.pid)
}

/// Kills one process of a role at each of the steps; at least `least` kills must succeed.
fn kill(job: &mut Running, role: &str, steps: impl IntoIterator<Item = u64>, least: usize) {
    let mut n_killed = 0;
    for wanted in steps {
        at(job, wanted, |job| {
            let is_killed = pid_of(job, role).is_some_and(|pid| try_signal(pid, Signal::KILL));
            n_killed += usize::from(is_killed);
        });
    }
    assert!(n_killed >= least, "only {n_killed} kills of a {role} before the job ended");
}

/// Whether the job recorded an event of this kind.
fn has_event(home: &Home, name: &str, kind: &str) -> bool {
    let path = home.job_dir(name).join("events.jsonl");
    let text = std::fs::read_to_string(&path).expect("events");
    text.contains(&format!("\"{kind}\""))
}

#[test]
fn weights_are_bit_identical_for_any_number_of_workers_and_servers() {
    let home = Home::new();
    people(&home);
    let expected = SAME_BITS.undisturbed(&home);
    let mut found: Vec<(String, String)> = Vec::new();
    for (workers, servers) in [(2, 1), (3, 2)] {
        let name = format!("workers-{workers}");
        let weights = SAME_BITS.trained(&home, &name, job(&home, &name, (workers, servers), &[]));
        found.push((name, weights));
    }
    assert!(found.iter().all(|(_, weights)| *weights == expected), "not {expected}: {found:#?}");
}

#[test]
fn weights_are_bit_identical_when_workers_are_killed() {
    let home = Home::new();
    people(&home);
    let mut killed = job(&home, "killed", (3, 1), &[]);
    kill(&mut killed, "worker", (20..STEPS).step_by(70), 2);
    SAME_BITS.assert(&home, "killed", killed);
    assert!(has_event(&home, "killed", "worker_killed"));
    assert!(!has_event(&home, "killed", "restored"), "survivors continue from their own memory");
}

#[test]
fn weights_are_bit_identical_when_servers_are_killed() {
    let home = Home::new();
    people(&home);
    let mut no_servers = job(&home, "no-servers", (2, 2), &["--checkpoint_steps=10"]);
    kill(&mut no_servers, "ps", [65, 250], 2);
    SAME_BITS.assert(&home, "no-servers", no_servers);
    assert!(has_event(&home, "no-servers", "restored"));
}

#[test]
fn weights_are_bit_identical_when_masters_are_killed() {
    let home = Home::new();
    people(&home);
    let mut no_master = job(&home, "no-master", (2, 1), &[]);
    kill(&mut no_master, "master", [40, 200], 2);
    SAME_BITS.assert(&home, "no-master", no_master);
    assert_eq!(home.status("no-master")["term"], 3, "the master was replaced twice");
}

#[test]
fn weights_are_bit_identical_when_all_workers_are_killed_at_once() {
    let home = Home::new();
    people(&home);
    let mut no_workers = job(&home, "no-workers", (2, 1), &["--checkpoint_steps=10"]);
    let was_running = at(&mut no_workers, 75, |job| {
        let all = job.instances().into_iter().filter(|instance| instance.role == "worker");
        all.for_each(|worker| signal(worker.pid, Signal::KILL));
    });
    assert!(was_running);
    SAME_BITS.assert(&home, "no-workers", no_workers);
    assert!(has_event(&home, "no-workers", "restored"));
}

#[test]
fn weights_are_bit_identical_when_everything_is_killed_and_resumed() {
    let home = Home::new();
    let data = people(&home);
    let mut dead = job(&home, "dead", (2, 1), &["--checkpoint_steps=10"]);
    assert!(at(&mut dead, 90, Running::kill_all));
    let more = ["train", "--resume", "dead", "--num_workers=3", "--num_ps_pods=3"];
    let resumed = home.start("dead", &more);
    SAME_BITS.assert(&home, "dead", resumed);

    // For evaluation, servers hold the model, no matter which strategy trained it.
    let checkpoints = home.job_dir("dead").join("checkpoints").to_string_lossy().into_owned();
    let from = format!("--checkpoint_dir_for_init={checkpoints}");
    let on = format!("--validation_data={data}");
    let evaluated = home.run(&["evaluate", "--job_name=judge", &from, &on]);
    assert!(evaluated.status.success(), "{}", stderr(&evaluated));
}

/// Three lanes of nine records: the last step of an epoch has two records, both in one lane.
#[test]
fn hybrid_training_is_exactly_once_when_processes_are_killed() {
    const EPOCHS: u32 = 3;
    for seed in crate::chaos::seeds(2) {
        let (home, name) = (Home::new(), format!("hybrid-{seed}"));
        let data = format!("--training_data={}", shipped("test"));
        let job_name = format!("--job_name={name}");
        let mut job = home.start(
            &name,
            &[
                "train",
                "--distribution_strategy=HybridStrategy",
                "--model_def=count",
                "--model_params=sleep_ms=20",
                "--lanes=3",
                "--minibatch_size=9",
                "--num_epochs=3",
                "--num_workers=3",
                "--num_ps_pods=2",
                "--checkpoint_steps=20",
                "--checkpoint_secs=2",
                "--heartbeat_timeout_secs=1.5",
                &job_name,
                &data,
            ],
        );
        let mut rng = Rng::new(2000 + seed);
        job.wait_until("the first process", |status| {
            status["instances"].as_array().is_some_and(|i| i.len() > 2)
        });
        let mut done = Vec::new();
        while done.len() < 8 && job.is_running() {
            std::thread::sleep(Duration::from_millis(50 + rng.below(700)));
            done.extend(inject_fault(&mut job, &mut rng));
        }
        let status = job.wait();
        assert!(status.success(), "seed {seed}: {status} after {done:#?}\n{}", job.log());
        assert!(done.len() >= 4, "seed {seed}: the job ended after {done:#?}");
        oracle::assert_counted(&home, &name, EPOCHS, oracle::Step::Lanes(3));
    }
}

#[test]
fn unsupported_hybrid_options_are_refused_in_one_line() {
    let home = Home::new();
    let data = format!("--training_data={}", shipped("test"));
    for (args, words) in [
        (&["--model_def=mnist_cnn"][..], ["no embedding tables", "AllreduceStrategy"]),
        (&["--model_def=count", "--num_ps_pods=0"][..], ["--num_ps_pods", "at least 1"]),
        (&["--model_def=count", "--grads_to_wait=2"][..], ["--grads_to_wait", "--lanes"]),
    ] {
        let strategy = "--distribution_strategy=HybridStrategy";
        let output = home.run(&[&["train", strategy, &data], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let text = stderr(&output);
        assert!(words.iter().all(|word| text.contains(word)), "{args:?}: {text}");
    }
    let refused = home.run(&["train", "--num_ps_pods=0", "--model_def=count", &data]);
    assert!(stderr(&refused).contains("HybridStrategy"), "{}", stderr(&refused));
}
