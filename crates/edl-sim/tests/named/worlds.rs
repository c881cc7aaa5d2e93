// SPDX-License-Identifier: Apache-2.0
//! Workers under AllReduce: worlds that form, lose members and are replaced.

use std::time::Duration;

use edl_core::id::{Term, WorkerId, WorldId};
use edl_core::job::{Event, JobState};
use edl_core::platform::Report;
use edl_core::spec::{JobSpec, Strategy};
use edl_net::proto::{worker_command, worker_message};
use edl_sim::{Hold, Script, Sent, What};

use crate::{
    MASTER, first_checkpoint, has_state, is_launch, is_ready, is_settled, last_world,
    loaded_folder, timings, worker, world_in,
};

/// 200 steps of four lanes with two records.
const N_RECORDS: u64 = 1600;
pub(crate) const N_STEPS: u64 = 200;
/// Longer than workers that start together wait for each other, shorter than a silence.
const A_WHILE: Duration = Duration::from_millis(1300);

pub(crate) fn spec() -> JobSpec {
    JobSpec {
        job_name: "named".into(),
        distribution_strategy: Strategy::Allreduce,
        num_ps_pods: 0,
        lanes: Some(4),
        num_workers: 2,
        minibatch_size: 2,
        num_minibatches_per_task: 1,
        partitions: 4,
        checkpoint_secs: 0,
        evaluation_epochs: false,
        task_timeout_secs: 20,
        heartbeat_timeout_secs: 2.0,
        ..JobSpec::default()
    }
}

pub(crate) fn alone() -> JobSpec {
    JobSpec { num_workers: 1, ..spec() }
}

/// Jobs in which `spec.num_workers` workers train together.
pub(crate) fn started(spec: JobSpec, n_validation_records: u64) -> impl Iterator<Item = Script> {
    let n_workers = spec.num_workers;
    timings(spec, N_RECORDS, n_validation_records).map(move |mut run| {
        start(&mut run, n_workers);
        run
    })
}

pub(crate) fn start(run: &mut Script, n_workers: u32) {
    let n_workers = n_workers as usize;
    run.until("all train", |run| {
        is_settled(run) && run.members().len() == n_workers && run.n_done() >= 6
    });
}

fn step_of(run: &Script, id: u32) -> u64 {
    run.step_of(run.pid(worker(id))).expect("it holds state")
}

fn gradients(sent: &Sent) -> Option<u64> {
    match sent.what {
        What::Gradients(step) => Some(step),
        _ => None,
    }
}

/// From `step` on, only `leader` receives the gradients of others: it alone completes the step.
fn lead(run: &mut Script, leader: u32, step: u64) -> Hold {
    let is_late = move |sent: &Sent| gradients(sent).is_some_and(|of| of >= step);
    let hold = run.hold(move |sent| sent.to != worker(leader) && is_late(sent));
    run.until("one member is a step ahead", |run| step_of(run, leader) == step + 1);
    let others = run.members().into_iter().filter(|id| *id != leader);
    assert!(others.clone().count() > 0);
    others.for_each(|id| assert_eq!(step_of(run, id), step, "worker-{id}"));
    hold
}

/// A step that no member has begun.
fn next_step(run: &Script) -> u64 {
    let steps = run.members().into_iter().map(|id| step_of(run, id));
    steps.max().expect("a world has members") + 2
}

#[test]
fn the_member_with_the_highest_step_dies_before_it_passes_on_its_state() {
    for mut run in started(JobSpec { num_workers: 3, ..spec() }, 0) {
        let launches = run.hold(is_launch);
        let step = next_step(&run);
        let gradients = lead(&mut run, 2, step);
        run.until("it counts", |run| run.n_done() == step + 1);
        run.kill(worker(1));
        run.until("two are left", |run| run.members() == [0, 2]);
        assert_eq!((step_of(&run, 0), step_of(&run, 2)), (step, step + 1));
        assert!(!is_settled(&run));
        run.kill(worker(2));
        run.lose(gradients);
        run.until("one is left", |run| run.members() == [0] && is_settled(run));
        assert_eq!(run.n_done(), step, "the step is repeated");
        assert_eq!(run.count("restored"), 0, "and nothing else");
        run.release(launches);
        run.finish();
    }
}

