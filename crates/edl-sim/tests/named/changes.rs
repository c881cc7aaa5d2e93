// SPDX-License-Identifier: Apache-2.0
//! Workers that leave and join under AllReduce, and the checkpoints that this calls for.

use edl_core::id::Term;
use edl_core::job::{Event, MemberReport, STOP_TIMEOUT};
use edl_core::platform::InstanceId;
use edl_core::spec::JobSpec;
use edl_core::worker::Report;
use edl_net::proto::{worker_command, worker_message};
use edl_sim::{Hold, Script, Sent, What};

use crate::hybrid;
use crate::worlds::{N_STEPS, alone, spec, started};
use crate::{
    MASTER, first_checkpoint, has_state, is_checkpoint_order, is_launch, is_ready, is_settled,
    loaded_folder, worker, world_in,
};

#[test]
fn the_only_worker_writes_a_checkpoint_before_it_leaves() {
    for mut run in started(alone(), 0) {
        let launches = run.hold(is_launch);
        let pid = run.pid(worker(0));
        run.dismiss(worker(0));
        run.until("it exits", |run| !run.runs(pid));
        let last = run.durable().checkpoints.last().unwrap();
        let (folder, version) = (last.folder.clone(), last.version);
        assert_eq!(version, run.n_done(), "no step was trained after it");
        run.release(launches);
        run.until("its successor trains", is_settled);
        let loaded = run.delivered().iter().rev().find_map(world_in).and_then(loaded_folder);
        assert_eq!(loaded, Some(folder.as_str()));
        assert_eq!(run.n_done(), version, "no step is repeated");
        run.finish();
    }
}

#[test]
fn the_only_worker_passes_its_state_to_its_successor_before_it_leaves() {
    for mut run in started(alone(), 0) {
        let pid = run.pid(worker(0));
        let ready = second_worker(&mut run);
        let is_leaving =
            |sent: &Sent| matches!(sent.what, What::FromWorker(worker_message::Kind::Leaving(_)));
        run.dismiss(worker(0));
        run.until("it leaves", |run| run.delivered().iter().any(is_leaving));
        run.release(ready);
        let after = planned(&mut run);
        assert!(has_state(&run, 0) && !has_state(&run, 1));
        run.until("it exits", |run| !run.runs(pid));
        run.until("its successor trains", |run| run.members() == [1] && is_settled(run));
        assert!(run.n_done() >= after && run.count("restored") == 0);
        run.finish();
    }
}

#[test]
fn a_worker_that_leaves_keeps_the_state_when_those_that_stay_die() {
    for mut run in started(spec(), 0) {
        let launches = run.hold(is_launch);
        let pid = run.pid(worker(1));
        run.dismiss(worker(1));
        run.until("one is to stay", |run| run.members() == [0]);
        assert!(run.runs(pid));
        run.kill(worker(0));
        run.until("the other is needed", |run| run.members() == [1]);
        assert!(has_state(&run, 1));
        run.until("it exits", |run| !run.runs(pid));
        let last = run.durable().checkpoints.last().unwrap();
        assert_eq!(last.version, run.n_done());
        run.release(launches);
        run.until("its successor trains", is_settled);
        assert!(run.n_done() >= 6);
        run.finish();
    }
}

#[test]
fn a_stop_between_two_worlds_still_gets_its_checkpoint() {
    for mut run in started(spec(), 0) {
        let launches = run.hold(is_launch);
        run.kill(worker(1));
        run.until("a world is decided", |run| run.members() == [0]);
        assert!(!is_settled(&run));
        let n_done = run.n_done();
        run.request(Event::Stop { reason: "enough".into(), within: STOP_TIMEOUT });
        run.until("it stops", |run| run.count("stopped by the user") == 1);
        assert!(run.durable().checkpoints.last().unwrap().version >= n_done);
        run.release(launches);
        run.finish();
    }
}

/// A second worker is started, but the master has not heard that it is ready.
fn second_worker(run: &mut Script) -> Hold {
    let ready = run.hold(|sent| sent.from == worker(1) && is_ready(sent));
    run.request(Event::Scale { workers: 2 });
    run.until("another worker is there", |run| run.held(ready).count() == 1);
    ready
}

