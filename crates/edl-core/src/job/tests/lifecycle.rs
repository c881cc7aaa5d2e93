// SPDX-License-Identifier: Apache-2.0
//! The course of a job without faults: training, evaluations, limits, the other job types.

use std::time::Duration;

use super::bench::{Bench, config, from_worker, spec};
use crate::id::{EvalId, Incarnation, WorkerId};
use crate::job::EventKind;
use crate::job::JobState;
use crate::job::{Effect, End, Event};
use crate::metric::Measures;
use crate::spec::{JobSpec, JobType, Seconds};
use crate::worker::{Report, Shard, Task};

fn versions(bench: &Bench) -> Vec<u64> {
    bench.evaluated.iter().map(|evaluated| evaluated.version).collect()
}

#[test]
fn a_job_trains_every_batch_of_every_epoch_once_and_succeeds() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 3, ..spec() }, 0));
    assert_eq!(bench.job.state(), JobState::Running);
    bench.run();
    bench.expect_trained(3);
    assert_eq!(bench.job.progress(), (60, Some(60)));
    assert_eq!(bench.job.state(), JobState::Succeeded);
    assert!(bench.workers.is_empty() && bench.servers.is_empty(), "all processes have exited");
}

#[test]
fn evaluations_are_of_exact_versions_by_steps_and_after_each_epoch() {
    let by_steps = JobSpec { evaluation_steps: 4, evaluation_epochs: false, ..spec() };
    let cases = [
        (JobSpec { num_epochs: 2, ..by_steps.clone() }, vec![4, 8, 12, 16, 20]),
        (JobSpec { num_epochs: 1, ..by_steps.clone() }, vec![4, 8, 10]),
        (JobSpec { num_epochs: 2, ..spec() }, vec![10, 20]),
        (
            JobSpec { num_epochs: 2, evaluation_epochs: true, ..by_steps },
            vec![4, 8, 10, 12, 16, 20],
        ),
        (JobSpec { num_epochs: 2, evaluation_epochs: false, ..spec() }, vec![20]),
    ];
    for (spec, expected) in cases {
        let mut bench = Bench::started(config(spec, 8));
        while bench.ended.is_none() {
            bench.run_until(|bench| bench.job.state() == JobState::Evaluating);
            if bench.ended.is_none() {
                let n_done = bench.job.ledger().n_done();
                let mut parts = bench.servers.values().flat_map(|server| server.parts.values());
                assert!(parts.all(|(applied, _)| applied.len() == n_done), "nothing is under way");
                bench.run_until(|bench| bench.job.state() != JobState::Evaluating);
            }
        }
        assert_eq!(versions(&bench), expected);
        assert_eq!(bench.n_shards_evaluated as usize, 2 * expected.len(), "two shards each");
    }
}

#[test]
fn the_best_model_is_kept_in_its_own_checkpoint() {
    let spec = JobSpec { num_epochs: 4, keep_checkpoint_max: 1, ..spec() };
    let mut bench = Bench::started(config(spec, 4));
    bench.losses = vec![0.9, 0.5, 0.7, 0.8];
    bench.run();
    bench.expect_trained(4);
    let best: Vec<bool> = bench.evaluated.iter().map(|evaluated| evaluated.is_best).collect();
    assert_eq!(best, [true, true, false, false]);
    let folder = bench.disk.best.clone().unwrap();
    let kept = &bench.folders[&folder];
    assert!(kept.values().all(|(applied, _)| applied.len() == 20), "it is of version 20");
    assert_eq!(bench.committed.len(), 2, "the best one and the last one are kept");
}

#[test]
fn the_best_model_waits_for_a_checkpoint_that_is_still_being_written() {
    let spec = JobSpec { num_epochs: 2, checkpoint_steps: 9, ..spec() };
    let mut bench = Bench::started(config(spec, 4));
    bench.holds_checkpoints = true;
    bench.run_until(|bench| !bench.evaluated.is_empty());
    assert_eq!(bench.held_back.len(), 2, "that of version 9; servers write one at a time");
    bench.holds_checkpoints = false;
    for effect in std::mem::take(&mut bench.held_back) {
        let Effect::ToPs(ps, order) = effect else { panic!() };
        let done = bench.obey_as_ps(ps, order).remove(0);
        bench.handle(done);
    }
    let best = bench.disk.best.clone().unwrap();
    assert!(bench.disk.checkpoints.iter().any(|c| c.folder == best && c.exact == Some(10)));
    bench.run();
    bench.expect_trained(2);
}

#[test]
fn training_ends_early_when_evaluations_get_no_better() {
    let spec = JobSpec { num_epochs: 9, early_stop_patience: 2, ..spec() };
    let mut bench = Bench::started(config(spec, 4));
    bench.losses = vec![0.9, 0.5, 0.7, 0.8, 0.1];
    bench.run();
    bench.expect_trained(4);
    assert!(bench.has_note(EventKind::EarlyStop));
}

#[test]
fn training_ends_at_max_step() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 0, max_step: 13, ..spec() }, 0));
    bench.run();
    assert_eq!(bench.ended, Some(End::Succeeded));
    assert!(bench.exported.unwrap().values().all(|(applied, _)| applied.len() == 13));
}