#[test]
fn a_worker_that_trains_alone_and_disconnected_commits_nothing_while_another_world_trains() {
    for mut run in started(JobSpec { checkpoint_steps: 120, ..alone() }, 0) {
        let (folder, version) = first_checkpoint(&mut run);
        let n_heard = run.n_done();
        let link = run.disconnect(worker(0), MASTER);
        let old = run.lose_node(worker(0));
        run.until("it trains alone", |run| run.step_of(old) > Some(n_heard));
        let is_replaced = move |run: &Script| {
            let world = run.world();
            world.is_some_and(|w| w.members.iter().all(|m| m.incarnation.0 != u64::from(old)))
        };
        run.until("another world trains", |run| is_replaced(run) && is_settled(run));
        assert!(run.n_done() >= version && run.step_of(old) > Some(n_heard));
        let loaded = run.delivered().iter().rev().find_map(world_in).and_then(loaded_folder);
        assert_eq!(loaded, Some(folder.as_str()));
        let is_stepped =
            |sent: &Sent| matches!(sent.what, What::FromWorker(worker_message::Kind::Stepped(_)));
        run.until("it reports them", |run| run.held(link).any(is_stepped));
        let n_done = run.n_done();
        run.release(link);
        assert_eq!(run.n_done(), n_done, "what it reports is void");
        run.pass(A_WHILE);
        assert_eq!(run.count("restored"), 1, "the other world keeps training");
        run.end(old);
        run.finish();
    }
}

#[test]
fn a_master_that_dies_while_it_decides_a_world_loses_nothing() {
    for n_effects in 0.. {
        let mut n_deaths = 0;
        for mut run in started(spec(), 0) {
            run.kill(worker(1));
            run.kill_master_at(n_effects, |event| match event {
                Event::WorkerGone { worker, .. } => *worker == WorkerId(1),
                Event::Platform(Report::Ended { instance, .. }) => *instance == worker(1),
                _ => false,
            });
            run.until("it decides", |run| {
                run.job().is_none() || !run.members().contains(&1) && is_settled(run)
            });
            n_deaths += usize::from(run.job().is_none());
            let is_next = run.job().is_none();
            run.until("the other one trains", is_settled);
            assert!(!is_next || run.world().unwrap().id > WorldId(2 << 40), "a later world");
            assert!(has_state(&run, 0) && run.n_done() >= 6);
            assert_eq!(run.count("restored"), 0);
            run.finish();
        }
        if n_deaths == 0 {
            assert!(n_effects > 2, "a world was decided");
            return;
        }
    }
}

#[test]
fn a_new_master_does_not_count_what_workers_report_of_an_earlier_world() {
    for mut run in started(spec(), 0) {
        let old = run.world().unwrap().id;
        let worlds = run.hold(|sent| world_in(sent).is_some());
        run.kill(MASTER);
        let mark = run.delivered().len();
        let is_old_step = move |sent: &Sent| match &sent.what {
            What::FromWorker(worker_message::Kind::Stepped(stepped)) => stepped.world == old.0,
            _ => false,
        };
        run.until("an old report arrives late", |run| {
            run.delivered()[mark..].iter().any(is_old_step)
        });
        assert_eq!((run.term(), run.n_done()), (Term(2), 0));
        run.until("a world is decided", |run| run.held(worlds).count() > 0);
        assert!(run.world().unwrap().id > old);
        assert_eq!(run.n_done(), 0);
        run.release(worlds);
        run.until("it trains", is_settled);
        assert!(run.n_done() >= 6 && run.count("restored") == 0);
        run.finish();
    }
}

