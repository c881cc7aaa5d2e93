// SPDX-License-Identifier: Apache-2.0
//! Invalid input is refused at once with a one-line error that names it, and leaves no files.

use std::net::TcpListener;
use std::process::Output;

use crate::harness::{Home, ended, shipped, shipped_as};

const BAD_INPUT: i32 = 2;
const NOT_FOUND: i32 = 4;

/// Runs a command that must be refused with a one-line error that contains all of `words`.
fn refused(home: &Home, args: &[&str], code: i32, words: &[&str]) {
    let before = home.jobs();
    let mut command = home.command(args);
    // No setting shows a backtrace to the user.
    command.env("RUST_BACKTRACE", "1");
    let output = ended(command);
    let text = one_line(args, &output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    assert_eq!(output.stdout, b"", "{args:?}: an error was printed to stdout");
    for word in words {
        assert!(text.contains(word), "{args:?}: `{word}` is not in: {text}");
    }
    assert_eq!(home.jobs(), before, "{args:?}: files were left behind");
}

fn one_line(args: &[&str], output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    for word in ["panicked", "backtrace", "Backtrace", "src/", ".rs:"] {
        assert!(!text.contains(word), "{args:?}: `{word}` must not be shown to users: {text}");
    }
    let is_note = |line: &&str| line.contains(" is deprecated; ");
    let lines: Vec<&str> = text.lines().filter(|line| !is_note(line)).collect();
    assert_eq!(lines.len(), 1, "{args:?}: expected one line, not: {text}");
    assert!(lines[0].starts_with("error: "), "{args:?}: {text}");
    text
}

#[test]
fn a_bad_flag_is_refused_by_name() {
    let home = Home::new();
    let table: &[(&[&str], &[&str])] = &[
        (&["train", "--num_wokers=2"], &["`--num_wokers`", "did you mean `--num_workers`?"]),
        (&["train", "--frobnicate"], &["`--frobnicate`", "elasticdl train --help"]),
        (&["tran"], &["`tran`", "did you mean `train`?"]),
        (&["train", "a-word"], &["`a-word`"]),
        (&["train", "--num_workers"], &["--num_workers"]),
        (&["train", "--num_workers=two"], &["--num_workers", "'two'"]),
        (&["train", "--num_workers=0"], &["--num_workers=0"]),
        (&["train", "--num_workers=100000"], &["--num_workers=100000", "at most"]),
        (&["train", "--num_ps_pods=0", "--lanes=1"], &["--lanes=1", "lane"]),
        (&["train", "--num_ps_pods=99"], &["--num_ps_pods", "--partitions"]),
        (&["train", "--partitions=1000000"], &["--partitions"]),
        (&["train", "--distribution_strategy=Ring"], &["`Ring`", "AllreduceStrategy"]),
        (&["train", "--volume=x"], &["--volume", "mount_path=PATH"]),
        (&["train", "--envs=A=1"], &["--envs", "Kubernetes", "--image_name"]),
        (&["train", "--image_name=x", "--training_data=/d"], &["--volume", "storage"]),
        (&["top", "x", "--namespace=y"], &["`elasticdl top`", "elasticdl attach"]),
        (
            &["train", "--docker_image_prefix=x", "--image_name=y"],
            &["--docker_image_prefix", "--image_name"],
        ),
        (&["train", "--loss=loss"], &["--loss", "Python"]),
        (&["train", "--minibatch_size=0"], &["--minibatch_size"]),
        (&["train", "--grads_to_wait=0"], &["--grads_to_wait"]),
        (&["train", "--use_async=true", "--grads_to_wait=2"], &["--grads_to_wait", "--use_async"]),
        (&["train", "--optimizer=sdg"], &["`sdg`", "sgd"]),
        (&["train", "--learning_rate=-1"], &["--learning_rate"]),
        (&["train", "--learning_rate_schedule=up"], &["--learning_rate_schedule", "`up`"]),
        (&["train", "--clip_norm=-1"], &["--clip_norm"]),
        (&["train", "--weight_decay=-1"], &["--weight_decay"]),
        (&["train", "--heartbeat_timeout_secs=nan"], &["--heartbeat_timeout_secs"]),
        (&["train", "--max_time=soon"], &["--max_time", "'soon'"]),
        (&["train", "--log_level=LOUD"], &["--log_level", "WARNING"]),
        (&["train", "--codec_type=json"], &["--codec_type", "tf_example, bytes"]),
        (&["train", "--port=77777"], &["--port", "77777"]),
        (&["train", "--job_name=no/slash"], &["`no/slash`", "--job_name"]),
        (&["train", "--job_name=-x"], &["`-x`", "--job_name"]),
        (&["train", "--num_workers", "-1"], &["'-1'", "--num_workers"]),
        (&["train", "--records_per_task=0"], &["--num_minibatches_per_task"]),
        (&["train", "--config=/no/such.yaml"], &["`/no/such.yaml`", "elasticdl init"]),
        (&["predict", "--training_data=x"], &["`--training_data`"]),
        (&["scale", "x"], &["--workers"]),
        (&["completions", "tcsh"], &["`tcsh`", "bash"]),
    ];
    for (args, words) in table {
        refused(&home, args, BAD_INPUT, words);
    }
}

#[test]
fn an_unknown_model_is_refused_by_name() {
    let home = Home::new();
    let table: &[(&[&str], &[&str])] = &[
        (&["train", "--model_def=mnist_cn"], &["`mnist_cn`", "did you mean `mnist_cnn`?"]),
        (&["train", "--model_def=resnet"], &["`resnet`", "mnist_cnn", "wide_deep"]),
        (
            &["train", "--model_def=mnist.mnist_functional_api.custom_model"],
            &["`mnist.mnist_functional_api.custom_model`", "elasticdl package"],
        ),
        (&["train", "--model_def=model_zoo/mnist/model.py"], &["model.py", "--training_data"]),
        (
            &["train", "--model_def=model_zoo/mnist/model.py", "--training_data=x"],
            &["model.py", "elasticdl package"],
        ),
        (&["train", "--model_def=mnist_mlp", "--model_params=lrr=1"], &["`lrr`", "hidden"]),
        (&["train", "--model_params=lr"], &["`lr`", "--model_params"]),
    ];
    for (args, words) in table {
        refused(&home, args, BAD_INPUT, words);
    }
}

#[test]
fn unusable_data_is_refused_by_name() {
    let home = Home::new();
    let (empty, table) = (home.path().join("empty"), home.path().join("table.csv"));
    std::fs::create_dir(&empty).expect("a folder");
    std::fs::write(&table, "a,b\n1,2\n").expect("a file");
    let broken = home.path().join("broken.recordio");
    let file = format!("{}/data-00000.recordio", shipped("test"));
    let bytes = std::fs::read(file).expect("the shipped data");
    std::fs::write(&broken, &bytes[..bytes.len() / 2]).expect("a file");
    let text = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    let as_data = |path: &str| format!("--training_data={path}");
    let [empty_data, table_data, broken_data] =
        [&empty, &table, &broken].map(|path| as_data(&text(path)));
    let (images, yaml) = (as_data(&shipped("train")), home.path().join("bad.yaml"));
    std::fs::write(&yaml, "num_worker: 4\n").expect("a file");
    let config = format!("--config={}", yaml.display());
    let rows: &[(&[&str], &[&str])] = &[
        (&["train", "--training_data=/no/such/data"], &["--training_data", "`/no/such/data`"]),
        (&["train", &empty_data], &["--training_data", &text(&empty)]),
        (&["train", &table_data], &["`mnist_cnn`", "table.csv", "`image`"]),
        (&["train", "--model_def=deepfm", &images], &["`deepfm`", "`image`, `label`"]),
        (&["train", "--model_def=deepfm"], &["`deepfm`", "--training_data"]),
        (&["train", &broken_data], &["broken.recordio", "chunk 0", "truncated"]),
        (&["train", "--training_data=s3://bucket/x"], &["s3://bucket/x"]),
        (&["train", "--validation_data=/no/such"], &["--validation_data", "`/no/such`"]),
        (&["train", "--codec_type=bytes"], &["--codec_type=bytes", "tf_example"]),
        (&["train", "--data_reader_params=foo=1"], &["`foo`", "delimiter"]),
        (&["train", &config], &["bad.yaml", "did you mean `num_workers`?"]),
        (&["data", "inspect", "/no/such/data"], &["`/no/such/data`"]),
        (&["data", "head", empty.to_str().expect("text")], &[&text(&empty)]),
        (&["data", "gen", "imagenet", "/tmp/x"], &["`imagenet`", "fashion_mnist"]),
    ];
    for (args, words) in rows {
        refused(&home, args, BAD_INPUT, words);
    }
}

#[test]
fn an_occupied_port_or_unusable_path_is_refused_by_name() {
    let home = Home::new();
    let file = home.path().join("file");
    std::fs::write(&file, "").expect("a file");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let [as_port, as_http] = ["--port", "--http_port"].map(|flag| format!("{flag}={port}"));
    let below = |flag: &str| format!("--{flag}={}/below", file.display());
    let [output, checkpoints, tensorboard, job_dir] =
        ["output", "checkpoint_dir", "tensorboard_dir", "job_dir"].map(below);
    let occupied = format!("--job_dir={}", home.path().display());
    let rows: &[(&[&str], &[&str])] = &[
        (&["train", &as_port], &[&as_port, "choose another"]),
        (&["train", &as_http], &[&as_http, "choose another"]),
        (&["train", "--job_dir=/proc/none"], &["`/proc/none`", "--job_dir"]),
        (&["train", &job_dir], &["file/below", "--job_dir"]),
        (&["train", &occupied], &["is not empty", "--job_dir"]),
        (&["train", &output], &["--output", "file/below"]),
        (&["train", &checkpoints], &["--checkpoint_dir", "file/below"]),
        (&["train", &tensorboard], &["--tensorboard_dir", "file/below"]),
    ];
    for (args, words) in rows {
        refused(&home, args, BAD_INPUT, words);
    }
    let mut command = home.command(&["train"]);
    command.env("ELASTICDL_HOME", file.join("home"));
    let output = ended(command);
    assert_eq!(output.status.code(), Some(BAD_INPUT));
    assert!(one_line(&["train"], &output).contains("ELASTICDL_HOME"));
}

#[test]
fn a_job_that_cannot_be_resumed_or_loaded_is_refused_by_name() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    home.train("done", &["--model_def=mnist_mlp", &data, "--max_step=3", "--num_workers=1"]);
    let from = format!("--checkpoint_dir_for_init={}", home.job_dir("done").display());
    let empty = format!("--checkpoint_dir_for_init={}", home.path().display());
    let on = shipped_as("validation_data", "test");
    let rows: &[(&[&str], i32, &[&str])] = &[
        (&["train", "--job_name=done", &data], BAD_INPUT, &["`done`", "--resume", "--job_name"]),
        (&["train", "--resume=done", "--minibatch_size=8"], BAD_INPUT, &["--minibatch_size"]),
        (&["train", "--resume=done", "--model_def=count"], BAD_INPUT, &["--model_def"]),
        (&["evaluate", "--resume=done"], BAD_INPUT, &["`done`", "elasticdl train"]),
        (&["train", "--resume=dune"], NOT_FOUND, &["`dune`", "did you mean `done`?"]),
        (&["train", &from, "--model_def=mnist_cnn"], BAD_INPUT, &["`mnist_mlp`", "`mnist_cnn`"]),
        (&["evaluate", &from, "--model_def=mnist_cnn"], BAD_INPUT, &["`mnist_mlp`", "--model_def"]),
        (
            &["evaluate", &from, "--model_params=hidden=7", &on],
            BAD_INPUT,
            &["`mnist_mlp`", "--model_params"],
        ),
        (&["evaluate"], BAD_INPUT, &["`elasticdl evaluate MODEL`"]),
        (&["evaluate", "done"], BAD_INPUT, &["without validation data; set --validation_data"]),
        (
            &["evaluate", "done", &on, "--partitions=7"],
            BAD_INPUT,
            &["32 partitions", "--partitions"],
        ),
        (&["evaluate", "dune"], BAD_INPUT, &["trained model `dune` not found"]),
        (&["predict", "done", &from], BAD_INPUT, &["`done`", "--checkpoint_dir_for_init"]),
        (&["export", "Cargo.toml"], BAD_INPUT, &["`Cargo.toml` is not a trained model"]),
        (&["predict", &empty], BAD_INPUT, &["no complete checkpoint"]),
        (&["status", "unknown"], NOT_FOUND, &["`unknown`"]),
        (&["attach", "unknown"], NOT_FOUND, &["`unknown`"]),
        (&["logs", "unknown"], NOT_FOUND, &["`unknown`"]),
        (&["stop", "unknown"], NOT_FOUND, &["`unknown`"]),
        (&["clean", "unknown"], NOT_FOUND, &["`unknown`"]),
        (&["audit", "unknown"], NOT_FOUND, &["`unknown`"]),
        (&["scale", "done", "--workers=2"], NOT_FOUND, &["`done`"]),
        (&["scale", "done", "--workers=0"], BAD_INPUT, &["at least 1 worker", "elasticdl stop"]),
        (&["clean"], BAD_INPUT, &["done", "--all"]),
        (&["worker", "--job_name=unknown"], NOT_FOUND, &["`unknown`"]),
        (&["worker", "--master_addr=nowhere"], BAD_INPUT, &["`nowhere`", "HOST:PORT"]),
        (
            &["worker", "--master_addr=localhost:1", "--job_key_file=/no/key"],
            BAD_INPUT,
            &["--job_key_file", "`/no/key`"],
        ),
        (&["operator", "--kubeconfig=/no/file"], BAD_INPUT, &["/no/file", "--kubeconfig"]),
        (&["plan", "--kubeconfig=/no/file"], BAD_INPUT, &["/no/file", "--kubeconfig"]),
    ];
    for (args, code, words) in rows {
        refused(&home, args, *code, words);
    }
}