#[test]
fn max_time_ends_an_evaluation_too() {
    let spec = JobSpec { max_time: Seconds(5), num_epochs: 2, ..spec() };
    let mut bench = Bench::started(config(spec, 6));
    bench.run_until(|bench| bench.job.state() == JobState::Evaluating);
    bench.pass(Duration::from_secs(6), None);
    assert_eq!(bench.ended, Some(End::Succeeded), "{:?}", bench.notes);
    assert!(bench.has_note(EventKind::MaxTime) && bench.evaluated.is_empty());
    bench.expect_trained(1);
    let spec =
        JobSpec { job_type: JobType::Evaluate, max_time: Seconds(5), ..super::bench::spec() };
    let mut bench = Bench::started(config(spec, 6));
    bench.pass(Duration::from_secs(6), None);
    assert_eq!(bench.ended, Some(End::Stopped("--max_time=5 reached".into())));
}

#[test]
fn training_ends_at_max_time_with_what_is_under_way() {
    let mut bench =
        Bench::started(config(JobSpec { num_epochs: 0, max_time: Seconds(5), ..spec() }, 0));
    bench.run_to(7);
    bench.pass(Duration::from_secs(5), None);
    assert!(bench.has_note(EventKind::MaxTime));
    bench.run();
    assert_eq!(bench.ended, Some(End::Succeeded));
    let n_applied = bench.exported.unwrap()[&0].0.len();
    assert!((7..=15).contains(&n_applied), "{n_applied}: what was assigned is finished, no more");
}

#[test]
fn evaluations_by_the_clock_wait_for_what_is_under_way() {
    let every = JobSpec { evaluation_secs: 2, evaluation_epochs: false, ..spec() };
    let mut bench = Bench::started(config(JobSpec { num_epochs: 3, ..every.clone() }, 4));
    bench.run_to(5);
    bench.pass(Duration::from_secs(3), None);
    bench.run();
    assert_eq!(bench.evaluated.len(), 2, "one by the clock, one at the end");
    // Without validation data the clock must not hold training up.
    let mut bench = Bench::started(config(JobSpec { num_epochs: 3, ..every }, 0));
    bench.pass(Duration::from_secs(3), None);
    let frontier = bench.job.ledger().frontier();
    bench.step(0);
    bench.step(0);
    assert!(bench.job.ledger().frontier() > frontier, "more is assigned at once");
    bench.run();
    bench.expect_trained(3);
}

#[test]
fn an_evaluate_job_measures_once_and_ends() {
    let spec = JobSpec { job_type: JobType::Evaluate, ..spec() };
    let mut bench = Bench::started(config(spec, 10));
    bench.run();
    assert_eq!(bench.ended, Some(End::Succeeded));
    assert_eq!((versions(&bench), bench.n_shards_evaluated), (vec![0], 3));
    assert_eq!(bench.exported, None);
}

#[test]
fn a_predict_job_predicts_each_shard_and_ends() {
    let spec = JobSpec { job_type: JobType::Predict, ..spec() };
    let mut config = config(spec, 0);
    (config.n_records, config.n_prediction_records) = (0, 10);
    let mut bench = Bench::started(config);
    bench.run();
    assert_eq!(bench.ended, Some(End::Succeeded));
    assert_eq!(bench.job.progress(), (10, Some(10)));
}

/// The next shard of a worker has no room on its disk.
fn fill_disk(bench: &mut Bench, worker: u32) {
    let (lease, task) = bench.next_work(worker).expect("a shard");
    let Task::Shard(Shard { number: index, .. }) = task else { panic!("{task:?}") };
    let incarnation = Incarnation(bench.workers[&worker].incarnation);
    let report = Report::DiskFull { lease, index, error: "no space".into() };
    bench.handle(Event::FromWorker { worker: WorkerId(worker), incarnation, report });
}

#[test]
fn one_full_disk_of_several_is_reported_once() {
    let spec = JobSpec { job_type: JobType::Predict, num_workers: 2, ..spec() };
    let mut config = config(spec, 0);
    (config.n_records, config.n_prediction_records) = (0, 40);
    let mut bench = Bench::started(config);
    for _ in 0..4 {
        fill_disk(&mut bench, 0);
        bench.step(1);
        assert!(bench.job.trouble().is_some(), "worker 0 has no room");
        bench.pass(Duration::from_secs(1), None);
    }
    let is_said = |kind| kind == EventKind::CheckpointFailed;
    assert_eq!(bench.notes.iter().filter(|note| is_said(note.kind)).count(), 1);
    bench.run();
    assert_eq!((bench.ended.clone(), bench.job.trouble()), (Some(End::Succeeded), None));
}

