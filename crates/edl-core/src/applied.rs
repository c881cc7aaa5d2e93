// SPDX-License-Identifier: Apache-2.0
//! Which batches a partition has applied. It never forgets.
//!
//! "All epochs below `closed`", plus one bit per batch of each open epoch. An epoch closes by
//! itself when its last bit is set, so the set stays small for ever.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::BatchId;

/// A set of batches, of a plan with a fixed number of batches per epoch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AppliedSet {
    n_batches: u32,
    closed: u32,
    open: BTreeMap<u32, Bits>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Bits {
    n_set: u32,
    words: Vec<u64>,
}

impl AppliedSet {
    /// The empty set.
    ///
    /// # Panics
    /// If an epoch has no batches: such a set could not say where it ends.
    #[must_use]
    pub fn new(n_batches: u32) -> Self {
        assert!(n_batches > 0, "an epoch has at least one batch");
        Self { n_batches, closed: 0, open: BTreeMap::new() }
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
            || self.open.get(&batch.epoch).is_some_and(|bits| bits.get(batch.index))
    }

    /// Adds `batch`; false if it was in already.
    ///
    /// # Panics
    /// If the batch is not of the plan.
    pub fn insert(&mut self, batch: BatchId) -> bool {
        assert!(batch.index < self.n_batches, "batch {batch} is not of this plan");
        if self.contains(batch) {
            return false;
        }
        let n_words = self.n_batches.div_ceil(64) as usize;
        let bits = self
            .open
            .entry(batch.epoch)
            .or_insert_with(|| Bits { n_set: 0, words: vec![0; n_words] });
        bits.words[batch.index as usize / 64] |= 1 << (batch.index % 64);
        bits.n_set += 1;
        self.close_full();
        true
    }

    /// How many batches are in.
    #[must_use]
    pub fn len(&self) -> u64 {
        let open: u64 = self.open.values().map(|bits| u64::from(bits.n_set)).sum();
        u64::from(self.closed) * u64::from(self.n_batches) + open
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many batches of `epoch` are in.
    #[must_use]
    pub fn n_in_epoch(&self, epoch: u32) -> u32 {
        if epoch < self.closed {
            return self.n_batches;
        }
        self.open.get(&epoch).map_or(0, |bits| bits.n_set)
    }

    /// What is in both sets.
    ///
    /// # Panics
    /// If the sets are of different plans.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        assert_eq!(self.n_batches, other.n_batches, "sets of different plans");
        let closed = self.closed.min(other.closed);
        let last = self.last_epoch().max(other.last_epoch());
        let mut both = Self { n_batches: self.n_batches, closed, open: BTreeMap::new() };
        for epoch in closed..=last {
            for index in 0..self.n_batches {
                let batch = BatchId { epoch, index };
                if self.contains(batch) && other.contains(batch) {
                    both.insert(batch);
                }
            }
        }
        both
    }

    fn last_epoch(&self) -> u32 {
        self.open.keys().next_back().copied().unwrap_or(self.closed)
    }

    fn close_full(&mut self) {
        while self.open.get(&self.closed).is_some_and(|bits| bits.n_set == self.n_batches) {
            self.open.remove(&self.closed);
            self.closed += 1;
        }
    }

    /// A compact form for the wire and for files: all numbers little-endian `u32`.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let n_open = u32::try_from(self.open.len()).expect("few epochs are open");
        let mut bytes = Vec::new();
        for word in [self.n_batches, self.closed, n_open] {
            bytes.extend(word.to_le_bytes());
        }
        for (epoch, bits) in &self.open {
            bytes.extend(epoch.to_le_bytes());
            bits.words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        }
        bytes
    }

    /// Reads what `to_bytes` wrote; `None` if it is anything else.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]));
        let (n_batches, closed, n_open) = (words.next()?, words.next()?, words.next()?);
        let n_words = n_batches.div_ceil(64) as usize;
        let expected = 12 + n_open as usize * (4 + n_words * 8);
        // No job sees a billion epochs; a number near the end of its range is damage.
        if n_batches == 0 || closed > u32::MAX / 2 || bytes.len() != expected {
            return None;
        }
        let mut set = Self::new(n_batches);
        set.closed = closed;
        for _ in 0..n_open {
            let epoch = words.next()?;
            let mut bits = Bits { n_set: 0, words: Vec::with_capacity(n_words) };
            for _ in 0..n_words {
                let (low, high) = (words.next()?, words.next()?);
                bits.words.push(u64::from(low) | u64::from(high) << 32);
            }
            bits.n_set = bits.words.iter().map(|word| word.count_ones()).sum();
            let spare = n_words * 64 - n_batches as usize;
            let is_clean = spare == 0 || bits.words[n_words - 1] >> (64 - spare) == 0;
            if epoch < closed || !is_clean || set.open.insert(epoch, bits).is_some() {
                return None;
            }
        }
        set.close_full();
        Some(set)
    }
}

impl Bits {
    fn get(&self, index: u32) -> bool {
        self.words.get(index as usize / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
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
            prop_assert_eq!(AppliedSet::from_bytes(&a.to_bytes()), Some(a));
        }

        #[test]
        fn foreign_bytes_are_refused_not_believed(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(set) = AppliedSet::from_bytes(&bytes) {
                prop_assert!(set.n_in_epoch(set.epoch()) < set.n_batches());
            }
        }
    }
}
