// SPDX-License-Identifier: Apache-2.0
//! What people ask of a running job: more workers, fewer workers, an end.

use std::time::Duration;

use super::bench::{Bench, config, ps, spec, worker};
use crate::job::{End, Event};
use crate::platform::{Ended, Order};
use crate::spec::JobSpec;

fn stop(with_checkpoint: bool) -> Event {
    Event::Stop { reason: "enough".into(), with_checkpoint }
}

fn stopped() -> Option<End> {
    Some(End::Stopped("enough".into()))
}

#[test]
fn scaling_up_starts_workers_and_scaling_down_asks_the_youngest_to_leave() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 2, ..spec() }, 0));
    bench.handle(Event::Scale { workers: 5 });
    assert_eq!(bench.workers.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(bench.disk.workers_wanted, Some(5));
    bench.run_to(4);
    bench.handle(Event::Scale { workers: 1 });
    assert_eq!(bench.workers.keys().copied().collect::<Vec<_>>(), [0]);
    assert!(bench.disk.failures.is_empty());
    bench.run();
    bench.expect_trained(2);
}

#[test]
fn a_scale_decision_survives_the_master() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 1, ..spec() }, 0));
    bench.handle(Event::Scale { workers: 3 });
    bench.restart_master();
    bench.connect_all();
    bench.kill_now(worker(1), Ended::Signal(9));
    assert_eq!(bench.workers.len(), 3);
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_job_scaled_to_nobody_waits_and_goes_on_when_somebody_comes() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 1, ..spec() }, 0));
    bench.run_to(3);
    bench.handle(Event::Scale { workers: 0 });
    bench.pass(Duration::from_secs(60), None);
    assert!(bench.workers.is_empty() && bench.ended.is_none());
    bench.handle(Event::Scale { workers: 1 });
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_stop_writes_a_checkpoint_and_the_job_can_be_resumed() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 2, ..spec() }, 0));
    bench.run_to(7);
    bench.handle(stop(true));
    assert_eq!(bench.ended, stopped());
    assert_eq!(bench.committed.len(), 1);
    let mut config = bench.job.config().clone();
    config.term = config.term.next();
    let mut resumed = Bench::new(config, bench.disk.clone());
    (resumed.folders, resumed.committed) = (bench.folders, bench.committed);
    resumed.handle(Event::Platform(crate::platform::Report::Running(Vec::new())));
    assert_eq!(resumed.job.ledger().n_done(), 7);
    resumed.run();
    resumed.expect_trained(2);
}

#[test]
fn a_stop_without_a_checkpoint_ends_at_once() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 2, ..spec() }, 0));
    bench.run_to(7);
    bench.handle(stop(false));
    assert_eq!((bench.ended.clone(), bench.committed.len()), (stopped(), 0));
    let n_stops = bench.orders.iter().filter(|o| matches!(o, Order::Dismiss { .. })).count();
    assert_eq!(n_stops, 4, "all processes are ended");
}

#[test]
fn a_stop_waits_for_its_checkpoint_no_longer_than_it_must() {
    let started = || {
        let mut bench = Bench::started(config(JobSpec { num_epochs: 2, ..spec() }, 0));
        bench.run_to(7);
        bench.holds_cuts = true;
        bench.handle(stop(true));
        assert_eq!(bench.ended, None);
        bench
    };
    let mut bench = started();
    bench.pass(Duration::from_secs(21), None);
    assert_eq!(bench.ended, stopped(), "its time is over");
    let mut bench = started();
    bench.handle(stop(false));
    assert_eq!(bench.ended, stopped(), "somebody has no more patience");
    let mut bench = started();
    bench.kill_now(ps(0), Ended::Signal(9));
    assert_eq!(bench.ended, stopped(), "there is nothing left to cut");
    let mut bench = started();
    bench.holds_cuts = false;
    bench.disk_is_full = true;
    bench.connect(ps(0));
    assert_eq!(bench.ended, stopped(), "the cut failed");
}

#[test]
fn a_stop_before_anything_is_loaded_ends_at_once() {
    let mut bench = Bench::new(config(spec(), 0), crate::job::Durable::default());
    bench.handle(stop(true));
    assert_eq!(bench.ended, stopped());
}
