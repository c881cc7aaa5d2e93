// SPDX-License-Identifier: Apache-2.0
//! Which work is assigned to which worker: batches, evaluation shards and prediction shards.
//!
//! Work is todo, assigned or done. A lease that ends early makes its open work todo again.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::time::Duration;

use super::{Config, HeldLease, Suspect, Work};
use crate::applied::AppliedSet;
use crate::evaluation::{Evaluation, shard_records};
use crate::id::{BatchId, EvalId, LeaseId, WorkerId};
use crate::ledger::Ledger;
use crate::metric::{Measures, Metric};
use crate::pool::{Lease, Pool};
use crate::spec::Mode;
use crate::time::Time;

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
    records_per_shard: u64,
    timeout: Duration,
    /// In a synchronous round, one worker may have to supply every gradient.
    min_capacity: u32,
    /// Workers that may hold fewer leases than they can; on each tick, all of them.
    idle: BTreeSet<WorkerId>,
    /// The last worker that was assigned something: the one after it is next.
    last_served: WorkerId,
    /// Batches reported before it is known whether the servers still hold them.
    early: BTreeSet<BatchId>,
}

/// A lease that was just made.
pub(super) struct Assigned {
    pub worker: WorkerId,
    pub lease: LeaseId,
    pub work: Work,
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
            ledger: Ledger::new(config.n_batches(), spec.num_minibatches_per_task, mode, timeout),
            evaluation: None,
            predictions: None,
            n_validation_records: config.n_validation_records,
            n_prediction_records: config.n_prediction_records,
            records_per_shard: config.records_per_shard(),
            timeout,
            min_capacity,
            idle: BTreeSet::new(),
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

    fn suspect_shard(&self, shard: u32) -> Suspect {
        match self.evaluation {
            Some(_) => Suspect::EvalShard(shard),
            None => Suspect::PredictShard(shard),
        }
    }

    /// These workers may be able to take more work.
    pub(super) fn add_idle(&mut self, workers: impl IntoIterator<Item = WorkerId>) {
        self.idle.extend(workers);
    }

    /// Assigns all work that idle workers can take, batches only before `barrier`. `capacity` is
    /// how many leases a worker can hold; none if it can take no work now. The idle worker that
    /// holds the least is first; with very many workers, only some are compared for each lease.
    pub(super) fn assign(
        &mut self,
        barrier: Option<u64>,
        n_workers: u32,
        capacity: impl Fn(WorkerId) -> Option<u32>,
        mut new_lease: impl FnMut() -> LeaseId,
        now: Time,
    ) -> Vec<Assigned> {
        let mut assigned = Vec::new();
        while self.has_work(barrier) {
            let mut free = self.some_idle(&capacity);
            if free.is_empty() {
                break;
            }
            while let Some((n_held, worker)) = free.pop_first() {
                let most = capacity(worker).unwrap_or(0).max(self.min_capacity) as usize;
                let must_wait = n_held > 0 && self.ledger.must_finish_first(worker);
                if n_held >= most || must_wait {
                    self.idle.remove(&worker);
                    continue;
                }
                let lease = new_lease();
                let work = self.next_work(lease, worker, barrier, n_workers, now);
                let Some(work) = work else { return assigned };
                assigned.push(Assigned { worker, lease, work });
                self.last_served = worker;
                free.insert((n_held + 1, worker));
            }
        }
        assigned
    }

    /// The next idle workers in turn, by what they hold. A worker that can take no work now is
    /// considered again at the next tick.
    fn some_idle(
        &mut self,
        capacity: impl Fn(WorkerId) -> Option<u32>,
    ) -> BTreeSet<(usize, WorkerId)> {
        let (mut free, mut unfit) = (BTreeSet::new(), Vec::new());
        let after = (Bound::Excluded(self.last_served), Bound::Unbounded);
        let in_turn = self.idle.range(after).chain(self.idle.range(..=self.last_served));
        for id in in_turn {
            match capacity(*id) {
                Some(_) => _ = free.insert((self.n_held(*id), *id)),
                None => unfit.push(*id),
            }
            if free.len() == COMPARED {
                break;
            }
        }
        for id in unfit {
            self.idle.remove(&id);
        }
        free
    }

    fn has_work(&self, barrier: Option<u64>) -> bool {
        match self.shards() {
            Some(shards) => shards.has_todo(u32::MAX),
            None => barrier.is_some_and(|barrier| self.ledger.has_todo(barrier)),
        }
    }

    pub(super) fn n_held(&self, worker: WorkerId) -> usize {
        self.ledger.n_held(worker) + self.shards().map_or(0, |shards| shards.n_held(worker))
    }

    /// The first piece of work that a worker holds.
    pub(super) fn first_held(&self, worker: WorkerId) -> Option<Suspect> {
        let epoch = self.ledger.epoch();
        let batch = self.ledger.first_held(worker);
        let shard = || self.shards().and_then(|shards| shards.first_held(worker));
        batch
            .map(|index| Suspect::Batch(BatchId { epoch, index }))
            .or_else(|| shard().map(|shard| self.suspect_shard(shard)))
    }

