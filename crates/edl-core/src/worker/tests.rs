// SPDX-License-Identifier: Apache-2.0
//! The machine by example; `tests/shell.rs` runs it through random orders of events.

mod shell;

use std::time::Duration;

use super::*;
use crate::activity::{Activity, WaitingFor};
use crate::id::EvalId;
use crate::job::HeldLease;
use crate::metric::Measures;
use crate::optimizer::OptimizerSpec;
use crate::route::ServerRoute;

const LIMITS: Limits = Limits {
    finish: Duration::from_millis(1200),
    last_answers: Duration::from_millis(700),
    hand_over: Duration::from_secs(10),
};

fn config(mode: Mode) -> Config {
    Config { mode, n_batches: 10, minibatch_size: 10, dense_steps: 1, limits: LIMITS }
}

fn model() -> Box<ModelSpec> {
    Box::new(ModelSpec {
        name: "toy".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: OptimizerSpec::sgd(0.1),
    })
}

fn route(generation: u64) -> Route {
    let server = ServerRoute {
        ps: crate::id::PsId(0),
        address: "a:1".into(),
        unix_path: String::new(),
        partitions: 0..4,
    };
    Route { generation: Generation(generation), servers: vec![server] }
}

fn batch(index: u32) -> BatchId {
    BatchId { epoch: 0, index }
}

fn item(index: u32) -> WorkItem {
    WorkItem::Batch(batch(index))
}

fn train(lease: u64, indices: std::ops::Range<u32>) -> Event {
    Event::Command(Command::Lease {
        lease: LeaseId(lease),
        task: Task::Train { epoch: 0, indices, skipped: Vec::new() },
    })
}

fn skip(lease: u64, indices: std::ops::Range<u32>, skipped: &[u32]) -> Event {
    let task = Task::Train { epoch: 0, indices, skipped: skipped.to_vec() };
    Event::Command(Command::Lease { lease: LeaseId(lease), task })
}

fn stop() -> Event {
    Event::Command(Command::Stop("the job is over".into()))
}

fn shard(n_records: u64) -> Shard {
    let pass = Pass::Evaluate { eval: EvalId(5), version: 9 };
    Shard { number: 2, records: 30..30 + n_records, pass }
}

fn piece(lease: u64, piece: u32) -> WorkItem {
    WorkItem::Piece { lease: LeaseId(lease), piece }
}

fn trained(index: u32) -> Event {
    let result = Ok(Computed::Batch { loss: 0.5 });
    Event::Computed { item: item(index), result }
}

fn decoded(item: WorkItem) -> Event {
    Event::Decoded { item, result: Ok(()) }
}

/// A worker under test and its clock.
struct Stage {
    worker: Worker,
    now: Time,
}

impl Stage {
    /// A worker with a model and a connection to the servers of generation 1.
    fn new(config: Config) -> Self {
        let mut stage = Self { worker: Worker::new(config), now: Time::ZERO };
        stage.take(Event::Built(model()));
        stage.take(Event::Command(Command::Route(route(1))));
        stage.take(Event::Connected { connection: 1 });
        stage
    }

    fn take(&mut self, event: Event) -> Vec<Effect> {
        let effects = self.worker.handle(event, self.now);
        self.worker.check_invariants();
        effects
    }

    fn after(&mut self, pause: Duration) -> Vec<Effect> {
        self.now = self.now + pause;
        self.take(Event::Tick)
    }

    /// Takes an item from decoded to the first effect after its parameters are here.
    fn compute(&mut self, connection: u64, item: WorkItem) -> Vec<Effect> {
        self.take(decoded(item));
        self.take(Event::Pulled { connection, item })
    }

    fn acknowledged(&mut self, connection: u64, index: u32, generation: u64) -> Vec<Effect> {
        let (batch, generation) = (batch(index), Generation(generation));
        self.take(Event::Acknowledged { connection, batch, generation })
    }
}

