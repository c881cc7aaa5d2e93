// SPDX-License-Identifier: Apache-2.0
//! Which work is assigned to which worker: batches, evaluation shards and prediction shards.
//!
//! Work is todo, assigned or done. A lease that ends early makes its open work todo again.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::Bound;
use std::time::Duration;

use super::{Config, HeldLease, Suspect};
use crate::applied::AppliedSet;
use crate::evaluation::{Evaluation, shard_records};
use crate::id::{BatchId, EvalId, LeaseId, WorkerId};
use crate::ledger::Ledger;
use crate::metric::{Measures, Metric};
use crate::pool::{Lease, Pool};
use crate::spec::Mode;
use crate::time::Time;
use crate::worker::{Pass, Shard, Task};

/// Idle workers by what they hold, the least first, with their capacities.
type Free = BinaryHeap<Reverse<(usize, WorkerId, u32)>>;

/// How many idle workers are compared at once.
const COMPARED: usize = 64;

/// The work of a job, and the workers that can take more of it.
#[derive(Clone, Debug)]
pub(super) struct Assignments {
    ledger: Ledger,
    evaluation: Option<Evaluation>,
    predictions: Option<Pool>,
    n_validation_records: u64,
    n_prediction_records: u64,
    output: String,
    records_per_shard: u64,
    timeout: Duration,
    /// In a synchronous round, one worker may have to supply every gradient.
    min_capacity: u32,
    /// Workers that may hold fewer leases than they can; on each tick, all of them.
    idle: BTreeSet<WorkerId>,
    /// Empty; it keeps its memory.
    free: Free,
    /// The last worker that was assigned something: the one after it is next.
    last_served: WorkerId,
    /// Batches reported before it is known whether the servers still hold them.
    early: BTreeSet<BatchId>,
}

/// A lease that was just made.
pub(super) struct Assigned {
    pub worker: WorkerId,
    pub lease: LeaseId,
    pub task: Task,
}

/// A lease that ended because its worker made no progress.
pub(super) struct Overdue {
    pub worker: WorkerId,
    pub lease: LeaseId,
    pub suspect: Suspect,
}

