// SPDX-License-Identifier: Apache-2.0
//! Which records are in a batch: a function of the job's plan alone, never of events.
//!
//! Records are numbered through all files of the data set. Consecutive records form shards;
//! an epoch visits the shards in a seeded order and, inside a shard, the records in a seeded
//! order. Only the last shard can be short, and it always comes last, so batch numbers
//! map to shards by division.
//!
//! A job keeps the version of the plan that it was started with. Version 1 shuffles tables of all
//! shards and of all records of a shard; version 2 computes each place by itself, so a batch costs
//! the same however many records there are.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::id::BatchId;
use crate::lanes;
use crate::permutation::Permutation;
use crate::rng;
use crate::runs::Runs;

/// The version of the plan of new jobs.
pub const NEWEST: u32 = 2;
/// The version of the plan of jobs whose description names none.
pub const OLDEST: u32 = 1;

/// Everything that determines the content of batches.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BatchPlan {
    pub version: u32,
    pub n_records: u64,
    pub minibatch_size: u32,
    /// Batches per shard: what one lease usually assigns, and how far records are shuffled.
    pub batches_per_shard: u32,
    pub seed: u64,
    pub shuffle: bool,
}

/// The batch that is trained after `step` steps, where each step trains one batch.
///
/// # Panics
/// If that is in epoch 2^32 or later.
#[must_use]
pub fn batch_of(step: u64, n_batches: u32) -> BatchId {
    let n_batches = u64::from(n_batches);
    let narrow = |number: u64| u32::try_from(number).expect("a job has fewer than 2^32 epochs");
    BatchId { epoch: narrow(step / n_batches), index: narrow(step % n_batches) }
}

impl BatchPlan {
    fn records_per_shard(&self) -> u64 {
        u64::from(self.minibatch_size) * u64::from(self.batches_per_shard)
    }

    /// Batches of one epoch.
    ///
    /// # Panics
    /// If an epoch would have 2^32 batches or more; `JobSpec::check` refuses such jobs.
    #[must_use]
    pub fn n_batches(&self) -> u32 {
        u32::try_from(self.n_records.div_ceil(u64::from(self.minibatch_size)))
            .expect("an epoch has fewer than 2^32 batches")
    }

    /// Records of a batch: the last one of an epoch may be short.
    #[must_use]
    pub fn n_records_of(&self, index: u32) -> u32 {
        let before = u64::from(index) * u64::from(self.minibatch_size);
        let left = self.n_records.saturating_sub(before);
        u32::try_from(left).unwrap_or(u32::MAX).min(self.minibatch_size)
    }

    /// Records of some batches of an epoch.
    #[must_use]
    pub fn n_records_in(&self, batches: &Runs) -> u64 {
        let size = u64::from(self.minibatch_size);
        // Only the last batch of an epoch can be short.
        let before = u64::from(batches.len().saturating_sub(1)) * size;
        batches.end().checked_sub(1).map_or(0, |last| before + u64::from(self.n_records_of(last)))
    }

    /// The shard that holds a batch's records, as a range of record numbers.
    fn shard(&self, batch: BatchId) -> Range<u64> {
        let slot = u64::from(batch.index / self.batches_per_shard);
        let n_full = self.n_records / self.records_per_shard();
        let shard = if slot < n_full {
            let key = rng::key(&[self.seed, 1, u64::from(batch.epoch)]);
            self.order(n_full, key, slot..slot + 1)[0]
        } else {
            slot
        };
        let start = shard * self.records_per_shard();
        start..self.n_records.min(start + self.records_per_shard())
    }

    /// The numbers of the records of `batch`, in training order.
    ///
    /// # Panics
    /// If the batch is not part of this plan.
    #[must_use]
    pub fn records(&self, batch: BatchId) -> Vec<u64> {
        self.records_at(batch, 0..self.n_records_of(batch.index) as usize)
    }

