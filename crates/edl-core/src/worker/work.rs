// SPDX-License-Identifier: Apache-2.0
//! What is assigned to this worker, and how far it is.
//!
//! A batch that is held is *open* (not trained yet) or *pushed* (trained and sent, not yet
//! acknowledged by every server). An acknowledged batch is forgotten here, because from then on
//! the servers remember it. Work is done in the order of [`WorkItem`], so in synchronous mode no
//! worker waits for a round while it holds a batch of an earlier one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::effect::Records;
use super::event::{Pass, Shard, WorkItem};
use crate::id::{BatchId, Generation, LeaseId};
use crate::job::HeldLease;

/// The leases held.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Work {
    batches: BTreeMap<BatchId, HeldBatch>,
    shards: BTreeMap<LeaseId, HeldShard>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct HeldBatch {
    lease: LeaseId,
    /// The loss of the batch, once it has been sent to the servers.
    pushed: Option<f32>,
    /// It is pushed without a gradient.
    is_skipped: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct HeldShard {
    shard: Shard,
    n_pieces: u32,
    n_done: u32,
}

impl Work {
    /// Takes a lease of batches. A batch that is held under another lease moves to this one as it
    /// is; a lease number that comes again replaces the old lease.
    pub(super) fn assign_batches(
        &mut self,
        lease: LeaseId,
        epoch: u32,
        indices: Range<u32>,
        skipped: &[u32],
    ) {
        let keeps = |batch: &BatchId| batch.epoch == epoch && indices.contains(&batch.index);
        self.batches.retain(|batch, held| held.lease != lease || keeps(batch));
        for index in indices {
            let is_skipped = skipped.contains(&index);
            self.batches
                .entry(BatchId { epoch, index })
                .and_modify(|held| {
                    held.lease = lease;
                    held.is_skipped |= is_skipped;
                })
                .or_insert(HeldBatch { lease, pushed: None, is_skipped });
        }
    }

    /// Takes a lease of a shard, of which a piece has this many records.
    pub(super) fn assign_shard(&mut self, lease: LeaseId, shard: Shard, minibatch_size: u32) {
        let n_pieces = shard.n_pieces(minibatch_size);
        self.shards.insert(lease, HeldShard { shard, n_pieces, n_done: 0 });
    }

    /// Forgets a lease: it was revoked, failed, or its shard is finished. Returns the shard.
    pub(super) fn release(&mut self, lease: LeaseId) -> Option<Shard> {
        self.batches.retain(|_, held| held.lease != lease);
        self.shards.remove(&lease).map(|held| held.shard)
    }

    /// Forgets the batches that are not pushed, except for `current`; whether there were any.
    pub(super) fn return_open(&mut self, current: Option<WorkItem>) -> bool {
        let n_before = self.batches.len();
        let is_current = |batch: &BatchId| current == Some(WorkItem::Batch(*batch));
        self.batches.retain(|batch, held| held.pushed.is_some() || is_current(batch));
        self.batches.len() < n_before
    }

    /// Whether a batch that is held is not pushed yet.
    pub(super) fn has_open(&self) -> bool {
        self.batches.values().any(|held| held.pushed.is_none())
    }

    /// The batches that are held, in order.
    pub(super) fn batches(&self) -> impl Iterator<Item = BatchId> + '_ {
        self.batches.keys().copied()
    }

    /// Forgets the batches: the generation in which they were assigned has ended.
    pub(super) fn clear_batches(&mut self) {
        self.batches.clear();
    }

    /// Forgets all shards and names their leases.
    pub(super) fn release_shards(&mut self) -> Vec<LeaseId> {
        std::mem::take(&mut self.shards).into_keys().collect()
    }

    /// Everything that is not computed yet, in the order of the work.
    pub(super) fn upcoming(&self) -> impl Iterator<Item = WorkItem> + '_ {
        let pieces = self.shards.iter().flat_map(|(lease, held)| {
            (held.n_done..held.n_pieces).map(|piece| WorkItem::Piece { lease: *lease, piece })
        });
        let open =
            self.batches.iter().filter(|(_, held)| held.pushed.is_none() && !held.is_skipped);
        pieces.chain(open.map(|(batch, _)| WorkItem::Batch(*batch)))
    }

    /// Whether `item` is assigned and not computed yet.
    pub(super) fn is_open(&self, item: WorkItem) -> bool {
        match item {
            WorkItem::Piece { lease, piece } => self
                .shards
                .get(&lease)
                .is_some_and(|held| (held.n_done..held.n_pieces).contains(&piece)),
            WorkItem::Batch(batch) => {
                self.batches.get(&batch).is_some_and(|held| held.pushed.is_none())
            }
        }
    }

    /// The lease of `item`, if it is held.
    pub(super) fn lease_of(&self, item: WorkItem) -> Option<LeaseId> {
        match item {
            WorkItem::Piece { lease, .. } => self.shards.contains_key(&lease).then_some(lease),
            WorkItem::Batch(batch) => self.batches.get(&batch).map(|held| held.lease),
        }
    }

    /// The records of `item`, if it is held.
    pub(super) fn records(&self, item: WorkItem, minibatch_size: u32) -> Option<Records> {
        let (lease, piece) = match item {
            WorkItem::Batch(batch) => return Some(Records::Batch(batch)),
            WorkItem::Piece { lease, piece } => (lease, piece),
        };
        let shard = &self.shards.get(&lease)?.shard;
        let range = shard.piece(piece, minibatch_size);
        Some(match shard.pass {
            Pass::Evaluate { .. } => Records::Validation(range),
            Pass::Predict { .. } => Records::Prediction(range),
        })
    }

    pub(super) fn shard(&self, lease: LeaseId) -> Option<&Shard> {
        self.shards.get(&lease).map(|held| &held.shard)
    }

    /// Notes that an open batch goes to the servers now; false if it is no longer open.
    pub(super) fn pushed(&mut self, batch: BatchId, loss: f32) -> bool {
        match self.batches.get_mut(&batch) {
            Some(held) if held.pushed.is_none() => {
                held.pushed = Some(loss);
                true
            }
            Some(_) | None => false,
        }
    }

    /// The batches that are pushed without a gradient; they count as pushed from now on.
    pub(super) fn push_skipped(&mut self) -> Vec<BatchId> {
        let open =
            |(_, held): &(&BatchId, &mut HeldBatch)| held.is_skipped && held.pushed.is_none();
        let push = |(batch, held): (&BatchId, &mut HeldBatch)| {
            held.pushed = Some(f32::NAN);
            *batch
        };
        self.batches.iter_mut().filter(open).map(push).collect()
    }

    /// Notes that every server has acknowledged `batch`; returns its loss. An acknowledgement
    /// of a batch that was revoked or opened again meanwhile has no effect.
    pub(super) fn acknowledged(&mut self, batch: BatchId) -> Option<f32> {
        let loss = self.batches.get(&batch)?.pushed?;
        self.batches.remove(&batch);
        Some(loss)
    }

    /// Notes that the next piece of a shard is computed; true if it was the last.
    pub(super) fn piece_done(&mut self, lease: LeaseId) -> bool {
        let Some(held) = self.shards.get_mut(&lease) else { return false };
        held.n_done += 1;
        held.n_done == held.n_pieces
    }

    /// Whether a shard has no piece left to compute.
    pub(super) fn is_finishing(&self) -> bool {
        self.shards.values().any(|held| held.n_done == held.n_pieces)
    }

    /// Opens every pushed batch again: their acknowledgements are lost with the connection. It is
    /// harmless to push a batch twice, because the servers apply it once.
    pub(super) fn reopen(&mut self) {
        self.batches.values_mut().for_each(|held| held.pushed = None);
    }

    /// Batches sent and not yet acknowledged.
    pub(super) fn n_pushed(&self) -> usize {
        self.batches.values().filter(|held| held.pushed.is_some()).count()
    }

    /// What a new master must know: the batches that are not acknowledged, by lease.
    pub(super) fn announce(&self, generation: Generation) -> Vec<HeldLease> {
        let mut leases: BTreeMap<(LeaseId, u32), BTreeSet<u32>> = BTreeMap::new();
        for (batch, held) in &self.batches {
            leases.entry((held.lease, batch.epoch)).or_default().insert(batch.index);
        }
        let held = leases.into_iter().map(|((lease, epoch), indices)| HeldLease {
            lease,
            generation,
            epoch,
            indices: indices.into_iter().collect(),
        });
        held.collect()
    }

    pub(super) fn check_invariants(&self) {
        for (lease, held) in &self.shards {
            assert!(held.n_done <= held.n_pieces, "lease {lease} has too many pieces");
            let batches = self.batches.values().any(|batch| batch.lease == *lease);
            assert!(!batches, "lease {lease} assigns both batches and a shard");
        }
    }
}

#[cfg(test)]
mod tests;