impl Assignments {
    pub(super) fn new(config: &Config) -> Self {
        let spec = &config.spec;
        let (mode, timeout) = (spec.mode(), spec.task_timeout());
        let min_capacity = match mode {
            Mode::Sync { grads_to_wait } => grads_to_wait,
            Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => 0,
        };
        Self {
            ledger: Ledger::new(config.n_batches(), spec.num_minibatches_per_task, mode),
            evaluation: None,
            predictions: None,
            n_validation_records: config.n_validation_records,
            n_prediction_records: config.n_prediction_records,
            output: config.output.clone(),
            records_per_shard: config.records_per_shard(),
            timeout,
            min_capacity,
            idle: BTreeSet::new(),
            free: Free::new(),
            last_served: WorkerId(0),
            early: BTreeSet::new(),
        }
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(super) fn predictions(&self) -> Option<&Pool> {
        self.predictions.as_ref()
    }

    /// The shards of the evaluation or prediction in progress; a job never does both.
    pub(super) fn shards(&self) -> Option<&Pool> {
        self.evaluation.as_ref().map(|evaluation| &evaluation.shards).or(self.predictions.as_ref())
    }

    fn shards_mut(&mut self) -> Option<&mut Pool> {
        let evaluation = self.evaluation.as_mut().map(|evaluation| &mut evaluation.shards);
        evaluation.or(self.predictions.as_mut())
    }

    /// Everything that is assigned: batches and shards.
    fn pools(&self) -> impl Iterator<Item = &Pool> {
        [self.ledger.pool()].into_iter().chain(self.shards())
    }

    fn pools_mut(&mut self) -> impl Iterator<Item = &mut Pool> {
        let evaluation = self.evaluation.as_mut().map(|evaluation| &mut evaluation.shards);
        let shards = evaluation.or(self.predictions.as_mut());
        [self.ledger.pool_mut()].into_iter().chain(shards)
    }

    fn suspect_shard(&self, shard: u32) -> Suspect {
        match self.evaluation {
            Some(_) => Suspect::EvalShard(shard),
            None => Suspect::PredictShard(shard),
        }
    }

    /// These workers may be able to take more work.
    pub(super) fn add_idle(&mut self, workers: impl IntoIterator<Item = WorkerId>) {
        self.idle.append(&mut workers.into_iter().collect());
    }

    /// Assigns all work that idle workers can take, batches only before `barrier`. `capacity` is
    /// how many leases a worker can hold; none if it can take no work now. The idle worker that
    /// holds the least is first; with very many workers, only some are compared for each lease.
    /// `give` takes what is assigned.
    pub(super) fn assign(
        &mut self,
        barrier: Option<u64>,
        n_workers: u32,
        capacity: impl Fn(WorkerId) -> Option<u32>,
        mut new_lease: impl FnMut() -> LeaseId,
        now: Time,
        mut give: impl FnMut(Assigned),
    ) {
        let mut free = std::mem::take(&mut self.free);
        'work: while self.has_work(barrier) {
            self.compare_idle(&capacity, &mut free);
            if free.is_empty() {
                break;
            }
            while let Some(Reverse((n_held, worker, capacity))) = free.pop() {
                let most = capacity.max(self.min_capacity) as usize;
                if n_held >= most || self.must_finish_first(worker) {
                    self.idle.remove(&worker);
                    continue;
                }
                let lease = new_lease();
                let task = self.next_task(lease, worker, barrier, n_workers, now);
                let Some(task) = task else { break 'work };
                give(Assigned { worker, lease, task });
                self.last_served = worker;
                free.push(Reverse((n_held + 1, worker, capacity)));
            }
        }
        free.clear();
        self.free = free;
    }

    /// Adds the next idle workers in turn to `free`. A worker that can take no work now is
    /// considered again at the next tick.
    fn compare_idle(&mut self, capacity: impl Fn(WorkerId) -> Option<u32>, free: &mut Free) {
        let mut unfit = Vec::new();
        let after = (Bound::Excluded(self.last_served), Bound::Unbounded);
        let in_turn = self.idle.range(after).chain(self.idle.range(..=self.last_served));
        for id in in_turn {
            match capacity(*id) {
                Some(capacity) => free.push(Reverse((self.n_held(*id), *id, capacity))),
                None => unfit.push(*id),
            }
            if free.len() == COMPARED {
                break;
            }
        }
        for id in unfit {
            self.idle.remove(&id);
        }
    }

    fn has_work(&self, barrier: Option<u64>) -> bool {
        match self.shards() {
            Some(shards) => shards.has_todo(u32::MAX),
            None => barrier.is_some_and(|barrier| self.ledger.has_todo(barrier)),
        }
    }

    pub(super) fn n_held(&self, worker: WorkerId) -> usize {
        self.pools().map(|pool| pool.n_held(worker)).sum()
    }

    /// Whether `worker` must compute what it holds before it gets more.
    fn must_finish_first(&self, worker: WorkerId) -> bool {
        self.pools().any(|pool| pool.must_finish_first(worker))
    }

    /// The first piece of work that a worker holds.
    pub(super) fn first_held(&self, worker: WorkerId) -> Option<Suspect> {
        let epoch = self.ledger.epoch();
        let batch = self.ledger.pool().first_held(worker);
        let shard = || self.shards().and_then(|shards| shards.first_held(worker));
        batch
            .map(|index| Suspect::Batch(BatchId { epoch, index }))
            .or_else(|| shard().map(|shard| self.suspect_shard(shard)))
    }

    fn next_task(
        &mut self,
        lease: LeaseId,
        worker: WorkerId,
        barrier: Option<u64>,
        n_workers: u32,
        now: Time,
    ) -> Option<Task> {
        let deadline = now + self.timeout;
        if let Some(evaluation) = &mut self.evaluation {
            let range = evaluation.shards.assign(lease, worker, u32::MAX, |_| 1, deadline)?;
            let pass = Pass::Evaluate { eval: evaluation.id, version: evaluation.version };
            let (number, records) = (range.start, evaluation.records(range.start));
            return Some(Task::Shard(Shard { number, records, pass }));
        }
        if let Some(predictions) = &mut self.predictions {
            let number = predictions.assign(lease, worker, u32::MAX, |_| 1, deadline)?.start;
            let records = shard_records(number, self.n_prediction_records, self.records_per_shard);
            let pass = Pass::Predict { folder: self.output.clone() };
            return Some(Task::Shard(Shard { number, records, pass }));
        }
        let (epoch, indices) = self.ledger.assign(lease, worker, n_workers, barrier?, deadline)?;
        Some(Task::Train { epoch, indices, skipped: Vec::new() })
    }

    /// Counts what a worker holds as assigned to it.
    pub(super) fn adopt(&mut self, worker: WorkerId, held: &[HeldLease], now: Time) {
        let deadline = now + self.timeout;
        held.iter().for_each(|held| self.ledger.adopt(worker, held, deadline));
    }

    /// A worker makes progress, and may be able to take more.
    pub(super) fn progressed(&mut self, worker: WorkerId, now: Time) {
        let deadline = now + self.timeout;
        self.pools_mut().for_each(|pool| pool.extend(worker, deadline));
        self.idle.insert(worker);
    }

    /// A lease without progress for this long is overdue.
    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// A worker has pushed `batch`, which waits for the rest of its round; false if that is not new.
    pub(super) fn batch_pushed(&mut self, worker: WorkerId, batch: BatchId, now: Time) -> bool {
        self.progressed(worker, now);
        self.ledger.pushed(worker, batch)
    }

    /// Every partition has applied `batch`; false if that is not new.
    pub(super) fn batch_done(&mut self, batch: BatchId) -> bool {
        self.ledger.done(batch)
    }

    /// Keeps a report until the servers are known to continue: a server may have announced its
    /// applied set before, and the report is not repeated.
    pub(super) fn keep_early(&mut self, batch: BatchId) {
        self.early.insert(batch);
    }

    pub(super) fn forget_early(&mut self) {
        self.early.clear();
    }

    /// Starts from what all servers have applied. `last` is the last batch that any of them has.
    pub(super) fn restore(&mut self, done: &AppliedSet, last: Option<BatchId>) {
        self.ledger.restore(done, last);
        for batch in std::mem::take(&mut self.early) {
            self.ledger.done(batch);
        }
    }

    /// Starts from the first `n_done` batches of all epochs.
    pub(super) fn restore_first(&mut self, n_done: u64) {
        self.ledger.restore_first(n_done);
        self.evaluation = None;
    }

    /// Starts to evaluate the model as it is now; returns its version.
    pub(super) fn begin_evaluation(&mut self, id: EvalId) -> u64 {
        let (version, epoch) = (self.ledger.version(), self.ledger.epoch());
        let (n_records, per_shard) = (self.n_validation_records, self.records_per_shard);
        self.evaluation = Some(Evaluation::new(id, version, epoch, n_records, per_shard));
        version
    }

    /// Ends the evaluation: it is finished, or its model is lost.
    pub(super) fn end_evaluation(&mut self) -> Option<Evaluation> {
        self.evaluation.take()
    }

    pub(super) fn is_evaluating(&self) -> bool {
        self.evaluation.as_ref().is_some_and(|evaluation| !evaluation.shards.is_finished())
    }

    /// A worker evaluated a shard; false if that is not new.
    pub(super) fn eval_done(
        &mut self,
        worker: WorkerId,
        (eval, shard): (EvalId, u32),
        measures: Measures,
        metrics: &[Metric],
        now: Time,
    ) -> bool {
        let evaluation = self.evaluation.as_mut().filter(|e| e.id == eval);
        let Some(evaluation) = evaluation.filter(|_| measures.fits(metrics)) else { return false };
        evaluation.shards.extend(worker, now + self.timeout);
        evaluation.done(shard, measures)
    }

    pub(super) fn begin_predictions(&mut self) {
        if self.predictions.is_none() {
            let n = self.n_prediction_records.div_ceil(self.records_per_shard);
            self.predictions = Some(Pool::new(u32::try_from(n).unwrap_or(u32::MAX)));
        }
    }

    /// A worker predicted a shard; false if that is not new.
    pub(super) fn predict_done(&mut self, worker: WorkerId, shard: u32, now: Time) -> bool {
        self.idle.insert(worker);
        let Some(predictions) = &mut self.predictions else { return false };
        predictions.extend(worker, now + self.timeout);
        predictions.done(shard)
    }

    /// Ends all leases of a worker; returns the work that may have crashed it, which is tried
    /// alone if the worker is suspicious. It may have finished some of it without reporting that.
    pub(super) fn release_worker(
        &mut self,
        worker: WorkerId,
        is_suspicious: bool,
    ) -> BTreeSet<Suspect> {
        let epoch = self.ledger.epoch();
        let open = |leases: &[Lease]| leases.iter().flat_map(Lease::uncomputed).collect::<Vec<_>>();
        let batches = open(&self.ledger.pool_mut().release_worker(worker));
        let shards = open(&self.release_shards(worker));
        if is_suspicious {
            self.ledger.pool_mut().isolate(batches.iter().copied());
            if let Some(pool) = self.shards_mut() {
                pool.isolate(shards.iter().copied());
            }
        }
        let batches = batches.into_iter().map(|index| Suspect::Batch(BatchId { epoch, index }));
        batches.chain(shards.into_iter().map(|shard| self.suspect_shard(shard))).collect()
    }

    /// Ends the leases of a worker on shards.
    pub(super) fn release_shards(&mut self, worker: WorkerId) -> Vec<Lease> {
        self.shards_mut().map(|shards| shards.release_worker(worker)).unwrap_or_default()
    }

    /// A worker returns the batches that it holds, except for these.
    pub(super) fn take_back(&mut self, worker: WorkerId, kept: &[BatchId]) {
        self.ledger.take_back(worker, kept);
    }

    /// A worker failed on `item` of a lease. Only work of that lease can be at fault.
    pub(super) fn failed(
        &mut self,
        worker: WorkerId,
        lease: LeaseId,
        item: u32,
    ) -> Option<Suspect> {
        let epoch = self.ledger.epoch();
        let at_fault = |lease: Lease| {
            if lease.open.contains(&item) { Some(item) } else { lease.open.first().copied() }
        };
        if let Some(ended) = self.ledger.pool_mut().release(worker, lease) {
            return at_fault(ended).map(|index| Suspect::Batch(BatchId { epoch, index }));
        }
        let ended = self.shards_mut()?.release(worker, lease)?;
        at_fault(ended).map(|shard| self.suspect_shard(shard))
    }

    /// Ends every overdue lease. The one that its worker hangs in comes first: workers compute what
    /// they hold in order.
    pub(super) fn expire(&mut self, now: Time) -> Vec<Overdue> {
        let epoch = self.ledger.epoch();
        let overdue = |lease: Lease, suspect: &dyn Fn(u32) -> Suspect| {
            let first = lease.uncomputed().next().or(lease.open.first().copied());
            let first = first.expect("a lease holds something");
            Overdue { worker: lease.worker, lease: lease.id, suspect: suspect(first) }
        };
        let mut batches = self.ledger.expire(now, self.timeout);
        batches.sort_by_key(|lease| lease.uncomputed().next().unwrap_or(u32::MAX));
        let batch = |index| Suspect::Batch(BatchId { epoch, index });
        let mut all: Vec<Overdue> =
            batches.into_iter().map(|lease| overdue(lease, &batch)).collect();
        let shards = self.shards_mut().map(|shards| shards.expire(now)).unwrap_or_default();
        let shard = |shard| self.suspect_shard(shard);
        all.extend(shards.into_iter().map(|lease| overdue(lease, &shard)));
        all
    }

    /// When leases become overdue, the first of each kind.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        self.pools().filter_map(Pool::next_deadline)
    }

    /// The master was paused: all leases get their full time again.
    pub(super) fn extend_all(&mut self, now: Time) {
        let deadline = now + self.timeout;
        self.pools_mut().for_each(|pool| pool.extend_all(deadline));
    }

    pub(super) fn check_invariants(&self) {
        self.pools().for_each(Pool::check_invariants);
    }
}
