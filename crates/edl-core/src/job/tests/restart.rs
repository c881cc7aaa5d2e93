// SPDX-License-Identifier: Apache-2.0
//! Masters that die and come back: what is durable, what is asked for again.

use std::time::Duration;

use super::bench::{Bench, config, ps, spec, worker};
use crate::id::{BatchId, Generation, Incarnation, LeaseId, WorkerId};
use crate::job::EventKind;
use crate::job::{Durable, Effect, End, Event, HeldLease, Job};
use crate::platform::{Ended, Process, Report};
use crate::spec::JobSpec;
use crate::time::Time;
use crate::worker;

fn train(n_epochs: u32) -> JobSpec {
    JobSpec { num_epochs: n_epochs, ..spec() }
}

#[test]
fn a_new_master_continues_with_what_the_servers_hold_and_loads_nothing() {
    let mut bench = Bench::started(config(train(2), 0));
    bench.run_to(7);
    bench.restart_master();
    bench.connect_all();
    assert_eq!((bench.job.ledger().n_done(), bench.job.servers().generation().0), (7, 1));
    let note = bench.notes.iter().find(|note| note.kind == EventKind::Resumed).expect("it resumed");
    assert_eq!(note.text, "resumed at step 7");
    bench.run();
    bench.expect_trained(2);
}

#[test]
fn a_new_master_starts_no_process_that_runs_already() {
    let mut bench = Bench::started(config(train(1), 0));
    let n_orders = bench.orders.len();
    bench.restart_master();
    bench.connect_all();
    assert_eq!(bench.orders.len(), n_orders);
    bench.kill_now(worker(0), Ended::Signal(9));
    assert!(bench.workers.contains_key(&2), "numbering continues");
}

#[test]
fn a_new_master_takes_note_of_what_workers_hold() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.run_to(2);
    let held: Vec<usize> = bench.workers.values().map(|worker| worker.work.len()).collect();
    bench.restart_master();
    bench.connect_all();
    let holds = |bench: &Bench, id: u32| bench.job.ledger().pool().n_held(WorkerId(id));
    assert!(holds(&bench, 0) >= held[0] && holds(&bench, 1) >= held[1]);
    bench.job.check_invariants();
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn work_that_a_worker_holds_of_an_earlier_generation_is_not_assigned_to_it() {
    let mut bench = Bench::started(config(JobSpec { num_workers: 1, ..train(1) }, 0));
    bench.run_to(2);
    // The worker says that it holds this, and drops it when it learns of the new generation.
    let (worker, incarnation) = (WorkerId(0), Incarnation(bench.workers[&0].incarnation));
    let (generation, indices) = (Generation(0), vec![9, 9]);
    let held = vec![HeldLease { lease: LeaseId(77), generation, epoch: 0, indices }];
    let model = Box::new(super::bench::model());
    bench.handle(Event::WorkerConnected { worker, incarnation, pid: 1 });
    bench.workers.get_mut(&0).unwrap().work.clear();
    let report = worker::Report::Ready { model, capacity: 2, held, peer: None };
    bench.handle(Event::FromWorker { worker, incarnation, report });
    assert_eq!(bench.job.ledger().pool().lease(worker, LeaseId(77)), None);
    bench.run();
    bench.expect_trained(1);
    assert!(bench.disk.failures.is_empty() && !bench.has_note(EventKind::WorkFailed));
}

#[test]
fn a_batch_reported_before_all_servers_have_connected_is_not_forgotten() {
    let mut bench = Bench::started(config(JobSpec { num_workers: 1, ..train(1) }, 0));
    bench.run_to(2);
    bench.restart_master();
    // The first server announces its set, then a batch is applied everywhere and reported.
    bench.connect(ps(0));
    bench.connect(worker(0));
    let batch = BatchId { epoch: 0, index: 2 };
    bench.push_everywhere(batch);
    bench.report(0, batch);
    bench.connect(ps(1));
    assert!(bench.job.ledger().is_done(batch), "no worker will report it again");
}