#[test]
fn a_new_master_does_not_trust_the_state_of_a_worker_that_was_left_out() {
    for mut run in started(spec(), 0) {
        let orders = run.hold(|sent| matches!(sent.what, What::Order(_)));
        let step = next_step(&run);
        let is_reported = move |sent: &Sent| match &sent.what {
            What::FromWorker(worker_message::Kind::Stepped(stepped)) => stepped.step > step,
            _ => false,
        };
        let report = run.hold(move |sent| sent.from == worker(1) && is_reported(sent));
        let gradients = lead(&mut run, 1, step);
        let link = run.disconnect(worker(1), MASTER);
        let formed = run.hold(|sent| {
            sent.from == worker(0)
                && matches!(sent.what, What::FromWorker(worker_message::Kind::Formed(_)))
        });
        run.until("worker-0 trains without it", |run| run.held(formed).count() == 1);
        let other = run.freeze(worker(0));
        run.release(formed);
        assert!(run.members() == [0] && run.n_done() == step);
        assert_eq!((step_of(&run, 0), step_of(&run, 1)), (step, step + 1));
        run.kill(MASTER);
        run.lose(gradients);
        run.lose(report);
        let mark = run.delivered().len();
        run.release(link);
        run.until("worker-1 calls the next master", |run| {
            run.delivered()[mark..].iter().any(|sent| sent.from == worker(1) && is_ready(sent))
        });
        run.thaw(other);
        run.until("worker-0 is in a world", |run| run.members().contains(&0));
        assert!(has_state(&run, 0) && !has_state(&run, 1));
        assert_eq!(run.count("restored"), 0);
        run.release(orders);
        run.finish();
    }
}

/// The network between two members and their master breaks: the master loses one, names a world
/// of the other alone, and loses that one before it hears of it. Orders to stop them do not reach
/// them either.
fn disconnect_one_after_the_other(run: &mut Script) -> [Hold; 2] {
    run.hold(|sent| matches!(sent.what, What::Order(_)));
    let first = run.disconnect(worker(0), MASTER);
    run.until("worker-0 is silent", |run| run.members() == [1]);
    let second = run.disconnect(worker(1), MASTER);
    run.until("no world is left", |run| run.world().is_none());
    let known = last_world(run, worker(1)).map(|world| world.members.len());
    assert_eq!(known, Some(2), "it has not heard of the other");
    assert_eq!(step_of(run, 0), step_of(run, 1));
    [first, second]
}

fn comes_back(run: &mut Script, id: u32, link: Hold) {
    let mark = run.delivered().len();
    run.release(link);
    run.until("it comes back", |run| {
        run.delivered()[mark..].iter().any(|sent| sent.from == worker(id) && is_ready(sent))
    });
}

#[test]
fn members_that_come_back_after_a_dissolved_world_repeat_nothing() {
    for is_holder_first in [false, true] {
        for mut run in started(spec(), 0) {
            let links = disconnect_one_after_the_other(&mut run);
            let step = step_of(&run, 1);
            let order = if is_holder_first { [1, 0] } else { [0, 1] };
            for id in order {
                comes_back(&mut run, id, links[id as usize]);
                run.pass(A_WHILE);
            }
            run.until("both train", |run| run.members().len() == 2 && is_settled(run));
            assert!(run.n_done() >= step);
            assert_eq!(run.count("restored"), 0);
            run.finish();
        }
    }
}

#[test]
fn state_that_a_worker_is_about_to_announce_is_not_loaded() {
    for mut run in started(spec(), 0) {
        let [first, second] = disconnect_one_after_the_other(&mut run);
        let ready = run.hold(|sent| sent.from == worker(1) && is_ready(sent));
        run.release(second);
        run.until("worker-1 is connected", |run| run.held(ready).count() == 1);
        comes_back(&mut run, 0, first);
        run.pass(A_WHILE);
        assert!(run.world().is_none() && run.count("restored") == 0);
        run.release(ready);
        run.until("both train", |run| run.members().len() == 2 && is_settled(run));
        assert_eq!(run.count("restored"), 0);
        run.finish();
    }
}

#[test]
fn a_holder_of_the_state_that_does_not_come_back_is_not_waited_for_long() {
    for mut run in started(spec(), 0) {
        let [first, _] = disconnect_one_after_the_other(&mut run);
        comes_back(&mut run, 0, first);
        run.pass(Duration::from_millis(1500));
        assert!(run.world().is_none() && run.count("restored") == 0);
        run.pass(Duration::from_millis(1000));
        assert_eq!((run.members(), run.count("restored")), (vec![0], 1));
        run.finish();
    }
}

