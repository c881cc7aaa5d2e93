// SPDX-License-Identifier: Apache-2.0
//! What one worker pushes for one batch to one server.
//!
//! One push contains the parts of all partitions of a server, so a batch needs one frame per server.
//! Each partition reads its part by reference.

use std::ops::Range;

use edl_core::id::{BatchId, PartitionId, WorldId};
use edl_core::layout::Layout;

/// The gradient of one batch, as far as the partitions of one server are concerned.
#[derive(Clone, Debug, PartialEq)]
pub struct Push {
    pub head: Head,
    pub body: Body,
    /// Row lengths of the model's tables.
    dims: Vec<usize>,
    starts: Vec<Start>,
}

/// The part of a batch that a push contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The world whose member trained it.
    pub world: WorldId,
    pub number: u32,
    /// Lanes of every batch.
    pub of: u32,
}

/// Which batch is pushed to which partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    pub batch: BatchId,
    /// Records of the batch: its weight in a round. A batch without records changes nothing.
    pub n_records: u32,
    /// Version of the server when the batch's parameters were pulled.
    pub base_version: u64,
    /// The partitions that the server hosts.
    pub partitions: Range<u32>,
    pub layout: Layout,
    /// Set if the batch is pushed lane by lane.
    pub lane: Option<Lane>,
}

/// The numbers of a push, as they are sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Body {
    /// Dense gradient of the hosted partitions, which are adjacent in the flat vector.
    pub dense: Vec<f32>,
    /// Per partition (ascending), per table: the number of ids.
    pub counts: Vec<u32>,
    /// The ids, unique within one partition and table, in the order of `counts`.
    pub ids: Vec<u64>,
    /// One row of gradient per id, in the order of `ids`.
    pub grads: Vec<f32>,
}

/// Where the rows of one partition and table begin.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Start {
    id: usize,
    grad: usize,
}

/// Why numbers do not form a push.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("invalid push: partitions {start}..{end} of {n_partitions}")]
    Partitions { start: u32, end: u32, n_partitions: u32 },
    #[error("invalid push: it has {has} {what} and needs {needs}")]
    Length { what: &'static str, has: usize, needs: usize },
}

impl Push {
    /// Checks that all lengths fit; `dims` are the row lengths of the model's tables.
    pub fn new(head: Head, dims: &[usize], body: Body) -> Result<Self, Error> {
        let Range { start, end } = head.partitions;
        let n_partitions = head.layout.n_partitions;
        if start > end || end > n_partitions {
            return Err(Error::Partitions { start, end, n_partitions });
        }
        let n_counts = (end - start) as usize * dims.len();
        expect_length("counts", body.counts.len(), n_counts)?;
        let span = span(&head.layout, &head.partitions);
        expect_length("dense numbers", body.dense.len(), span.len())?;
        let starts = starts(&body, dims)?;
        Ok(Self { head, body, dims: dims.to_vec(), starts })
    }

    /// Row lengths of the model's tables.
    #[must_use]
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The dense gradient of one partition.
    ///
    /// # Panics
    /// If the partition is not hosted by this push's server.
    #[must_use]
    pub fn dense_of(&self, partition: PartitionId) -> &[f32] {
        self.expect_hosted(partition);
        let Head { layout, partitions, .. } = &self.head;
        let first = layout.segment(PartitionId(partitions.start)).start;
        let segment = layout.segment(partition);
        &self.body.dense[segment.start - first..segment.end - first]
    }

    /// The ids of one partition in one table, and a row of gradient for each.
    ///
    /// # Panics
    /// If the partition is not hosted by this push's server or the table does not exist.
    #[must_use]
    pub fn rows_of(&self, partition: PartitionId, table: usize) -> (&[u64], &[f32]) {
        self.expect_hosted(partition);
        assert!(table < self.dims.len(), "table {table} of {}", self.dims.len());
        let place = (partition.0 - self.head.partitions.start) as usize * self.dims.len() + table;
        let Start { id, grad } = self.starts[place];
        let Body { counts, ids, grads, .. } = &self.body;
        let n = counts[place] as usize;
        (&ids[id..id + n], &grads[grad..grad + n * self.dims[table]])
    }