    fn next_work(
        &mut self,
        lease: LeaseId,
        worker: WorkerId,
        barrier: Option<u64>,
        n_workers: u32,
        now: Time,
    ) -> Option<Work> {
        let deadline = now + self.timeout;
        if let Some(evaluation) = &mut self.evaluation {
            let range = evaluation.shards.assign(lease, worker, u32::MAX, |_| 1, deadline)?;
            let (eval, version, shard) = (evaluation.id, evaluation.version, range.start);
            return Some(Work::Eval { eval, version, shard, records: evaluation.records(shard) });
        }
        if let Some(predictions) = &mut self.predictions {
            let shard = predictions.assign(lease, worker, u32::MAX, |_| 1, deadline)?.start;
            let records = shard_records(shard, self.n_prediction_records, self.records_per_shard);
            return Some(Work::Predict { shard, records });
        }
        let (epoch, range) = self.ledger.assign(lease, worker, n_workers, barrier?, now)?;
        Some(Work::Train { epoch, range, skipped: Vec::new() })
    }

    /// Counts what a worker claims to hold as assigned to it.
    pub(super) fn adopt(&mut self, worker: WorkerId, held: Vec<HeldLease>, now: Time) {
        for held in held {
            self.ledger.adopt(held.lease, worker, held.epoch, &held.indices, now);
        }
    }

    /// A worker makes progress, and may be able to take more.
    pub(super) fn progressed(&mut self, worker: WorkerId, now: Time) {
        self.ledger.extend(worker, now);
        let timeout = self.timeout;
        if let Some(shards) = self.shards_mut() {
            shards.extend(worker, now, timeout);
        }
        self.idle.insert(worker);
    }

    /// A lease without progress for so long is overdue.
    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
        self.ledger.set_timeout(timeout);
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
        evaluation.shards.extend(worker, now, self.timeout);
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
        predictions.extend(worker, now, self.timeout);
        predictions.done(shard)
    }

    /// Ends all leases of a worker; returns the work that it was doing. `step` is the step that
    /// it was training. Batches that may have crashed it are tried alone.
    pub(super) fn release_worker(
        &mut self,
        worker: WorkerId,
        is_suspicious: bool,
        step: Option<Suspect>,
    ) -> Option<Suspect> {
        let epoch = self.ledger.epoch();
        let first = |leases: &[Lease]| leases.first().and_then(|lease| lease.open.first().copied());
        let batches = self.ledger.release_worker(worker);
        if is_suspicious {
            // It may have finished the first of them without reporting it: any may be the cause.
            self.ledger.isolate(batches.iter().flat_map(|lease| &lease.open).copied());
        }
        let batch = first(&batches).map(|index| Suspect::Batch(BatchId { epoch, index }));
        let shard = first(&self.release_shards(worker));
        batch.or(step).or(shard.map(|shard| self.suspect_shard(shard)))
    }

    /// Ends the leases of a worker on shards.
    pub(super) fn release_shards(&mut self, worker: WorkerId) -> Vec<Lease> {
        self.shards_mut().map(|shards| shards.release_worker(worker)).unwrap_or_default()
    }

    /// A worker failed on `item` of a lease. Only work of that lease can be at fault.
    pub(super) fn failed(&mut self, lease: LeaseId, item: u32) -> Option<Suspect> {
        let epoch = self.ledger.epoch();
        let at_fault = |lease: Lease| {
            if lease.open.contains(&item) { Some(item) } else { lease.open.first().copied() }
        };
        if let Some(ended) = self.ledger.release(lease) {
            return at_fault(ended).map(|index| Suspect::Batch(BatchId { epoch, index }));
        }
        let ended = self.shards_mut()?.release(lease)?;
        at_fault(ended).map(|shard| self.suspect_shard(shard))
    }

    /// Ends every overdue lease.
    pub(super) fn expire(&mut self, now: Time) -> Vec<Overdue> {
        let epoch = self.ledger.epoch();
        let overdue = |(lease, ended): (LeaseId, Lease), suspect: &dyn Fn(u32) -> Suspect| {
            let first = *ended.open.first().expect("a lease holds something");
            Overdue { worker: ended.worker, lease, suspect: suspect(first) }
        };
        // It was never proved that a worker holds what it only claimed, so it is not to blame.
        let batches = self.ledger.expire(now).into_iter().filter(|(_, lease)| !lease.is_adopted);
        let batch = |index| Suspect::Batch(BatchId { epoch, index });
        let mut all: Vec<Overdue> = batches.map(|ended| overdue(ended, &batch)).collect();
        let shards = self.shards_mut().map(|shards| shards.expire(now)).unwrap_or_default();
        let shard = |shard| self.suspect_shard(shard);
        all.extend(shards.into_iter().map(|ended| overdue(ended, &shard)));
        all
    }

    /// When leases become overdue, the first of each kind.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let shards = self.shards().and_then(Pool::next_deadline);
        self.ledger.next_deadline().into_iter().chain(shards)
    }

    /// The master was paused: all leases get their full time again.
    pub(super) fn extend_all(&mut self, now: Time) {
        self.ledger.extend_all(now);
        let timeout = self.timeout;
        if let Some(shards) = self.shards_mut() {
            shards.extend_all(now, timeout);
        }
    }

    pub(super) fn check_invariants(&self) {
        self.ledger.check_invariants();
        if let Some(shards) = self.shards() {
            shards.check_invariants();
        }
    }
}
