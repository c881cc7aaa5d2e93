// SPDX-License-Identifier: Apache-2.0
//! A naive shell that performs effects in random order, with a master that assigns and revokes
//! and servers that break, restart and acknowledge when they like.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const N_BATCHES: u32 = 12;

/// What the shell and its surroundings do next, as far as it is possible.
#[derive(Clone, Copy, Debug)]
enum Step {
    Assign {
        first: u32,
        count: u32,
    },
    AssignShard {
        n_records: u64,
    },
    Revoke(usize),
    Rejoin,
    /// The job stops.
    Drain,
    /// The servers are restored from a checkpoint.
    Restore,
    Break,
    Connect,
    Decode(usize),
    Pull,
    Compute,
    Acknowledge(usize),
    Finish,
    Wait,
    /// Records cannot be read.
    FailToDecode(usize),
    /// The model cannot use the records.
    FailToPull,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..N_BATCHES, 1..4_u32).prop_map(|(first, count)| Step::Assign { first, count }),
        1 => (0..35_u64).prop_map(|n_records| Step::AssignShard { n_records }),
        1 => (0..4_usize).prop_map(Step::Revoke),
        1 => Just(Step::Rejoin),
        1 => Just(Step::Drain),
        1 => Just(Step::Restore),
        1 => Just(Step::Break),
        4 => Just(Step::Connect),
        8 => (0..3_usize).prop_map(Step::Decode),
        8 => Just(Step::Pull),
        8 => Just(Step::Compute),
        6 => (0..4_usize).prop_map(Step::Acknowledge),
        2 => Just(Step::Finish),
        4 => Just(Step::Wait),
        1 => (0..3_usize).prop_map(Step::FailToDecode),
        1 => Just(Step::FailToPull),
    ]
}

struct Shell {
    stage: Stage,
    generation: u64,
    next_lease: u64,
    leases: Vec<LeaseId>,
    /// Batches and shards that the master has assigned and not heard of.
    assigned: BTreeMap<BatchId, LeaseId>,
    shards: BTreeSet<LeaseId>,
    connecting: Option<u64>,
    connection: Option<u64>,
    reads: Vec<WorkItem>,
    records: BTreeSet<WorkItem>,
    pull: Option<(u64, WorkItem)>,
    /// With the generation of its parameters.
    pulled: Option<(WorkItem, u64)>,
    compute: Option<(WorkItem, u64)>,
    /// The last batch computed, with the generation of its parameters.
    gradient: Option<(BatchId, u64)>,
    /// Sent on the connection and not acknowledged.
    pushed: Vec<BatchId>,
    pieces: BTreeMap<LeaseId, u32>,
    finishing: Vec<LeaseId>,
}

impl Shell {
    fn new(mode: Mode) -> Self {
        let mut shell = Self {
            stage: Stage { worker: Worker::new(config(mode)), now: Time::ZERO },
            generation: 1,
            next_lease: 0,
            leases: Vec::new(),
            assigned: BTreeMap::new(),
            shards: BTreeSet::new(),
            connecting: None,
            connection: None,
            reads: Vec::new(),
            records: BTreeSet::new(),
            pull: None,
            pulled: None,
            compute: None,
            gradient: None,
            pushed: Vec::new(),
            pieces: BTreeMap::new(),
            finishing: Vec::new(),
        };
        shell.take(Event::Built(model()));
        shell.take(Event::Command(Command::Route(route(1))));
        shell
    }