fn done(index: u32, generation: u64) -> Effect {
    Effect::Report(Report::BatchDone {
        batch: batch(index),
        generation: Generation(generation),
        loss: 0.5,
    })
}

fn read(index: u32) -> Effect {
    Effect::Read { item: item(index), records: Records::Batch(batch(index)) }
}

fn pull(connection: u64, index: u32) -> Effect {
    let wants = Wants { dense: true, will_push: true, min_round: None };
    Effect::Pull { connection, item: item(index), wants }
}

fn pulls(effects: &[Effect]) -> usize {
    effects.iter().filter(|effect| matches!(effect, Effect::Pull { .. })).count()
}

#[test]
fn a_batch_is_read_pulled_computed_pushed_and_reported() {
    let mut stage = Stage::new(config(Mode::Async));
    assert_eq!(stage.take(train(7, 0..3)), [read(0), read(1)]);
    assert_eq!(stage.take(decoded(item(0))), [pull(1, 0), read(2)]);
    let pulled = Event::Pulled { connection: 1, item: item(0) };
    assert_eq!(stage.take(pulled), [Effect::Compute(item(0))]);
    let push = Effect::Push { connection: 1, batch: batch(0) };
    assert_eq!(stage.take(trained(0)), [push]);
    assert_eq!(stage.acknowledged(1, 0, 1), [done(0, 1)]);
    assert_eq!(stage.acknowledged(1, 0, 1), [], "reported once");
}

#[test]
fn the_next_parameters_are_pulled_before_and_while_a_batch_is_computed() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..3));
    stage.take(decoded(item(1)));
    stage.take(decoded(item(0)));
    let pulled = Event::Pulled { connection: 1, item: item(0) };
    assert_eq!(stage.take(pulled), [pull(1, 1), Effect::Compute(item(0))]);
}

#[test]
fn a_bounded_worker_pulls_only_after_it_has_pushed() {
    let mut stage = Stage::new(config(Mode::Bounded { versions: 1 }));
    stage.take(train(7, 0..3));
    stage.take(decoded(item(1)));
    assert_eq!(pulls(&stage.compute(1, item(0))), 0);
    let push = Effect::Push { connection: 1, batch: batch(0) };
    assert_eq!(stage.take(trained(0))[..2], [push, pull(1, 1)]);
}

#[test]
fn batches_of_a_round_overlap_and_the_next_round_waits() {
    let mut stage = Stage::new(config(Mode::Sync { grads_to_wait: 2 }));
    assert_eq!([2, 3].map(|grads_to_wait| capacity(Mode::Sync { grads_to_wait })), [2, 3]);
    stage.take(train(7, 0..4));
    stage.take(decoded(item(1)));
    assert_eq!(pulls(&stage.compute(1, item(0))), 1, "1 is of the round of 0");
    stage.take(decoded(item(2)));
    stage.take(Event::Pulled { connection: 1, item: item(1) });
    let effects = stage.take(trained(0));
    assert_eq!(pulls(&effects), 0, "2 is of the round after 1");
    assert!(effects.contains(&Effect::Report(Report::BatchPushed { batch: batch(0) })));
    let effects = stage.take(trained(1));
    let wants = Wants { dense: true, will_push: true, min_round: Some(1) };
    assert!(effects.contains(&Effect::Pull { connection: 1, item: item(2), wants }));
}

#[test]
fn unanswered_gradients_are_limited() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..6));
    for index in 0..4 {
        stage.compute(1, item(index));
        stage.take(trained(index));
    }
    assert_eq!(pulls(&stage.take(decoded(item(4)))), 0);
    assert_eq!(stage.worker.activity().waiting_for, WaitingFor::Acknowledgements);
    assert_eq!(pulls(&stage.acknowledged(1, 2, 1)), 1);
}

