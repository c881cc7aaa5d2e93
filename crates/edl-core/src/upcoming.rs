// SPDX-License-Identifier: Apache-2.0
//! What a worker will train next if nothing changes in its job, for models that read records ahead.
//!
//! It is a guess: a new world, another lease or a skipped step makes it wrong. Nothing but the time
//! that reading takes may depend on it.

use crate::batch::{BatchPlan, batch_of};
use crate::id::BatchId;
use crate::lanes::Span;
use crate::rng;

/// One pass of a model in training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// In training order.
    pub records: Vec<u64>,
    /// Of its random numbers.
    pub seed: u64,
}

/// The passes after one that a worker makes now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Upcoming {
    /// Nothing is known.
    #[default]
    Unknown,
    /// The worker trains the lanes `mine` of each step; now it trains `lane` of `step`.
    Lanes { plan: BatchPlan, n_lanes: u32, num_epochs: u32, step: u64, lane: u32, mine: Span },
    /// The worker trains whole batches, mostly one after another of a shard; now it trains `batch`.
    Batches { plan: BatchPlan, batch: BatchId },
}

impl Upcoming {
    /// The next passes, at most `n`.
    #[must_use]
    pub fn passes(&self, n: usize) -> Vec<Pass> {
        match self {
            Self::Unknown => Vec::new(),
            Self::Lanes { plan, n_lanes, num_epochs, step, lane, mine } => {
                let n_batches = plan.n_batches();
                // Only the last step of an epoch can have no records for these lanes.
                let steps = (*step..).take(n + 2).map(|step| batch_of(step, n_batches));
                let steps = steps.take_while(|batch| *num_epochs == 0 || batch.epoch < *num_epochs);
                let lanes = steps.flat_map(|batch| mine.clone().map(move |lane| (batch, lane)));
                let now = (batch_of(*step, n_batches), *lane);
                let pass = |(batch, lane)| {
                    let records = plan.records_of_lane(batch, lane, *n_lanes)?;
                    Some(Pass { records, seed: lane_seed(plan.seed, batch, lane) })
                };
                lanes.filter(|place| *place > now).filter_map(pass).take(n).collect()
            }
            Self::Batches { plan, batch } => {
                let shard = batch.index / plan.batches_per_shard;
                let end = plan.n_batches().min((shard + 1).saturating_mul(plan.batches_per_shard));
                let batches = (batch.index + 1..end).map(|index| BatchId { index, ..*batch });
                let pass = |batch| Pass {
                    records: plan.records(batch),
                    seed: batch_seed(plan.seed, batch),
                };
                batches.take(n).map(pass).collect()
            }
        }
    }
}

/// The seed of a lane's random numbers, in a job with this seed.
#[must_use]
pub fn lane_seed(seed: u64, batch: BatchId, lane: u32) -> u64 {
    rng::key(&[seed, batch.epoch.into(), batch.index.into(), lane.into()])
}

/// The seed of a batch's random numbers, in a job with this seed and parameter servers.
#[must_use]
pub fn batch_seed(seed: u64, batch: BatchId) -> u64 {
    rng::key(&[seed, batch.epoch.into(), batch.index.into()])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two full steps of four lanes and a short one, in which the first lane has all records.
    fn plan() -> BatchPlan {
        BatchPlan {
            version: crate::batch::NEWEST,
            n_records: 18,
            minibatch_size: 8,
            batches_per_shard: 2,
            seed: 3,
            shuffle: true,
        }
    }

    fn after(step: u64, lane: u32, mine: Span, n: usize) -> Vec<Pass> {
        let (plan, n_lanes, num_epochs) = (plan(), 4, 2);
        Upcoming::Lanes { plan, n_lanes, num_epochs, step, lane, mine }.passes(n)
    }

    fn pass(epoch: u32, index: u32, lane: u32) -> Pass {
        let batch = BatchId { epoch, index };
        let records = plan().records_of_lane(batch, lane, 4).unwrap();
        Pass { records, seed: lane_seed(3, batch, lane) }
    }

    #[test]
    fn lanes_follow_each_other_to_the_end_of_the_job() {
        let all = [pass(0, 0, 3), pass(0, 1, 2), pass(0, 1, 3), pass(1, 0, 2)];
        assert_eq!(after(0, 2, 2..4, 4), all);
        assert_eq!(after(0, 2, 2..4, 2), all[..2]);
        assert_eq!(after(2, 0, 0..1, 9), [pass(1, 0, 0), pass(1, 1, 0), pass(1, 2, 0)]);
        assert_eq!(after(4, 3, 2..4, 9), [], "the last step has no records for them");
        assert_eq!(after(0, 0, 0..0, 9), []);
    }

    #[test]
    fn batches_follow_each_other_to_the_end_of_a_shard() {
        let batch = BatchId { epoch: 1, index: 0 };
        let next = BatchId { index: 1, ..batch };
        let expected = Pass { records: plan().records(next), seed: batch_seed(3, next) };
        assert_eq!(Upcoming::Batches { plan: plan(), batch }.passes(5), [expected]);
        let last = BatchId { epoch: 0, index: 2 };
        assert_eq!(Upcoming::Batches { plan: plan(), batch: last }.passes(5), []);
        assert_eq!(Upcoming::Unknown.passes(5), []);
    }
}
