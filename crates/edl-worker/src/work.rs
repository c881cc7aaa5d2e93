// SPDX-License-Identifier: Apache-2.0
//! What this worker has been lent, and how far it is with it.
//!
//! A batch that is held is *open* (still to train) or *pushed* (trained and sent, not yet
//! acknowledged by every server); an acknowledged batch is forgotten here, because from then on
//! the servers remember it. Work is done in the order of [`Item`], so that in synchronous mode
//! nobody waits for a round while holding a batch of an earlier one. No I/O, no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use edl_core::id::{BatchId, LeaseId};

/// One step of the loop: a batch to train, or a minibatch of a shard to evaluate or predict.
/// The order is that of the work: an evaluation is waited for, so it comes before training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Item {
    Piece { lease: LeaseId, piece: u32 },
    Batch(BatchId),
}

/// What a lease lends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Task {
    Train {
        epoch: u32,
        indices: Range<u32>,
    },
    /// A range of records that is walked in `n_pieces` minibatches.
    Shard {
        n_pieces: u32,
    },
}

/// What came out of training one batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trained {
    pub(crate) loss: f32,
    pub(crate) n_records: u32,
}

/// A batch that every server has acknowledged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Done {
    pub(crate) lease: LeaseId,
    pub(crate) trained: Trained,
}

/// What a worker tells a master that it still works on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Announced {
    pub(crate) lease: LeaseId,
    pub(crate) epoch: u32,
    pub(crate) indices: Vec<u32>,
}

/// The leases held.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Work {
    batches: BTreeMap<BatchId, Held>,
    shards: BTreeMap<LeaseId, Shard>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    lease: LeaseId,
    /// Set once the batch has been sent to the servers.
    pushed: Option<Trained>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shard {
    n_pieces: u32,
    n_done: u32,
}

impl Work {
    /// Takes a lease. A batch that is already held under another lease moves to this one as it
    /// is; a lease that is lent anew under an old number replaces the old one.
    pub(crate) fn lend(&mut self, lease: LeaseId, task: Task) {
        match task {
            Task::Train { epoch, indices } => {
                let keeps =
                    |batch: &BatchId| batch.epoch == epoch && indices.contains(&batch.index);
                self.batches.retain(|batch, held| held.lease != lease || keeps(batch));
                self.shards.remove(&lease);
                for index in indices {
                    self.batches
                        .entry(BatchId { epoch, index })
                        .and_modify(|held| held.lease = lease)
                        .or_insert(Held { lease, pushed: None });
                }
            }
            Task::Shard { n_pieces } => {
                self.release(lease);
                self.shards.insert(lease, Shard { n_pieces, n_done: 0 });
            }
        }
    }

    /// Lets go of a lease: it was revoked, failed, or its shard is done.
    pub(crate) fn release(&mut self, lease: LeaseId) {
        self.batches.retain(|_, held| held.lease != lease);
        self.shards.remove(&lease);
    }

    /// Lets go of everything: the generation that it was lent in has ended.
    pub(crate) fn clear(&mut self) {
        self.batches.clear();
        self.shards.clear();
    }

    /// Lets go of shards of evaluation and prediction, and names their leases.
    pub(crate) fn release_shards(&mut self) -> Vec<LeaseId> {
        std::mem::take(&mut self.shards).into_keys().collect()
    }

    /// Everything that is still to be computed, in the order of the work.
    pub(crate) fn upcoming(&self) -> impl Iterator<Item = Item> + '_ {
        let pieces = self.shards.iter().flat_map(|(lease, shard)| {
            (shard.n_done..shard.n_pieces).map(|piece| Item::Piece { lease: *lease, piece })
        });
        let open = self.batches.iter().filter(|(_, held)| held.pushed.is_none());
        pieces.chain(open.map(|(batch, _)| Item::Batch(*batch)))
    }

    /// Whether `item` is still to be computed here.
    pub(crate) fn is_open(&self, item: Item) -> bool {
        match item {
            Item::Piece { lease, piece } => self
                .shards
                .get(&lease)
                .is_some_and(|shard| (shard.n_done..shard.n_pieces).contains(&piece)),
            Item::Batch(batch) => {
                self.batches.get(&batch).is_some_and(|held| held.pushed.is_none())
            }
        }
    }

    /// The lease that lends `item`, if it is held.
    pub(crate) fn lease_of(&self, item: Item) -> Option<LeaseId> {
        match item {
            Item::Piece { lease, .. } => self.shards.contains_key(&lease).then_some(lease),
            Item::Batch(batch) => self.batches.get(&batch).map(|held| held.lease),
        }
    }

    /// Notes that an open batch goes to the servers now; false if it is no longer wanted.
    pub(crate) fn pushed(&mut self, batch: BatchId, trained: Trained) -> bool {
        match self.batches.get_mut(&batch) {
            Some(held) if held.pushed.is_none() => {
                held.pushed = Some(trained);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Notes that every server has acknowledged `batch`. An answer that nobody waits for, to a
    /// batch revoked meanwhile or opened again, is no news.
    pub(crate) fn acknowledged(&mut self, batch: BatchId) -> Option<Done> {
        let held = *self.batches.get(&batch)?;
        let trained = held.pushed?;
        self.batches.remove(&batch);
        Some(Done { lease: held.lease, trained })
    }

    /// Notes that the first open piece of a shard is computed; true if it was the last.
    pub(crate) fn piece_done(&mut self, lease: LeaseId) -> bool {
        let Some(shard) = self.shards.get_mut(&lease) else { return false };
        shard.n_done += 1;
        shard.n_done >= shard.n_pieces
    }

    /// Opens every pushed batch again: their acknowledgements are lost with the connection. To
    /// push a batch twice is harmless, the servers apply it once.
    pub(crate) fn reopen(&mut self) {
        self.batches.values_mut().for_each(|held| held.pushed = None);
    }

    /// Batches sent and not yet acknowledged.
    pub(crate) fn n_pushed(&self) -> usize {
        self.batches.values().filter(|held| held.pushed.is_some()).count()
    }

    /// What to tell a master that has forgotten it: the leases of training, oldest first.
    pub(crate) fn announce(&self) -> Vec<Announced> {
        let mut leases: BTreeMap<(LeaseId, u32), BTreeSet<u32>> = BTreeMap::new();
        for (batch, held) in &self.batches {
            leases.entry((held.lease, batch.epoch)).or_default().insert(batch.index);
        }
        let announced = leases.into_iter().map(|((lease, epoch), indices)| Announced {
            lease,
            epoch,
            indices: indices.into_iter().collect(),
        });
        announced.collect()
    }
}

#[cfg(test)]
mod tests;
