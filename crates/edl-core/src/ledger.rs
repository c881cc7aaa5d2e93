// SPDX-License-Identifier: Apache-2.0
//! Which batches of a job are todo, assigned and done, epoch by epoch.
//!
//! Epochs do not overlap: the next one opens when the last batch of this one is done. A batch
//! has a position, counted over all epochs; no batch after a barrier is
//! assigned until all batches before it are done, so the model there has an exact version.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use crate::applied::AppliedSet;
use crate::batch::batch_of;
use crate::id::{BatchId, LeaseId, WorkerId};
use crate::pool::{Lease, Pool};
use crate::runs::Runs;
use crate::spec::Mode;
use crate::time::Time;

/// Work that a worker only claims goes to others unless some of it is done by then.
const PROOF_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of all batches of a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ledger {
    n_batches: u32,
    batches_per_shard: u32,
    /// Batches of one version: the round's size in synchronous mode, else one.
    round: u32,
    /// Rounds are trained one after the other.
    is_sync: bool,
    timeout: Duration,
    epoch: u32,
    pool: Pool,
    /// Below this position some partitions may have applied what others have not.
    touched: u64,
    /// Batches of the open epoch that a worker held when it was lost, one of which may be why.
    /// Each is assigned alone, so the next loss shows which one.
    isolated: BTreeSet<u32>,
}

impl Ledger {
    /// # Panics
    /// If an epoch has no batches.
    #[must_use]
    pub fn new(n_batches: u32, batches_per_shard: u32, mode: Mode, timeout: Duration) -> Self {
        assert!(n_batches > 0, "an epoch has at least one batch");
        let round = match mode {
            Mode::Sync { grads_to_wait } => grads_to_wait,
            Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => 1,
        };
        Self {
            n_batches,
            batches_per_shard,
            round,
            is_sync: matches!(mode, Mode::Sync { .. }),
            timeout,
            epoch: 0,
            pool: Pool::new(n_batches),
            touched: 0,
            isolated: BTreeSet::new(),
        }
    }

    /// Starts again from what all partitions hold. All leases are void. `last` is the last batch
    /// that any partition holds.
    pub fn restore(&mut self, applied: &AppliedSet, last: Option<BatchId>) {
        self.touched = last.map_or(0, |batch| self.position(batch) + 1);
        self.epoch = applied.epoch();
        self.pool = Pool::with_done(self.n_batches, &applied.runs(self.epoch));
        self.isolated.clear();
    }

    /// Starts again from the first `n_done` batches of all epochs. All leases are void.
    ///
    /// # Panics
    /// If there are more epochs than 32 bits count.
    pub fn restore_first(&mut self, n_done: u64) {
        let n_batches = u64::from(self.n_batches);
        self.epoch = u32::try_from(n_done / n_batches).expect("epochs are counted in 32 bits");
        self.touched = n_done;
        let in_epoch = u32::try_from(n_done % n_batches).expect("fewer than `n_batches`");
        self.pool = Pool::with_done(self.n_batches, &Runs::from(0..in_epoch));
        self.isolated.clear();
    }

    /// A lease without progress for so long is overdue.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The batch at `position` among those of all epochs.
    ///
    /// # Panics
    /// If there are more epochs than 32 bits count.
    #[must_use]
    pub fn batch_at(&self, position: u64) -> BatchId {
        batch_of(position, self.n_batches)
    }

    /// The position of `batch` among those of all epochs.
    #[must_use]
    pub fn position(&self, batch: BatchId) -> u64 {
        u64::from(batch.epoch) * u64::from(self.n_batches) + u64::from(batch.index)
    }

    /// Assigns the next batches before `barrier` to one of `n_workers` workers.
    pub fn assign(
        &mut self,
        lease: LeaseId,
        worker: WorkerId,
        n_workers: u32,
        barrier: u64,
        now: Time,
    ) -> Option<(u32, Range<u32>)> {
        let limit = self.limit_in_epoch(barrier);
        let left = limit.saturating_sub(self.pool.n_done());
        let deadline = now + self.timeout;
        // Towards a barrier leases get smaller, so no worker waits long for the last one.
        let fair = left.div_ceil(4 * n_workers.max(1)).max(1);
        let (shard, is_sync) = (self.batches_per_shard, self.is_sync);
        let isolated = &self.isolated;
        let most = |start: u32| match isolated.range(start..).next() {
            _ if is_sync => 1,
            Some(&index) if index == start => 1,
            Some(&index) => fair.min(shard - start % shard).min(index - start),
            None => fair.min(shard - start % shard),
        };
        let range = self.pool.assign(lease, worker, limit, most, deadline)?;
        Some((self.epoch, range))
    }

    /// The items of the open epoch that may be assigned: below the barrier and, in synchronous mode,
    /// of the open round, so no worker waits for a round that has not begun.
    fn limit_in_epoch(&self, barrier: u64) -> u32 {
        let limit = barrier.saturating_sub(self.start()).min(u64::from(self.n_batches));
        let limit = u32::try_from(limit).expect("at most n_batches");
        if !self.is_sync {
            return limit;
        }
        let n_rounds_done = self.pool.n_done() / self.round;
        limit.min((n_rounds_done + 1).saturating_mul(self.round))
    }