    fn expect_hosted(&self, partition: PartitionId) {
        let is_hosted = self.head.partitions.contains(&partition.0);
        assert!(is_hosted, "partition {partition} is not in this push");
    }
}

/// The part of the dense vector that a range of partitions owns.
#[must_use]
pub fn span(layout: &Layout, partitions: &Range<u32>) -> Range<usize> {
    if partitions.is_empty() {
        return 0..0;
    }
    let first = layout.segment(PartitionId(partitions.start)).start;
    first..layout.segment(PartitionId(partitions.end - 1)).end
}

fn expect_length(what: &'static str, has: usize, needs: usize) -> Result<(), Error> {
    if has == needs { Ok(()) } else { Err(Error::Length { what, has, needs }) }
}

fn starts(body: &Body, dims: &[usize]) -> Result<Vec<Start>, Error> {
    let mut starts = Vec::with_capacity(body.counts.len());
    // Counts come from a peer and can be anything, so the sums must not wrap.
    let mut start = Start { id: 0, grad: 0 };
    for (count, dim) in body.counts.iter().zip(dims.iter().cycle()) {
        starts.push(start);
        start.id = start.id.saturating_add(*count as usize);
        start.grad = start.grad.saturating_add((*count as usize).saturating_mul(*dim));
    }
    expect_length("ids", body.ids.len(), start.id)?;
    expect_length("row numbers", body.grads.len(), start.grad)?;
    Ok(starts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        Head {
            batch: BatchId { epoch: 1, index: 2 },
            n_records: 8,
            base_version: 5,
            partitions: 1..3,
            layout: Layout::shared(10, 4),
            lane: None,
        }
    }

    fn body() -> Body {
        // Partitions 1 and 2 own 2..5 and 5..7.
        Body {
            dense: vec![2.0, 3.0, 4.0, 5.0, 6.0],
            counts: vec![1, 0, 2, 1],
            ids: vec![10, 20, 21, 30],
            grads: vec![1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 9.0],
        }
    }

    #[test]
    fn each_partition_finds_its_own_part() {
        let push = Push::new(head(), &[2, 1], body()).unwrap();
        assert_eq!(push.dense_of(PartitionId(1)), [2.0, 3.0, 4.0]);
        assert_eq!(push.dense_of(PartitionId(2)), [5.0, 6.0]);
        assert_eq!(push.rows_of(PartitionId(1), 0), (&[10][..], &[1.0, 1.5][..]));
        assert_eq!(push.rows_of(PartitionId(1), 1), (&[][..], &[][..]));
        assert_eq!(push.rows_of(PartitionId(2), 0), (&[20, 21][..], &[2.0, 2.5, 3.0, 3.5][..]));
        assert_eq!(push.rows_of(PartitionId(2), 1), (&[30][..], &[9.0][..]));
        assert_eq!(push.body, body());
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let refused = |change: fn(&mut Head, &mut Body)| {
            let (mut head, mut body) = (head(), body());
            change(&mut head, &mut body);
            Push::new(head, &[2, 1], body).unwrap_err().to_string()
        };
        assert_eq!(refused(|head, _| head.partitions = 3..5), "invalid push: partitions 3..5 of 4");
        let text = refused(|_, body| body.dense.truncate(3));
        assert_eq!(text, "invalid push: it has 3 dense numbers and needs 5");
        let text = refused(|_, body| body.counts[0] = u32::MAX);
        assert_eq!(text, "invalid push: it has 4 ids and needs 4294967298");
        let text = refused(|_, body| body.counts.push(0));
        assert_eq!(text, "invalid push: it has 5 counts and needs 4");
        let text = refused(|_, body| body.grads.push(0.0));
        assert_eq!(text, "invalid push: it has 8 row numbers and needs 7");
    }
}
