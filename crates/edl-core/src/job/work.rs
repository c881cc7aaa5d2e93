// SPDX-License-Identifier: Apache-2.0
//! Work is assigned to workers, finished, and sometimes fails.

use std::collections::BTreeSet;
use std::time::Duration;

use super::assignments::Assigned;
use super::roster::Suspects;
use super::{Command, Effect, End, EventKind, Job, Suspect};
use crate::evaluation::shard_records;
use crate::id::{BatchId, EvalId, Generation, LeaseId, WorkerId};
use crate::metric::Measures;
use crate::servers::ServersPhase;
use crate::text::without_traceback;
use crate::time::Time;
use crate::worker::Task;

/// A worker that failed gets no new work for this long, so others can try the same work.
const PENALTY: Duration = Duration::from_millis(500);
/// A worker whose output has no room on the disk tries again after this pause.
const DISK_PAUSE: Duration = Duration::from_secs(1);
/// A disk may have room for some shards and not for others. That it is full is noted again only if
/// it had room for this long.
const DISK_QUIET: Duration = Duration::from_secs(60);

impl Job {
    /// Assigns what can be assigned.
    pub(super) fn assign_work(&mut self, now: Time) {
        let is_training = self.stages.is_working() || self.completes_round();
        let has_batches = is_training && !self.strategy.trains_in_steps();
        let barrier = has_batches.then(|| self.stages.next_stop());
        let most = self.instances.max_trainers();
        let has_spares = most.is_some() && !self.strategy.trains_in_steps();
        let Self { assignments, roster, strategy, next_number, config, durable, effects, .. } =
            self;
        let may_work = |worker| match has_spares {
            true => roster.is_trainer(worker),
            false => strategy.has_joined(worker),
        };
        let capacity = |worker| roster.capacity(worker, now).filter(|_| may_work(worker));
        let new_lease = || {
            *next_number += 1;
            LeaseId::of(config.term, *next_number)
        };
        let n_workers = u32::try_from(roster.worker_ids().len()).unwrap_or(u32::MAX);
        let n_workers = n_workers.min(most.unwrap_or(u32::MAX));
        let give = |Assigned { worker, lease, mut task }: Assigned| {
            if let Task::Train { epoch, indices, skipped } = &mut task {
                *skipped = durable.skipped_in(*epoch, indices);
            }
            effects.push(Effect::ToWorker(worker, Command::Lease { lease, task }));
        };
        assignments.assign(barrier, n_workers, capacity, new_lease, now, give);
    }

    pub(super) fn batch_done(
        &mut self,
        worker: WorkerId,
        batch: BatchId,
        generation: Generation,
        loss: f32,
        now: Time,
    ) {
        self.assignments.progressed(worker, now);
        // A report from another generation is not about the current parameters.
        if generation != self.servers().generation() {
            return;
        }
        match self.servers().phase() {
            ServersPhase::Serving => {
                if self.assignments.batch_done(batch) {
                    self.trained(batch, loss);
                }
            }
            ServersPhase::Gathering { must_restore: false } => self.assignments.keep_early(batch),
            ServersPhase::Gathering { must_restore: true } | ServersPhase::Loading => {}
        }
    }

    /// A worker has computed a batch, which waits for the rest of its round.
    pub(super) fn batch_pushed(&mut self, worker: WorkerId, batch: BatchId, now: Time) {
        if self.assignments.batch_pushed(worker, batch, now) {
            self.pardon(Suspect::Batch(batch));
        }
    }

    /// A heartbeat shows that a worker has computed something, and how long that took: what it holds
    /// need not be finished, and its next deadlines follow its speed.
    pub(super) fn worker_progressed(&mut self, worker: WorkerId, time: Duration, now: Time) {
        self.assignments.progressed(worker, now);
        match self.strategy.steps_mut() {
            Some(steps) if steps.worlds().is_involved(worker) => steps.progressed(now),
            Some(_) => {}
            None => self.measured(time),
        }
    }

    /// A batch or step took this long.
    pub(super) fn measured(&mut self, time: Duration) {
        self.pace.add(time);
        self.assignments.set_timeout(self.hang_timeout());
    }

