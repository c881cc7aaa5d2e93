// SPDX-License-Identifier: Apache-2.0
//! Metrics for other programs: Prometheus and health over HTTP, JSON lines, TensorBoard files.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::harness::{Home, ended, print_note, shipped_as, stderr};

/// Status line, and body.
pub(crate) fn get(address: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("the master listens");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

#[test]
fn the_master_serves_health_and_metrics_over_http() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let mut job = home.start(
        "seen",
        &[
            "train",
            "--job_name=seen",
            "--model_def=count",
            "--model_params=sleep_ms=15",
            &data,
            "--minibatch_size=10",
            "--num_epochs=2",
        ],
    );
    let status = job.wait_until("some training", |status| status["step"].as_u64() > Some(30));
    let address = status["http_address"].as_str().expect("an address").to_owned();
    // Health is published about every second.
    job.wait_until("health", |_| get(&address, "/healthz").1.trim() == "running");
    assert!(get(&address, "/healthz").0.contains("200"));
    let (line, body) = get(&address, "/metrics");
    assert!(line.contains("200"), "{line}");
    for metric in ["step", "records_done", "records_per_second", "loss", "generation"] {
        let name = format!("elasticdl_master_{metric}");
        assert!(body.contains(&format!("# TYPE {name} gauge")), "{name} in {body}");
    }
    assert!(body.contains("elasticdl_master_instances{role=\"worker\"} 2"), "{body}");
    for counter in
        ["spent_seconds_total{role=\"worker\",kind=\"compute\"}", "batches_trained_total"]
    {
        assert!(body.contains(&format!("elasticdl_master_{counter}")), "{counter} in {body}");
    }
    prometheus_parses(&home, &body);
    assert!(get(&address, "/etc/passwd").0.contains("404"));
    job.wait_for_success();
    let lines = std::fs::read_to_string(home.job_dir("seen").join("metrics.jsonl")).expect("lines");
    let last: Value = serde_json::from_str(lines.lines().last().expect("a line")).expect("JSON");
    assert_eq!((&last["kind"], &last["version"]), (&"training".into(), &400.into()), "{last}");
}

/// Parses the scraped metrics with Prometheus' own parser.
fn prometheus_parses(home: &Home, body: &str) {
    let Some(python) = std::env::var_os("ELASTICDL_TEST_PYTHON") else {
        print_note("skipped: ELASTICDL_TEST_PYTHON is not a Python with prometheus_client");
        return;
    };
    let path = home.path().join("scraped");
    std::fs::write(&path, body).expect("a file");
    let mut command = Command::new(python);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/python/read_metrics.py");
    command.arg(script).arg(&path);
    let output = ended(command);
    assert!(output.status.success(), "{}\n{body}", stderr(&output));
    let families: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    for (name, kind) in [("step", "gauge"), ("loss", "gauge"), ("spent_seconds", "counter")] {
        let family = &families[format!("elasticdl_master_{name}")];
        assert_eq!(family["kind"], kind, "{name} in {families:#}");
    }
    let samples = &families["elasticdl_master_batches_trained"]["samples"];
    assert!(samples[0]["value"].as_f64() > Some(0.0), "{samples:#}");
}

#[test]
fn tensorboard_reads_the_evaluations() {
    let Some(python) = std::env::var_os("ELASTICDL_TEST_PYTHON") else {
        print_note("skipped: ELASTICDL_TEST_PYTHON is not a Python with tensorboard");
        return;
    };
    let home = Home::new();
    let folder = home.path().join("tensorboard");
    let flag = format!("--tensorboard_dir={}", folder.display());
    let (training, validation) =
        (shipped_as("training_data", "test"), shipped_as("validation_data", "test"));
    home.train(
        "board",
        &["--model_def=mnist_mlp", &training, &validation, "--num_epochs=2", &flag],
    );
    let mut command = Command::new(python);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/python/read_events.py");
    command.arg(script).arg(&folder);
    let output = ended(command);
    assert!(output.status.success(), "{}", stderr(&output));
    let scalars: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let status = home.status("board");
    let evaluations = status["evaluations"].as_array().expect("evaluations");
    assert_eq!(evaluations.len(), 2);
    for metric in ["accuracy", "loss"] {
        let tag = format!("evaluation/{metric}");
        let points = scalars[&tag].as_array().unwrap_or_else(|| panic!("{tag} in {scalars:#}"));
        assert_eq!(points.len(), evaluations.len(), "{scalars:#}");
        for (point, evaluation) in points.iter().zip(evaluations) {
            assert_eq!(point["step"], evaluation["version"]);
            let [read, reported] = [&point["value"], &evaluation["metrics"][metric]]
                .map(|value| value.as_f64().expect("a number"));
            assert!((read - reported).abs() < 1e-6, "{tag}: {read}, not {reported}");
        }
    }
}
