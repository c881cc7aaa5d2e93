// SPDX-License-Identifier: Apache-2.0
//! Where parameters live: a fixed cut of all parameter state into partitions.
//!
//! The flat dense vector is cut into equal, contiguous segments, whatever the tensors'
//! borders; embedding rows go by hash of their id. Partitions, too, lie contiguously on
//! servers, so that what one server holds of the dense vector is one range.

use std::ops::Range;

use crate::id::{PartitionId, PsId};
use crate::rng;

/// The cut of one model's state into `n_partitions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    pub dense_len: usize,
    pub n_partitions: u32,
}

impl Layout {
    /// The part of the dense vector that `partition` owns.
    #[must_use]
    pub fn segment(&self, partition: PartitionId) -> Range<usize> {
        let cut = |p: u32| self.dense_len * p as usize / self.n_partitions as usize;
        cut(partition.0)..cut(partition.0 + 1)
    }

    /// The owner of an embedding row. Tables are spread alike, which keeps one id together.
    #[must_use]
    pub fn partition_of(&self, id: u64) -> PartitionId {
        let wide = u128::from(rng::mix(id)) * u128::from(self.n_partitions);
        PartitionId(u32::try_from(wide >> 64).expect("below n_partitions"))
    }

    /// The partitions that server number `ps` of `n_ps` holds.
    #[must_use]
    pub fn hosted(&self, ps: PsId, n_ps: u32) -> Range<u32> {
        let cut = |k: u32| {
            let wide = u64::from(self.n_partitions) * u64::from(k) / u64::from(n_ps);
            u32::try_from(wide).expect("at most n_partitions")
        };
        cut(ps.0)..cut(ps.0 + 1)
    }
}