    /// A worker that computes nothing for this long hangs.
    pub(super) fn hang_timeout(&self) -> Duration {
        self.pace.hang_timeout(self.config.spec.task_timeout())
    }

    /// A batch is done that was not done before.
    pub(super) fn trained(&mut self, batch: BatchId, loss: f32) {
        self.count_loss(batch, loss);
        self.pardon(Suspect::Batch(batch));
        self.instances.progressed();
        if self.ledger().n_done() > self.furthest {
            self.furthest = self.ledger().n_done();
            self.instances.went_further();
        }
    }

    /// A worker has evaluated a shard. A load ends the evaluation, so the model was the job's.
    pub(super) fn eval_done(
        &mut self,
        worker: WorkerId,
        (eval, shard): (EvalId, u32),
        measures: Measures,
        now: Time,
    ) {
        self.assignments.add_idle([worker]);
        let Some(model) = &self.durable.model else { return };
        if self.assignments.eval_done(worker, (eval, shard), measures, &model.metrics, now) {
            self.pardon(Suspect::EvalShard(shard));
        }
    }

    /// Whether the model that `worker` evaluates is the job's.
    pub(super) fn is_holding(&self, worker: WorkerId) -> bool {
        self.strategy.is_holding(worker, self.roster.incarnation(worker))
    }

    pub(super) fn predict_done(&mut self, worker: WorkerId, shard: u32, now: Time) {
        if self.assignments.predict_done(worker, shard, now) {
            self.pardon(Suspect::PredictShard(shard));
        }
        self.found_room(worker);
    }

    /// A worker wrote predictions, or is gone.
    fn found_room(&mut self, worker: WorkerId) {
        if self.without_room.remove(&worker) && self.without_room.is_empty() {
            self.checkpoints.forget_failure();
        }
    }

    /// A worker finishes what it computes and returns the rest: the job stops, or the worker leaves.
    pub(super) fn work_returned(&mut self, worker: WorkerId, kept: &[BatchId]) {
        if self.stages.stopping().is_none() {
            self.roster.worker_leaves(worker);
        }
        self.assignments.take_back(worker, kept);
    }

    /// Takes all leases of a worker back, and remembers what it was working on.
    pub(super) fn release_worker(&mut self, worker: WorkerId) {
        self.found_room(worker);
        let steps = self.steps_of(worker);
        let is_known = self.roster.incarnation(worker).is_some();
        let is_suspicious = is_known && !self.roster.is_leaving(worker);
        let work = self.assignments.release_worker(worker, is_suspicious);
        let suspects = Suspects { steps, work };
        if !suspects.is_empty() {
            self.roster.suspect(worker, suspects);
        }
    }

    /// A worker crashed, and one of these may be why. If it is not clear which, they are tried one
    /// by one, so that the next crash shows it.
    pub(super) fn worker_crashed(&mut self, worker: WorkerId, suspects: Suspects, how: &str) {
        let Suspects { steps, mut work } = suspects;
        if let (Some(range), Some(control)) = (steps, self.strategy.steps_mut()) {
            control.isolate(range.clone());
            if range.end - range.start > 1 {
                self.instances.crash_is_unclear();
                let (first, last) = (range.start + 1, range.end);
                let text = format!(
                    "one of steps {first} to {last} failed on worker-{worker}: {how}; retrying \
                     them one at a time"
                );
                return self.note(EventKind::WorkFailed, text);
            }
            work.insert(Suspect::Batch(self.ledger().batch_at(range.start)));
        }
        match work.len() {
            0 => {}
            1 => work.into_iter().for_each(|suspect| self.blame(suspect, worker, how)),
            n => {
                self.instances.crash_is_unclear();
                self.change(|facts| work.iter().for_each(|work| _ = facts.count_failure(*work)));
                let named = work.iter().take(4).map(|suspect| match suspect {
                    Suspect::Batch(batch) => format!("batch {batch}"),
                    Suspect::EvalShard(_) | Suspect::PredictShard(_) => self.describe(*suspect),
                });
                let (named, more) = (named.collect::<Vec<_>>(), if n > 4 { ", …" } else { "" });
                let text = format!(
                    "one of {n} tasks failed on worker-{worker}: {how}; retrying each one \
                     separately ({}{more})",
                    named.join(", ")
                );
                self.note(EventKind::WorkFailed, text);
            }
        }
    }

