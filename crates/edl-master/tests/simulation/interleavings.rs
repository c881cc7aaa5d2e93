// SPDX-License-Identifier: Apache-2.0
//! Orders of events that were thought of before the code was written, and that chance may miss.

use std::time::Duration;

use edl_core::id::{BatchId, Generation, Incarnation, PsId, WorkerId};
use edl_core::job::{Event, Holder, PsOrder};
use edl_core::platform::{Ended, InstanceId, Report, Role};
use edl_core::spec::JobSpec;
use edl_tensor::partition::Pushed;

use crate::site::{Site, spec, write};

const ANN: WorkerId = WorkerId(0);
const BOB: WorkerId = WorkerId(1);

fn batch(index: u32) -> BatchId {
    BatchId { epoch: 0, index }
}

/// Cuts now, by asking for a checkpoint as a user's stop would, but going on.
fn checkpoint_every(steps: u32) -> JobSpec {
    JobSpec { checkpoint_steps: steps, ..spec() }
}

fn sync(grads_to_wait: u32) -> JobSpec {
    JobSpec { grads_to_wait: Some(grads_to_wait), ..spec() }
}

/// 1. Worker A stops, its lease ends, B trains the batch and the shard is done; A wakes and pushes.
#[test]
fn a_worker_that_wakes_after_its_lease_ended_pushes_into_set_bits_and_harms_nothing() {
    let mut site = Site::running(JobSpec { task_timeout_secs: 5, ..spec() }, 1);
    let (worker, first) = site.lent.pop_front().unwrap();
    assert_eq!((worker, first), (ANN, batch(0)));
    site.join(BOB.0);
    // Bob works; Ann does not, and her lease ends.
    for _ in 0..60 {
        site.now = site.now + Duration::from_millis(100);
        for (worker, incarnation) in [(ANN, Incarnation(0)), (BOB, Incarnation(1))] {
            let waiting_for = String::new();
            site.handle(Event::WorkerHeard { worker, incarnation, waiting_for });
        }
        (0..2).for_each(|ps| {
            let incarnation = Incarnation(site.seats[&ps].incarnation);
            site.handle(Event::PsHeard { ps: PsId(ps), incarnation });
        });
        site.handle(Event::Tick);
        let to_bob = site.lent.iter().position(|(worker, _)| *worker == BOB);
        if let Some((bob, batch)) = to_bob.and_then(|place| site.lent.remove(place)) {
            site.train(bob, batch);
        }
    }
    assert!(site.job.ledger().is_done(first), "Bob trained it");
    let n_done = site.job.ledger().n_done();
    let before: Vec<f32> = dense(&site);
    // Ann wakes: her push is acknowledged, because the batch is applied, and changes nothing.
    let generation = site.generation();
    assert!(site.push(0, generation, first) && site.push(1, generation, first));
    site.report(ANN, first, generation);
    assert_eq!((dense(&site), site.job.ledger().n_done()), (before, n_done));
    site.finish();
}

fn dense(site: &Site) -> Vec<f32> {
    let parts = site.seats.values().flat_map(|seat| seat.parts.values());
    parts.flat_map(|part| part.dense().to_vec()).collect()
}

/// 2. Ledger state taken, batch applied and done, partition snapshot taken, everything dies.
#[test]
fn what_is_done_follows_from_the_snapshots_and_not_from_any_ledger_of_before() {
    let mut site = Site::running(checkpoint_every(2), 1);
    site.train(ANN, batch(0));
    let ledger = site.job.ledger().clone();
    site.holds_cuts = true;
    site.train(ANN, batch(1));
    // Between the order to cut and the snapshots another batch is applied and done.
    site.train(ANN, batch(2));
    assert_eq!((ledger.n_done(), site.job.ledger().n_done()), (1, 3));
    for (ps, order) in std::mem::take(&mut site.held_cuts) {
        let done = site.obey(ps, order).unwrap();
        site.handle(done);
    }
    assert_eq!(site.disk.durable.checkpoints[0].version, 2, "what the order was given for");
    site.holds_cuts = false;
    site.restart_all(2, 1);
    assert_eq!(site.job.ledger().n_done(), 3, "what the snapshots hold");
    site.finish();
}

