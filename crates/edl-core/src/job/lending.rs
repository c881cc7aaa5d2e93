// SPDX-License-Identifier: Apache-2.0
//! Work goes out to workers, results come in.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::{Command, Effect, Job, Stage, Suspect, Work};
use crate::evaluation::shard_records;
use crate::id::{BatchId, EvalId, Generation, LeaseId, WorkerId};
use crate::metric::Measures;
use crate::platform::{InstanceId, Role};
use crate::servers::Phase;
use crate::spec::Mode;
use crate::time::Time;

/// How many hungry workers are compared at once.
const COMPARED: usize = 64;

impl Job {
    /// Lends what can be lent. Of some hungry workers the one that holds least comes first; with
    /// very many workers not all of them are compared for each piece of work.
    pub(super) fn lend(&mut self, now: Time) {
        let n_workers = u32::try_from(self.workers.len()).unwrap_or(u32::MAX);
        while self.has_work() {
            let mut free = self.some_hungry(now);
            if free.is_empty() {
                return;
            }
            while let Some((n_held, worker)) = free.pop_first() {
                let must_wait = n_held > 0 && self.ledger.must_finish_first(worker);
                if n_held >= self.capacity(worker) || must_wait {
                    self.hungry.remove(&worker);
                    continue;
                }
                let lease = LeaseId::of(self.config.term, self.number());
                let Some(work) = self.next_work(lease, worker, n_workers, now) else { return };
                let timeout = self.config.spec.task_timeout();
                let command = Command::Lease { lease, timeout, work };
                self.effects.push(Effect::ToWorker(worker, command));
                self.last_fed = worker;
                free.insert((n_held + 1, worker));
            }
        }
    }

    /// The next hungry workers in turn, by what they hold. Who cannot take work now is hungry
    /// again at the next tick.
    fn some_hungry(&mut self, now: Time) -> BTreeSet<(usize, WorkerId)> {
        let (mut free, mut unfit) = (BTreeSet::new(), Vec::new());
        let after = (Bound::Excluded(self.last_fed), Bound::Unbounded);
        let in_turn = self.hungry.range(after).chain(self.hungry.range(..=self.last_fed));
        for id in in_turn {
            let worker = self.workers.get(id);
            // Under AllReduce only those who hold the state can evaluate it.
            let holds = !self.is_allreduce() || self.worlds.has_formed(*id);
            if holds && worker.is_some_and(|worker| worker.is_ready() && worker.not_before <= now) {
                free.insert((self.n_held(*id), *id));
            } else {
                unfit.push(*id);
            }
            if free.len() == COMPARED {
                break;
            }
        }
        for id in unfit {
            self.hungry.remove(&id);
        }
        free
    }

    fn has_work(&self) -> bool {
        if let Some(evaluation) = &self.evaluation {
            return evaluation.shards.has_todo(u32::MAX);
        }
        if let Some(predictions) = &self.predictions {
            return predictions.has_todo(u32::MAX);
        }
        !self.is_allreduce()
            && self.stage == Stage::Working
            && self.ledger.has_todo(self.barrier.min(self.limit))
    }

    /// In a synchronous round one worker may have to supply every gradient.
    fn capacity(&self, worker: WorkerId) -> usize {
        let capacity = self.workers.get(&worker).map_or(0, |worker| worker.capacity);
        match self.mode() {
            Mode::Sync { grads_to_wait } => capacity.max(grads_to_wait) as usize,
            Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => capacity as usize,
        }
    }

    fn n_held(&self, worker: WorkerId) -> usize {
        let evaluation = self.evaluation.as_ref().map_or(0, |e| e.shards.n_held(worker));
        let predictions = self.predictions.as_ref().map_or(0, |p| p.n_held(worker));
        self.ledger.n_held(worker) + evaluation + predictions
    }

    fn next_work(
        &mut self,
        lease: LeaseId,
        worker: WorkerId,
        n_workers: u32,
        now: Time,
    ) -> Option<Work> {
        let deadline = now + self.config.spec.task_timeout();
        if let Some(evaluation) = &mut self.evaluation {
            let range = evaluation.shards.lend(lease, worker, u32::MAX, |_| 1, deadline)?;
            let (eval, version, shard) = (evaluation.id, evaluation.version, range.start);
            return Some(Work::Eval { eval, version, shard, records: evaluation.records(shard) });
        }
        let per_shard = self.records_per_shard();
        if let Some(predictions) = &mut self.predictions {
            let shard = predictions.lend(lease, worker, u32::MAX, |_| 1, deadline)?.start;
            let records = shard_records(shard, self.config.n_prediction_records, per_shard);
            return Some(Work::Predict { shard, records });
        }
        if self.stage != Stage::Working {
            return None;
        }
        let barrier = self.barrier.min(self.limit);
        let (epoch, range) = self.ledger.lend(lease, worker, n_workers, barrier, now)?;
        Some(Work::Train { epoch, range })
    }

