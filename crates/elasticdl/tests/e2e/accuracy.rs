// SPDX-License-Identifier: Apache-2.0
//! Accuracy on full Fashion-MNIST, asynchronously and in rounds. `make soak` runs these tests.

use crate::harness::{Home, print_note, stderr};

const ENOUGH: f64 = 0.85;

#[test]
#[ignore = "trains on 120,000 images, which takes minutes; `make soak` runs it"]
fn two_epochs_of_fashion_mnist_reach_85_percent_asynchronously() {
    learns("async", &[]);
}

#[test]
#[ignore = "trains on 120,000 images, which takes minutes; `make soak` runs it"]
fn two_epochs_of_fashion_mnist_reach_85_percent_in_rounds() {
    learns("sync", &["--grads_to_wait=2"]);
}

fn learns(name: &str, more: &[&str]) {
    let home = Home::new();
    let place = home.path().join("sets");
    let generated = home.run(&["data", "gen", "fashion_mnist", place.to_str().expect("text")]);
    assert!(generated.status.success(), "{}", stderr(&generated));
    let part =
        |flag: &str, part: &str| format!("--{flag}={}/fashion_mnist/{part}", place.display());
    let (name_flag, training) = (format!("--job_name={name}"), part("training_data", "train"));
    let validation = part("validation_data", "test");
    let mut args = vec![
        "train",
        &name_flag,
        "--model_def=mnist_cnn",
        &training,
        &validation,
        "--num_workers=2",
        "--num_ps_pods=2",
        "--num_epochs=2",
    ];
    args.extend(more);
    // This takes longer than any other test, so it has no time limit.
    let output = home.command(&args).output().expect("the command starts");
    assert!(output.status.success(), "{}", stderr(&output));
    print_note(&String::from_utf8_lossy(&output.stdout));
    let status = home.status(name);
    let last = status["evaluations"].as_array().and_then(|all| all.last()).expect("evaluations");
    let accuracy = last["metrics"]["accuracy"].as_f64().expect("an accuracy");
    assert!(accuracy >= ENOUGH, "{accuracy} is below {ENOUGH}");
}