/// 3. One PS dies after acknowledging a batch and comes back from an older cut; the worker's
///    report arrives afterwards.
#[test]
fn a_report_that_arrives_after_a_restore_does_not_count() {
    let mut site = Site::running(checkpoint_every(2), 1);
    site.train(ANN, batch(0));
    site.train(ANN, batch(1));
    assert_eq!(site.disk.durable.checkpoints.len(), 1);
    let old = site.generation();
    let lost = batch(2);
    assert!(site.push(0, old, lost) && site.push(1, old, lost), "all have acknowledged");
    end_process(&mut site, 1);
    site.replace(1);
    assert_eq!(site.generation(), old.next());
    site.report(ANN, lost, old);
    assert!(!site.job.ledger().is_done(lost), "the servers do not have it any more");
    site.finish();
}

fn end_process(site: &mut Site, ps: u32) {
    let instance = InstanceId { role: Role::Ps, id: ps };
    site.handle(Event::Platform(Report::Started { instance, pid: ps }));
    site.handle(Event::Platform(Report::Ended { instance, pid: ps, how: Ended::Signal(9) }));
}

/// 4. A zombie PS (SIGSTOP) wakes after the restore and acknowledges, and writes a checkpoint file.
#[test]
fn a_zombie_server_cannot_acknowledge_for_the_new_generation_nor_add_to_a_checkpoint() {
    let mut site = Site::running(checkpoint_every(2), 1);
    site.train(ANN, batch(0));
    site.holds_cuts = true;
    site.train(ANN, batch(1));
    let cuts = std::mem::take(&mut site.held_cuts);
    let [_, (zombie_ps, zombie_order)] = cuts.try_into().unwrap();
    let PsOrder::Cut { cut, generation: old, folder, .. } = zombie_order else { panic!() };
    // It stops before it cuts; the platform ends it as far as anybody knows.
    end_process(&mut site, zombie_ps.0);
    let zombie = site.replace(zombie_ps.0);
    assert_eq!((site.generation(), site.job.ledger().n_done()), (Generation(2), 0));
    // It wakes: it still serves its own generation, to whoever asks for that one alone.
    assert!(zombie.is_serving && zombie.generation == old);
    site.report(ANN, batch(0), old);
    assert_eq!(site.job.ledger().n_done(), 0, "its acknowledgement is void");
    // Its file finds no folder, and if it did, no manifest would name it.
    assert!(write(&mut site.disk, &zombie, &folder).is_none());
    site.disk.folders.insert(folder.clone(), Default::default());
    let files = write(&mut site.disk, &zombie, &folder).unwrap();
    site.handle(Event::CutDone { holder: Holder::Ps(zombie_ps), cut, generation: old, files });
    assert!(site.disk.durable.checkpoints.is_empty());
    assert!(site.disk.folders[&folder].manifest.is_none());
    site.holds_cuts = false;
    site.finish();
}

/// 5. Restore with another number of PS from a cut in which partitions differ by one batch.
#[test]
fn a_cut_with_uneven_partitions_is_restored_onto_another_number_of_servers() {
    for n_ps in [1, 3, 4] {
        let mut site = Site::running(checkpoint_every(2), 1);
        site.train(ANN, batch(0));
        site.holds_cuts = true;
        site.train(ANN, batch(1));
        let cuts = std::mem::take(&mut site.held_cuts);
        // One partition of each server has applied one more batch when it is cut.
        site.push_to(0, &[1], batch(2));
        site.push_to(1, &[2], batch(2));
        for (ps, order) in cuts {
            let done = site.obey(ps, order).unwrap();
            site.handle(done);
        }
        assert_eq!(site.disk.durable.checkpoints.len(), 1);
        site.holds_cuts = false;
        site.restart_all(n_ps, 1);
        assert_eq!(site.job.ledger().n_done(), 2, "done is what all partitions have");
        let has = |id: u32, site: &Site| {
            let part = site.seats.values().find_map(|seat| seat.parts.get(&id)).unwrap();
            part.applied().contains(batch(2))
        };
        assert_eq!([0, 1, 2, 3].map(|id| has(id, &site)), [false, true, true, false]);
        site.finish();
    }
}