#[test]
fn a_new_generation_voids_leases_and_what_is_computed() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..3));
    stage.take(Event::Command(Command::Lease { lease: LeaseId(8), task: Task::Shard(shard(20)) }));
    for number in [0, 1] {
        stage.compute(1, piece(8, number));
    }
    stage.compute(1, item(0));
    let effects = stage.take(Event::Command(Command::Route(route(2))));
    assert!(effects.contains(&Effect::Abort { connection: 1 }));
    assert!(effects.contains(&Effect::Drop(LeaseId(8))));
    assert!(effects.contains(&Effect::Connect { connection: 2, route: route(2) }));
    stage.take(Event::Connected { connection: 2 });
    stage.take(train(9, 0..1));
    let computed = Event::Computed { item: piece(8, 0), result: Ok(Computed::Piece) };
    assert_eq!(stage.take(computed), []);
    assert_eq!(stage.compute(2, item(0)), [Effect::Compute(item(0))]);
    stage.take(trained(0));
    assert_eq!(stage.acknowledged(1, 0, 1), [], "of the generation before");
    assert_eq!(stage.acknowledged(2, 0, 1), [], "of the generation before");
    assert_eq!(stage.acknowledged(2, 0, 2), [done(0, 2)]);
}

#[test]
fn a_gradient_from_the_parameters_of_another_generation_is_not_pushed() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..1));
    assert_eq!(stage.compute(1, item(0)), [Effect::Compute(item(0))]);
    stage.take(Event::Command(Command::Route(route(2))));
    stage.take(Event::Connected { connection: 2 });
    assert_eq!(stage.take(train(9, 0..1)), [read(0)]);
    assert_eq!(stage.take(trained(0)), []);
    assert_eq!(stage.take(decoded(item(0))), [pull(2, 0)]);
}

#[test]
fn a_route_of_a_lower_generation_is_ignored() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(Event::Command(Command::Route(route(3))));
    stage.take(train(7, 0..1));
    assert_eq!(stage.take(Event::Command(Command::Route(route(2)))), []);
    assert_eq!(stage.take(Event::Command(Command::Route(route(3)))), [], "known already");
}

#[test]
fn a_broken_connection_is_made_again_and_its_batches_are_computed_again() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..2));
    stage.compute(1, item(0));
    stage.take(trained(0));
    stage.take(decoded(item(1)));
    assert_eq!(stage.take(Event::Broken { connection: 1 }), [read(0)]);
    assert_eq!(stage.take(Event::Broken { connection: 1 }), [], "known already");
    assert_eq!(stage.acknowledged(1, 0, 1), [], "lost with the connection");
    stage.take(decoded(item(0)));
    for (connection, delay) in
        [(2, 50), (3, 100), (4, 200), (5, 400), (6, 800), (7, 1000), (8, 1000)]
    {
        let delay = Duration::from_millis(delay);
        assert_eq!(stage.worker.next_deadline(), Some(stage.now + delay));
        assert_eq!(stage.after(delay), [Effect::Connect { connection, route: route(1) }]);
        stage.take(Event::Broken { connection });
    }
    stage.after(Duration::from_secs(1));
    assert_eq!(stage.take(Event::Connected { connection: 9 }), [pull(9, 0)]);
    let effects = stage.take(Event::Pulled { connection: 9, item: item(0) });
    assert_eq!(effects, [pull(9, 1), Effect::Compute(item(0))], "1 was read already");
    stage.take(Event::Broken { connection: 9 });
    assert_eq!(stage.worker.next_deadline(), Some(stage.now + Duration::from_millis(50)));
}

#[test]
fn a_revoked_batch_is_neither_computed_nor_pushed() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..1));
    stage.take(decoded(item(0)));
    stage.take(Event::Command(Command::Revoke(LeaseId(7))));
    stage.take(train(8, 5..7));
    stage.take(decoded(item(5)));
    let effects = stage.take(Event::Pulled { connection: 1, item: item(0) });
    assert_eq!(effects[..2], [Effect::Forget(item(0)), pull(1, 5)]);
    stage.take(Event::Pulled { connection: 1, item: item(5) });
    let effects = stage.take(Event::Command(Command::Revoke(LeaseId(8))));
    assert_eq!(effects, [Effect::Forget(item(6))]);
    assert_eq!(stage.take(trained(5)), []);
}

