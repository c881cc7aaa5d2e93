// SPDX-License-Identifier: Apache-2.0
//! Processes without the job's key cannot join, and their attempts do not disturb the job.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;

use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::Value;

use crate::allreduce::exported;
use crate::harness::{Home, Running, assert_exactly_once, ended, shipped_as, signal, stderr};
use crate::metrics::get;

#[test]
fn processes_with_the_key_of_another_job_are_refused_and_the_job_continues() {
    let (home, elsewhere) = (Home::new(), Home::new());
    let data = shipped_as("training_data", "test");
    elsewhere.train("other", &["--model_def=count", &data, "--max_step=1", "--num_workers=1"]);
    let mut job = home.start(
        "target",
        &[
            "train",
            "--job_name=target",
            "--model_def=count",
            "--model_params=sleep_ms=15",
            &data,
            "--minibatch_size=10",
        ],
    );
    let status = job.wait_until("some training", |status| status["step"].as_u64() > Some(2));
    let address = format!("--master_addr={}", status["master_address"].as_str().expect("text"));
    let key = format!("--job_key_file={}", elsewhere.job_dir("other").join("job.key").display());
    for role in [["worker", "--worker_id=9"], ["ps", "--ps_id=9"]] {
        let refused = elsewhere.run(&[role.as_slice(), &[&address, &key]].concat());
        let printed = stderr(&refused);
        assert_eq!(refused.status.code(), Some(1), "{role:?}: {printed}");
        assert!(printed.contains("another job's key"), "{role:?}: {printed}");
        assert!(!printed.contains("panicked"), "{role:?}: {printed}");
    }
    assert!(job.is_running(), "the job ended while it was attacked:\n{}", job.log());
    job.wait_for_success();
    assert_exactly_once(&home, "target", 1, 1);
    let status = home.status("target");
    let is_intruder = |instance: &Value| instance["id"] == 9;
    assert!(!status["instances"].as_array().expect("instances").iter().any(is_intruder));
    assert_eq!((&status["generation"], &status["term"]), (&1.into(), &1.into()), "undisturbed");
    let text = status["events"].to_string();
    assert!(!text.contains("worker-9") && !text.contains("ps-9"), "{text}");
}

#[test]
fn only_the_owner_can_read_the_folder_and_key_of_a_job() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    home.train("private", &["--model_def=count", &data, "--max_step=1", "--num_workers=1"]);
    let mode = |path: &std::path::Path| {
        std::fs::metadata(path).expect("it is there").permissions().mode() & 0o777
    };
    let folder = home.job_dir("private");
    assert_eq!(mode(&folder), 0o700);
    assert_eq!(mode(&folder.join("job.key")), 0o600);
    assert_eq!(mode(&folder.join("logs")), 0o700);
}

/// Trains over TCP only; returns the weights and the logs of all processes.
fn train_by_tcp(home: &Home, name: &str, flags: &[&str]) -> (String, String) {
    let (name_flag, data) = (format!("--job_name={name}"), shipped_as("training_data", "test"));
    let common = [
        "train",
        "--model_def=mnist_mlp",
        "--minibatch_size=20",
        "--seed=3",
        "--log_level=DEBUG",
        &name_flag,
        &data,
    ];
    let mut command = home.command(&[&common, flags].concat());
    command.env("ELASTICDL_TRANSPORT", "tcp");
    let output = ended(command);
    assert!(output.status.success(), "{name}: {}", stderr(&output));
    let logs = std::fs::read_dir(home.job_dir(name).join("logs")).expect("logs");
    let logs = logs.map(|entry| std::fs::read(entry.expect("an entry").path()).expect("a log"));
    let logs = String::from_utf8_lossy(&logs.collect::<Vec<_>>().concat()).into_owned();
    (exported(home, name), logs)
}

#[test]
fn encryption_does_not_change_a_bit_of_the_result() {
    let home = Home::new();
    let allreduce: &[&str] = &["--num_ps_pods=0", "--num_workers=3", "--lanes=3"];
    let servers: &[&str] = &["--num_ps_pods=2", "--num_workers=1", "--grads_to_wait=1"];
    for (name, flags, plain_mark, encrypted_mark) in [
        ("members", allreduce, "transport=\"tcp\"", "transport=\"encrypted tcp\""),
        ("servers", servers, "is_encrypted=false", "is_encrypted=true"),
    ] {
        let train = |is_encrypted: &str| {
            let (name, flag) =
                (format!("{name}-{is_encrypted}"), format!("--encrypt_data={is_encrypted}"));
            let (weights, logs) = train_by_tcp(&home, &name, &[flags, &[&flag]].concat());
            (weights, logs.contains(plain_mark), logs.contains(encrypted_mark))
        };
        let (plain, encrypted) = (train("false"), train("true"));
        assert_eq!((plain.1, plain.2), (true, false), "{name}: {plain_mark}");
        assert_eq!((encrypted.1, encrypted.2), (false, true), "{name}: {encrypted_mark}");
        assert_eq!(plain.0, encrypted.0, "{name}");
    }
}

fn pid_of_master(job: &Running) -> i32 {
    let master = job.instances().into_iter().find(|instance| instance.role == "master");
    master.expect("a master").pid
}

/// Opens more incomplete requests than the master can have file descriptors.
#[test]
fn many_incomplete_requests_do_not_disturb_a_job() {
    edl_net::open_files::raise_limit();
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let mut job = home.start(
        "crowded",
        &[
            "train",
            "--job_name=crowded",
            "--model_def=count",
            "--model_params=sleep_ms=30",
            &data,
            "--minibatch_size=10",
            "--num_epochs=4",
        ],
    );
    job.wait_until("some training", |status| status["step"].as_u64() > Some(2));
    // The next master starts with a low limit that it can raise a little, as is usual.
    let limit = Rlimit { current: Some(512), maximum: Some(1024) };
    prlimit(Pid::from_raw(job.pid()), Resource::Nofile, limit).expect("it is ours");
    signal(pid_of_master(&job), Signal::KILL);
    let status = job.wait_until("a second master", |status| {
        status["term"] == 2 && status["step"].as_u64() > Some(2)
    });
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", pid_of_master(&job)));
    let limits = limits.expect("limits");
    let open_files = limits.lines().find(|line| line.starts_with("Max open files"));
    let raised: Vec<&str> = open_files.expect("it").split_whitespace().skip(3).collect();
    assert_eq!(raised, ["1024", "1024", "files"]);

    let address = status["http_address"].as_str().expect("an address");
    let half_sent = || {
        let mut stream = TcpStream::connect(address).expect("the master listens");
        // The master may have closed it already.
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: 127.");
        stream
    };
    let crowd: Vec<TcpStream> = (0..1100).map(|_| half_sent()).collect();
    assert!(get(address, "/healthz").0.contains("200"));
    assert!(job.is_running(), "{}", job.log());
    job.wait_for_success();
    drop(crowd);
    assert_exactly_once(&home, "crowded", 4, 1);
    assert_eq!(home.status("crowded")["term"], 2, "no further master was needed");
}
