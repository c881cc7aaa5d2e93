// SPDX-License-Identifier: Apache-2.0
//! Describes a partition to the state machines that make decisions about it.

use std::sync::Arc;

use edl_core::id::PartitionId;
use edl_core::server::{Load, Progress};
use edl_core::servers::PartitionState;

use super::{Partition, PartitionConfig};

impl PartitionConfig {
    /// One partition of a load.
    #[must_use]
    pub fn of(load: &Load, partition: u32) -> Self {
        Self {
            id: PartitionId(partition),
            layout: load.layout,
            model: Arc::clone(&load.model),
            optimizer: load.optimizer.clone(),
            seed: load.seed,
            n_batches: load.n_batches,
            mode: load.mode,
            lr_staleness_modulation: load.lr_staleness_modulation,
        }
    }
}

impl Partition {
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress { version: self.version(), round: self.round(), n_rows: self.n_rows() }
    }

    /// What a master needs to know of the partition.
    #[must_use]
    pub fn state(&self) -> PartitionState {
        PartitionState {
            partition: self.id(),
            applied: self.applied().clone(),
            updates: self.updates(),
            n_rows: self.n_rows(),
        }
    }
}