#[test]
fn dense_parameters_are_pulled_every_few_batches_and_after_a_pull_that_was_not_used() {
    let mut stage = Stage::new(Config { dense_steps: 3, ..config(Mode::Async) });
    let dense = |effects: &[Effect]| {
        effects.iter().find_map(|effect| {
            let Effect::Pull { wants, .. } = effect else { return None };
            Some(wants.dense)
        })
    };
    for index in 0..4 {
        stage.take(train(u64::from(index), index..index + 1));
        let effects = stage.take(decoded(item(index)));
        assert_eq!(dense(&effects), Some(index % 3 == 0), "batch {index}");
        stage.take(Event::Pulled { connection: 1, item: item(index) });
        stage.take(trained(index));
        stage.acknowledged(1, index, 1);
    }
    stage.take(Event::Broken { connection: 1 });
    stage.after(Duration::from_secs(1));
    stage.take(Event::Connected { connection: 2 });
    stage.take(train(7, 7..9));
    assert_eq!(dense(&stage.take(decoded(item(7)))), Some(true), "after a lost connection");
    stage.take(Event::Command(Command::Revoke(LeaseId(7))));
    stage.take(Event::Pulled { connection: 2, item: item(7) });
    stage.take(train(8, 8..9));
    assert_eq!(dense(&stage.take(decoded(item(8)))), Some(true), "those of 7 were dropped");
}

#[test]
fn a_shard_is_computed_piece_by_piece_before_training() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..1));
    let lease = LeaseId(8);
    let effects =
        stage.take(Event::Command(Command::Lease { lease, task: Task::Shard(shard(15)) }));
    let records = [30..40, 40..45].map(Records::Validation);
    let [first, second] = records;
    let reads = [
        Effect::Begin { lease, shard: shard(15) },
        Effect::Read { item: piece(8, 0), records: first },
        Effect::Read { item: piece(8, 1), records: second },
    ];
    assert_eq!(effects, reads);
    let computed = |number| Event::Computed { item: piece(8, number), result: Ok(Computed::Piece) };
    stage.take(decoded(piece(8, 1)));
    let effects = stage.compute(1, piece(8, 0));
    assert_eq!(effects.last(), Some(&Effect::Compute(piece(8, 0))));
    stage.take(Event::Broken { connection: 1 });
    stage.take(computed(0));
    stage.after(Duration::from_secs(1));
    let effects = stage.take(Event::Connected { connection: 2 });
    let wants = Wants { dense: true, will_push: false, min_round: None };
    assert_eq!(effects, [Effect::Pull { connection: 2, item: piece(8, 1), wants }]);
    stage.take(Event::Pulled { connection: 2, item: piece(8, 1) });
    assert_eq!(stage.worker.activity().spends, TimeKind::Compute);
    assert!(stage.take(computed(1)).contains(&Effect::Finish(lease)));
    let measures = Box::new(Measures::new(&[]));
    let result = Ok(Finished::Evaluation(measures.clone()));
    let done = Report::EvalDone { eval: EvalId(5), shard: 2, measures };
    assert_eq!(stage.take(Event::Finished { lease, result }), [Effect::Report(done)]);
}

#[test]
fn a_shard_without_records_is_finished_at_once() {
    let mut stage = Stage::new(config(Mode::Async));
    let lease = LeaseId(8);
    let effects = stage.take(Event::Command(Command::Lease { lease, task: Task::Shard(shard(0)) }));
    assert_eq!(effects, [Effect::Begin { lease, shard: shard(0) }, Effect::Finish(lease)]);
}