#[test]
fn a_server_that_ended_with_the_master_makes_the_new_one_restore() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 3, ..train(1) }, 0));
    bench.run_to(5);
    bench.servers.remove(&1);
    bench.restart_master();
    bench.connect_all();
    assert_eq!((bench.job.ledger().n_done(), bench.job.servers().generation().0), (3, 2));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_server_that_never_connects_to_a_new_master_is_replaced() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 3, ..train(1) }, 0));
    bench.run_to(5);
    let frozen = bench.servers[&1].pid;
    bench.restart_master();
    bench.connect(ps(0));
    [worker(0), worker(1)].into_iter().for_each(|instance| bench.connect(instance));
    bench.pass(Duration::from_secs(25), Some(ps(1)));
    assert_ne!(bench.servers[&1].pid, frozen);
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn the_master_dies_between_deciding_a_generation_and_announcing_it() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 3, ..train(1) }, 0));
    bench.run_to(5);
    // Everything up to each effect of the list is performed, then the master is gone.
    bench.kill(ps(1), Ended::Signal(9));
    for n_performed in 0..8 {
        let old = bench.disk.generation;
        let (instance, pid) = (ps(1), 999 + n_performed);
        bench.handle_partly(Event::Platform(Report::Started { instance, pid }), 0);
        let hello = bench.launch(instance);
        for event in hello.into_iter().skip(1) {
            bench.handle_partly(event, n_performed as usize);
        }
        assert!(bench.disk.generation >= old);
        bench.restart_master();
        let announced = bench.servers.values().map(|server| server.machine.generation()).max();
        assert!(announced <= Some(bench.disk.generation), "no server knows more than the disk");
        bench.connect_all();
        let serves = |bench: &Bench| {
            let generation = bench.job.servers().generation();
            bench.servers.values().all(|s| s.machine.generation() == generation && s.is_serving)
        };
        assert!(serves(&bench), "after {n_performed} effects");
        assert_eq!(bench.job.ledger().n_done(), 3);
        bench.kill(ps(1), Ended::Signal(9));
        let held = std::mem::take(&mut bench.held_back);
        assert!(held.is_empty());
    }
    bench.restart_master();
    bench.connect_all();
    bench.run();
    bench.expect_trained(1);
}

impl Bench {
    /// The master dies after it has performed some of the effects.
    fn handle_partly(&mut self, event: Event, n_performed: usize) {
        let effects = self.job.handle(event, self.now);
        for effect in effects.into_iter().take(n_performed) {
            match effect {
                Effect::Persist(facts) => self.persist(facts),
                Effect::ToPs(id, order) => drop(self.obey_as_ps(id, order)),
                Effect::ToWorker(..)
                | Effect::CloseWorker(..)
                | Effect::RefuseWorker(..)
                | Effect::ClosePs(..)
                | Effect::Platform(_)
                | Effect::PrepareCheckpoint { .. }
                | Effect::Commit { .. }
                | Effect::Delete(_)
                | Effect::Export { .. }
                | Effect::JoinPredictions { .. }
                | Effect::EvaluationStarted { .. }
                | Effect::Evaluated(_)
                | Effect::Note(_)
                | Effect::Reply(_)
                | Effect::Ended(_) => {}
            }
        }
    }
}

#[test]
fn a_lost_evaluation_is_made_again_and_a_kept_one_is_not() {
    let spec = JobSpec { evaluation_steps: 4, evaluation_epochs: false, ..train(1) };
    let mut bench = Bench::started(config(spec, 4));
    bench.losses = vec![0.5, 0.6, 0.7, 0.8];
    bench.run_to(9);
    // The best model is that of version 4, so there is a checkpoint of it and of no later one.
    assert_eq!(bench.evaluated.len(), 2);
    bench.kill_now(ps(0), Ended::Signal(9));
    assert_eq!(bench.job.ledger().n_done(), 4);
    assert_eq!(bench.disk.evaluations.len(), 1, "the one of version 8 is of a discarded model");
    bench.restart_master();
    bench.connect_all();
    bench.run();
    bench.expect_trained(1);
    let versions: Vec<u64> = bench.disk.evaluations.iter().map(|e| e.version).collect();
    assert_eq!(versions, [4, 8, 10]);
    assert_eq!(bench.evaluated.len(), 4);
}