/// 6a. Sync: the last round of an epoch is smaller.
#[test]
fn the_last_round_of_an_epoch_is_smaller_and_is_applied_whole() {
    for grads_to_wait in [1, 2, 4, 5, 9] {
        let mut site = Site::running(JobSpec { num_epochs: 2, ..sync(grads_to_wait) }, 2);
        site.finish();
        let exported = site.exported.unwrap();
        let per_epoch = u64::from(6u32.div_ceil(grads_to_wait));
        assert!(exported.values().all(|part| part.version() == 2 * per_epoch));
    }
}

/// 6b. Sync: a worker dies with its batch of the round half pushed.
#[test]
fn a_batch_of_a_round_that_was_half_pushed_is_pushed_again_by_another_worker() {
    let mut site = Site::running(sync(2), 2);
    let generation = site.generation();
    let lent: Vec<_> = site.lent.drain(..).collect();
    assert_eq!(lent.len(), 2, "one round is open");
    let (dead, half) = *lent.iter().find(|(worker, _)| *worker == ANN).unwrap();
    let (living, whole) = *lent.iter().find(|(worker, _)| *worker == BOB).unwrap();
    assert!(!site.push(0, generation, half), "staged on the first server; then Ann dies");
    assert!(!site.push(1, generation, whole), "it waits for Ann's");
    assert!(site.push(0, generation, whole), "the first server has the whole round");
    assert!(site.seats[&0].parts.values().all(|part| part.applied().contains(half)));
    site.handle(Event::WorkerGone { worker: dead, incarnation: Incarnation(0) });
    let again = site.lent.pop_front().unwrap();
    assert_eq!(again, (living, half), "Bob gets it");
    assert!(site.push(0, generation, half), "already applied there");
    assert!(site.push(1, generation, half), "and it completes the round here");
    assert!(site.push(1, generation, whole), "so that Bob's own is acknowledged too");
    site.report(living, half, generation);
    site.report(living, whole, generation);
    assert_eq!(site.job.ledger().version(), 1);
    site.finish();
}

/// 6c. Sync: fewer live workers than the round's size.
#[test]
fn one_worker_alone_completes_rounds_of_four() {
    let mut site = Site::running(sync(4), 1);
    assert_eq!(site.lent.len(), 4, "it is lent the whole round");
    site.finish();
}

/// 6d. Sync: a cut in which one partition is a round ahead.
#[test]
fn a_partition_that_is_a_round_ahead_in_a_cut_waits_for_the_others() {
    let mut site = Site::running(JobSpec { checkpoint_steps: 1, ..sync(2) }, 1);
    site.holds_cuts = true;
    let first: Vec<_> = site.lent.drain(..).collect();
    for (_, batch) in &first {
        site.train(ANN, *batch);
    }
    for (_, batch) in first {
        site.train(ANN, batch);
    }
    let second: Vec<_> = site.lent.drain(..).collect();
    assert_eq!(second.len(), 2);
    for (_, batch) in second {
        site.push_to(0, &[0], batch);
    }
    for (ps, order) in std::mem::take(&mut site.held_cuts) {
        let done = site.obey(ps, order).unwrap();
        site.handle(done);
    }
    site.holds_cuts = false;
    site.restart_all(3, 2);
    assert_eq!(site.job.ledger().n_done(), 2);
    let rounds: Vec<u64> =
        site.seats.values().flat_map(|seat| seat.parts.values()).map(|part| part.round()).collect();
    assert_eq!(rounds, [2, 1, 1, 1]);
    site.finish();
}

