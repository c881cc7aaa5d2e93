// SPDX-License-Identifier: Apache-2.0
//! A stop finishes what is computed and saves it: after a resume, nothing is computed again.

use std::time::Duration;

use super::bench::{Bench, config, spec, worker};
use super::members::Members;
use crate::id::{BatchId, PsId};
use crate::job::{Effect, End, Event};
use crate::platform::{Ended, Report};
use crate::server;
use crate::spec::{JobSpec, Strategy};
use crate::worker::Task;

const WITHIN: Duration = Duration::from_secs(6);

fn stop() -> Event {
    Event::Stop { reason: "enough".into(), within: WITHIN }
}

fn hybrid() -> JobSpec {
    JobSpec { distribution_strategy: Strategy::Hybrid, num_ps_pods: 2, ..super::members::spec() }
}

fn reason(bench: &Bench) -> Option<&str> {
    match &bench.ended {
        Some(End::Stopped(why)) => Some(why),
        _ => None,
    }
}

/// A job in the middle of its first epoch; worker 0 computes a batch.
fn busy(spec: JobSpec) -> (Bench, BatchId) {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 2, ..spec }, 0));
    bench.run_to(4);
    let busy = bench.workers.get_mut(&0).unwrap();
    busy.is_computing = true;
    let Some((_, Task::Train { epoch, indices, .. })) = busy.work.front() else {
        panic!("it has work")
    };
    let batch = BatchId { epoch: *epoch, index: indices.start };
    (bench, batch)
}

/// The batches that the last checkpoint holds.
fn n_saved(bench: &Bench) -> u64 {
    assert_eq!(bench.committed.len(), 1);
    let mut config = bench.job.config().clone();
    config.term = config.term.next();
    let mut resumed = Bench::new(config, bench.disk.clone());
    (resumed.folders, resumed.committed) = (bench.folders.clone(), bench.committed.clone());
    resumed.handle(Event::Platform(Report::Running(Vec::new())));
    let n_done = resumed.job.ledger().n_done();
    resumed.run();
    resumed.expect_trained(2);
    n_done
}

#[test]
fn the_batch_that_is_computed_is_saved_and_the_rest_is_returned() {
    let (mut bench, batch) = busy(spec());
    bench.handle(stop());
    assert!(bench.committed.is_empty(), "worker 0 is not done");
    assert_eq!(bench.job.ledger().pool().n_assigned(), 1);
    bench.pass(WITHIN / 3, None);
    assert_eq!(bench.ended, None);
    bench.step(0);
    assert_eq!(reason(&bench), Some("enough"));
    assert!(bench.job.ledger().is_done(batch));
    assert_eq!(n_saved(&bench), 5);
}

#[test]
fn a_job_whose_processes_are_all_being_deleted_is_saved_before_they_exit() {
    let (mut bench, batch) = busy(spec());
    let within_ms = u64::try_from(WITHIN.as_millis()).unwrap();
    bench.handle(Event::Platform(Report::AllDeleted { within_ms }));
    bench.step(0);
    assert_eq!(reason(&bench), Some("all pods of the job were deleted"));
    assert!(bench.job.ledger().is_done(batch));
    assert_eq!(n_saved(&bench), 5);
}

#[test]
fn servers_stay_for_a_checkpoint_from_the_deletion_of_the_master_on() {
    let mut members = Members::new(hybrid());
    members.effects.clear();
    members.handle(Event::Platform(Report::MasterDeleted));
    let stay = [0, 1].map(|id| Effect::ToPs(PsId(id), server::Order::Drain));
    assert_eq!(members.effects, stay, "and nothing stops: it may have been deleted alone");
}

#[test]
fn a_server_that_reconnects_is_asked_again_to_stay() {
    let deleted = || Event::Platform(Report::MasterDeleted);
    for (event, stays) in [(None, false), (Some(stop()), true), (Some(deleted()), true)] {
        let mut members = Members::new(hybrid());
        event.into_iter().for_each(|event| members.handle(event));
        members.effects.clear();
        members.join_ps(1);
        let order = |effect: &Effect| {
            let Effect::ToPs(ps, order) = effect else { return None };
            let is_it = matches!(order, server::Order::Welcome | server::Order::Drain);
            is_it.then(|| (ps.0, order.clone()))
        };
        let orders = members.effects.iter().filter_map(order);
        let mut expected = vec![(1, server::Order::Welcome)];
        expected.extend(stays.then_some((1, server::Order::Drain)));
        assert_eq!(orders.collect::<Vec<_>>(), expected);
    }
}

#[test]
fn a_batch_that_takes_too_long_is_trained_again_and_the_reason_says_so() {
    let (mut bench, _) = busy(spec());
    bench.handle(stop());
    bench.pass(WITHIN / 2, None);
    let why = "enough; 1 batch was not finished in time and will be trained again";
    assert_eq!(reason(&bench), Some(why));
    assert_eq!(n_saved(&bench), 4);
}

#[test]
fn a_worker_that_dies_does_not_delay_a_stop() {
    let (mut bench, _) = busy(spec());
    bench.handle(stop());
    bench.kill_now(worker(0), Ended::Signal(9));
    assert_eq!((reason(&bench), n_saved(&bench)), (Some("enough"), 4));
}

#[test]
fn a_worker_that_reconnects_is_asked_again() {
    let (mut bench, _) = busy(spec());
    bench.workers.get_mut(&1).unwrap().is_computing = true;
    bench.handle(stop());
    bench.connect(worker(1));
    assert_eq!(bench.job.ledger().pool().n_assigned(), 2, "both still compute");
    bench.step(0);
    bench.step(1);
    assert_eq!((reason(&bench), n_saved(&bench)), (Some("enough"), 6));
}

#[test]
fn a_second_request_can_only_shorten_the_time() {
    let (mut bench, _) = busy(spec());
    bench.handle(stop());
    bench.handle(Event::Stop { reason: "more".into(), within: 10 * WITHIN });
    bench.handle(Event::Stop { reason: "less".into(), within: WITHIN / 3 });
    bench.pass(WITHIN / 6, None);
    assert!(reason(&bench).is_some_and(|why| why.starts_with("enough; 1 batch ")));
}

#[test]
fn the_open_round_is_completed() {
    let spec = JobSpec { grads_to_wait: Some(4), ..spec() };
    let (mut bench, _) = busy(spec);
    bench.step(1);
    assert_eq!(bench.job.ledger().n_done(), 5, "the second round has begun");
    bench.handle(stop());
    bench.run();
    assert_eq!((reason(&bench), n_saved(&bench)), (Some("enough"), 8));
}

#[test]
fn a_checkpoint_that_was_begun_before_is_not_that_of_the_stop() {
    let (mut bench, batch) =
        busy(JobSpec { checkpoint_steps: 5, keep_checkpoint_max: 1, ..spec() });
    bench.holds_commits = true;
    bench.step(1);
    assert_eq!(bench.held_back.len(), 1, "a checkpoint is being written");
    bench.handle(stop());
    bench.step(0);
    assert!(bench.job.ledger().is_done(batch) && bench.ended.is_none());
    bench.holds_commits = false;
    let Some(Effect::Commit { checkpoint, folder, .. }) = bench.held_back.pop() else { panic!() };
    bench.committed.insert(folder);
    bench.handle(Event::Committed { checkpoint });
    assert_eq!((reason(&bench), n_saved(&bench)), (Some("enough"), 6));
}
