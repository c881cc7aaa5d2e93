// SPDX-License-Identifier: Apache-2.0
//! A partition whose weights are in a vector of its owner, where a model reads them.
//!
//! A worker under AllReduce holds all partitions. Their weights are adjacent in the vector that its
//! model computes with, so a step writes them where the next pass reads them. Optimizer state, counts
//! and the applied set stay in the partition.

use edl_core::applied::AppliedSet;
use edl_core::id::{BatchId, PartitionId};

use super::Partition;
use crate::checkpoint::codec::Snapshot;

/// A partition without its weights. Every call gets the vector of all dense parameters.
#[derive(Debug)]
pub struct Placed(Partition);

impl Placed {
    /// Moves the weights of a partition to their place in `all`.
    ///
    /// # Panics
    /// If `all` is the vector of another model.
    #[must_use]
    pub fn new(mut partition: Partition, all: &mut [f32]) -> Self {
        let weights = std::mem::take(&mut partition.dense.weights);
        all[partition.config.layout.segment(partition.config.id)].copy_from_slice(&weights);
        Self(partition)
    }

    #[must_use]
    pub fn id(&self) -> PartitionId {
        self.0.id()
    }

    #[must_use]
    pub fn applied(&self) -> &AppliedSet {
        self.0.applied()
    }

    /// Takes the state of the training script out of the partition.
    pub fn take_state(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0.state)
    }

    /// Takes the step of a batch by a gradient of all dense parameters, which may be in pieces.
    ///
    /// # Panics
    /// If the batch was applied before or is not part of the plan, or vectors are for another model.
    pub fn step(&mut self, batch: BatchId, all: &mut [f32], gradient: &[&[f32]]) {
        let Self(partition) = self;
        assert!(batch.index < partition.config.n_batches, "batch {batch} is of another plan");
        let segment = partition.config.layout.segment(partition.config.id);
        let update = partition.begin_step(1);
        let weights = &mut all[segment.clone()];
        partition.dense.apply_to(weights, &update, &partition.runs, segment.start, gradient);
        partition.finish_step([batch]);
    }

    /// Counts a batch that is skipped, or whose step the training script has taken: the weights stay
    /// as they are.
    ///
    /// # Panics
    /// If the batch was applied before.
    pub fn pass(&mut self, batch: BatchId) {
        self.0.finish_step([batch]);
    }

    /// One copy of the state, into the memory of an earlier one.
    pub fn snapshot_into(&self, all: &[f32], snapshot: &mut Snapshot) {
        let Self(partition) = self;
        let segment = partition.config.layout.segment(partition.config.id);
        partition.snapshot_with(&all[segment], snapshot);
    }
}