#[test]
fn failures_return_the_lease_with_a_reason() {
    let failed = |lease, index| {
        let (lease, error) = (LeaseId(lease), "bad".to_owned());
        Effect::Report(Report::Failed { lease, index, error })
    };
    let error = || "bad".to_owned();
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..2));
    let effects = stage.take(Event::Decoded { item: item(1), result: Err(error()) });
    assert_eq!(effects, [failed(7, 1), Effect::Forget(item(0)), Effect::Forget(item(1))]);
    stage.take(train(8, 3..4));
    stage.take(decoded(item(3)));
    let not_pulled = Event::NotPulled { connection: 1, item: item(3), error: error() };
    assert_eq!(stage.take(not_pulled), [Effect::Forget(item(3)), failed(8, 3)]);
    stage.take(train(9, 4..5));
    stage.compute(1, item(4));
    let effects =
        stage.take(Event::Computed { item: item(4), result: Err(Fault::Failed(error())) });
    assert_eq!(effects, [failed(9, 4)]);
    for (lease, n_records) in [(10, 15), (11, 0)] {
        stage.take(Event::Command(Command::Lease {
            lease: LeaseId(lease),
            task: Task::Shard(shard(n_records)),
        }));
        let effects =
            stage.take(Event::NotBegun { lease: LeaseId(lease), fault: Fault::Failed(error()) });
        assert_eq!(effects[..2], [Effect::Drop(LeaseId(lease)), failed(lease, 2)]);
    }
    assert_eq!(stage.worker.work, Work::default());
}

#[test]
fn a_batch_that_is_not_finite_goes_back_to_the_master() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 4..6));
    stage.compute(1, item(4));
    let result = Err(Fault::NonFinite("nan".into()));
    let effects = stage.take(Event::Computed { item: item(4), result });
    let report = Report::NonFinite { lease: LeaseId(7), index: 4, error: "nan".into() };
    assert_eq!(effects[0], Effect::Report(report));
    assert_eq!(stage.worker.work, Work::default(), "nothing is pushed");
}

#[test]
fn a_shard_whose_output_has_no_room_goes_back_to_the_master() {
    let mut stage = Stage::new(config(Mode::Async));
    let lease = LeaseId(8);
    stage.take(Event::Command(Command::Lease { lease, task: Task::Shard(shard(0)) }));
    let result = Err(Fault::DiskFull("full".into()));
    let report = Report::DiskFull { lease, index: 2, error: "full".into() };
    assert!(stage.take(Event::Finished { lease, result }).contains(&Effect::Report(report)));
}

#[test]
fn a_skipped_batch_is_pushed_without_being_read_again_after_a_lost_connection() {
    let mut stage = Stage::new(config(Mode::Async));
    let (skip_4, read_5) = (
        |connection| Effect::Skip { connection, batch: batch(4) },
        Effect::Read { item: item(5), records: Records::Batch(batch(5)) },
    );
    assert_eq!(stage.take(skip(7, 4..6, &[4])), [skip_4(1), read_5]);
    stage.take(Event::Broken { connection: 1 });
    stage.after(Duration::from_secs(5));
    assert_eq!(stage.take(Event::Connected { connection: 2 }), [skip_4(2)]);
    let done = stage.acknowledged(2, 4, 1);
    assert!(matches!(done[..], [Effect::Report(Report::BatchDone { loss, .. })] if loss.is_nan()));
}

#[test]
fn the_master_learns_that_a_skipped_batch_of_a_round_is_pushed() {
    let mut stage = Stage::new(config(Mode::Sync { grads_to_wait: 4 }));
    let effects = stage.take(skip(7, 1..2, &[1]));
    let pushed = Effect::Report(Report::BatchPushed { batch: batch(1) });
    assert_eq!(effects, [Effect::Skip { connection: 1, batch: batch(1) }, pushed]);
}

