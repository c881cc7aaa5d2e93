// SPDX-License-Identifier: Apache-2.0
//! Spares take only the places of workers that are lost, frozen or leave.

use std::time::Duration;

use super::bench::{Bench, config, spec, worker};
use super::members::{self, Members};
use crate::activity::WaitingFor;
use crate::id::{Incarnation, WorkerId, WorldId};
use crate::job::{Effect, Event, EventKind, Job, MemberReport};
use crate::platform::{Ended, InstanceId, InstanceState, Order, Report};
use crate::spec::{JobSpec, JobType};

const KILLED: Ended = Ended::Signal(9);
const BEAT: Duration = Duration::from_millis(100);

/// Two workers train, and a third one is ready.
fn with_servers() -> Bench {
    let bench = Bench::started(config(JobSpec { num_epochs: 0, spares: 1, ..spec() }, 0));
    assert_eq!(states(&bench.job), "working working spare");
    bench
}

fn in_steps(spares: u32, n_processes: usize) -> Members {
    Members::with_probes(JobSpec { spares, ..members::spec() }, &vec![7; n_processes])
}

/// The states of all connected workers, in the order of their numbers.
fn states(job: &Job) -> String {
    let states: Vec<&str> = job.connected_workers().map(|(_, _, state)| state.name()).collect();
    states.join(" ")
}

fn held(bench: &Bench) -> Vec<bool> {
    let pool = bench.job.ledger().pool();
    bench.workers.keys().map(|id| pool.n_held(WorkerId(*id)) > 0).collect()
}

fn launched(effects: &[Effect]) -> Vec<InstanceId> {
    let launched = |effect: &Effect| {
        let Effect::Platform(Order::Launch { instance, .. }) = effect else { return None };
        Some(*instance)
    };
    effects.iter().filter_map(launched).collect()
}

#[test]
fn a_spare_gets_no_work_until_a_worker_is_lost_and_then_at_once() {
    let mut bench = with_servers();
    bench.run_to(30);
    assert_eq!(held(&bench), [true, true, false]);
    bench.kill_now(worker(0), KILLED);
    assert_eq!(held(&bench), [true, true, false], "of workers 1, 2 and 3");
    assert_eq!(states(&bench.job), "working working spare");
    let note = "worker-2 was a spare and is now training";
    assert!(bench.notes.iter().any(|n| n.kind == EventKind::WorkerJoined && n.text == note));
    bench.run_to(60);
}

#[test]
fn a_spare_that_dies_is_replaced_and_disturbs_no_worker() {
    let mut bench = with_servers();
    bench.run_to(5);
    let before = held(&bench);
    bench.kill_now(worker(2), KILLED);
    assert_eq!((held(&bench), states(&bench.job).as_str()), (before, "working working spare"));
    assert_eq!(bench.workers.keys().copied().collect::<Vec<_>>(), [0, 1, 3]);
}

#[test]
fn a_scaled_job_keeps_its_spares() {
    let mut bench = with_servers();
    bench.handle(Event::Scale { workers: 3 });
    assert_eq!(states(&bench.job), "working working working spare");
    assert!(held(&bench)[2], "the spare trains before the new worker has started");
    bench.handle(Event::Scale { workers: 1 });
    assert_eq!(states(&bench.job), "working spare");
    bench.handle(Event::Scale { workers: 0 });
    assert_eq!(states(&bench.job), "", "there is nothing to replace");
    bench.handle(Event::Scale { workers: 2 });
    assert_eq!(states(&bench.job), "working working spare");
    bench.run_to(30);
}

#[test]
fn a_frozen_worker_whose_place_was_taken_is_a_spare_when_it_returns() {
    let mut bench = with_servers();
    for _ in 0..10 {
        bench.progress += 1;
        bench.pass(BEAT, None);
    }
    while !bench.has_note(EventKind::Stuck) {
        bench.pass(BEAT, Some(worker(1)));
    }
    assert_eq!(held(&bench), [true, false, true]);
    bench.pass(BEAT, None);
    assert_eq!(held(&bench), [true, false, true], "it was heard again");
    assert_eq!(states(&bench.job), "working spare working");
}

#[test]
fn only_jobs_that_train_a_model_of_ours_have_spares() {
    let job_command = "python3 train.py".to_owned();
    let custom = JobSpec { spares: 1, job_command, ..spec() };
    assert!(custom.check().unwrap_err().0.starts_with("--spares cannot be used with a custom"));
    JobSpec { spares: 1, ..spec() }.check().unwrap();
    let job_type = JobType::Evaluate;
    let mut spec = JobSpec { spares: 1, job_type, ..spec() };
    spec.settle_strategy();
    assert_eq!(spec.spares, 0);
}

/// The members hold the state of `step`.
fn form(members: &mut Members, step: u64) {
    for id in members.members() {
        let (world, pause_secs, state_bytes) = (members.world(), 0.0, 0);
        members.report(id, MemberReport::Formed { world, step, pause_secs, state_bytes });
    }
}

fn kill(members: &mut Members, id: u32) {
    members.effects.clear();
    let (instance, pid) = (worker(id), id);
    members.handle(Event::Platform(Report::Ended { instance, pid, how: KILLED }));
}