#[test]
fn the_state_of_a_worker_that_is_known_to_have_exited_is_not_waited_for() {
    for mut run in started(spec(), 0) {
        let [first, _] = disconnect_one_after_the_other(&mut run);
        run.kill(worker(1));
        run.pass(Duration::from_millis(50));
        comes_back(&mut run, 0, first);
        run.pass(A_WHILE);
        assert_eq!((run.members(), run.count("restored")), (vec![0], 1));
        run.finish();
    }
}

#[test]
fn a_member_trains_further_than_it_reported_before_it_hears_of_a_new_masters_world() {
    for mut run in started(JobSpec { checkpoint_steps: 1, ..alone() }, 0) {
        run.until("it may continue", |run| {
            let until = run.job().and_then(|job| job.worlds()).map_or(0, |w| w.until());
            run.n_done() > 2 && until >= step_of(run, 0) + 4
        });
        let pid = run.freeze(worker(0));
        run.kill(MASTER);
        run.until("a new master starts", |run| run.job().is_some());
        let worlds = run.hold(|sent| world_in(sent).is_some());
        let mark = run.delivered().len();
        run.thaw(pid);
        run.until("a world is announced to it", |run| run.held(worlds).count() == 1);
        let reported = run.delivered()[mark..].iter().find_map(|sent| match &sent.what {
            What::FromWorker(worker_message::Kind::Ready(ready)) => ready.peer.as_ref()?.step,
            _ => None,
        });
        let reported = reported.unwrap();
        run.until("it keeps training", |run| step_of(run, 0) > reported);
        let mark = run.delivered().len();
        run.release(worlds);
        run.until("it hears of it", is_settled);
        let n_done = run.n_done();
        assert!(n_done > reported);
        let order = |run: &Script| {
            run.delivered()[mark..].iter().rev().find_map(|sent| match &sent.what {
                What::ToWorker(worker_command::Kind::Checkpoint(order)) => Some(order.at),
                _ => None,
            })
        };
        run.until("a checkpoint is ordered", |run| order(run).is_some());
        assert!(order(&run) >= Some(n_done), "of a step that it has not passed");
        run.finish();
    }
}

fn evaluating() -> JobSpec {
    JobSpec { evaluation_steps: 50, ..spec() }
}

fn is_lease(sent: &Sent) -> bool {
    matches!(sent.what, What::ToWorker(worker_command::Kind::Lease(_)))
}

fn evaluated(run: &Script) -> Vec<u64> {
    run.durable().evaluations.iter().map(|evaluation| evaluation.version).collect()
}

#[test]
fn a_worker_that_joins_during_an_evaluation_waits_for_nothing_and_breaks_nothing() {
    for mut run in started(evaluating(), 8) {
        let leases = run.hold(is_lease);
        run.until("an evaluation runs", |run| run.held(leases).count() >= 2);
        assert_eq!((run.state(), run.n_done()), (Some(JobState::Evaluating), 50));
        run.request(Event::Scale { workers: 3 });
        run.until("a third worker joins", |run| run.members().len() == 3);
        assert_eq!(run.world().unwrap().after, Some(50));
        assert!(evaluated(&run).is_empty());
        run.release(leases);
        run.until("the evaluation ends", |run| !evaluated(run).is_empty());
        run.until("all train", |run| run.n_done() > 50);
        assert_eq!((evaluated(&run), run.members().len()), (vec![50], 3));
        assert_eq!(run.count("work_failed"), 0);
        run.finish();
    }
}

#[test]
fn an_evaluation_waits_until_all_members_hold_its_version() {
    for mut run in started(evaluating(), 4) {
        let launches = run.hold(is_launch);
        let gradients = lead(&mut run, 0, 49);
        run.until("one member has its version", |run| run.n_done() == 50);
        run.pass(Duration::from_millis(300));
        assert!(!run.delivered().iter().any(is_lease), "it could be lost with worker-0");
        run.kill(worker(0));
        run.lose(gradients);
        run.until("one is left", |run| run.members() == [1] && is_settled(run));
        assert_eq!(run.n_done(), 49);
        let until = run.job().and_then(|job| job.worlds()).map(|worlds| worlds.until());
        assert_eq!(until, Some(50), "no worker may pass the version to be evaluated");
        run.until("it is evaluated", |run| !evaluated(run).is_empty());
        assert_eq!((evaluated(&run), run.n_done()), (vec![50], 50));
        run.release(launches);
        run.finish();
    }
}

