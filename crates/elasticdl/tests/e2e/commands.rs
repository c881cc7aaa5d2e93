// SPDX-License-Identifier: Apache-2.0
//! Runs each command once, on real jobs.

use serde_json::Value;

use crate::harness::{
    Home, N_RECORDS, assert_exactly_once, has_checkpoint, n_running, shipped_as, stderr,
};

/// A job of the `count` model that takes a few seconds.
fn long_job(data: &str) -> Vec<&str> {
    vec![
        "--model_def=count",
        "--model_params=sleep_ms=40",
        data,
        "--num_epochs=2",
        "--minibatch_size=10",
        "--num_minibatches_per_task=4",
        "--checkpoint_steps=20",
    ]
}

/// Trains a small model on the test data and evaluates it there.
fn train_mlp(home: &Home) {
    let (training, validation) =
        (shipped_as("training_data", "test"), shipped_as("validation_data", "test"));
    let more = ["--num_epochs=2", "--partitions=5"];
    home.train("mlp", &[&["--model_def=mnist_mlp", &training, &validation], &more[..]].concat());
}

fn last_metrics(status: &Value) -> Vec<(String, f64)> {
    let evaluations = status["evaluations"].as_array().expect("evaluations");
    let metrics = evaluations.last().expect("an evaluation")["metrics"].as_object();
    let number = |(name, value): (&String, &Value)| (name.clone(), value.as_f64().expect(name));
    metrics.expect("metrics").iter().map(number).collect()
}

/// The time that workers compute is recorded, also without training.
fn assert_computed(status: &Value) {
    let workers = &status["goodput"]["workers"];
    assert!(workers["compute"].as_f64() > Some(0.0), "{workers:#}");
}

#[test]
fn evaluate_reproduces_the_last_evaluation_of_training() {
    let home = Home::new();
    train_mlp(&home);
    let trained = home.status("mlp");
    assert_eq!(trained["evaluations"].as_array().map(Vec::len), Some(2), "one after each epoch");
    let quiet = home.run(&["evaluate", "mlp", "--job_name=again", "--num_workers=3", "--quiet"]);
    assert_eq!((quiet.status.code(), stderr(&quiet).as_str()), (Some(0), ""));
    let summary = String::from_utf8_lossy(&quiet.stdout);
    let measured = home.status("again");
    let (expected, found) = (last_metrics(&trained), last_metrics(&measured));
    let names = |metrics: &[(String, f64)]| -> Vec<String> {
        metrics.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&expected), names(&found));
    assert!(names(&found).contains(&"accuracy".into()), "{found:?}");
    for ((name, expected), (_, found)) in expected.iter().zip(&found) {
        assert!((expected - found).abs() < 1e-6, "{name}: {expected} in training, {found} now");
        assert!(summary.contains(&format!("{expected:.4}")), "{name} is missing: {summary}");
    }
    assert_eq!(measured["records_done"], N_RECORDS);
    assert_computed(&measured);
    let version = |status: &Value| {
        status["evaluations"].as_array().unwrap().last().unwrap()["version"].clone()
    };
    assert_eq!(version(&measured), version(&trained), "the version of the checkpoint");

    // The exported model, in a folder that no job knows, is the same model.
    let folder = home.path().join("elsewhere");
    let model = folder.join("model.safetensors").display().to_string();
    let exported = home.stdout(&["export", "mlp", "--output", &folder.display().to_string()]);
    assert_eq!(exported, format!("{model}\n"));
    let result = home.job_dir("mlp").join("output/model.safetensors");
    assert!(std::fs::read(result).unwrap() == std::fs::read(&model).unwrap(), "the final model");
    let data = shipped_as("validation_data", "test");
    home.stdout(&["evaluate", &model, &data, "--job_name=from-file", "--num_workers=1"]);
    let measured = home.status("from-file");
    assert_eq!(version(&measured), version(&trained));
    for ((name, expected), (_, found)) in expected.iter().zip(last_metrics(&measured)) {
        assert!((expected - found).abs() < 1e-6, "{name}: {expected} in training, {found} now");
    }
    let again = home.run(&["export", "mlp", "--output", &folder.display().to_string()]);
    assert_eq!(again.status.code(), Some(2), "a model is not overwritten");
    let wrong = home.run(&["evaluate", &format!("{}/test", crate::harness::shipped(""))]);
    assert!(stderr(&wrong).contains("no trained model in"), "{}", stderr(&wrong));
}

