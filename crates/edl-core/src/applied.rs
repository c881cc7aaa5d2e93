// SPDX-License-Identifier: Apache-2.0
//! Which batches a partition has applied. It never forgets.
//!
//! "All epochs below `closed`", plus the runs of batches of each open epoch. An epoch closes by
//! itself when its last batch is in. Batches are applied roughly in order, so there are about as
//! many runs as workers, no matter how large the data is.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::batch::batch_of;
use crate::id::BatchId;
use crate::runs::Runs;

mod bytes;

/// A set of batches, of a plan with a fixed number of batches per epoch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AppliedSet {
    n_batches: u32,
    closed: u32,
    /// Never empty.
    open: BTreeMap<u32, Runs>,
}

impl AppliedSet {
    /// The empty set.
    ///
    /// # Panics
    /// If an epoch has no batches: the end of such a set would be undefined.
    #[must_use]
    pub fn new(n_batches: u32) -> Self {
        assert!(n_batches > 0, "an epoch has at least one batch");
        Self { n_batches, closed: 0, open: BTreeMap::new() }
    }

    /// The first `n` batches of all epochs.
    ///
    /// # Panics
    /// If an epoch has no batches, or there are more epochs than 32 bits count.
    #[must_use]
    pub fn of_first(n: u64, n_batches: u32) -> Self {
        let BatchId { epoch, index } = batch_of(n, n_batches);
        let runs = Runs::from(0..index);
        let open = [(epoch, runs)].into_iter().filter(|(_, runs)| !runs.is_empty()).collect();
        Self { n_batches, closed: epoch, open }
    }

    #[must_use]
    pub fn n_batches(&self) -> u32 {
        self.n_batches
    }

