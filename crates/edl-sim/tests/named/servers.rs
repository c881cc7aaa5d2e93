// SPDX-License-Identifier: Apache-2.0
//! Workers with parameter servers.

use std::time::Duration;

use edl_core::id::{BatchId, Generation, PsId, Term};
use edl_core::job::{Event, Job};
use edl_core::spec::JobSpec;
use edl_net::proto::{ps_command, ps_message, worker_message};
use edl_sim::{Script, Sent, What};
use edl_tensor::partition::Partition;

use crate::{
    MASTER, first_checkpoint, is_checkpoint_order, load_in, server, serves, timings, worker,
};

const FIRST: Generation = Generation(1);
const SECOND: Generation = Generation(2);

/// 200 batches of two records; two servers with two partitions each.
const N_RECORDS: u64 = 400;

fn spec() -> JobSpec {
    JobSpec {
        job_name: "named".into(),
        minibatch_size: 2,
        num_minibatches_per_task: 1,
        partitions: 4,
        num_ps_pods: 2,
        num_workers: 2,
        use_async: Some(true),
        checkpoint_secs: 0,
        heartbeat_timeout_secs: 20.0,
        task_timeout_secs: 30,
        ..JobSpec::default()
    }
}

/// One worker, and one checkpoint before the final one.
fn with_checkpoint() -> JobSpec {
    JobSpec { num_workers: 1, checkpoint_steps: 120, ..spec() }
}

fn in_rounds(grads_to_wait: u32) -> JobSpec {
    JobSpec { use_async: None, grads_to_wait: Some(grads_to_wait), ..spec() }
}

fn pushed(sent: &Sent) -> Option<BatchId> {
    match sent.what {
        What::Push(batch) => Some(batch),
        _ => None,
    }
}

fn has(run: &Script, partition: u32, batch: BatchId) -> bool {
    run.partition(partition).is_some_and(|part| part.applied().contains(batch))
}

fn is_done(run: &Script, batch: BatchId) -> bool {
    run.job().is_some_and(|job| job.ledger().is_done(batch))
}

#[test]
fn a_worker_that_wakes_after_others_trained_its_batch_changes_nothing() {
    for mut run in timings(spec(), N_RECORDS, 0) {
        let pushes = run.hold(|sent| sent.from == worker(0) && pushed(sent).is_some());
        run.until("worker-0 has pushed to both servers", |run| run.held(pushes).count() >= 2);
        let batch = run.held(pushes).find_map(pushed).unwrap();
        let zombie = run.freeze(worker(0));
        run.lose_node(worker(0));
        run.until("another worker trains its batch", |run| is_done(run, batch));
        let answers =
            run.hold(|sent| sent.to == worker(0) && matches!(sent.what, What::Acknowledgement));
        run.release(pushes);
        run.until("both servers acknowledge it again", |run| run.held(answers).count() >= 2);
        assert!((0..4).all(|id| has(&run, id, batch)));
        run.release(answers);
        run.thaw(zombie);
        run.pass(Duration::from_millis(100));
        run.end(zombie);
        run.finish();
    }
}

#[test]
fn batches_done_after_a_checkpoint_was_ordered_count_if_the_servers_saved_them() {
    for mut run in timings(with_checkpoint(), N_RECORDS, 0) {
        let orders = run.hold(is_checkpoint_order);
        run.until("a checkpoint is ordered", |run| run.held(orders).count() == 2);
        let n_ordered = run.n_done();
        run.until("another batch is done", |run| run.n_done() > n_ordered);
        let n_saved = run.n_done();
        run.release(orders);
        let (_, version) = first_checkpoint(&mut run);
        assert!(version <= n_ordered, "what the order was given for");
        run.restart(|_| {});
        run.until("the servers have loaded it", |run| serves(run, SECOND));
        assert!(run.n_done() >= n_saved, "what the servers saved");
        run.finish();
    }
}

/// A process that is started for a slot takes it, and the one before exits. Then the platform starts
/// a third one, which keeps the slot.
#[test]
fn a_server_that_is_started_twice_does_not_contend_for_its_slot() {
    for mut run in timings(with_checkpoint(), N_RECORDS, 0) {
        let (_, version) = first_checkpoint(&mut run);
        let first = run.pid(server(1));
        let second = run.start_twice(server(1));
        run.until("the first process exits", |run| !run.runs(first));
        run.until("the second process exits", |run| !run.runs(second));
        run.until("all servers have loaded", |run| run.job().is_some_and(Job::is_serving));
        assert!(run.n_done() >= version && run.count("replaced servers refused") >= 2);
        run.finish();
    }
}

