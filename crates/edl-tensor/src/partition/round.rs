// SPDX-License-Identifier: Apache-2.0
//! Rounds of synchronous training: which batches are applied together, and those that wait.
//!
//! Round r of an epoch is its batches `[r * size, (r + 1) * size)`; the last one may be smaller.
//! Rounds are applied in order, over all epochs. Which round is next follows from the applied set
//! alone, so a restored partition continues where its set ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::applied::AppliedSet;
use edl_core::id::BatchId;

use crate::push::Push;

/// The pushes that wait for their round.
#[derive(Clone, Debug)]
pub(super) struct Rounds {
    /// Batches per round.
    size: u32,
    n_batches: u32,
    /// The first round that is not applied whole, over all epochs.
    next: u64,
    staged: BTreeMap<BatchId, Arc<Push>>,
}

impl Rounds {
    /// How many rounds may be open at once. Workers wait for a round before they pull for the
    /// next, so more than one open round is rare and more than this is misuse.
    pub(super) const OPEN: u64 = 4;

    pub(super) fn new(size: u32, applied: &AppliedSet) -> Self {
        let mut rounds = Self {
            size: size.max(1),
            n_batches: applied.n_batches(),
            next: 0,
            staged: BTreeMap::new(),
        };
        // Nearly all rounds before the first gap are in one run.
        let first_run = applied.runs(applied.epoch()).first().filter(|run| run.start == 0);
        let n_whole = first_run.map_or(0, |run| run.end / rounds.size);
        rounds.next = u64::from(applied.epoch()) * rounds.per_epoch() + u64::from(n_whole);
        rounds.skip_applied(applied);
        rounds
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    pub(super) fn n_staged(&self) -> usize {
        self.staged.len()
    }

    pub(super) fn round_of(&self, batch: BatchId) -> u64 {
        u64::from(batch.epoch) * self.per_epoch() + u64::from(batch.index / self.size)
    }

    /// Keeps a push whose batch is not applied yet; the first one of a batch stays.
    pub(super) fn stage(&mut self, push: &Arc<Push>) {
        self.staged.entry(push.head.batch).or_insert_with(|| Arc::clone(push));
    }

    /// Takes out the pushes of the next round, in batch order, if all that are missing are here.
    pub(super) fn take_complete(&mut self, applied: &AppliedSet) -> Option<Vec<Arc<Push>>> {
        let missing: Vec<BatchId> =
            self.batches(self.next).filter(|batch| !applied.contains(*batch)).collect();
        if missing.is_empty() || !missing.iter().all(|batch| self.staged.contains_key(batch)) {
            return None;
        }
        missing.iter().map(|batch| self.staged.remove(batch)).collect()
    }

    /// Moves on to the first round with a batch that is not applied.
    pub(super) fn skip_applied(&mut self, applied: &AppliedSet) {
        while self.batches(self.next).all(|batch| applied.contains(batch)) {
            self.next += 1;
        }
    }

    pub(super) fn check_invariants(&self, applied: &AppliedSet) {
        assert!(self.batches(self.next).any(|batch| !applied.contains(batch)), "next is open");
        for (batch, push) in &self.staged {
            assert_eq!(*batch, push.head.batch, "a push is staged under its own batch");
            assert!(!applied.contains(*batch), "staged batch {batch} is not applied");
            let round = self.round_of(*batch);
            assert!(
                (self.next..self.next + Self::OPEN).contains(&round),
                "{batch} is of an open round"
            );
        }
    }

    fn per_epoch(&self) -> u64 {
        u64::from(self.n_batches.div_ceil(self.size))
    }

    fn batches(&self, round: u64) -> impl Iterator<Item = BatchId> + use<> {
        let epoch = u32::try_from(round / self.per_epoch()).expect("rounds come from batches");
        let first = u32::try_from(round % self.per_epoch()).expect("below per_epoch") * self.size;
        let end = self.n_batches.min(first.saturating_add(self.size));
        (first..end).map(move |index| BatchId { epoch, index })
    }
}
