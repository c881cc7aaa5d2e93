// SPDX-License-Identifier: Apache-2.0
//! Batches whose loss or gradient is not finite, with parameter servers; `members.rs` has AllReduce.

use super::bench::{Bench, batch_done, config, spec};
use crate::id::{BatchId, Generation, Incarnation, LeaseId, WorkerId};
use crate::job::{Event, EventKind};
use crate::spec::{JobSpec, OnNonfinite};
use crate::worker::{Report, Task};

fn job(on_nonfinite: OnNonfinite) -> Bench {
    Bench::started(config(JobSpec { on_nonfinite, checkpoint_steps: 3, ..spec() }, 0))
}

/// A worker finds that the first batch of its next task that is not skipped is not finite.
fn find_one(bench: &mut Bench, worker: u32) -> BatchId {
    let (lease, work) = bench.next_work(worker).expect("it has work");
    let Task::Train { epoch, mut indices, skipped } = work else { panic!("{work:?}") };
    let index = indices.find(|index| !skipped.contains(index)).expect("a batch to train");
    report(bench, worker, lease, index);
    BatchId { epoch, index }
}

fn report(bench: &mut Bench, worker: u32, lease: LeaseId, index: u32) {
    let incarnation = Incarnation(bench.workers[&worker].incarnation);
    let (worker, error) = (WorkerId(worker), "the loss is not finite".into());
    let report = Report::NonFinite { lease, index, error };
    bench.handle(Event::FromWorker { worker, incarnation, report });
}

#[test]
fn a_job_that_stops_names_batch_step_records_learning_rate_and_checkpoint() {
    let mut bench = job(OnNonfinite::Stop);
    bench.run_to(4);
    let batch = find_one(&mut bench, 0);
    let why = bench.failure();
    let first = 2 * batch.index;
    let start = format!("batch {batch} (records {first}, {}), step 5, worker-0: ", first + 1);
    assert!(why.starts_with(&start), "{why}");
    for text in ["learning rate is 1.0: try a lower --learning_rate", "--on_nonfinite=skip"] {
        assert!(why.contains(text), "{why}");
    }
    assert!(why.ends_with("the last checkpoint is from step 3"), "{why}");
    assert!(bench.committed.len() == 1, "the checkpoint is kept");
}

#[test]
fn a_skipped_batch_is_durable_and_is_pushed_without_a_gradient() {
    let mut bench = job(OnNonfinite::Skip);
    bench.run_to(4);
    let batch = find_one(&mut bench, 0);
    assert!(bench.disk.skipped.contains(&batch) && bench.has_note(EventKind::NonFinite));
    let mut skips = Vec::new();
    for worker in bench.workers.values() {
        for (_, work) in &worker.work {
            if let Task::Train { epoch, skipped, .. } = work {
                skips.extend(skipped.iter().map(|index| BatchId { epoch: *epoch, index: *index }));
            }
        }
    }
    assert_eq!(skips, [batch], "it is assigned again, to be skipped");
    bench.run();
    bench.expect_trained(1);
    assert_eq!(bench.job.loss(), Some(0.5), "it has no loss");
}

#[test]
fn a_rollback_loads_the_last_checkpoint_and_other_reports_of_that_time_are_void() {
    let mut bench = job(OnNonfinite::Rollback);
    bench.run_to(4);
    bench.holds_loads = true;
    let batch = find_one(&mut bench, 0);
    find_one(&mut bench, 1);
    assert_eq!(bench.disk.skipped, [batch].into(), "the leases of the other worker are void");
    bench.holds_loads = false;
    for effect in std::mem::take(&mut bench.held_back) {
        let crate::job::Effect::ToPs(ps, order) = effect else { panic!("{effect:?}") };
        let loaded = bench.obey_as_ps(ps, order).remove(0);
        bench.handle(loaded);
    }
    assert_eq!(bench.disk.generation, Generation(2));
    assert!(bench.has_note(EventKind::Restored));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_job_whose_parameters_are_not_finite_fails_instead_of_skipping_everything() {
    let mut bench = job(OnNonfinite::Skip);
    bench.run_to(1);
    while bench.ended.is_none() {
        for worker in [0, 1] {
            let next = bench.workers.get(&worker).and_then(|worker| worker.work.front());
            match next {
                Some((_, Task::Train { indices, skipped, .. }))
                    if indices.len() == skipped.len() =>
                {
                    bench.step(worker);
                }
                Some(_) => _ = find_one(&mut bench, worker),
                None => {}
            }
        }
    }
    let why = bench.failure();
    assert!(why.contains("8 batches in a row are not finite; the learning rate is"), "{why}");
}

#[test]
fn a_loss_that_explodes_is_reported_once_with_the_learning_rate() {
    let mut bench = job(OnNonfinite::Stop);
    bench.run_to(2);
    for (index, loss) in [(4, 7e5), (5, 7e7)] {
        let batch = BatchId { epoch: 0, index };
        let generation = bench.job.servers().generation();
        bench.push_everywhere(batch);
        bench.handle(batch_done(0, batch, generation, loss));
    }
    let said = bench.notes.iter().filter(|note| note.kind == EventKind::LossExploded);
    let said: Vec<&str> = said.map(|note| note.text.as_str()).collect();
    let expected = "the loss grew from 0.5000 to 700000.0000; the learning rate is 1.0: try a lower \
                    --learning_rate";
    assert_eq!(said, [expected]);
}

#[test]
fn a_report_about_a_batch_that_the_lease_does_not_hold_skips_nothing() {
    let mut bench = job(OnNonfinite::Skip);
    let (lease, _) = bench.next_work(0).expect("it has work");
    report(&mut bench, 0, lease, u32::MAX);
    report(&mut bench, 0, LeaseId(99), 0);
    assert!(bench.disk.skipped.is_empty());
    bench.run();
    bench.expect_trained(1);
}
