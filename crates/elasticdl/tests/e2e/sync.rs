// SPDX-License-Identifier: Apache-2.0
//! Synchronous rounds and bounded staleness: jobs succeed and train every record once.

use crate::harness::{Home, assert_exactly_once, shipped_as};

#[test]
fn one_worker_supplies_every_gradient_of_a_round() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    home.train(
        "rounds",
        &[
            "--model_def=count",
            &data,
            "--num_workers=1",
            "--num_ps_pods=2",
            "--grads_to_wait=3",
            "--minibatch_size=15",
            "--num_epochs=2",
        ],
    );
    // 134 batches, so the last round has two and the last batch five records.
    assert_eq!(home.status("rounds")["step"], 2 * 45);
    assert_exactly_once(&home, "rounds", 2, 3);
}

#[test]
fn three_workers_with_bounded_staleness_train_every_record_once() {
    let home = Home::new();
    let data = shipped_as("training_data", "test");
    home.train(
        "bounded",
        &[
            "--model_def=count",
            "--model_params=sleep_ms=2",
            &data,
            "--num_workers=3",
            "--num_ps_pods=2",
            "--sync_version_tolerance=2",
            "--minibatch_size=10",
            "--num_epochs=2",
        ],
    );
    assert_eq!(home.status("bounded")["step"], 400);
    assert_exactly_once(&home, "bounded", 2, 1);
}