#[test]
fn a_disk_that_has_room_for_some_shards_only_is_reported_once() {
    let spec = JobSpec { job_type: JobType::Predict, num_workers: 2, ..spec() };
    let mut config = config(spec, 0);
    (config.n_records, config.n_prediction_records) = (0, 400);
    let mut bench = Bench::started(config);
    let n_reports = |bench: &Bench| {
        bench.notes.iter().filter(|note| note.kind == EventKind::CheckpointFailed).count()
    };
    for _ in 0..4 {
        fill_disk(&mut bench, 0);
        bench.pass(Duration::from_secs(1), None);
        bench.step(0);
    }
    assert_eq!(n_reports(&bench), 1);
    bench.pass(Duration::from_secs(60), None);
    bench.step(0);
    fill_disk(&mut bench, 0);
    assert_eq!(n_reports(&bench), 2, "after a minute with room, this is news");
}

#[test]
fn a_predict_job_whose_output_has_no_room_says_so_and_tries_again() {
    let spec = JobSpec { job_type: JobType::Predict, num_workers: 1, ..spec() };
    let n_tries = 3 * spec.max_batch_failures;
    let mut config = config(spec, 0);
    (config.n_records, config.n_prediction_records) = (0, 4);
    let mut bench = Bench::started(config);
    for _ in 0..n_tries {
        fill_disk(&mut bench, 0);
        assert_eq!(bench.next_work(0), None, "it pauses");
        let trouble = bench.job.trouble().expect("a reason");
        assert_eq!(trouble, "cannot write the result: no space; retrying");
        bench.pass(Duration::from_secs(1), None);
    }
    bench.run();
    assert_eq!((bench.ended.clone(), bench.job.trouble()), (Some(End::Succeeded), None));
    assert_eq!(bench.job.progress(), (4, Some(4)));
}

#[test]
fn a_result_of_another_evaluation_or_form_does_not_count() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 1, ..spec() }, 8));
    bench.run_until(|bench| bench.job.state() == JobState::Evaluating);
    for (eval, metrics) in [(EvalId(1), vec![crate::metric::Metric::loss()]), (EvalId(0), vec![])] {
        let measures = Box::new(Measures::new(&metrics));
        let done = Report::EvalDone { eval, shard: 0, measures };
        bench.handle(from_worker(0, done));
    }
    assert_eq!(bench.job.state(), JobState::Evaluating);
    bench.run();
    assert_eq!(bench.n_shards_evaluated, 2, "both shards were still to be measured");
}

#[test]
fn one_worker_supplies_every_gradient_of_a_synchronous_round() {
    for grads_to_wait in 1..=4 {
        let spec =
            JobSpec { grads_to_wait: Some(grads_to_wait), num_workers: 1, num_epochs: 2, ..spec() };
        let mut bench = Bench::started(config(spec, 0));
        let n_assigned = bench.workers[&0].work.len();
        assert!(
            n_assigned >= grads_to_wait as usize,
            "a whole round, or no worker could complete it"
        );
        bench.run();
        bench.expect_trained(2);
        let per_epoch = u64::from(10u32.div_ceil(grads_to_wait));
        assert_eq!(bench.job.ledger().version(), 2 * per_epoch, "the last round is smaller");
    }
}

#[test]
fn a_round_is_shared_out_among_more_workers_than_it_has_batches() {
    let spec = JobSpec { grads_to_wait: Some(2), num_workers: 4, num_epochs: 1, ..spec() };
    let mut bench = Bench::started(config(spec, 0));
    let n_assigned: Vec<usize> = bench.workers.values().map(|worker| worker.work.len()).collect();
    assert_eq!(n_assigned.iter().sum::<usize>(), 2, "no worker gets a round that is not open");
    assert_eq!(n_assigned.iter().max(), Some(&1));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn checkpoints_are_due_by_steps_and_by_time_and_old_ones_are_deleted() {
    let spec = JobSpec { num_epochs: 3, checkpoint_steps: 5, keep_checkpoint_max: 2, ..spec() };
    let mut bench = Bench::started(config(spec, 0));
    bench.run();
    bench.expect_trained(3);
    assert_eq!(bench.committed.len(), 2);
    assert_eq!(bench.folders.len(), 2, "folders of old checkpoints are gone");
    assert_eq!(bench.notes.iter().filter(|note| note.kind == EventKind::Checkpoint).count(), 6);

    let spec = JobSpec { num_epochs: 1, checkpoint_secs: 2, ..super::bench::spec() };
    let mut bench = Bench::started(config(spec, 0));
    bench.run_to(3);
    bench.pass(Duration::from_secs(5), None);
    assert_eq!(
        bench.committed.len(),
        1,
        "one for three batches; the same state is not saved twice"
    );
}

#[test]
fn a_checkpoint_that_hangs_is_abandoned_and_the_next_one_is_tried() {
    let spec = JobSpec { num_epochs: 2, checkpoint_steps: 5, task_timeout_secs: 3600, ..spec() };
    let mut bench = Bench::started(config(spec, 0));
    bench.holds_checkpoints = true;
    bench.run_to(6);
    assert!(matches!(bench.held_back[..], [Effect::ToPs(..), Effect::ToPs(..)]));
    bench.pass(Duration::from_secs(601), None);
    assert!(bench.has_note(EventKind::CheckpointFailed));
    bench.holds_checkpoints = false;
    bench.run();
    bench.expect_trained(2);
}
