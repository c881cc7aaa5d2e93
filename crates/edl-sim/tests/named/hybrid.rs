// SPDX-License-Identifier: Apache-2.0
//! Workers and servers that hold one model together, under Hybrid.

use std::time::Duration;

use edl_core::id::{Generation, Term, WorldId};
use edl_core::job::{Event, STOP_TIMEOUT};
use edl_core::server::Report;
use edl_core::spec::{JobSpec, OnNonfinite, Strategy};
use edl_net::proto::{ps_command, ps_message, worker_message};
use edl_sim::{Script, Sent, What};

use crate::worlds::{self, start};
use crate::{
    MASTER, N_TIMINGS, first_checkpoint, has_state, is_checkpoint_order, is_launch, is_ready,
    is_settled, last_world, load_in, loaded_folder, server, timings, worker, world_in,
};

const N_RECORDS: u64 = 1600;

/// Two servers hold partitions 4 to 7.
pub(crate) fn spec() -> JobSpec {
    JobSpec { distribution_strategy: Strategy::Hybrid, num_ps_pods: 2, ..worlds::spec() }
}

/// Jobs after their only checkpoint before the final one, with its folder and version.
fn with_checkpoint(num_workers: u32) -> impl Iterator<Item = (Script, String, u64)> {
    let spec = JobSpec { checkpoint_steps: 120, num_workers, ..spec() };
    let with_checkpoint = |mut run: Script| {
        let (folder, version) = first_checkpoint(&mut run);
        run.until("it keeps training", |run| run.n_done() > version + 4);
        (run, folder, version)
    };
    timings(spec, N_RECORDS, 0).map(with_checkpoint)
}

fn is_loaded(sent: &Sent) -> bool {
    matches!(sent.what, What::FromServer(ps_message::Kind::Loaded(_)))
}

/// Whether a worker reports that it is in a world of the second master.
fn is_formed(sent: &Sent) -> bool {
    match &sent.what {
        What::FromWorker(worker_message::Kind::Formed(formed)) => {
            formed.world >= WorldId::of(Term(2), 0).0
        }
        _ => false,
    }
}

fn is_server_hello(sent: &Sent) -> bool {
    matches!(sent.what, What::FromServer(ps_message::Kind::Hello(_)))
}

/// The generation and the checkpoint of the last load that a server was ordered.
fn last_load(run: &Script, ps: u32) -> Option<(u64, &str)> {
    let orders = run.delivered().iter().rev().filter(|sent| sent.to == server(ps));
    let load = orders.filter_map(load_in).next()?;
    Some((load.generation, load.from.as_ref()?.checkpoint.as_deref().unwrap_or_default()))
}

/// Servers and workers are back at the checkpoint, in this generation.
fn until_back(run: &mut Script, generation: u64, folder: &str, version: u64) {
    run.until("the job is back at the checkpoint", |run| {
        run.durable().generation == Generation(generation) && run.n_done() == version
    });
    run.until("all have loaded it", is_settled);
    for ps in 0..2 {
        assert_eq!(last_load(run, ps), Some((generation, folder)));
    }
    let member = run.members()[0];
    let world = last_world(run, worker(member)).expect("a member knows its world");
    assert_eq!(loaded_folder(world), Some(folder));
    assert!(world.members.iter().all(|member| !member.has_state), "what they held is void");
}

#[test]
fn workers_load_what_the_servers_have_loaded() {
    for mut run in timings(spec(), N_RECORDS, 0) {
        let loaded = run.hold(is_loaded);
        run.until("the servers have loaded", |run| run.held(loaded).count() == 2);
        run.pass(Duration::from_millis(1200));
        assert!(run.delivered().iter().filter(|sent| is_ready(sent)).count() == 2);
        assert!(
            !run.delivered().iter().any(|sent| world_in(sent).is_some()),
            "the servers load first"
        );
        run.release(loaded);
        run.until("all train", is_settled);
        let world = last_world(&run, worker(0)).unwrap();
        assert_eq!(loaded_folder(world), Some(""), "both begin with first values");
        assert_eq!(run.durable().generation, Generation(1));
        run.finish();
    }
}

#[test]
fn a_lost_worker_sets_no_other_process_back() {
    for mut run in timings(spec(), N_RECORDS, 0) {
        start(&mut run, 2);
        let launches = run.hold(is_launch);
        let n_done = run.n_done();
        run.kill(worker(1));
        run.until("the other one trains", |run| run.members() == [0] && is_settled(run));
        assert!(has_state(&run, 0) && run.n_done() >= n_done);
        assert_eq!((last_load(&run, 0), run.count("restored")), (Some((1, "")), 0));
        run.release(launches);
        run.finish();
    }
}

#[test]
fn a_lost_server_sets_servers_and_workers_back_to_one_checkpoint() {
    for (mut run, folder, version) in with_checkpoint(2) {
        let launches = run.hold(is_launch);
        run.kill(server(1));
        run.until("the world is dissolved", |run| run.world().is_none());
        run.pass(Duration::from_millis(1500));
        assert!(run.world().is_none(), "no worker trains before the server is back");
        run.release(launches);
        until_back(&mut run, 2, &folder, version);
        run.finish();
    }
}

#[test]
fn when_all_workers_are_lost_the_servers_go_back_with_the_next_ones() {
    for (mut run, folder, version) in with_checkpoint(1) {
        let loaded = run.hold(is_loaded);
        let old = run.pid(worker(0));
        run.kill(worker(0));
        assert_eq!(run.durable().generation, Generation(1), "the state may still come");
        let mark = run.delivered().len();
        run.until("the servers load", |run| run.held(loaded).count() == 2);
        run.pass(Duration::from_millis(500));
        assert!(!run.runs(old));
        assert!(!run.delivered()[mark..].iter().any(|sent| world_in(sent).is_some()));
        run.release(loaded);
        until_back(&mut run, 2, &folder, version);
        run.finish();
    }
}