#[test]
fn predict_writes_one_output_per_record_in_order() {
    let home = Home::new();
    train_mlp(&home);
    let from = format!("--checkpoint_dir_for_init={}/checkpoints", home.job_dir("mlp").display());
    let output = home.path().join("answers");
    let output_flag = format!("--output={}", output.display());
    let data = shipped_as("prediction_data", "test");
    let flags = ["--num_workers=3", "--minibatch_size=7", "--job_name=answers"];
    home.stdout(&[&["predict", &from, &data, &output_flag], &flags[..]].concat());
    assert_computed(&home.status("answers"));
    let predictions = std::fs::read_to_string(output.join("predictions.jsonl")).expect("a file");
    let head = home.stdout(&["data", "head", &crate::harness::shipped("test"), "-n", "2000"]);
    let (mut n_right, mut n_lines) = (0_u64, 0_u64);
    for (line, record) in predictions.lines().zip(head.lines()) {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let record: Value = serde_json::from_str(record).expect("JSON");
        assert_eq!(line["record"], n_lines);
        let output = line["output"].as_array().expect("an output");
        let output: Vec<f64> = output.iter().map(|p| p.as_f64().expect("a number")).collect();
        assert_eq!(output.len(), 10);
        let best = (0..10).max_by(|a, b| output[*a].total_cmp(&output[*b])).expect("ten");
        n_right += u64::from(record["label"] == best);
        n_lines += 1;
    }
    assert_eq!((n_lines, predictions.lines().count() as u64), (N_RECORDS, N_RECORDS));
    let metrics = last_metrics(&home.status("mlp"));
    let accuracy = metrics.iter().find(|(name, _)| name == "accuracy").expect("accuracy").1;
    let found = n_right as f64 / N_RECORDS as f64;
    assert!((found - accuracy).abs() < 1e-6, "accuracy {found}, not {accuracy}");
}

#[test]
fn a_detached_job_is_watched_listed_stopped_resumed_and_removed() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let detached = home
        .stdout(&[&["train", "--detach", "--job_name=bg"], long_job(&data).as_slice()].concat());
    assert_eq!(detached, "bg\n", "only the name, for scripts");
    home.wait_until("bg", "a checkpoint", has_checkpoint);
    let table = home.stdout(&["status"]);
    for word in ["bg (train count)", "running", "worker-1", "checkpoint"] {
        assert!(table.contains(word), "`{word}` in {table}");
    }
    // `list` reads the file that the master writes every half second.
    let start = std::time::Instant::now();
    loop {
        let list: Value = serde_json::from_str(&home.stdout(&["list", "--json"])).expect("JSON");
        assert_eq!(list[0]["job"], "bg");
        if list[0]["state"] == "running" {
            break;
        }
        assert!(start.elapsed() < crate::harness::PATIENCE, "{list:#}");
    }
    let impatient = home.run(&["wait", "bg", "--timeout=0"]);
    assert_eq!(impatient.status.code(), Some(124), "{}", stderr(&impatient));
    let refused = home.run(&["clean", "bg"]);
    assert_eq!(refused.status.code(), Some(2), "a running job is not removed");
    assert_eq!(home.stdout(&["stop", "bg"]), "job bg stopped\n");
    assert_eq!(home.stdout(&["stop", "bg"]), "job bg is not running (stopped)\n");
    assert_eq!(home.run(&["attach", "bg"]).status.code(), Some(3), "it can be resumed");
    let waited = home.run(&["wait", "bg"]);
    assert_eq!(waited.status.code(), Some(3));
    assert_eq!(waited.stdout, b"job bg stopped\n");
    for command in ["wait", "attach"] {
        // As for `elasticdl wait bg | true`.
        let (reader, closed) = std::io::pipe().expect("a pipe");
        drop(reader);
        let status = home.command(&[command, "bg"]).stdout(closed).status().expect("it runs");
        assert_eq!(status.code(), Some(3), "`{command}` to a reader that has left");
    }
    let stopped = home.status("bg");
    assert_eq!(stopped["state"], "stopped");
    assert!(stopped["records_done"].as_u64() < Some(2 * N_RECORDS), "{stopped:#}");

    home.stdout(&["train", "--resume", "bg", "--detach"]);
    let wait = std::thread::spawn({
        let command = home.command(&["wait"]);
        || crate::harness::ended(command)
    });
    let attached = home.run(&["attach", "bg"]);
    assert_eq!(attached.status.code(), Some(0), "{}", stderr(&attached));
    let summary = String::from_utf8_lossy(&attached.stdout);
    assert!(summary.starts_with("job bg succeeded"), "{summary}");
    let again = home.run(&["attach", "bg"]);
    assert_eq!((again.status.code(), &again.stdout), (Some(0), &attached.stdout), "it has ended");
    let waited = wait.join().expect("a thread");
    assert_eq!(waited.status.code(), Some(0));
    assert_eq!(
        (waited.stdout.as_slice(), stderr(&waited).as_str()),
        (&b"job bg succeeded\n"[..], "")
    );
    assert_exactly_once(&home, "bg", 2, 1);
    shows_logs(&home);
    let listed = |state: &str| home.stdout(&["clean", "--dry-run", &format!("--state={state}")]);
    assert!(listed("failed,succeeded").contains("bg ") && !listed("stopped").contains("bg "));
    assert!(!home.stdout(&["clean", "--older-than=7d"]).contains("bg"), "it is new");
    assert_eq!(home.stdout(&["clean", "bg"]), "removed bg\n");
    assert_eq!(home.jobs(), [""; 0]);
    assert_eq!(home.run(&["status", "bg"]).status.code(), Some(4));
}

