// SPDX-License-Identifier: Apache-2.0
//! What people ask of a running job: more workers, fewer workers, an end.

use std::time::Duration;

use super::bench::{Bench, config, ps, spec, worker};
use crate::job::{End, Event, Refusal, STOP_TIMEOUT};
use crate::platform::{ChaosAction, Ended, Order, Report};
use crate::spec::{JobSpec, Strategy};

fn stop(with_checkpoint: bool) -> Event {
    stop_within(if with_checkpoint { STOP_TIMEOUT } else { Duration::ZERO })
}

fn stop_within(within: Duration) -> Event {
    Event::Stop { reason: "enough".into(), within }
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
fn a_job_scaled_to_zero_waits_and_continues_when_a_worker_joins() {
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
    resumed.handle(Event::Platform(Report::Running(Vec::new())));
    assert_eq!(resumed.job.ledger().n_done(), 7);
    resumed.run();
    resumed.expect_trained(2);
}

#[test]
fn a_job_whose_processes_were_all_deleted_is_stopped_and_can_be_resumed() {
    let spec = JobSpec { num_epochs: 2, checkpoint_steps: 4, ..spec() };
    let mut bench = Bench::started(config(spec, 0));
    bench.run_to(9);
    bench.servers.clear();
    bench.workers.clear();
    let next = |bench: &Bench| {
        let mut config = bench.job.config().clone();
        config.term = config.term.next();
        let mut next = Bench::new(config, bench.disk.clone());
        (next.folders, next.committed) = (bench.folders.clone(), bench.committed.clone());
        next
    };
    let mut deleted = next(&bench);
    deleted.handle(Event::Platform(Report::AllDeleted { within_ms: 0 }));
    assert!(matches!(deleted.ended, Some(End::Stopped(_))), "{:?}", deleted.ended);
    assert!(deleted.orders.is_empty(), "nothing is started, and there is nothing to stop");
    let mut resumed = next(&deleted);
    resumed.handle(Event::Platform(Report::Running(Vec::new())));
    assert_eq!(resumed.job.ledger().n_done(), 8);
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
fn at_the_end_a_process_without_a_stream_is_stopped_and_the_others_exit_by_themselves() {
    let mut bench = Bench::started(config(JobSpec { num_epochs: 2, ..spec() }, 0));
    bench.run_to(7);
    bench.holds_launches = true;
    bench.handle(Event::Scale { workers: 3 });
    bench.orders.clear();
    bench.handle(stop(false));
    let stopped: Vec<_> = bench.orders.iter().filter(|o| matches!(o, Order::Stop { .. })).collect();
    assert_eq!(stopped, [&Order::Stop { instance: worker(2), grace_ms: 1500 }]);
    let n_dismissed = bench.orders.iter().filter(|o| matches!(o, Order::Dismiss { .. })).count();
    assert_eq!(n_dismissed, 4);
}

#[test]
fn a_stop_waits_for_its_checkpoint_no_longer_than_it_must() {
    let started = || {
        let mut bench = Bench::started(config(JobSpec { num_epochs: 2, ..spec() }, 0));
        bench.run_to(7);
        bench.holds_checkpoints = true;
        bench.handle(stop(true));
        assert_eq!(bench.ended, None);
        bench
    };
    let mut bench = started();
    bench.pass(Duration::from_secs(21), None);
    let Some(End::Stopped(why)) = &bench.ended else { panic!("{:?}", bench.ended) };
    assert_eq!(why, "enough; no time to save a checkpoint after step 0", "its time is over");
    let mut bench = started();
    bench.handle(stop(false));
    assert_eq!(bench.ended, stopped(), "the user does not want to wait any longer");
    let mut bench = started();
    bench.kill_now(ps(0), Ended::Signal(9));
    assert_eq!(bench.ended, stopped(), "there is nothing left to save");
    let mut bench = started();
    bench.holds_checkpoints = false;
    bench.disk_is_full = true;
    bench.connect(ps(0));
    let Some(End::Stopped(why)) = &bench.ended else { panic!("{:?}", bench.ended) };
    assert_eq!(why, "enough; its checkpoint could not be written");
}

#[test]
fn a_stop_before_anything_is_loaded_ends_at_once() {
    let mut bench = Bench::new(config(spec(), 0), crate::job::Durable::default());
    bench.handle(stop(true));
    assert_eq!(bench.ended, stopped());
}

/// The reply to `event`, as the caller reads it.
fn reply(bench: &mut Bench, event: Event) -> String {
    bench.replies.clear();
    bench.handle(event);
    assert_eq!(bench.replies.len(), 1, "one request, one reply");
    bench.replies[0].map_or_else(|refusal| refusal.to_string(), |()| "ok".into())
}

#[test]
fn a_scale_out_of_range_is_refused_and_changes_nothing() {
    let check = |spec: JobSpec, workers: u32, expected: &str| {
        let mut bench = Bench::new(config(spec, 0), crate::job::Durable::default());
        let before = bench.job.instances().workers_wanted();
        assert_eq!(reply(&mut bench, Event::Scale { workers }), expected);
        let after = if expected == "ok" { workers } else { before };
        assert_eq!(bench.job.instances().workers_wanted(), after);
        assert_eq!(bench.disk.workers_wanted, (expected == "ok").then_some(workers));
    };
    let lanes = |lanes| JobSpec {
        distribution_strategy: Strategy::Allreduce,
        num_ps_pods: 0,
        lanes: Some(lanes),
        min_workers: 1,
        ..spec()
    };
    let one = "cannot scale to 5: the job has 1 lane, fixed for its lifetime, and every worker \
               needs one; start a job with more --lanes";
    check(lanes(1), 5, one);
    check(lanes(4), 5, &one.replace("1 lane,", "4 lanes,"));
    check(lanes(4), 0, "cannot scale to 0: --min_workers is 1");
    check(lanes(4), 3, "ok");
    let linked = "cannot scale to 1025: under AllReduce, each worker connects to all others, and at \
                  most 1024 can";
    check(lanes(4096), 1025, linked);
    let most = JobSpec { max_workers: Some(4), ..spec() };
    check(most.clone(), 5, "cannot scale to 5: --max_workers is 4");
    check(most, 0, "ok");
}

#[test]
fn a_chaos_action_is_refused_with_the_reason() {
    let check = |spec: JobSpec, action: ChaosAction, id: u32, expected: &str| {
        let mut bench = Bench::started(config(spec, 0));
        let event = Event::Chaos { instance: worker(id), action };
        assert_eq!(reply(&mut bench, event), expected);
        let is_ordered = bench.orders.iter().any(|order| matches!(order, Order::Chaos { .. }));
        assert_eq!(is_ordered, expected == "ok");
    };
    let chaos = || JobSpec { allow_chaos: true, ..spec() };
    let pods = JobSpec { image_name: "image".into(), ..chaos() };
    check(spec(), ChaosAction::Kill, 0, "chaos is disabled; start the job with --allow_chaos");
    check(pods, ChaosAction::Pause, 0, "pods support only the chaos action kill");
    check(chaos(), ChaosAction::Pause, 9, "worker-9 is not running");
    check(chaos(), ChaosAction::Pause, 0, "ok");
}

#[test]
fn an_invalid_optimizer_ends_the_job_with_the_reason() {
    let spec = JobSpec { learning_rate: Some(-1.0), ..spec() };
    let bench = Bench::started(config(spec, 0));
    let Some(End::Failed(why)) = bench.ended else { panic!("{:?}", bench.ended) };
    assert!(why.starts_with("invalid optimizer: --learning_rate"), "{why}");
}

#[test]
fn a_job_that_has_ended_can_be_stopped_but_not_changed() {
    let mut bench = Bench::new(config(spec(), 0), crate::job::Durable::default());
    assert_eq!(reply(&mut bench, stop(true)), "ok");
    assert_eq!(bench.ended.take(), stopped());
    assert_eq!(reply(&mut bench, Event::Scale { workers: 1 }), Refusal::Ended.to_string());
    assert_eq!(reply(&mut bench, stop(true)), "ok");
}