/// The step after which two workers will train together.
fn planned(run: &mut Script) -> u64 {
    run.until("a change is planned", |run| run.members() == [0, 1]);
    run.world().and_then(|world| world.after).expect("it is planned")
}

fn allowed(run: &Script) -> u64 {
    run.job().and_then(|job| job.worlds()).map_or(0, |worlds| worlds.until())
}

fn is_answer_of(id: u32) -> impl Fn(&Sent) -> bool {
    move |sent| {
        let is_answer = matches!(sent.what, What::FromWorker(worker_message::Kind::Paused(_)));
        is_answer && sent.from == worker(id)
    }
}

fn checkpoint_orders(run: &Script) -> Vec<(InstanceId, u64)> {
    let order = |sent: &Sent| match &sent.what {
        What::ToWorker(worker_command::Kind::Checkpoint(order)) => Some((sent.to, order.at)),
        _ => None,
    };
    run.delivered().iter().filter_map(order).collect()
}

#[test]
fn a_worker_joins_after_the_step_that_is_begun_and_not_after_all_that_are_allowed() {
    for spec in [alone(), JobSpec { num_workers: 1, ..hybrid::spec() }] {
        for mut run in started(spec, 0) {
            let ready = second_worker(&mut run);
            let (before, allowed) = (run.n_done(), allowed(&run));
            run.release(ready);
            let after = planned(&mut run);
            assert!(after <= before + 3 && after + 4 < allowed, "{before}, {after}, {allowed}");
            run.until("both train", is_settled);
            assert_eq!((run.count("peer_lost"), run.count("restored")), (0, 0));
            run.finish();
        }
    }
}

#[test]
fn a_worker_joins_after_all_steps_that_are_allowed_if_a_member_does_not_answer() {
    for mut run in started(alone(), 0) {
        let ready = second_worker(&mut run);
        let answer = run.hold(is_answer_of(0));
        run.release(ready);
        run.until("it is asked", |run| run.held(answer).count() == 1);
        let allowed = allowed(&run);
        assert_eq!(planned(&mut run), allowed);
        run.release(answer);
        run.until("both train", is_settled);
        assert!(run.n_done() >= allowed);
        run.finish();
    }
}

/// Two members are asked to pause for a third one. Worker 0 has answered, and the answer of worker
/// 1 is on its way.
fn pausing(spec: JobSpec) -> impl Iterator<Item = (Script, Hold)> {
    started(spec, 0).map(|mut run| {
        let answer = run.hold(is_answer_of(1));
        run.request(Event::Scale { workers: 3 });
        run.until("worker 1 has paused", |run| run.held(answer).count() == 1);
        run.until("worker 0 has answered", |run| run.delivered().iter().any(is_answer_of(0)));
        (run, answer)
    })
}

#[test]
fn a_member_dies_while_members_pause() {
    for spec in [spec(), hybrid::spec()] {
        for dies in [0, 1] {
            for (mut run, answer) in pausing(spec.clone()) {
                let n_done = run.n_done();
                run.hold(is_launch);
                run.kill(worker(dies));
                run.until("the next world is formed", |run| run.members() == [1 - dies, 2]);
                assert_eq!(run.world().and_then(|world| world.after), None);
                run.release(answer);
                run.until("the others train", is_settled);
                run.until("they train on", |run| run.n_done() > n_done + 10);
                assert_eq!(run.count("restored"), 0);
                run.finish();
            }
        }
    }
}

#[test]
fn the_master_is_restarted_while_members_pause() {
    for spec in [spec(), hybrid::spec()] {
        for (mut run, answer) in pausing(spec.clone()) {
            let n_done = run.n_done();
            run.kill(MASTER);
            run.until("another master leads", |run| run.term() == Term(2));
            run.release(answer);
            run.until("all train", |run| run.members() == [0, 1, 2] && is_settled(run));
            run.until("they train on", |run| run.n_done() > n_done + 10);
            assert_eq!(run.count("restored"), 0);
            run.finish();
        }
    }
}

#[test]
fn the_master_dies_when_all_members_have_paused() {
    for spec in [spec(), hybrid::spec()] {
        // Before the members are allowed to train to one step, in between, and after that.
        for n_effects in 0..6 {
            for (mut run, answer) in pausing(spec.clone()) {
                run.kill_master_at(n_effects, is_paused);
                run.release(answer);
                run.until("another master leads", |run| run.term() == Term(2));
                run.until("all train", |run| run.members() == [0, 1, 2] && is_settled(run));
                assert_eq!(run.count("restored"), 0);
                run.finish();
            }
        }
    }
}