#[test]
fn a_new_master_learns_what_is_held_and_shards_are_dropped() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..3));
    stage.compute(1, item(0));
    stage.take(trained(0));
    stage.take(Event::Command(Command::Lease { lease: LeaseId(8), task: Task::Shard(shard(15)) }));
    let effects = stage.take(Event::Rejoined);
    let (generation, indices) = (Generation(1), vec![0, 1, 2]);
    let held = vec![HeldLease { lease: LeaseId(7), generation, epoch: 0, indices }];
    let ready = Report::Ready { model: model(), capacity: 2, held, peer: None };
    assert_eq!(effects[..2], [Effect::Drop(LeaseId(8)), Effect::Report(ready)]);
    assert_eq!(Worker::new(config(Mode::Async)).handle(Event::Rejoined, stage.now), []);
}

#[test]
fn a_worker_that_leaves_finishes_its_batch_and_waits_for_acknowledgements() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..3));
    stage.compute(1, item(0));
    stage.take(trained(0));
    stage.compute(1, item(1));
    assert_eq!(stage.take(Event::Leave), [returned(&[0, 1])]);
    assert_eq!(stage.worker.activity().spends, TimeKind::Compute);
    assert_eq!(stage.acknowledged(1, 0, 1), [done(0, 1)]);
    assert_eq!(stage.take(trained(1)), [Effect::Push { connection: 1, batch: batch(1) }]);
    assert_eq!(stage.worker.activity().waiting_for, WaitingFor::Acknowledgements);
    let end = [Effect::Report(Report::Leaving), Effect::Abort { connection: 1 }, Effect::End];
    let mut late = Stage { worker: stage.worker.clone(), now: stage.now };
    let effects = stage.acknowledged(1, 1, 1);
    assert_eq!(effects[0], done(1, 1));
    assert_eq!(effects[1..], end);
    assert_eq!(stage.take(train(8, 4..5)), [], "it is over");
    assert_eq!(late.worker.next_deadline(), Some(late.now + LIMITS.last_answers));
    assert_eq!(late.after(LIMITS.last_answers), end);
}

#[test]
fn a_worker_that_leaves_does_not_wait_forever_for_its_model() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..1));
    stage.compute(1, item(0));
    stage.take(Event::Leave);
    assert_eq!(stage.worker.next_deadline(), Some(stage.now + LIMITS.hand_over));
    stage.take(stop());
    assert_eq!(stage.worker.next_deadline(), Some(stage.now + LIMITS.finish));
    assert_eq!(stage.after(LIMITS.finish).last(), Some(&Effect::End));
    let mut building = Worker::new(config(Mode::Async));
    assert_eq!(building.handle(Event::Leave, Time::ZERO), [returned(&[])]);
    let effects = building.handle(Event::Built(model()), Time::ZERO);
    assert_eq!(effects.last(), Some(&Effect::End));
}

fn drain() -> Event {
    Event::Command(Command::Drain { within: Duration::from_secs(5) })
}

fn returned(kept: &[u32]) -> Effect {
    let kept = kept.iter().map(|index| batch(*index)).collect();
    Effect::Report(Report::Returned { kept })
}

#[test]
fn a_worker_that_drains_finishes_what_it_computes_and_returns_the_rest() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..4));
    stage.compute(1, item(0));
    stage.take(decoded(item(1)));
    stage.take(trained(0));
    stage.take(Event::Pulled { connection: 1, item: item(1) });
    assert!(stage.take(drain()).contains(&returned(&[0, 1])), "pushed, and computed now");
    let push = Effect::Push { connection: 1, batch: batch(1) };
    assert_eq!(stage.take(trained(1)), [push]);
    assert_eq!(stage.acknowledged(1, 0, 1), [done(0, 1)]);
    assert_eq!(stage.acknowledged(1, 1, 1), [done(1, 1)]);
    assert_eq!(stage.take(train(8, 5..6)), [returned(&[])], "nothing is begun");
    stage.take(Event::Rejoined);
    assert_eq!(stage.take(train(9, 6..7)), [read(6)], "another master needs it");
}