/// The logs of an ended job, by process.
fn shows_logs(home: &Home) {
    let worker = home.stdout(&["logs", "bg", "--worker", "0"]);
    assert!(worker.contains("Loss = ") && worker.contains("steps = "), "{worker}");
    let tail = home.stdout(&["logs", "bg", "--master", "-n", "2"]);
    assert_eq!(tail.lines().count(), 2, "{tail}");
    let all = home.stdout(&["logs", "bg", "--follow"]);
    for process in ["master", "ps-0", "worker-0", "worker-1"] {
        assert!(all.lines().any(|line| line.starts_with(process)), "{process} in {all}");
    }
    assert_eq!(home.run(&["logs", "bg", "--worker", "99"]).status.code(), Some(4));
}

#[test]
fn scaling_up_and_down_trains_every_record_once() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let args = [
        &["train", "--job_name=grow", "--num_workers=1", "--num_ps_pods=2"],
        long_job(&data).as_slice(),
    ]
    .concat();
    let mut job = home.start("grow", &args);
    job.wait_until("some training", |status| status["step"].as_u64() > Some(5));
    let printed = home.stdout(&["scale", "grow", "--workers", "3"]);
    assert_eq!(printed, "job grow: workers scaled from 1 to 3\n");
    let working = |status: &Value| {
        let instances = status["instances"].as_array().into_iter().flatten();
        instances.filter(|i| i["role"] == "worker" && i["state"] == "working").count()
    };
    job.wait_until("three workers", |status| working(status) == 3);
    home.stdout(&["scale", "grow", "--workers", "1"]);
    let status = job.wait_until("one worker", |status| n_running(status, "worker") == 1);
    assert_eq!(status["workers_wanted"], 1);
    job.wait_for_success();
    assert_exactly_once(&home, "grow", 2, 1);
}

#[test]
fn doctor_finds_this_machine_ready_and_prints_how_to_fix_a_bad_home() {
    let home = Home::new();
    let printed = home.stdout(&["doctor"]);
    assert!(printed.ends_with("this machine is ready to train\n"), "{printed}");
    let file = home.path().join("file");
    std::fs::write(&file, "").expect("a file");
    let mut command = home.command(&["doctor"]);
    command.env("ELASTICDL_HOME", file.join("below"));
    let output = crate::harness::ended(command);
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("FAIL  jobs folder") && printed.contains("fix: "), "{printed}");
}

#[test]
fn version_help_and_completions_are_printed() {
    let home = Home::new();
    let version = home.stdout(&["--version"]);
    assert!(version.starts_with("elasticdl ") && version.contains("(commit "), "{version}");
    assert_eq!(home.stdout(&["version"]), version);
    assert!(home.stdout(&["--help"]).contains("Exit codes: 0 success"));
    let bare = home.stdout(&[]);
    assert!(bare.contains("Usage: elasticdl") && bare.lines().count() <= 40, "{bare}");
    let [short, long] = ["-h", "--help"].map(|flag| home.stdout(&["train", flag]));
    assert!(short.lines().count() <= 40 && long.contains("--worker_image"), "{short}");
    assert_eq!(home.stdout(&["help", "train"]), long);
    for command in ["train", "evaluate", "predict", "data", "worker"] {
        assert!(home.stdout(&[command, "--help"]).contains("Usage: elasticdl"), "{command}");
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = home.stdout(&["completions", shell]);
        assert!(script.contains("num_ps_pods") && script.contains("evaluate"), "{shell}");
    }
    assert_eq!(home.jobs(), [""; 0]);
}