fn is_paused(event: &Event) -> bool {
    matches!(event, Event::FromWorker { report: Report::Member(MemberReport::Paused { .. }), .. })
}

#[test]
fn the_worker_that_was_to_join_dies_while_members_pause() {
    for spec in [spec(), hybrid::spec()] {
        for (mut run, answer) in pausing(spec.clone()) {
            let n_done = run.n_done();
            let launches = run.hold(is_launch);
            run.kill(worker(2));
            run.until("they train on", |run| run.n_done() > n_done + 3);
            assert_eq!(run.members(), [0, 1]);
            run.release(answer);
            run.release(launches);
            run.until("three train", |run| run.members().len() == 3 && is_settled(run));
            run.finish();
        }
    }
}

#[test]
fn a_checkpoint_that_is_due_while_a_join_is_planned_waits_for_the_new_world() {
    let spec = JobSpec { checkpoint_steps: 150, heartbeat_timeout_secs: 60.0, ..alone() };
    for mut run in started(spec, 0) {
        let ready = second_worker(&mut run);
        run.until("a checkpoint is soon due", |run| {
            let until = allowed(run);
            until > 150 && until <= run.n_done() + 13
        });
        assert!(run.n_done() < 150);
        // It does not pause in time, so the new world begins late.
        let answer = run.hold(is_answer_of(0));
        run.release(ready);
        let after = planned(&mut run);
        run.release(answer);
        assert!(after > 150, "{after}");
        run.until("both train", is_settled);
        let orders = checkpoint_orders(&run);
        assert!(run.n_done() >= after && orders.is_empty(), "{orders:?}");
        run.until("both are ordered to write", |run| checkpoint_orders(run).len() == 2);
        let orders = checkpoint_orders(&run);
        assert!(orders[0].1 == orders[1].1 && orders[0].1 >= after && orders[0].0 != orders[1].0);
        let (_, version) = first_checkpoint(&mut run);
        assert_eq!(version, orders[0].1);
        run.finish();
    }
}

#[test]
fn a_join_while_a_checkpoint_is_written_breaks_neither() {
    let spec = JobSpec { checkpoint_steps: 120, heartbeat_timeout_secs: 60.0, ..alone() };
    for mut run in started(spec, 0) {
        let ready = second_worker(&mut run);
        run.until("a checkpoint is ordered", |run| !checkpoint_orders(run).is_empty());
        let at = checkpoint_orders(&run)[0].1;
        run.release(ready);
        assert_eq!(planned(&mut run), at, "the members write it before another one joins");
        assert!(run.durable().checkpoints.is_empty());
        let (_, version) = first_checkpoint(&mut run);
        assert_eq!(version, at);
        run.until("both train", is_settled);
        run.finish();
    }
}

#[test]
fn a_member_dies_before_it_has_written_its_part_of_the_final_checkpoint() {
    for mut run in started(spec(), 0) {
        run.hold(is_launch);
        let order = run.hold(|sent| sent.to == worker(1) && is_checkpoint_order(sent));
        run.until("the final checkpoint is ordered", |run| run.held(order).count() == 1);
        assert_eq!(run.n_done(), N_STEPS);
        run.kill(worker(1));
        run.until("the other one writes all of it", |run| run.count("checkpoint") == 1);
        let orders = checkpoint_orders(&run);
        let others = orders.iter().filter(|order| **order == (worker(0), N_STEPS)).count();
        assert!(others >= 2, "{orders:?}");
        run.finish();
    }
}

#[test]
fn a_member_that_is_left_out_does_not_delay_the_final_checkpoint() {
    for mut run in started(spec(), 0) {
        let order = run.hold(|sent| sent.to == worker(1) && is_checkpoint_order(sent));
        run.until("the final checkpoint is ordered", |run| run.held(order).count() == 1);
        run.hold(|sent| matches!(sent.what, What::Order(_)));
        run.disconnect(worker(1), MASTER);
        run.until("the other one writes all of it", |run| run.count("checkpoint") == 1);
        assert_eq!(run.members(), [0]);
        run.finish();
    }
}
