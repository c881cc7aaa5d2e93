// SPDX-License-Identifier: Apache-2.0
//! Which batches of a job are todo, assigned and done, epoch by epoch.
//!
//! Epochs do not overlap: the next one opens when the last batch of this one is done. A batch
//! has a position, counted over all epochs; no batch after a barrier is
//! assigned until all batches before it are done, so the model there has an exact version.

use std::ops::Range;
use std::time::Duration;

use crate::applied::AppliedSet;
use crate::batch::batch_of;
use crate::id::{BatchId, LeaseId, WorkerId};
use crate::job::HeldLease;
use crate::pool::{Lease, Pool};
use crate::runs::Runs;
use crate::spec::Mode;
use crate::time::Time;

/// The state of all batches of a job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ledger {
    n_batches: u32,
    batches_per_shard: u32,
    /// Batches of one version: the round's size in synchronous mode, else one.
    round: u32,
    /// Rounds are trained one after the other.
    is_sync: bool,
    epoch: u32,
    pool: Pool,
    /// Below this position some partitions may have applied what others have not.
    touched: u64,
}

impl Ledger {
    /// # Panics
    /// If an epoch has no batches.
    #[must_use]
    pub fn new(n_batches: u32, batches_per_shard: u32, mode: Mode) -> Self {
        assert!(n_batches > 0, "an epoch has at least one batch");
        let round = match mode {
            Mode::Sync { grads_to_wait } => grads_to_wait,
            Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => 1,
        };
        Self {
            n_batches,
            batches_per_shard,
            round,
            is_sync: mode.is_sync(),
            epoch: 0,
            pool: Pool::new(n_batches),
            touched: 0,
        }
    }

    /// Starts again from what all partitions hold. All leases are void. `last` is the last batch
    /// that any partition holds.
    pub fn restore(&mut self, applied: &AppliedSet, last: Option<BatchId>) {
        self.touched = last.map_or(0, |batch| self.position(batch) + 1);
        self.epoch = applied.epoch();
        self.pool = Pool::with_done(self.n_batches, &applied.runs(self.epoch));
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
        deadline: Time,
    ) -> Option<(u32, Range<u32>)> {
        let limit = self.limit_in_epoch(barrier);
        let left = limit.saturating_sub(self.pool.n_done());
        // Towards a barrier leases get smaller, so no worker waits long for the last one.
        let fair = left.div_ceil(4 * n_workers.max(1)).max(1);
        let (shard, is_sync) = (self.batches_per_shard, self.is_sync);
        let most = |start: u32| if is_sync { 1 } else { fair.min(shard - start % shard) };
        let range = self.pool.assign(lease, worker, limit, most, deadline)?;
        Some((self.epoch, range))
    }

    /// The items of the open epoch that may be assigned: below the barrier and, in synchronous mode,
    /// of the open round, so no worker waits for a round that has not begun.
    fn limit_in_epoch(&self, barrier: u64) -> u32 {
        let limit = barrier.saturating_sub(self.start()).min(u64::from(self.n_batches));
        let limit = u32::try_from(limit).expect("at most n_batches");
        if self.is_sync { limit.min(self.round_end()) } else { limit }
    }

    /// One above the last batch of the open round.
    fn round_end(&self) -> u32 {
        let n_rounds_done = self.pool.n_done() / self.round;
        (n_rounds_done + 1).saturating_mul(self.round)
    }

    /// Notes that `worker` has pushed a batch, which waits for the rest of its round.
    pub fn pushed(&mut self, worker: WorkerId, batch: BatchId) -> bool {
        batch.epoch == self.epoch && self.pool.computed(worker, batch.index)
    }

    /// A worker returns the batches that it holds, except for these.
    pub fn take_back(&mut self, worker: WorkerId, kept: &[BatchId]) {
        let epoch = self.epoch;
        self.pool.take_back(worker, |index| kept.contains(&BatchId { epoch, index }));
    }

    /// Whether rounds are trained one after the other.
    #[must_use]
    pub fn is_sync(&self) -> bool {
        self.is_sync
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
        if self.pool.is_finished() {
            self.epoch += 1;
            self.pool = Pool::new(self.n_batches);
        }
        true
    }

    /// Records what a worker claims to work on.
    pub fn adopt(&mut self, worker: WorkerId, held: &HeldLease, deadline: Time) {
        if held.epoch == self.epoch {
            self.pool.adopt(held.lease, worker, &held.indices, deadline);
        }
    }

    /// The batches of the open epoch and their leases.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn pool_mut(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// Ends every overdue lease. A worker that waits for others to finish its round is in time.
    pub fn expire(&mut self, now: Time, timeout: Duration) -> Vec<Lease> {
        let is_late = self.pool.next_deadline().is_some_and(|deadline| deadline <= now);
        let waits = || self.pool.has_todo(self.round_end()) || self.pool.has_uncomputed();
        if is_late && self.is_sync && waits() {
            self.pool.extend_computed(now + timeout);
        }
        self.pool.expire(now)
    }

    /// Whether everything before `barrier` is done and nothing is in progress: the model
    /// is exactly that of `n_done` batches.
    #[must_use]
    pub fn is_reached(&self, barrier: u64) -> bool {
        self.n_done() >= barrier && self.pool.n_assigned() == 0 && !self.has_todo(barrier)
    }

    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
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

    /// The first position after everything that was assigned or applied anywhere so far, at the
    /// border of a version: the next one at which the model can be that of an exact version.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(n_batches: u32, mode: Mode) -> Ledger {
        Ledger::new(n_batches, 8, mode)
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
        let lost = ledger.pool_mut().release_worker(first);
        ledger
            .pool_mut()
            .isolate(lost.iter().flat_map(|lease| &lease.open).copied().skip(2).take(2));
        let mut assign = |lease, worker| {
            ledger.assign(LeaseId(lease), worker, 1, u64::MAX, Time::ZERO).unwrap().1
        };
        assert_eq!((assign(1, first), assign(2, second)), (0..2, 2..3));
        assert_eq!((assign(3, first), assign(4, first)), (3..4, 4..8));
        assert!(ledger.pool().must_finish_first(second), "it holds one");
        assert!(ledger.pool().must_finish_first(first));
        for index in 2..4 {
            ledger.done(BatchId { epoch: 0, index });
        }
        assert!(!ledger.pool().must_finish_first(first));
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
        ledger.pool().check_invariants();
        // A partition that is ahead of the others moves the next exact version.
        assert_eq!((ledger.frontier(), ledger.can_be_exact(6)), (7, true));
        ledger.restore(&applied, Some(BatchId { epoch: 2, index: 0 }));
        assert_eq!((ledger.frontier(), ledger.can_be_exact(8)), (9, false));
    }
}