#[test]
fn a_broken_connection_in_a_drain_returns_what_was_pushed() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..2));
    stage.compute(1, item(0));
    stage.take(trained(0));
    assert!(stage.take(drain()).contains(&returned(&[0])));
    assert!(stage.take(Event::Broken { connection: 1 }).contains(&returned(&[])));
}

#[test]
fn a_round_is_completed_in_a_drain() {
    let mut stage = Stage::new(config(Mode::Sync { grads_to_wait: 2 }));
    stage.take(train(7, 0..1));
    stage.take(train(8, 1..2));
    stage.compute(1, item(0));
    stage.take(decoded(item(1)));
    assert_eq!(stage.take(drain()), []);
    stage.take(trained(0));
    let effects = stage.take(Event::Pulled { connection: 1, item: item(1) });
    assert_eq!(effects, [Effect::Compute(item(1))]);
}

#[test]
fn a_worker_that_leaves_returns_at_once_what_it_has_not_begun() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..3));
    stage.compute(1, item(0));
    assert!(stage.take(Event::Leave).contains(&returned(&[0])));
    stage.take(trained(0));
    let end = [done(0, 1), Effect::Report(Report::Leaving)];
    assert_eq!(stage.acknowledged(1, 0, 1)[..2], end);
}

#[test]
fn a_worker_that_leaves_completes_its_part_of_the_round() {
    let mut stage = Stage::new(config(Mode::Sync { grads_to_wait: 4 }));
    (0..2).for_each(|index| drop(stage.take(train(7 + u64::from(index), index..index + 1))));
    stage.compute(1, item(0));
    stage.take(decoded(item(1)));
    assert!(stage.take(Event::Leave).contains(&returned(&[0, 1])), "all others may leave, too");
    stage.take(trained(0));
    let effects = stage.take(Event::Pulled { connection: 1, item: item(1) });
    assert!(effects.contains(&Effect::Compute(item(1))), "{effects:?}");
    stage.take(trained(1));
    assert_eq!(stage.after(LIMITS.last_answers), [], "the round takes its time");
    stage.acknowledged(1, 0, 1);
    let end = [done(1, 1), Effect::Report(Report::Leaving)];
    assert_eq!(stage.acknowledged(1, 1, 1)[..2], end);
}

#[test]
fn a_stopped_worker_pushes_nothing_more() {
    let mut stage = Stage::new(config(Mode::Async));
    stage.take(train(7, 0..2));
    stage.compute(1, item(0));
    stage.take(stop());
    assert_eq!(stage.take(trained(0)), [Effect::Abort { connection: 1 }, Effect::End]);
}

#[test]
fn what_a_worker_waits_for_is_named() {
    let mut worker = Worker::new(config(Mode::Async));
    let mut take = |event: Event| {
        drop(worker.handle(event, Time::ZERO));
        let Activity { waiting_for, spends } = worker.activity();
        (waiting_for.name(), spends.name())
    };
    assert_eq!(take(Event::Tick), ("", "idle"));
    assert_eq!(take(Event::Built(model())), ("work", "idle"));
    assert_eq!(take(train(7, 0..1)), ("server addresses from the master", "idle"));
    assert_eq!(take(Event::Command(Command::Route(route(1)))), ("parameter servers", "idle"));
    assert_eq!(take(Event::Connected { connection: 1 }), ("", "data_wait"));
    assert_eq!(take(decoded(item(0))), ("parameters", "communicate"));
    let pulled = Event::Pulled { connection: 1, item: item(0) };
    assert_eq!(take(pulled), ("", "compute"));
    assert_eq!(take(trained(0)), ("acknowledgements", "communicate"));
    assert_eq!(take(Event::Broken { connection: 1 }), ("parameter servers", "heal"));
}