    /// The numbers of the records at `places` of `batch`.
    ///
    /// # Panics
    /// If the batch or a place is not part of this plan.
    #[must_use]
    pub fn records_at(&self, batch: BatchId, places: Range<usize>) -> Vec<u64> {
        let n_records = self.n_records_of(batch.index) as usize;
        let is_planned = batch.index < self.n_batches() && places.end <= n_records;
        assert!(is_planned, "places {places:?} of batch {batch} are not part of this plan");
        let shard = self.shard(batch);
        let in_shard = batch.index % self.batches_per_shard;
        let first = u64::from(in_shard) * u64::from(self.minibatch_size);
        let places = first + places.start as u64..first + places.end as u64;
        let key = rng::key(&[self.seed, 2, u64::from(batch.epoch), shard.start]);
        let order = self.order(shard.end - shard.start, key, places);
        order.into_iter().map(|place| shard.start + place).collect()
    }

    /// The numbers of the records of one of `n_lanes` lanes; none for a lane without records.
    ///
    /// # Panics
    /// If the plan has no such batch.
    #[must_use]
    pub fn records_of_lane(&self, batch: BatchId, lane: u32, n_lanes: u32) -> Option<Vec<u64>> {
        let n_records = self.n_records_of(batch.index) as usize;
        let share = lanes::share_of(lane, n_records, n_lanes, self.minibatch_size / n_lanes)?;
        Some(self.records_at(batch, share))
    }

    /// The numbers at `places` when those below `n` are shuffled.
    fn order(&self, n: u64, key: u64, places: Range<u64>) -> Vec<u64> {
        if !self.shuffle {
            return places.collect();
        }
        if self.version == OLDEST {
            let index = |number: u64| usize::try_from(number).expect("a table fits in memory");
            let table = rng::permutation(index(n), key);
            return table[index(places.start)..index(places.end)]
                .iter()
                .map(|n| (*n).into())
                .collect();
        }
        let order = Permutation::new(n, key);
        places.map(|place| order.at(place)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(version: u32, n_records: u64, shuffle: bool) -> BatchPlan {
        BatchPlan { version, n_records, minibatch_size: 10, batches_per_shard: 8, seed: 3, shuffle }
    }

    #[test]
    fn every_epoch_has_every_record_once_in_its_own_order() {
        for (version, (n_records, shuffle)) in (OLDEST..=NEWEST).flat_map(|version| {
            [(1, true), (640, true), (1003, true), (1003, false)].map(|case| (version, case))
        }) {
            let plan = plan(version, n_records, shuffle);
            let epoch = |epoch| -> Vec<u64> {
                (0..plan.n_batches())
                    .flat_map(|index| plan.records(BatchId { epoch, index }))
                    .collect()
            };
            let (first, second) = (epoch(0), epoch(1));
            assert_eq!(first == second, !shuffle || n_records == 1);
            let mut sorted = first.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..n_records).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_version_of_the_plan_never_changes() {
        #[derive(Deserialize)]
        struct Example {
            plan: BatchPlan,
            epoch: u32,
            index: u32,
            records: Vec<u64>,
        }
        // Computed by tests/python/test_batch_plan.py.
        let examples: Vec<Example> =
            serde_json::from_str(include_str!("batch/plans.json")).unwrap();
        for Example { plan, epoch, index, records } in examples {
            assert_eq!(plan.records(BatchId { epoch, index }), records, "{plan:?}");
        }
    }

    #[test]
    fn places_of_a_batch_are_a_part_of_it() {
        let plan = plan(NEWEST, 1003, true);
        let batch = BatchId { epoch: 0, index: 100 };
        assert_eq!(plan.records(batch).len(), 3);
        assert_eq!(plan.records_at(batch, 1..3), plan.records(batch)[1..3]);
    }

    #[test]
    fn steps_visit_the_batches_of_one_epoch_after_another() {
        let batch = |epoch, index| BatchId { epoch, index };
        let all: Vec<BatchId> = (0..5).map(|step| batch_of(step, 2)).collect();
        assert_eq!(all, [batch(0, 0), batch(0, 1), batch(1, 0), batch(1, 1), batch(2, 0)]);
    }
}