#[test]
fn a_report_that_arrives_after_a_restore_does_not_count() {
    for mut run in timings(with_checkpoint(), N_RECORDS, 0) {
        first_checkpoint(&mut run);
        let reports = run
            .hold(|sent| matches!(sent.what, What::FromWorker(worker_message::Kind::BatchDone(_))));
        run.until("all servers have a batch", |run| run.held(reports).count() > 0);
        let report = run.held(reports).find_map(|sent| match &sent.what {
            What::FromWorker(worker_message::Kind::BatchDone(report)) => Some(*report),
            _ => None,
        });
        let report = report.unwrap();
        let lost = BatchId { epoch: report.epoch, index: report.index };
        assert!((0..4).all(|id| has(&run, id, lost)) && report.generation == FIRST.0);
        run.kill(server(1));
        run.until("the servers are back at the checkpoint", |run| serves(run, SECOND));
        run.release(reports);
        assert!(!(0..4).any(|id| has(&run, id, lost)));
        assert!(!is_done(&run, lost), "the servers have lost it");
        run.finish();
    }
}

#[test]
fn a_server_that_was_replaced_cannot_add_to_a_checkpoint() {
    for mut run in timings(with_checkpoint(), N_RECORDS, 0) {
        let orders = run.hold(|sent| sent.to == server(1) && is_checkpoint_order(sent));
        run.until("a checkpoint is ordered", |run| run.held(orders).count() == 1);
        let order = run.held(orders).next().unwrap().what.clone();
        let What::ToServer(ps_command::Kind::Checkpoint(order)) = order else { panic!() };
        // The order is in its socket when it stops.
        let zombie = run.freeze(server(1));
        run.release(orders);
        run.lose_node(server(1));
        run.until("the servers have loaded again", |run| serves(run, SECOND));
        assert_eq!(run.generation_of(zombie), Some(FIRST), "it has not noticed");
        run.thaw(zombie);
        run.pass(Duration::from_secs(1));
        assert!(!run.is_committed(&order.folder));
        assert!(run.durable().checkpoints.iter().all(|c| c.folder != order.folder));
        run.end(zombie);
        run.finish();
    }
}

/// A checkpoint for which ps-1 saves more than ps-0.
fn write_uneven_checkpoint(run: &mut Script) {
    let order = run.hold(|sent| sent.to == server(1) && is_checkpoint_order(sent));
    let has_saved = |sent: &Sent| {
        let is_done = |kind: &_| matches!(kind, ps_message::Kind::CheckpointDone(_));
        matches!(&sent.what, What::FromServer(kind) if sent.from == server(0) && is_done(kind))
    };
    run.until("ps-0 has saved", |run| run.delivered().iter().any(has_saved));
    run.until("ps-1 is ordered to", |run| run.held(order).count() == 1);
    let version = |run: &Script| run.partition(3).map(Partition::version);
    let before = version(run);
    run.until("ps-1 has more", |run| version(run) > before);
    run.release(order);
    first_checkpoint(run);
}

#[test]
fn an_uneven_checkpoint_is_restored_onto_another_number_of_servers() {
    for n_ps in [1, 3, 4] {
        for mut run in timings(with_checkpoint(), N_RECORDS, 0) {
            write_uneven_checkpoint(&mut run);
            run.restart(|spec| spec.num_ps_pods = n_ps);
            run.until("it is loaded", |run| serves(run, SECOND));
            let updates = [0, 1, 2, 3].map(|id| run.partition(id).unwrap().updates());
            assert!(updates[0] == updates[1] && updates[1] < updates[2]);
            assert!(updates[2] == updates[3]);
            assert_eq!(run.n_done(), updates[0], "done is what all partitions have");
            run.finish();
        }
    }
}

#[test]
fn a_partition_that_is_rounds_ahead_in_a_checkpoint_waits_for_the_others() {
    let spec = JobSpec { num_workers: 1, checkpoint_steps: 60, ..in_rounds(2) };
    for mut run in timings(spec, N_RECORDS, 0) {
        write_uneven_checkpoint(&mut run);
        run.restart(|spec| spec.num_ps_pods = 3);
        run.until("it is loaded", |run| serves(run, SECOND));
        let rounds = [0, 1, 2, 3].map(|id| run.partition(id).unwrap().round());
        assert!(rounds[0] == rounds[1] && rounds[1] < rounds[2] && rounds[2] == rounds[3]);
        assert_eq!(run.n_done(), 2 * rounds[0]);
        run.finish();
    }
}