    /// Assigns these batches alone from now on. A round needs all its batches at once, maybe by
    /// one worker, so there it cannot be.
    pub fn isolate(&mut self, indices: impl IntoIterator<Item = u32>) {
        if !self.is_sync {
            self.isolated.extend(indices.into_iter().filter(|index| !self.pool.is_done(*index)));
        }
    }

    /// Whether `worker`, which holds something, must finish it first: that or the next batch is
    /// to be trained alone.
    #[must_use]
    pub fn must_finish_first(&self, worker: WorkerId) -> bool {
        let is_isolated = |index: &u32| self.isolated.contains(index);
        let holds_isolated = || {
            let leases = self.pool.held_by(worker).filter_map(|lease| self.pool.lease(lease));
            leases.flat_map(|lease| &lease.open).any(is_isolated)
        };
        !self.isolated.is_empty()
            && (self.pool.first_todo().as_ref().is_some_and(is_isolated) || holds_isolated())
    }

    /// Whether anything before `barrier` waits for a worker.
    #[must_use]
    pub fn has_todo(&self, barrier: u64) -> bool {
        self.pool.has_todo(self.limit_in_epoch(barrier))
    }

    /// Records that every partition has applied `batch`; false if that is not new.
    pub fn done(&mut self, batch: BatchId) -> bool {
        if batch.epoch != self.epoch || !self.pool.done(batch.index) {
            return false;
        }
        self.isolated.remove(&batch.index);
        if self.pool.is_finished() {
            self.epoch += 1;
            self.pool = Pool::new(self.n_batches);
        }
        true
    }

    /// Records what a worker claims to work on.
    pub fn adopt(
        &mut self,
        lease: LeaseId,
        worker: WorkerId,
        epoch: u32,
        items: &[u32],
        now: Time,
    ) {
        if epoch == self.epoch {
            self.pool.adopt(lease, worker, items, now + self.timeout.min(PROOF_TIMEOUT));
        }
    }

    pub fn release(&mut self, lease: LeaseId) -> Option<Lease> {
        self.pool.release(lease)
    }

    pub fn release_worker(&mut self, worker: WorkerId) -> Vec<Lease> {
        self.pool.release_worker(worker)
    }

    pub fn expire(&mut self, now: Time) -> Vec<(LeaseId, Lease)> {
        self.pool.expire(now)
    }

    /// A worker that finishes batches keeps its other leases.
    pub fn extend(&mut self, worker: WorkerId, now: Time) {
        self.pool.extend(worker, now, self.timeout);
    }

    /// The master did not listen for some time: all leases get their full time again.
    pub fn extend_all(&mut self, now: Time) {
        self.pool.extend_all(now, self.timeout);
    }