    /// The first epoch that is not complete.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.closed
    }

    #[must_use]
    pub fn contains(&self, batch: BatchId) -> bool {
        batch.epoch < self.closed
            || self.open.get(&batch.epoch).is_some_and(|runs| runs.contains(batch.index))
    }

    /// Adds `batch`; false if it was already in the set.
    ///
    /// # Panics
    /// If the batch is not part of the plan.
    pub fn insert(&mut self, batch: BatchId) -> bool {
        assert!(batch.index < self.n_batches, "batch {batch} is not part of this plan");
        if batch.epoch < self.closed {
            return false;
        }
        let is_new = self.open.entry(batch.epoch).or_default().insert(batch.index);
        self.close_full();
        is_new
    }

    /// How many batches are in.
    #[must_use]
    pub fn len(&self) -> u64 {
        let open: u64 = self.open.values().map(|runs| u64::from(runs.len())).sum();
        u64::from(self.closed) * u64::from(self.n_batches) + open
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many runs of batches it is stored as.
    #[must_use]
    pub fn n_runs(&self) -> usize {
        self.open.values().map(|runs| runs.iter().len()).sum()
    }

    /// The batches of `epoch` that are in, by their index.
    #[must_use]
    pub fn runs(&self, epoch: u32) -> Cow<'_, Runs> {
        if epoch < self.closed {
            return Cow::Owned(Runs::from(0..self.n_batches));
        }
        self.open.get(&epoch).map_or_else(Cow::default, Cow::Borrowed)
    }

    /// How many batches of `epoch` are in.
    #[must_use]
    pub fn n_in_epoch(&self, epoch: u32) -> u32 {
        self.runs(epoch).len()
    }

    /// The last batch that is in.
    #[must_use]
    pub fn last(&self) -> Option<BatchId> {
        let epoch = self.open.keys().next_back().copied().or(self.closed.checked_sub(1))?;
        let index = self.runs(epoch).end().checked_sub(1)?;
        Some(BatchId { epoch, index })
    }

    /// The batches in both sets.
    ///
    /// # Panics
    /// If the sets are of different plans.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        // An epoch that is closed in one set is in both as far as it is in the other.
        self.combine(other, self.closed.min(other.closed), Runs::and)
    }

    /// Adds all of `other`; returns how many batches are new.
    ///
    /// # Panics
    /// If the sets are of different plans.
    pub fn add(&mut self, other: &Self) -> u64 {
        let before = self.len();
        *self = self.combine(other, self.closed.max(other.closed), Runs::or);
        self.len() - before
    }

    fn combine(&self, other: &Self, closed: u32, both: fn(&Runs, &Runs) -> Runs) -> Self {
        let open = self.combine_open(other, closed, both);
        let mut combined = Self { n_batches: self.n_batches, closed, open };
        combined.close_full();
        combined
    }

    /// `both` of every epoch from `closed` on that is open in either set.
    fn combine_open(
        &self,
        other: &Self,
        closed: u32,
        both: fn(&Runs, &Runs) -> Runs,
    ) -> BTreeMap<u32, Runs> {
        assert_eq!(self.n_batches, other.n_batches, "sets of different plans");
        let epochs = self.open.keys().chain(other.open.keys()).filter(|epoch| **epoch >= closed);
        let open = epochs.map(|epoch| (*epoch, both(&self.runs(*epoch), &other.runs(*epoch))));
        open.filter(|(_, runs)| !runs.is_empty()).collect()
    }

    fn close_full(&mut self) {
        while self.open.get(&self.closed).is_some_and(|runs| runs.len() == self.n_batches) {
            self.open.remove(&self.closed);
            self.closed += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn batches(n_batches: u32) -> impl Strategy<Value = Vec<BatchId>> {
        let batch = (0..3u32, 0..n_batches).prop_map(|(epoch, index)| BatchId { epoch, index });
        proptest::collection::vec(batch, 0..300)
    }

    fn build(n_batches: u32, batches: &[BatchId]) -> (AppliedSet, BTreeSet<BatchId>) {
        let (mut set, mut naive) = (AppliedSet::new(n_batches), BTreeSet::new());
        for batch in batches {
            assert_eq!(set.insert(*batch), naive.insert(*batch));
        }
        (set, naive)
    }

    /// The set as earlier versions wrote it.
    fn bitmaps(set: &AppliedSet) -> Vec<u8> {
        let n_open = u32::try_from(set.open.len()).unwrap();
        let mut bytes = [set.n_batches, set.closed, n_open].map(u32::to_le_bytes).concat();
        for (epoch, runs) in &set.open {
            bytes.extend(epoch.to_le_bytes());
            let bit = |index: u32| u64::from(runs.contains(index)) << (index % 64);
            for word in 0..set.n_batches.div_ceil(64) {
                let bits: u64 = (word * 64..word * 64 + 64).map(bit).sum();
                bytes.extend(bits.to_le_bytes());
            }
        }
        bytes
    }

    #[test]
    fn a_set_of_an_earlier_version_can_be_read() {
        let bytes = [[3, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [5, 0, 0, 0], [0; 4]];
        let set = AppliedSet::from_bytes(&bytes.concat(), None).unwrap();
        assert_eq!((set.n_batches(), set.epoch(), set.len()), (3, 1, 5));
        assert!(set.contains(BatchId { epoch: 1, index: 2 }));
    }

    #[test]
    fn its_bytes_do_not_grow_with_the_data() {
        // A million and a billion batches, of which a thousand workers have some in progress.
        let set = |n_batches: u32, partition: u32| {
            let mut set = AppliedSet::new(n_batches);
            let mut runs = Runs::from(0..n_batches / 2);
            let in_progress = (1..1_000).map(|worker| n_batches / 2 - 8 * worker);
            in_progress.for_each(|index| assert!(runs.remove(index - partition % 2)));
            set.open.insert(0, runs);
            set
        };
        let size = |n_batches| {
            let sets: Vec<AppliedSet> =
                (0..128).map(|partition| set(n_batches, partition)).collect();
            let first = sets[0].to_bytes(None).len();
            let second = sets[1].to_bytes(Some(&sets[0])).len();
            let third = sets[2].to_bytes(Some(&sets[0])).len();
            assert!(first < 2_100 && second < 4_100 && third < 16, "{first}, {second}, {third}");
            first
        };
        assert!(size(1_000_000_000) <= size(1_000_000) + 4);
    }

    proptest! {
        #[test]
        fn it_equals_a_plain_set((n, a, b) in (1..80u32).prop_flat_map(|n| (Just(n), batches(n), batches(n)))) {
            let ((a, naive_a), (b, naive_b)) = (build(n, &a), build(n, &b));
            prop_assert_eq!(a.len(), naive_a.len() as u64);
            let both = a.and(&b);
            for epoch in 0..4 {
                let n_in_epoch = naive_a.iter().filter(|batch| batch.epoch == epoch).count();
                prop_assert_eq!(a.n_in_epoch(epoch) as usize, n_in_epoch);
                for index in 0..n {
                    let batch = BatchId { epoch, index };
                    prop_assert_eq!(a.contains(batch), naive_a.contains(&batch));
                    prop_assert_eq!(both.contains(batch), naive_a.contains(&batch) && naive_b.contains(&batch));
                }
            }
            prop_assert_eq!(a.last(), naive_a.last().copied());
            let mut either = a.clone();
            prop_assert_eq!(either.add(&b), naive_b.difference(&naive_a).count() as u64);
            prop_assert_eq!(either.len(), naive_a.union(&naive_b).count() as u64);
            prop_assert_eq!(AppliedSet::from_bytes(&a.to_bytes(None), None), Some(a.clone()));
            prop_assert_eq!(AppliedSet::from_bytes(&b.to_bytes(Some(&a)), Some(&a)), Some(b));
            prop_assert_eq!(AppliedSet::from_bytes(&bitmaps(&a), None), Some(a));
        }

        #[test]
        fn foreign_bytes_are_refused_not_believed(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
            is_marked: bool,
        ) {
            let bytes = if is_marked { [&[0; 4], &bytes[..]].concat() } else { bytes };
            if let Some(set) = AppliedSet::from_bytes(&bytes, None) {
                prop_assert!(set.n_in_epoch(set.epoch()) < set.n_batches());
                prop_assert_eq!(AppliedSet::from_bytes(&set.to_bytes(None), None), Some(set));
            }
        }
    }
}