    fn take(&mut self, event: Event) {
        for effect in self.stage.take(event) {
            self.perform(effect);
        }
        self.gradient = None;
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Read { item, .. } => self.reads.push(item),
            Effect::Forget(item) => {
                self.records.remove(&item);
                self.pulled.take_if(|(of, _)| *of == item);
            }
            Effect::Connect { connection, .. } => {
                (self.connecting, self.connection) = (Some(connection), None);
            }
            Effect::Abort { .. } => self.hang_up(),
            Effect::Pull { connection, item, wants } => {
                assert!(self.records.contains(&item), "{item:?} is pulled but not read");
                assert_eq!(self.connection, Some(connection));
                assert_eq!(wants.will_push, matches!(item, WorkItem::Batch(_)));
                assert!(self.pull.is_none(), "one pull at a time");
                self.pull = Some((connection, item));
            }
            Effect::Push { connection, batch } => {
                assert_eq!(self.connection, Some(connection));
                let gradient = self.gradient.take().expect("a gradient that was just computed");
                assert_eq!(gradient, (batch, self.generation), "of void parameters");
                self.pushed.push(batch);
            }
            Effect::Skip { connection, batch } => {
                assert_eq!((self.connection, batch.index % 4), (Some(connection), 3));
                self.pushed.push(batch);
            }
            Effect::Compute(item) => {
                assert!(self.compute.is_none(), "one computation at a time");
                assert!(self.records.remove(&item), "{item:?} is computed but not read");
                let pulled = self.pulled.take().expect("parameters");
                assert_eq!(pulled.0, item);
                self.compute = Some(pulled);
            }
            Effect::Begin { lease, .. } => drop(self.pieces.insert(lease, 0)),
            Effect::Finish(lease) => self.finishing.push(lease),
            Effect::Drop(lease) => drop(self.pieces.remove(&lease)),
            Effect::Report(report) => self.report(report),
            Effect::End => panic!("it was not asked to exit"),
        }
    }

    fn report(&mut self, report: Report) {
        match report {
            Report::Ready { held, .. } => {
                let held: BTreeSet<BatchId> = held
                    .iter()
                    .flat_map(|held| held.indices.iter().map(|index| batch(*index)))
                    .collect();
                assert_eq!(held, self.assigned.keys().copied().collect(), "what is held");
            }
            Report::BatchPushed { batch } => {
                assert!(self.assigned.contains_key(&batch), "a batch that is held");
            }
            Report::BatchDone { batch, generation, .. } => {
                assert_eq!(generation, Generation(self.generation));
                assert!(self.assigned.remove(&batch).is_some(), "reported once, if held");
            }
            Report::EvalDone { shard, .. } => {
                let lease = LeaseId(shard.into());
                assert!(self.shards.remove(&lease));
                assert!(self.pieces.remove(&lease).is_some(), "a shard that was begun");
            }
            Report::Failed { lease, .. } | Report::NonFinite { lease, .. } => {
                let n_held = self.assigned.len() + self.shards.len();
                self.assigned.retain(|_, held| *held != lease);
                self.shards.remove(&lease);
                assert!(self.assigned.len() + self.shards.len() < n_held, "a lease that is held");
            }
            Report::Returned { kept } => {
                let n_kept = kept.len();
                self.assigned.retain(|batch, _| kept.contains(batch));
                assert_eq!(self.assigned.len(), n_kept, "it keeps what it held");
            }
            Report::DiskFull { .. }
            | Report::PredictDone { .. }
            | Report::Leaving
            | Report::Heartbeat { .. }
            | Report::Spending(_)
            | Report::Member(_)
            | Report::CheckpointDone { .. }
            | Report::CheckpointFailed { .. } => panic!("never reported here"),
        }
    }

    fn hang_up(&mut self) {
        self.connection = None;
        self.pushed.clear();
        self.pull = None;
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Assign { first, count } => {
                let lease = self.new_lease();
                let indices = first..N_BATCHES.min(first + count);
                self.assigned.extend(indices.clone().map(|index| (batch(index), lease)));
                let skipped: Vec<u32> = indices.clone().filter(|index| index % 4 == 3).collect();
                self.take(skip(lease.0, indices, &skipped));
            }
            Step::AssignShard { n_records } => {
                let lease = self.new_lease();
                self.shards.insert(lease);
                // Its report names the shard and not the lease.
                let number = u32::try_from(lease.0).unwrap();
                let shard = Shard { number, ..shard(n_records) };
                self.take(Event::Command(Command::Lease { lease, task: Task::Shard(shard) }));
            }
            Step::Revoke(number) if number < self.leases.len() => {
                let lease = self.leases.swap_remove(number);
                self.assigned.retain(|_, held| *held != lease);
                self.shards.remove(&lease);
                self.take(Event::Command(Command::Revoke(lease)));
            }
            Step::Rejoin => {
                self.shards.clear();
                self.take(Event::Rejoined);
            }
            Step::Drain => {
                self.shards.clear();
                self.take(drain());
            }
            Step::Restore => {
                self.generation += 1;
                self.assigned.clear();
                self.shards.clear();
                self.take(Event::Command(Command::Route(route(self.generation))));
            }
            Step::Break => {
                let number = self.connecting.take().or(self.connection);
                if let Some(connection) = number {
                    self.hang_up();
                    self.take(Event::Broken { connection });
                }
            }
            Step::Connect => {
                if let Some(connection) = self.connecting.take() {
                    self.connection = Some(connection);
                    self.take(Event::Connected { connection });
                }
            }
            Step::Revoke(_) => {}
            Step::Decode(_)
            | Step::Pull
            | Step::Compute
            | Step::Acknowledge(_)
            | Step::Finish
            | Step::Wait
            | Step::FailToDecode(_)
            | Step::FailToPull => self.answer(step),
        }
    }

    /// Answers an effect.
    fn answer(&mut self, step: Step) {
        match step {
            Step::Decode(number) if number < self.reads.len() => {
                let item = self.reads.remove(number);
                self.records.insert(item);
                self.take(decoded(item));
            }
            Step::Pull => {
                if let Some((connection, item)) = self.pull.take() {
                    self.pulled = Some((item, self.generation));
                    self.take(Event::Pulled { connection, item });
                }
            }
            Step::Compute => self.compute(),
            Step::Acknowledge(number) if number < self.pushed.len() => {
                let batch = self.pushed.remove(number);
                let connection = self.connection.expect("a push has a connection");
                let generation = Generation(self.generation);
                self.take(Event::Acknowledged { connection, batch, generation });
            }
            Step::Finish => self.finish(),
            Step::Wait => {
                self.stage.now = self.stage.now + Duration::from_secs(1);
                self.take(Event::Tick);
            }
            Step::FailToDecode(number) if number < self.reads.len() => {
                let item = self.reads.remove(number);
                self.take(Event::Decoded { item, result: Err("bad".into()) });
            }
            Step::FailToPull => {
                if let Some((connection, item)) = self.pull.take() {
                    let error = "bad".to_owned();
                    self.take(Event::NotPulled { connection, item, error });
                }
            }
            Step::Decode(_) | Step::Acknowledge(_) | Step::FailToDecode(_) => {}
            Step::Assign { .. }
            | Step::AssignShard { .. }
            | Step::Revoke(_)
            | Step::Rejoin
            | Step::Drain
            | Step::Restore
            | Step::Break
            | Step::Connect => unreachable!("not an answer"),
        }
    }

    fn finish(&mut self) {
        let Some(lease) = self.finishing.pop() else { return };
        let finished = Finished::Evaluation(Box::new(Measures::new(&[])));
        self.take(Event::Finished { lease, result: Ok(finished) });
    }

    fn compute(&mut self) {
        let Some((item, generation)) = self.compute.take() else { return };
        let result = match item {
            WorkItem::Batch(batch) => {
                self.gradient = Some((batch, generation));
                Computed::Batch { loss: 0.5 }
            }
            WorkItem::Piece { lease, piece } => {
                if let Some(n_done) = self.pieces.get_mut(&lease) {
                    assert_eq!(*n_done, piece, "each piece is added once, in order");
                    *n_done += 1;
                }
                Computed::Piece
            }
        };
        self.take(Event::Computed { item, result: Ok(result) });
    }

    fn new_lease(&mut self) -> LeaseId {
        self.next_lease += 1;
        self.leases.push(LeaseId(self.next_lease));
        LeaseId(self.next_lease)
    }

    /// Without further faults everything that is assigned gets done, and nothing is left over.
    fn settle(&mut self) {
        for _ in 0..200 {
            let answers = [
                Step::Wait,
                Step::Connect,
                Step::Decode(0),
                Step::Pull,
                Step::Compute,
                Step::Finish,
            ];
            answers.into_iter().for_each(|answer| self.step(answer));
            self.step(Step::Acknowledge(0));
        }
        assert_eq!(self.assigned, BTreeMap::new(), "batches that are never reported");
        assert_eq!(self.shards, BTreeSet::new(), "shards that are never reported");
        assert_eq!(self.records, BTreeSet::new(), "records that are never forgotten");
        assert_eq!(self.stage.worker.work, Work::default());
    }
}

proptest! {
    #[test]
    fn all_work_is_done_and_reported_once_in_any_order_of_events(
        mode in prop_oneof![
            Just(Mode::Async),
            Just(Mode::Bounded { versions: 2 }),
            Just(Mode::Sync { grads_to_wait: 3 }),
        ],
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let mut shell = Shell::new(mode);
        for step in steps {
            shell.step(step);
        }
        shell.settle();
    }
}