    pub(super) fn batch_done(
        &mut self,
        worker: WorkerId,
        batch: BatchId,
        generation: Generation,
        loss: f32,
        now: Time,
    ) {
        self.ledger.extend(worker, now);
        self.hungry.insert(worker);
        // Of another generation it is no fact about the parameters that we have now.
        if generation != self.servers.generation() {
            return;
        }
        match self.servers.phase() {
            Phase::Serving => {}
            // What a server said of its set may be older than this fact, and nobody repeats it.
            Phase::Gathering { must_restore: false } => {
                self.early.insert(batch);
                return;
            }
            Phase::Gathering { must_restore: true } | Phase::Loading => return,
        }
        if self.ledger.done(batch) {
            self.trained(batch, loss);
        }
    }

    /// A batch is done that was not before.
    pub(super) fn trained(&mut self, batch: BatchId, loss: f32) {
        self.loss = Some(self.loss.map_or(loss, |before| 0.9 * before + 0.1 * loss));
        self.pardon(Suspect::Batch(batch));
        self.instances.progressed();
        if self.ledger.n_done() > self.furthest {
            self.furthest = self.ledger.n_done();
            self.instances.went_further();
        }
    }

    pub(super) fn eval_done(
        &mut self,
        worker: WorkerId,
        eval: EvalId,
        shard: u32,
        generation: Generation,
        measures: Measures,
        now: Time,
    ) {
        self.hungry.insert(worker);
        if generation != self.durable.generation || !self.is_holding(worker) {
            return;
        }
        let timeout = self.config.spec.task_timeout();
        let Some(evaluation) = self.evaluation.as_mut().filter(|e| e.id == eval) else { return };
        let metrics = self.durable.model.as_ref().map(|model| model.metrics.as_slice());
        if metrics.is_some_and(|metrics| measures.fits(metrics)) {
            evaluation.shards.extend(worker, now, timeout);
            if evaluation.done(shard, measures) {
                self.pardon(Suspect::EvalShard(shard));
            }
        }
    }

    /// Whether what `worker` measures is the job's model; under AllReduce it holds that itself.
    pub(super) fn is_holding(&self, worker: WorkerId) -> bool {
        let entry = self.workers.get(&worker);
        !self.is_allreduce()
            || entry.is_some_and(|entry| self.worlds.is_holder(worker, entry.incarnation))
    }

    pub(super) fn predict_done(&mut self, worker: WorkerId, shard: u32, now: Time) {
        self.hungry.insert(worker);
        let timeout = self.config.spec.task_timeout();
        if let Some(predictions) = &mut self.predictions {
            predictions.extend(worker, now, timeout);
            if predictions.done(shard) {
                self.pardon(Suspect::PredictShard(shard));
            }
        }
    }

    /// Takes back what is overdue. Its worker makes no progress, so it is replaced.
    pub(super) fn expire(&mut self, now: Time) {
        let epoch = self.ledger.epoch();
        let first =
            |lease: &crate::pool::Lease| *lease.open.first().expect("a lease holds something");
        let mut overdue: Vec<(LeaseId, WorkerId, Suspect)> = Vec::new();
        for (id, lease) in self.ledger.expire(now) {
            if lease.is_adopted {
                continue; // It was never proved that its worker has it, so nobody is to blame.
            }
            let suspect = Suspect::Batch(BatchId { epoch, index: first(&lease) });
            overdue.push((id, lease.worker, suspect));
        }
        for (id, lease) in
            self.evaluation.as_mut().map(|e| e.shards.expire(now)).unwrap_or_default()
        {
            overdue.push((id, lease.worker, Suspect::EvalShard(first(&lease))));
        }
        for (id, lease) in self.predictions.as_mut().map(|p| p.expire(now)).unwrap_or_default() {
            overdue.push((id, lease.worker, Suspect::PredictShard(first(&lease))));
        }
        let timeout = self.config.spec.task_timeout();
        let mut blamed = BTreeSet::new();
        for (lease, worker, suspect) in overdue {
            self.effects.push(Effect::ToWorker(worker, Command::Revoke(lease)));
            if blamed.insert(worker) && !self.is_ended() {
                // It must not get the same work at once again.
                if let Some(entry) = self.workers.get_mut(&worker) {
                    entry.not_before = now + timeout;
                }
                // Its other leases would follow soon, and would be blamed for the first one.
                self.release_worker(worker);
                self.blame(suspect, worker, &format!("no progress for {timeout:?}"));
                let instance = InstanceId { role: Role::Worker, id: worker.0 };
                self.effects.extend(self.instances.replace(instance).map(Effect::Platform));
            }
        }
    }
}