#[test]
fn bash_completes_the_names_of_jobs() {
    let home = Home::new();
    for name in ["alpha", "beta"] {
        std::fs::create_dir_all(home.job_dir(name)).expect("a folder");
        let spec = format!("{{\"job_name\": \"{name}\"}}");
        std::fs::write(home.job_dir(name).join("job.json"), spec).expect("a job");
    }
    let complete = |words: &[&str]| {
        let script = format!(
            "PATH={}:$PATH; source <(elasticdl completions bash); COMP_WORDS=({}); \
             COMP_CWORD={}; _elasticdl_with_jobs elasticdl \"${{COMP_WORDS[-1]}}\" \
             \"${{COMP_WORDS[-2]}}\"; echo \"${{COMPREPLY[*]}}\"",
            std::path::Path::new(env!("CARGO_BIN_EXE_elasticdl")).parent().unwrap().display(),
            words.iter().map(|word| format!("'{word}' ")).collect::<String>(),
            words.len() - 1
        );
        let mut command = std::process::Command::new("bash");
        command.args(["--norc", "-c", &script]).env("ELASTICDL_HOME", home.path());
        let output = crate::harness::ended(command);
        assert_eq!(stderr(&output), "", "{script}");
        let text = String::from_utf8(output.stdout).expect("text");
        let mut found: Vec<String> = text.split_whitespace().map(Into::into).collect();
        found.sort();
        found
    };
    assert_eq!(complete(&["elasticdl", "status", ""]), ["alpha", "beta"]);
    assert_eq!(complete(&["elasticdl", "logs", "--follow", "al"]), ["alpha"]);
    assert_eq!(complete(&["elasticdl", "train", "--resume", "b"]), ["beta"]);
    assert_eq!(complete(&["elasticdl", "train", "--resume", "=", "b"]), ["beta"]);
    assert_eq!(complete(&["elasticdl", "export", "al"]), ["alpha"]);
    assert_eq!(complete(&["elasticdl", "--quiet", "status", "b"]), ["beta"]);
    assert!(!complete(&["elasticdl", "--quiet", ""]).contains(&"alpha".into()));
    assert_eq!(complete(&["elasticdl", "sta"]), ["status"]);
    assert_eq!(complete(&["elasticdl", "stop", "--js"]), [""; 0]);
    assert_eq!(complete(&["elasticdl", "status", "--js"]), ["--json"]);
    assert!(!complete(&["elasticdl", "logs", "--worker", ""]).contains(&"alpha".into()));
    assert!(!complete(&["elasticdl", "data", ""]).contains(&"alpha".into()));
}

/// The data in the page of a job that has ended.
fn page_data(home: &Home, job: &str) -> Value {
    let page = std::fs::read_to_string(home.job_dir(job).join("report.html")).expect("a page");
    let (_, data) = page.split_once("id=\"data\">").expect("a place for the data");
    let (data, _) = data.split_once("</script>").expect("its end");
    serde_json::from_str(data).expect("JSON")
}

#[test]
fn the_page_of_a_job_that_succeeded_has_its_final_figures() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    let args = ["--model_def=count", "--minibatch_size=10", "--num_epochs=2", &data];
    home.train("done", &args);
    let final_status = home.status("done");
    let check = |by: &str| {
        let data = page_data(&home, "done");
        let status = &data["status"];
        assert_eq!(status["state"], "succeeded", "{by}");
        assert_eq!(status["step"], 2 * N_RECORDS / 10, "{by}");
        assert_eq!(status["records_done"], 2 * N_RECORDS, "{by}");
        assert_eq!(status["records_done"], status["records_total"], "{by}");
        assert_eq!(status["evaluations"], final_status["evaluations"], "{by}");
    };
    check("written by the master");
    std::fs::remove_file(home.job_dir("done").join("report.html")).expect("a page");
    home.stdout(&["report", "done"]);
    check("written by the command");
}