#[test]
fn the_next_world_has_the_spare_in_the_place_of_the_lost_member() {
    let mut members = in_steps(1, 3);
    assert_eq!(
        (members.members(), states(&members.job)),
        (vec![0, 1], "working working spare".into())
    );
    kill(&mut members, 0);
    assert_eq!(members.members(), [1, 2], "without waiting for a new process");
    let world = members.job.worlds().and_then(|worlds| worlds.current()).unwrap();
    assert_eq!(world.after, None);
    assert_eq!(launched(&members.effects), [worker(3)], "the next spare");
    form(&mut members, 0);
    members.join(3, 7);
    members.pass(BEAT * 5, &[WaitingFor::Nothing; 4]);
    assert_eq!(
        (members.members(), states(&members.job)),
        (vec![1, 2], "working working spare".into())
    );
}

#[test]
fn a_spare_that_dies_leaves_the_world_as_it_is() {
    let mut members = in_steps(1, 3);
    let world = members.world();
    kill(&mut members, 2);
    assert_eq!((members.world(), launched(&members.effects)), (world, vec![worker(3)]));
    members.join(3, 7);
    members.pass(BEAT * 5, &[WaitingFor::Nothing; 4]);
    assert_eq!((members.world(), states(&members.job)), (world, "working working spare".into()));
}

#[test]
fn a_scaled_world_takes_its_spares_in_and_keeps_as_many() {
    let mut members = in_steps(1, 3);
    members.effects.clear();
    members.handle(Event::Scale { workers: 3 });
    members.pause([(0, 1), (1, 1)]);
    assert_eq!((members.members(), launched(&members.effects)), (vec![0, 1, 2], vec![worker(3)]));
    form(&mut members, 8);
    members.join(3, 7);
    members.effects.clear();
    members.handle(Event::Scale { workers: 2 });
    members.pause([(0, 8), (1, 8), (2, 8)]);
    assert_eq!(members.members(), [0, 1]);
    let is_stop = |effect: &Effect| {
        let Effect::Platform(Order::Stop { instance, .. }) = effect else { return None };
        Some(*instance)
    };
    let stopped: Vec<InstanceId> = members.effects.iter().filter_map(is_stop).collect();
    assert_eq!(stopped, [worker(3)], "three processes are left");
    form(&mut members, 8);
    assert!(states(&members.job).starts_with("working working spare"));
}

/// Workers 0 and 1 train the steps up to `last`.
fn train(members: &mut Members, world: WorldId, last: u64) {
    for step in members.job.ledger().n_done() + 1..=last {
        for id in [0, 1] {
            members.report(id, MemberReport::Stepped { world, step, hash: 0, loss: 0.5 });
        }
        members.pass(BEAT, &[WaitingFor::Nothing; 3]);
    }
}

/// Only these workers are heard, until the master forms a world without the others.
fn freeze_all_but(members: &mut Members, heard: [u32; 2]) {
    let (since, world) = (members.now, members.world());
    while members.world() == world {
        assert!(members.now.since(since) < Duration::from_secs(3));
        members.now = members.now + BEAT;
        for id in heard {
            let (worker, incarnation) = (WorkerId(id), Incarnation(id.into()));
            let (waiting_for, progress) = (WaitingFor::Members, 0);
            let report = crate::worker::Report::Heartbeat { waiting_for, progress };
            members.handle(Event::FromWorker { worker, incarnation, report });
        }
        members.handle(Event::Tick);
    }
}

#[test]
fn the_others_do_not_wait_for_a_worker_that_freezes_while_it_joins() {
    let mut members = in_steps(1, 3);
    let world = members.world();
    train(&mut members, world, 4);
    members.handle(Event::Scale { workers: 3 });
    let until = members.job.worlds().map_or(0, |worlds| worlds.until());
    train(&mut members, world, until);
    assert_eq!(members.members(), [0, 1, 2], "they wait for worker 2 to enter");
    freeze_all_but(&mut members, [0, 1]);
    assert_eq!(members.members(), [0, 1]);
    assert_eq!(members.notes(EventKind::Stuck).len(), 1);
}

#[test]
fn a_member_that_does_not_answer_is_a_spare_when_it_returns() {
    let mut members = in_steps(1, 3);
    let world = members.world();
    train(&mut members, world, 8);
    freeze_all_but(&mut members, [0, 2]);
    assert_eq!(members.members(), [0, 2]);
    form(&mut members, 8);
    members.pass(BEAT * 5, &[WaitingFor::Nothing; 3]);
    assert_eq!(
        (members.members(), states(&members.job)),
        (vec![0, 2], "working spare working".into())
    );
    assert_eq!(members.notes(EventKind::Stuck).len(), 1);
    assert_eq!(InstanceState::Spare.name(), "spare");
}

#[test]
fn the_first_world_waits_for_no_spare() {
    let mut members = Members::starting(JobSpec { spares: 2, ..members::spec() }, 0);
    assert_eq!(launched(&members.effects).len(), 4);
    let since = members.now;
    members.join(3, 7);
    members.join(1, 7);
    assert_eq!((members.members(), members.now), (vec![1, 3], since));
}
