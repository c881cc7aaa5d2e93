// SPDX-License-Identifier: Apache-2.0
//! Which records a batch names: a function of the job's plan, never of what happened.
//!
//! Records are numbered through all files of the data set. Consecutive records form shards;
//! an epoch visits the shards in a seeded order and, inside a shard, the records in a seeded
//! order. Only the last shard can be short, and it always comes last, so that batch numbers
//! map to shards by division.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::id::BatchId;
use crate::rng;

/// Everything that decides the content of batches.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BatchPlan {
    pub n_records: u64,
    pub minibatch_size: u32,
    /// Batches per shard: what one lease usually lends, and how far records are shuffled.
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

    /// The shard that holds a batch's records, as a range of record numbers.
    #[must_use]
    pub fn shard(&self, batch: BatchId) -> Range<u64> {
        let slot = batch.index / self.batches_per_shard;
        let n_full = self.n_records / self.records_per_shard();
        let shard = if self.shuffle && u64::from(slot) < n_full {
            let n_full = usize::try_from(n_full).expect("shards are counted in 32 bits");
            let order = rng::permutation(n_full, rng::key(&[self.seed, 1, u64::from(batch.epoch)]));
            u64::from(order[slot as usize])
        } else {
            u64::from(slot)
        };
        let start = shard * self.records_per_shard();
        start..self.n_records.min(start + self.records_per_shard())
    }

    /// The numbers of the records of `batch`, in training order.
    ///
    /// # Panics
    /// If the batch is not of this plan.
    #[must_use]
    pub fn records(&self, batch: BatchId) -> Vec<u64> {
        assert!(batch.index < self.n_batches(), "batch {batch} is not of this plan");
        let shard = self.shard(batch);
        let n = usize::try_from(shard.end - shard.start).expect("a shard fits in memory");
        let first = (batch.index % self.batches_per_shard) as usize * self.minibatch_size as usize;
        let places = first..n.min(first + self.minibatch_size as usize);
        if !self.shuffle {
            return places.map(|place| shard.start + place as u64).collect();
        }
        let seed = rng::key(&[self.seed, 2, u64::from(batch.epoch), shard.start]);
        let order = rng::permutation(n, seed);
        order[places].iter().map(|place| shard.start + u64::from(*place)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_names_every_record_once_in_an_order_of_its_own() {
        for (n_records, shuffle) in [(1, true), (640, true), (1003, true), (1003, false)] {
            let plan =
                BatchPlan { n_records, minibatch_size: 10, batches_per_shard: 8, seed: 3, shuffle };
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
    fn steps_visit_the_batches_of_one_epoch_after_another() {
        let batch = |epoch, index| BatchId { epoch, index };
        let all: Vec<BatchId> = (0..5).map(|step| batch_of(step, 2)).collect();
        assert_eq!(all, [batch(0, 0), batch(0, 1), batch(1, 0), batch(1, 1), batch(2, 0)]);
    }
}