/// In a step that is skipped, members do not wait for each other. If one passed it before the
/// servers have all lanes, and another one were lost, the servers would never get past it.
#[test]
fn no_worker_passes_a_skipped_step_before_the_servers() {
    const SKIPPED: u64 = 12;
    let spec = JobSpec { on_nonfinite: OnNonfinite::Skip, ..spec() };
    for seed in 0..N_TIMINGS {
        let sizes = (N_RECORDS, 0);
        let mut run = Script::with_nonfinite(seed, spec.clone(), sizes, Some(SKIPPED));
        run.until("a batch is skipped", |run| run.count("nonfinite") == 1);
        let pushes = run.hold(|sent| sent.from == worker(1) && matches!(sent.what, What::Push(_)));
        run.until("it is pushed", |run| run.held(pushes).count() > 0);
        run.pass(Duration::from_millis(500));
        assert_eq!(run.step_of(run.pid(worker(0))), Some(SKIPPED));
        let launches = run.hold(is_launch);
        run.kill(worker(1));
        run.lose(pushes);
        run.until("the other one keeps training", |run| run.n_done() > SKIPPED + 3);
        assert_eq!(run.count("restored"), 0);
        run.release(launches);
        run.finish();
    }
}

/// One server has a step that the worker has not, and cannot save the one before. If the master dies
/// and the user stops the job, it is saved after that step.
#[test]
fn a_new_master_saves_no_step_that_a_server_may_have_passed() {
    let spec = JobSpec { num_workers: 1, heartbeat_timeout_secs: 20.0, ..spec() };
    for mut run in timings(spec, N_RECORDS, 0) {
        start(&mut run, 1);
        // More than a new master allows before it knows how far the worker is.
        run.until("it keeps training", |run| run.n_done() > 20);
        let pushes = run.hold(|sent| sent.to == server(1) && matches!(sent.what, What::Push(_)));
        let updates = |run: &Script| run.partition(4).expect("a server holds it").updates();
        run.until("one server is a step ahead", |run| {
            run.step_of(run.pid(worker(0))) < Some(updates(run))
        });
        let step = updates(&run);
        run.kill(MASTER);
        let formed = run.hold(is_formed);
        run.until("the worker is in a new world", |run| run.held(formed).count() == 1);
        run.lose(pushes);
        run.request(Event::Stop { reason: "by the user".into(), within: STOP_TIMEOUT });
        run.release(formed);
        run.until("the job has stopped", |run| run.count("stopped by the user") == 1);
        let saved = run.durable().checkpoints.last().map(|checkpoint| checkpoint.version);
        assert_eq!(saved, Some(step), "{:?}", run.durable().checkpoints);
        run.finish();
    }
}

#[test]
fn a_new_master_continues_with_what_workers_and_servers_hold() {
    for (mut run, ..) in with_checkpoint(2) {
        let n_done = run.n_done();
        let hellos = run.hold(is_server_hello);
        run.kill(MASTER);
        let mark = run.delivered().len();
        run.until("both workers call the next master", |run| {
            run.delivered()[mark..].iter().filter(|sent| is_ready(sent)).count() == 2
        });
        run.pass(Duration::from_millis(1200));
        let is_new =
            |run: &Script, is_it: fn(&Sent) -> bool| run.delivered()[mark..].iter().any(is_it);
        assert!(!is_new(&run, |sent| world_in(sent).is_some()), "the servers may be lost");
        run.release(hellos);
        run.until("all train", is_settled);
        assert!(!is_new(&run, |sent| load_in(sent).is_some()));
        assert!(has_state(&run, 0) && has_state(&run, 1) && run.n_done() >= n_done);
        run.finish();
    }
}

#[test]
fn a_server_that_died_with_the_master_sets_the_workers_back() {
    for (mut run, folder, version) in with_checkpoint(2) {
        run.kill(MASTER);
        run.kill(server(1));
        until_back(&mut run, 2, &folder, version);
        run.finish();
    }
}

#[test]
fn workers_do_not_train_on_servers_that_have_loaded_less_than_they_hold() {
    for (mut run, folder, version) in with_checkpoint(2) {
        let loaded = run.hold(is_loaded);
        run.kill(server(1));
        run.until("the servers have loaded", |run| run.held(loaded).count() == 2);
        run.kill_master_at(0, |event| {
            matches!(event, Event::FromPs { report: Report::Loaded { .. }, .. })
        });
        run.release(loaded);
        assert!(run.job().is_none(), "the workers have not heard of it");
        let held = [0, 1].map(|id| run.step_of(run.pid(worker(id))));
        assert!(held.into_iter().all(|step| step > Some(version)));
        until_back(&mut run, 3, &folder, version);
        run.finish();
    }
}

#[test]
fn a_checkpoint_that_a_server_is_too_late_for_fails_and_the_next_one_is_tried() {
    let spec = JobSpec { checkpoint_steps: 20, ..spec() };
    for mut run in timings(spec, N_RECORDS, 0) {
        let order = run.hold(|sent| sent.to == server(0) && is_checkpoint_order(sent));
        run.until("a checkpoint is ordered", |run| run.held(order).count() == 1);
        run.until("its step is over", |run| {
            let at = run.held(order).find_map(|sent| match &sent.what {
                What::ToServer(ps_command::Kind::Checkpoint(order)) => order.at,
                _ => None,
            });
            Some(run.partition(4).unwrap().updates()) > at
        });
        assert!(run.durable().checkpoints.is_empty());
        run.release(order);
        run.until("it fails", |run| run.count("checkpoint_failed") == 1);
        first_checkpoint(&mut run);
        run.finish();
    }
}