    /// Takes overdue work back. Its worker makes no progress, so it is replaced.
    pub(super) fn expire(&mut self, now: Time) {
        let mut blamed = BTreeSet::new();
        for overdue in self.assignments.expire(now) {
            let (worker, timeout) = (overdue.worker, self.hang_timeout());
            self.effects.push(Effect::ToWorker(worker, Command::Revoke(overdue.lease)));
            if blamed.insert(worker) {
                let why = self.hang(worker, overdue.suspect, timeout, now);
                // It must not get the same work again at once.
                self.roster.pause(worker, now + timeout);
                // Its other leases would expire soon, and be blamed for the first one.
                self.release_worker(worker);
                self.blame(overdue.suspect, worker, &why);
                if self.is_ended() {
                    return;
                }
                self.replace(worker);
            }
        }
    }

    /// A worker reports that it cannot do a piece of work.
    pub(super) fn work_failed(
        &mut self,
        worker: WorkerId,
        lease: LeaseId,
        item: u32,
        error: &str,
        now: Time,
    ) {
        let suspect = self.assignments.failed(worker, lease, item);
        self.roster.pause(worker, now + PENALTY);
        if let Some(suspect) = suspect {
            self.blame(suspect, worker, error);
        }
    }

    /// A worker has no room for its predictions. Nothing is to blame, so it tries again later.
    pub(super) fn output_not_written(
        &mut self,
        worker: WorkerId,
        lease: LeaseId,
        item: u32,
        error: &str,
        now: Time,
    ) {
        self.assignments.failed(worker, lease, item);
        self.roster.pause(worker, now + DISK_PAUSE);
        self.without_room.insert(worker);
        let last = self.last_without_room.insert(worker, now);
        if last.is_none_or(|last| now.since(last) >= DISK_QUIET) {
            self.note_unwritten(error);
        }
        self.checkpoints.failed(error);
    }

    /// Counts a failure of a piece of work. Nothing is skipped silently: work that fails too often
    /// ends the job with an error that names it.
    pub(super) fn blame(&mut self, suspect: Suspect, worker: WorkerId, error: &str) {
        let n_failures = self.change(|facts| facts.count_failure(suspect));
        let what = self.describe(suspect);
        // The traceback of user code is shown once: in the reason for the end of the job.
        let short = without_traceback(error);
        self.note(EventKind::WorkFailed, format!("{what} failed on worker-{worker}: {short}"));
        if n_failures >= self.config.spec.max_batch_failures {
            let times = match n_failures {
                1 => "once, on".to_owned(),
                n => format!("{n} times, most recently on"),
            };
            let why = format!("{what} failed {times} worker-{worker}: {error}");
            self.end(End::Failed(why));
        }
    }

    /// Work that was finished is no longer under suspicion.
    fn pardon(&mut self, suspect: Suspect) {
        if let Some(n) = self.durable.failures.iter().position(|known| known.work == suspect) {
            self.change(|facts| facts.failures.remove(n));
        }
    }

    pub(super) fn describe(&self, suspect: Suspect) -> String {
        let shard = |shard: u32, n_records: u64| {
            let records = shard_records(shard, n_records, self.config.records_per_shard());
            format!("records {} to {}", records.start, records.end.saturating_sub(1))
        };
        match suspect {
            Suspect::Batch(batch) => {
                let records = self.config.spec.plan(self.config.n_records).records(batch);
                let listed: Vec<String> = records.iter().take(8).map(u64::to_string).collect();
                let more = if records.len() > 8 { ", …" } else { "" };
                format!("batch {batch} (records {}{more})", listed.join(", "))
            }
            Suspect::EvalShard(n) => {
                format!("evaluation of {}", shard(n, self.config.n_validation_records))
            }
            Suspect::PredictShard(n) => {
                format!("prediction of {}", shard(n, self.config.n_prediction_records))
            }
        }
    }
}