/// 8a. Master dies between deciding a new generation and telling it.
#[test]
fn a_master_that_dies_after_any_of_its_effects_leaves_a_job_that_goes_on() {
    for n_effects in 0.. {
        let mut site = Site::running(checkpoint_every(2), 1);
        (0..3).for_each(|index| site.train(ANN, batch(index)));
        end_process(&mut site, 1);
        site.seats.remove(&1);
        // The new server calls, and the master decides a generation; it dies in the midst.
        let seat = crate::site::Seat { incarnation: 99, ..Default::default() };
        site.seats.insert(1, seat);
        let member = edl_core::servers::Member {
            incarnation: Incarnation(99),
            address: String::new(),
            unix_path: String::new(),
            generation: Generation(0),
            sets: Vec::new(),
        };
        let called = Event::PsConnected { ps: PsId(1), pid: 9, member: Box::new(member) };
        let n = site.handle_partly(called, n_effects);
        assert!(n > 2, "a generation was decided");
        site.restart_master();
        let told = site.seats.values().map(|seat| seat.generation).max();
        assert!(told <= Some(site.disk.durable.generation), "nobody knows more than the disk");
        site.join(0);
        (0..2).for_each(|ps| site.call_master(ps));
        let generation = site.generation();
        assert!(site.seats.values().all(|s| s.is_serving && s.generation == generation));
        assert_eq!(site.job.ledger().n_done(), 2);
        site.finish();
        if n_effects > n {
            return;
        }
    }
}

/// 8b. Two masters at once: the disk knows one, and the other can decide nothing.
#[test]
fn a_master_of_a_lower_term_can_make_nothing_durable() {
    let mut site = Site::running(checkpoint_every(2), 1);
    site.train(ANN, batch(0));
    let mut old = site.job.clone();
    site.restart_master();
    site.join(0);
    (0..2).for_each(|ps| site.call_master(ps));
    // The old one wakes up, believes a server lost and decides a generation: everything that it
    // would tell comes after something that it must make durable first, and cannot.
    assert!(old.config().term < site.disk.term);
    let instance = InstanceId { role: Role::Ps, id: 1 };
    old.handle(Event::Platform(Report::Started { instance, pid: 1 }), site.now);
    let ended = Report::Ended { instance, pid: 1, how: Ended::Signal(9) };
    old.handle(Event::Platform(ended), site.now);
    let member = edl_core::servers::Member {
        incarnation: Incarnation(77),
        address: String::new(),
        unix_path: String::new(),
        generation: Generation(0),
        sets: Vec::new(),
    };
    let called = Event::PsConnected { ps: PsId(1), pid: 7, member: Box::new(member) };
    let effects = old.handle(called, site.now);
    let persist = effects.iter().position(|e| *e == edl_core::job::Effect::Persist).unwrap();
    let load = effects
        .iter()
        .position(|effect| matches!(effect, edl_core::job::Effect::ToPs(_, PsOrder::Load { .. })));
    assert!(load.unwrap() > persist);
    // Meanwhile the new one goes on, and its numbers never meet those of the old one.
    site.finish();
}

/// The partition itself: a batch is applied once, whoever pushes it, however often.
#[test]
fn a_partition_applies_a_batch_once_and_says_so() {
    let mut site = Site::running(spec(), 1);
    let push = site.counter.push(batch(3), 0, 0..2);
    let part = site.seats.get_mut(&0).unwrap().parts.get_mut(&0).unwrap();
    assert_eq!(part.push(&push), Pushed::Applied);
    assert_eq!(part.push(&push), Pushed::Already);
    assert_eq!(part.updates(), 1);
}