#[test]
fn evaluation_shards_of_a_member_that_is_left_out_go_to_others() {
    for mut run in started(evaluating(), 8) {
        let leases = run.hold(|sent| sent.to == worker(1) && is_lease(sent));
        run.until("worker-1 is assigned a shard", |run| run.held(leases).count() > 0);
        run.hold(|sent| matches!(sent.what, What::Order(_)));
        let link = run.disconnect(worker(1), MASTER);
        run.until("it is evaluated without it", |run| !evaluated(run).is_empty());
        assert_eq!((evaluated(&run), run.members()), (vec![50], vec![0]));
        run.release(link);
        run.finish();
    }
}

#[test]
fn two_members_that_lose_each_other_do_not_stop_the_job() {
    for mut run in started(spec(), 0) {
        run.disconnect(worker(0), worker(1));
        run.until("all steps are done", |run| run.n_done() == N_STEPS);
        let of_two = |sent: &Sent| world_in(sent).is_some_and(|world| world.members.len() == 2);
        let n_tried = run.delivered().iter().filter(|sent| of_two(sent)).count();
        assert!(n_tried <= 16, "a world of two was announced {n_tried} times");
        assert_eq!(run.count("restored"), 0);
        run.finish();
    }
}

#[test]
fn a_worker_that_others_have_lost_trains_if_it_is_the_only_one_left() {
    for mut run in started(spec(), 0) {
        let launches = run.hold(is_launch);
        run.disconnect(worker(0), worker(1));
        run.until("they have lost each other", |run| run.members().len() == 1 && is_settled(run));
        let kept = run.members()[0];
        run.kill(worker(kept));
        run.until("the other one trains", |run| run.members() == [1 - kept] && is_settled(run));
        run.release(launches);
        run.finish();
    }
}

#[test]
fn a_newcomer_that_reaches_no_other_worker_does_not_displace_the_holders_of_the_state() {
    for mut run in started(alone(), 0) {
        let pid = run.pid(worker(0));
        run.disconnect(worker(0), worker(1));
        run.request(Event::Scale { workers: 2 });
        run.until("it joins", |run| run.members().len() == 2);
        run.until("it is left out", |run| run.members().len() == 1 && is_settled(run));
        assert_eq!((run.members(), run.pid(worker(0))), (vec![0], pid));
        assert!(has_state(&run, 0) && run.count("restored") == 0);
        run.finish();
    }
}

#[test]
fn a_worker_that_waited_long_for_the_master_is_not_blamed() {
    for mut run in started(JobSpec { num_workers: 1, ..evaluating() }, 40) {
        let pid = run.pid(worker(0));
        let begin = run.now();
        while evaluated(&run).is_empty() {
            let leases = run.hold(is_lease);
            run.until("a shard is assigned", |run| {
                run.held(leases).count() > 0 || !evaluated(run).is_empty()
            });
            run.pass(Duration::from_secs(15));
            run.release(leases);
            run.pass(Duration::from_millis(500));
        }
        assert!(run.now().since(begin) > Duration::from_secs(20), "longer than a step may take");
        assert_eq!((run.count("work_failed"), run.count("stuck")), (0, 0));
        assert_eq!(run.pid(worker(0)), pid, "it is not replaced");
        run.finish();
    }
}

#[test]
fn a_step_that_one_worker_computes_alone_may_take_longer_than_a_task() {
    let spec = JobSpec {
        lanes: Some(100),
        minibatch_size: 1,
        task_timeout_secs: 1,
        max_batch_failures: 1,
        ..alone()
    };
    for mut run in timings(spec, 300, 0) {
        run.until("it trains", |run| run.n_done() == 1);
        let start = run.now();
        run.until("the next step is done", |run| run.n_done() == 2);
        assert!(run.now().since(start) > Duration::from_secs(1), "too fast to show anything");
        assert_eq!((run.count("work_failed"), run.count("stuck")), (0, 0));
        run.finish();
    }
}