    /// Whether everything before `barrier` is done and nothing is in progress: the model
    /// is exactly that of `n_done` batches.
    #[must_use]
    pub fn is_reached(&self, barrier: u64) -> bool {
        self.n_done() >= barrier && self.pool.n_leases() == 0 && !self.has_todo(barrier)
    }

    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.pool.next_deadline()
    }

    #[must_use]
    pub fn n_held(&self, worker: WorkerId) -> usize {
        self.pool.n_held(worker)
    }

    /// The first batch of this epoch that a worker holds.
    #[must_use]
    pub fn first_held(&self, worker: WorkerId) -> Option<u32> {
        self.pool.first_held(worker)
    }

    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    #[must_use]
    pub fn lease(&self, lease: LeaseId) -> Option<&Lease> {
        self.pool.lease(lease)
    }

    #[must_use]
    pub fn is_done(&self, batch: BatchId) -> bool {
        batch.epoch < self.epoch || (batch.epoch == self.epoch && self.pool.is_done(batch.index))
    }

    /// Batches done in the open epoch.
    #[must_use]
    pub fn n_done_in_epoch(&self) -> u32 {
        self.pool.n_done()
    }

    /// Position of the open epoch's first batch.
    fn start(&self) -> u64 {
        u64::from(self.epoch) * u64::from(self.n_batches)
    }

    /// Batches done, over all epochs.
    #[must_use]
    pub fn n_done(&self) -> u64 {
        self.start() + u64::from(self.pool.n_done())
    }

    /// The version of the model: updates made by the batches done so far.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version_at(self.n_done())
    }

    /// The version of a model that has applied the batches before `position`.
    #[must_use]
    pub fn version_at(&self, position: u64) -> u64 {
        let n_batches = u64::from(self.n_batches);
        let in_epoch = (position % n_batches) / u64::from(self.round);
        position / n_batches * self.versions_per_epoch() + in_epoch
    }

    #[must_use]
    pub fn versions_per_epoch(&self) -> u64 {
        u64::from(self.n_batches.div_ceil(self.round))
    }

    /// The position at which the model has version `version`.
    #[must_use]
    pub fn position_of(&self, version: u64) -> u64 {
        let epoch = version / self.versions_per_epoch();
        let in_epoch = version % self.versions_per_epoch() * u64::from(self.round);
        epoch.saturating_mul(u64::from(self.n_batches)).saturating_add(in_epoch)
    }

    /// The first position that nothing assigned or applied anywhere so far lies behind, at a
    /// version's border: the next one at which the model can be that of an exact version.
    #[must_use]
    pub fn frontier(&self) -> u64 {
        let position = self.touched.max(self.start() + u64::from(self.pool.frontier()));
        let (n_batches, round) = (u64::from(self.n_batches), u64::from(self.round));
        let in_epoch = (position % n_batches).div_ceil(round) * round;
        position / n_batches * n_batches + in_epoch.min(n_batches)
    }

    /// Whether the model can be that of an exact version at `position`.
    #[must_use]
    pub fn can_be_exact(&self, position: u64) -> bool {
        position >= self.touched && position >= self.n_done()
    }

    pub fn check_invariants(&self) {
        self.pool.check_invariants();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn ledger(n_batches: u32, mode: Mode) -> Ledger {
        Ledger::new(n_batches, 8, mode, TIMEOUT)
    }

    #[test]
    fn nothing_is_assigned_past_a_barrier_until_all_before_it_is_done() {
        let mut ledger = ledger(20, Mode::Async);
        let worker = WorkerId(0);
        let mut assigned = Vec::new();
        for lease in 0.. {
            let Some((_, range)) = ledger.assign(LeaseId(lease), worker, 1, 7, Time::ZERO) else {
                break;
            };
            assigned.extend(range);
        }
        assert_eq!(assigned, (0..7).collect::<Vec<_>>());
        for index in assigned {
            ledger.done(BatchId { epoch: 0, index });
        }
        assert_eq!(ledger.n_done(), 7);
        assert!(ledger.assign(LeaseId(99), worker, 1, 14, Time::ZERO).is_some());
    }

    #[test]
    fn a_round_opens_when_the_one_before_is_done_and_the_last_may_be_smaller() {
        let mut ledger = ledger(5, Mode::Sync { grads_to_wait: 2 });
        let mut sizes = Vec::new();
        let mut lease = 0;
        while ledger.epoch() == 0 {
            let mut round = Vec::new();
            while let Some((epoch, range)) =
                ledger.assign(LeaseId(lease), WorkerId(0), 1, u64::MAX, Time::ZERO)
            {
                lease += 1;
                round.extend(range.map(|index| BatchId { epoch, index }));
            }
            sizes.push(round.len());
            round.into_iter().for_each(|batch| assert!(ledger.done(batch)));
        }
        assert_eq!(sizes, [2, 2, 1]);
        assert_eq!(ledger.version(), 3);
        assert_eq!((ledger.position_of(3), ledger.position_of(4)), (5, 7));
    }

    #[test]
    fn a_synchronous_round_of_one_is_a_round_too() {
        let mut ledger = ledger(5, Mode::Sync { grads_to_wait: 1 });
        let mut assign =
            |lease| ledger.assign(LeaseId(lease), WorkerId(0), 1, u64::MAX, Time::ZERO);
        assert_eq!(
            (assign(0), assign(1)),
            (Some((0, 0..1)), None),
            "the next would wait for this one"
        );
    }

    #[test]
    fn an_isolated_batch_is_assigned_alone_until_it_is_done() {
        let mut ledger = ledger(60, Mode::Async);
        let [first, second] = [WorkerId(0), WorkerId(1)];
        assert_eq!(ledger.assign(LeaseId(0), first, 1, u64::MAX, Time::ZERO), Some((0, 0..8)));
        let lost = ledger.release_worker(first);
        ledger.isolate(lost.iter().flat_map(|lease| &lease.open).copied().skip(2).take(2));
        let mut assign = |lease, worker| {
            ledger.assign(LeaseId(lease), worker, 1, u64::MAX, Time::ZERO).unwrap().1
        };
        assert_eq!((assign(1, first), assign(2, second)), (0..2, 2..3));
        assert_eq!((assign(3, first), assign(4, first)), (3..4, 4..8));
        assert!(ledger.must_finish_first(second), "it holds one");
        assert!(ledger.must_finish_first(first));
        for index in 2..4 {
            ledger.done(BatchId { epoch: 0, index });
        }
        assert!(!ledger.must_finish_first(first));
    }

    #[test]
    fn a_restore_brings_back_exactly_what_the_servers_hold() {
        let mut ledger = ledger(4, Mode::Async);
        let mut applied = AppliedSet::new(4);
        for (epoch, index) in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)] {
            applied.insert(BatchId { epoch, index });
        }
        ledger.restore(&applied, None);
        assert_eq!((ledger.epoch(), ledger.n_done()), (1, 5));
        assert_eq!(
            ledger.assign(LeaseId(0), WorkerId(0), 1, u64::MAX, Time::ZERO),
            Some((1, 0..1)),
        );
        ledger.check_invariants();
        // A partition that is ahead of the others moves the next exact version.
        assert_eq!((ledger.frontier(), ledger.can_be_exact(6)), (7, true));
        ledger.restore(&applied, Some(BatchId { epoch: 2, index: 0 }));
        assert_eq!((ledger.frontier(), ledger.can_be_exact(8)), (9, false));
    }
}