#[test]
fn the_last_round_of_an_epoch_is_smaller_and_is_applied_whole() {
    for grads_to_wait in [1, 2, 4, 5, 9] {
        let spec = JobSpec { num_epochs: 2, ..in_rounds(grads_to_wait) };
        for mut run in timings(spec, 12, 0) {
            run.until("all batches are done", |run| run.n_done() == 12);
            let n_rounds = 2 * u64::from(6u32.div_ceil(grads_to_wait));
            assert!((0..4).all(|id| run.partition(id).unwrap().version() == n_rounds));
            run.finish();
        }
    }
}

#[test]
fn a_round_that_one_worker_computes_alone_may_take_longer_than_a_task() {
    let spec =
        JobSpec { num_workers: 1, task_timeout_secs: 1, max_batch_failures: 1, ..in_rounds(100) };
    for mut run in timings(spec, 200, 0) {
        let start = run.now();
        run.until("the round is done", |run| run.n_done() == 100);
        assert!(run.now().since(start) > Duration::from_secs(1), "too fast to show anything");
        assert_eq!(
            (run.count("work_failed"), run.term(), run.durable().generation.0),
            (0, Term(1), 1)
        );
        run.finish();
    }
}

#[test]
fn a_batch_that_was_half_pushed_is_pushed_again_by_another_worker() {
    for mut run in timings(in_rounds(2), N_RECORDS, 0) {
        let is_its = |sent: &Sent, to| sent.from == worker(0) && sent.to == server(to);
        let half = run.hold(move |sent| is_its(sent, 1) && pushed(sent).is_some());
        run.until("worker-0 has pushed to ps-1", |run| run.held(half).count() > 0);
        let batch = run.held(half).find_map(pushed).unwrap();
        let is_other_half = |sent: &Sent| is_its(sent, 0) && pushed(sent) == Some(batch);
        run.until("and to ps-0", |run| run.delivered().iter().any(is_other_half));
        let is_staged = |run: &Script| {
            has(run, 0, batch) || run.partition(0).is_some_and(|part| part.n_staged() > 0)
        };
        run.until("ps-0 has it", is_staged);
        assert!(!has(&run, 2, batch) && !is_done(&run, batch));
        run.kill(worker(0));
        run.lose(half);
        run.until("another worker trains it", |run| is_done(run, batch));
        run.finish();
    }
}

#[test]
fn a_master_that_dies_while_it_decides_a_generation_leaves_a_job_that_continues() {
    for n_effects in 0.. {
        let mut n_deaths = 0;
        for mut run in timings(with_checkpoint(), N_RECORDS, 0) {
            first_checkpoint(&mut run);
            run.kill(server(1));
            run.kill_master_at(n_effects, |event| {
                matches!(event, Event::PsConnected { ps: PsId(1), .. })
            });
            run.until("it decides", |run| run.job().is_none() || serves(run, SECOND));
            if run.job().is_none() {
                n_deaths += 1;
                let known = [0, 1].map(|ps| run.generation_of(run.pid(server(ps))));
                let decided = run.durable().generation;
                assert!(known.into_iter().all(|known| known <= Some(decided)));
                run.until("the next master has the servers", |run| {
                    run.job().is_some_and(|job| job.is_serving())
                });
                assert_eq!(run.term(), Term(2));
            }
            run.finish();
        }
        if n_deaths == 0 {
            assert!(n_effects > 2, "a generation was decided");
            return;
        }
    }
}

#[test]
fn a_master_that_was_replaced_cannot_decide_a_generation() {
    for mut run in timings(with_checkpoint(), N_RECORDS, 0) {
        first_checkpoint(&mut run);
        let hello = run.hold(|sent| {
            sent.from == server(1)
                && matches!(sent.what, What::FromServer(ps_message::Kind::Hello(_)))
        });
        run.kill(server(1));
        run.until("a new server calls", |run| run.held(hello).count() == 1);
        // The call is in the master's socket when it stops.
        let old = run.freeze(MASTER);
        run.release(hello);
        assert_eq!(run.depose_master(), old);
        run.until("its successor has the servers", |run| serves(run, SECOND));
        let n_loads = |run: &Script| run.delivered().iter().filter_map(load_in).count();
        let n_before = n_loads(&run);
        run.thaw(old);
        assert!(!run.runs(old), "it cannot write, and exits");
        run.pass(Duration::from_secs(1));
        assert_eq!((n_loads(&run), run.durable().generation), (n_before, SECOND));
        run.finish();
    }
}
