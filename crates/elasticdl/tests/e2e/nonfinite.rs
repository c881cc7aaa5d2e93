// SPDX-License-Identifier: Apache-2.0
//! Losses, gradients and metrics that are not finite.

use crate::harness::{Home, N_RECORDS, counts, shipped_as};

#[test]
fn an_evaluation_that_is_not_finite_is_shown_and_never_the_best() {
    let home = Home::new();
    let (training, validation) =
        (shipped_as("training_data", "test"), shipped_as("validation_data", "test"));
    let args = ["train", "--job_name=a", "--model_def=count", "--learning_rate=1e38"];
    let summary = home.stdout(&[&args[..], &[&training, &validation, "--num_epochs=1"]].concat());
    assert!(summary.contains("loss      nan"), "{summary}");
    let status = home.status("a");
    let evaluations = status["evaluations"].as_array().expect("evaluations");
    assert_eq!(evaluations.len(), 1, "{status:#}");
    assert!(evaluations[0]["metrics"]["loss"].is_null(), "{status:#}");
    assert_eq!(evaluations[0]["best"], false, "{status:#}");
}

/// A record whose batch has no finite loss.
const BAD: u64 = 777;
const N_BAD: usize = 10;

/// Trains one epoch of the `count` model with one batch that is not finite.
fn count(home: &Home, name: &str, policy: &str, more: &[&str]) {
    let data = shipped_as("training_data", "test");
    let params = format!("--model_params=nan_record={BAD}");
    let policy = format!("--on_nonfinite={policy}");
    let args = ["--model_def=count", &params, &policy, &data];
    home.train(name, &[&args[..], more].concat());
}

/// The records that were not trained, and the counts of all others.
fn untrained(home: &Home, name: &str) -> (Vec<i64>, Vec<(i64, f32)>) {
    let (rows, _) = counts(&home.job_dir(name).join("output"));
    let trained: Vec<i64> = rows.iter().filter(|(_, n)| *n > 0.0).map(|(id, _)| *id).collect();
    let all = 0..i64::try_from(N_RECORDS).expect("few records");
    (all.filter(|id| !trained.contains(id)).collect(), rows)
}

fn assert_skipped(home: &Home, name: &str) {
    let (untrained, _) = untrained(home, name);
    assert_eq!(untrained.len(), N_BAD, "{name}: {untrained:?}");
    assert!(untrained.contains(&i64::try_from(BAD).expect("a record")), "{name}: {untrained:?}");
    let audit = home.stdout(&["audit", name]);
    assert!(audit.contains("(10 records) was skipped: it was not finite"), "{name}: {audit}");
    assert!(audit.contains("every other record"), "{name}: {audit}");
    let events = home.status(name)["events"].to_string();
    assert!(events.contains("nonfinite") && events.contains("skipping it"), "{events}");
}

#[test]
fn a_loss_that_is_not_finite_stops_the_job_with_the_learning_rate_in_its_reason() {
    let home = Home::new();
    let (training, validation) =
        (shipped_as("training_data", "test"), shipped_as("validation_data", "test"));
    let common = ["--model_def=mnist_mlp", "--learning_rate=1e30", &training, &validation];
    for (name, more) in [
        ("steps", &["--num_ps_pods=0", "--lanes=2", "--evaluation_steps=1"][..]),
        ("servers", &["--num_workers=1"]),
    ] {
        let name_flag = format!("--job_name={name}");
        let output = home.run(&[&["train", &name_flag], &common[..], more].concat());
        assert_eq!(output.status.code(), Some(1), "{name}");
        let status = home.status(name);
        let reason = status["reason"].as_str().expect("a reason");
        // The loss is not finite in either lane; the reason names one of them.
        let lane = if name == "steps" { ", lane " } else { ": " };
        for part in [
            "(records ",
            "), step ",
            ", worker-",
            lane,
            " records starting at ",
            "is not finite",
            "the learning rate is 1e30: try a lower --learning_rate",
        ] {
            assert!(reason.contains(part), "`{part}` in {reason}");
        }
    }
}

#[test]
fn a_batch_that_is_not_finite_is_skipped_and_the_audit_lists_it() {
    let home = Home::new();
    for (name, policy, more) in [
        ("async", "skip", &["--minibatch_size=10"][..]),
        ("sync", "skip", &["--minibatch_size=10", "--grads_to_wait=2"]),
        ("rollback", "rollback", &["--minibatch_size=10", "--checkpoint_steps=20"]),
    ] {
        count(&home, name, policy, more);
        assert_skipped(&home, name);
    }
    assert_eq!(home.status("rollback")["generation"], 2, "the checkpoint was loaded");
}

#[test]
fn any_number_of_workers_skips_the_same_batch() {
    let home = Home::new();
    let results = ["1", "2"].map(|n| {
        let (name, workers) = (format!("workers-{n}"), format!("--num_workers={n}"));
        let hybrid = ["--distribution_strategy=HybridStrategy", "--num_ps_pods=2", "--lanes=2"];
        count(&home, &name, "skip", &[&hybrid[..], &["--minibatch_size=5", &workers]].concat());
        assert_skipped(&home, &name);
        untrained(&home, &name).1
    });
    assert_eq!(results[0], results[1]);
}
