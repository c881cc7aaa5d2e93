// SPDX-License-Identifier: Apache-2.0
//! Where parameters are: how all parameter state is split into partitions.
//!
//! The flat dense vector is split into equal, contiguous segments, regardless of the tensors'
//! borders; embedding rows go by hash of their id. Partitions, too, lie contiguously on
//! servers, so one server holds one range of the dense vector.
//!
//! Where workers hold the dense vector and servers the rows, each of the two has partitions of its
//! own: the first half of all holds the segments, the second half the rows.

use std::ops::Range;

use crate::id::{PartitionId, PsId};
use crate::rng;

/// How one model's state is split into `n_partitions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    pub dense_len: usize,
    pub n_partitions: u32,
    /// Segments and rows are in separate partitions.
    pub is_apart: bool,
}

impl Layout {
    /// Every partition holds a segment of the dense vector and rows.
    #[must_use]
    pub fn shared(dense_len: usize, n_partitions: u32) -> Self {
        Self { dense_len, n_partitions, is_apart: false }
    }

    /// As many partitions for the dense vector alone, and as many again for rows alone.
    #[must_use]
    pub fn apart(dense_len: usize, n_each: u32) -> Self {
        Self { dense_len, n_partitions: 2 * n_each, is_apart: true }
    }

    /// The partitions that hold the dense vector.
    #[must_use]
    pub fn with_segments(&self) -> Range<u32> {
        0..if self.is_apart { self.n_partitions / 2 } else { self.n_partitions }
    }

    /// The partitions that hold rows, which are those on servers.
    #[must_use]
    pub fn with_rows(&self) -> Range<u32> {
        let first = if self.is_apart { self.n_partitions / 2 } else { 0 };
        first..self.n_partitions
    }

    /// How much of the dense vector is on servers.
    #[must_use]
    pub fn dense_on_servers(&self) -> usize {
        if self.is_apart { 0 } else { self.dense_len }
    }

    /// The part of the dense vector that `partition` owns; an empty one if it holds rows alone.
    #[must_use]
    pub fn segment(&self, partition: PartitionId) -> Range<usize> {
        let n = self.with_segments().end;
        if partition.0 >= n {
            return 0..0;
        }
        let border = |p: u32| self.dense_len * p as usize / n as usize;
        border(partition.0)..border(partition.0 + 1)
    }

    /// The owner of an embedding row. It depends only on the id, so the rows of one id in all tables
    /// have the same owner.
    #[must_use]
    pub fn partition_of(&self, id: u64) -> PartitionId {
        let Range { start, end } = self.with_rows();
        let wide = u128::from(rng::mix(id)) * u128::from(end - start);
        PartitionId(start + u32::try_from(wide >> 64).expect("below n_partitions"))
    }

    /// The partitions that server number `ps` of `n_ps` holds.
    #[must_use]
    pub fn hosted(&self, ps: PsId, n_ps: u32) -> Range<u32> {
        share(self.with_rows(), ps.0, n_ps)
    }

    /// The partitions that member number `rank` of `n_members` writes, where each of them holds
    /// the whole dense vector.
    #[must_use]
    pub fn written(&self, rank: u32, n_members: u32) -> Range<u32> {
        share(self.with_segments(), rank, n_members)
    }
}

/// Piece number `k` of `n` nearly equal pieces of `whole`.
fn share(whole: Range<u32>, k: u32, n: u32) -> Range<u32> {
    let border = |k: u32| {
        let wide = u64::from(whole.end - whole.start) * u64::from(k) / u64::from(n);
        whole.start + u32::try_from(wide).expect("at most n_partitions")
    };
    border(k)..border(k + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apart_every_number_and_every_row_has_one_owner_of_its_kind() {
        let (apart, shared) = (Layout::apart(10, 4), Layout::shared(10, 4));
        assert_eq!(apart.n_partitions, 8);
        for partition in (0..4).map(PartitionId) {
            assert_eq!(apart.segment(partition), shared.segment(partition));
            assert!(apart.segment(PartitionId(partition.0 + 4)).is_empty());
        }
        // Rows lie together as they do in the other layout: one becomes the other file by file.
        for id in 0..1000 {
            assert_eq!(apart.partition_of(id).0, shared.partition_of(id).0 + 4);
        }
        assert_eq!(
            (0..3).map(|ps| apart.hosted(PsId(ps), 3)).collect::<Vec<_>>(),
            [4..5, 5..6, 6..8]
        );
        assert_eq!((0..2).map(|rank| apart.written(rank, 2)).collect::<Vec<_>>(), [0..2, 2..4]);
        assert_eq!((apart.dense_on_servers(), shared.dense_on_servers()), (0, 10));
    }
}