#[test]
fn the_best_model_is_kept_although_the_master_died_before_it_was_written() {
    let mut bench = Bench::started(config(train(3), 4));
    bench.losses = vec![0.5, 0.6, 0.7];
    bench.holds_checkpoints = true;
    bench.run_until(|bench| !bench.evaluated.is_empty());
    assert_eq!(bench.disk.best, None);
    bench.holds_checkpoints = false;
    bench.restart_master();
    bench.connect_all();
    let best = bench.disk.best.clone().expect("the new master saved it");
    assert!(bench.folders[&best].values().all(|(applied, _)| applied.len() == 10));
    bench.run();
    bench.expect_trained(3);
    assert_eq!(bench.disk.best, Some(best));
}

#[test]
fn everything_killed_at_once_resumes_from_the_last_checkpoint() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 4, ..train(2) }, 0));
    bench.run_to(11);
    bench.servers.clear();
    bench.workers.clear();
    bench.restart_master();
    assert_eq!(bench.job.ledger().n_done(), 8);
    bench.run();
    bench.expect_trained(2);
}

#[test]
fn a_finished_job_that_lost_its_master_before_the_end_exports_again_and_trains_nothing() {
    let mut bench = Bench::started(config(train(1), 0));
    bench.run_to(9);
    let durable_before_end = {
        bench.run();
        let mut durable = bench.disk.clone();
        durable.end = None;
        durable
    };
    let (folders, committed) = (bench.folders.clone(), bench.committed.clone());
    let mut config = bench.job.config().clone();
    config.term = config.term.next();
    let mut again = Bench::new(config, durable_before_end);
    (again.folders, again.committed) = (folders, committed);
    again.handle(Event::Platform(Report::Running(Vec::new())));
    assert_eq!(again.ended, Some(End::Succeeded));
    again.expect_trained(1);
}

#[test]
fn a_master_that_knows_a_higher_generation_refuses_what_older_servers_hold() {
    let mut bench = Bench::started(config(JobSpec { checkpoint_steps: 4, ..train(1) }, 0));
    bench.run_to(9);
    bench.disk.generation = Generation(9);
    bench.restart_master();
    bench.connect_all();
    assert_eq!((bench.job.servers().generation().0, bench.job.ledger().n_done()), (10, 8));
    bench.run();
    bench.expect_trained(1);
}

#[test]
fn a_process_that_ran_long_before_a_new_master_has_the_heartbeat_timeout_to_connect() {
    let spec = JobSpec { heartbeat_timeout_secs: 2.0, ..spec() };
    for (age_ms, expected) in [(60_000, 2), (4_000, 8), (0, 12)] {
        let mut job = Job::new(config(spec.clone(), 0), Durable::default(), Time::ZERO);
        let process = |instance| Process { instance, pid: 1, age_ms };
        let running = vec![process(worker(0)), process(ps(0)), process(ps(1))];
        drop(job.handle(Event::Platform(Report::Running(running)), Time::ZERO));
        let mut now = Time::ZERO;
        let is_late = |effect: &Effect| matches!(effect, Effect::Note(note) if note.kind == EventKind::NotConnected);
        while !job.handle(Event::Tick, now).iter().any(is_late) {
            now = now + Duration::from_millis(100);
        }
        assert_eq!(now.since(Time::ZERO), Duration::from_secs(expected), "of {age_ms} ms");
    }
}
