// SPDX-License-Identifier: Apache-2.0
//! From ids to places: a hash index that is only ever added to.
//!
//! A bucket is one cache line, and nearly every id is found in the first line that is read, so
//! that a lookup costs one miss, which the caller can start early by `prefetch`. General-purpose
//! maps need two dependent misses and cannot be asked to start one.

use super::prefetch;

/// Places by id.
#[derive(Clone, Debug)]
pub(super) struct Index {
    /// A power of two of them.
    buckets: Vec<Bucket>,
    len: usize,
}

/// Filled from the front; a full one overflows into the next.
#[repr(align(64))]
#[derive(Clone, Copy, Debug)]
struct Bucket {
    ids: [u64; WIDTH],
    places: [u32; WIDTH],
}

const WIDTH: usize = 5;

/// The place of an unused entry.
const EMPTY: u32 = u32::MAX;

/// Spreads ids over buckets. It must not be the hash that chose the partition: all ids here agree
/// in some bits of that.
pub(crate) fn hash(id: u64) -> u64 {
    let wide = u128::from(id ^ 0x243f_6a88_85a3_08d3) * 0x9e37_79b9_7f4a_7c15_u128;
    #[expect(clippy::cast_possible_truncation, reason = "both halves are meant")]
    let folded = (wide >> 64) as u64 ^ wide as u64;
    folded
}

impl Default for Index {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl Index {
    pub(super) fn with_capacity(n: usize) -> Self {
        // Seven tenths full on average: overflows stay rare.
        let n_buckets = (n * 2 / 7 + 1).next_power_of_two();
        Self { buckets: vec![Bucket::NEW; n_buckets], len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where the search for an id begins.
    #[inline]
    pub(super) fn home(&self, id: u64) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "masked to the number of buckets")]
        let hash = hash(id) as usize;
        hash & (self.buckets.len() - 1)
    }

    /// Starts loading the line that a search from `home` will need.
    #[inline]
    pub(super) fn prefetch(&self, home: usize) {
        if let Some(bucket) = self.buckets.get(home) {
            prefetch(bucket);
        }
    }

    pub(super) fn get(&self, id: u64) -> Option<u32> {
        self.get_from(self.home(id), id)
    }

    /// Searches from the id's home. An index that has grown since has another home for it, and
    /// then finds it nowhere or right: the caller must ask again before it inserts.
    #[inline]
    pub(super) fn get_from(&self, home: usize, id: u64) -> Option<u32> {
        let mut home = home & (self.buckets.len() - 1);
        loop {
            let bucket = &self.buckets[home];
            let place = bucket.get(id);
            if place != EMPTY {
                return Some(place);
            }
            if !bucket.is_full() {
                return None;
            }
            home = (home + 1) & (self.buckets.len() - 1);
        }
    }

    /// Adds an id that is not in yet.
    ///
    /// # Panics
    /// If there is no number left for the place.
    pub(super) fn insert(&mut self, id: u64, place: u32) {
        assert!(place != EMPTY, "a partition's table has fewer than 2^32 - 1 rows");
        if (self.len + 1) * 10 > self.buckets.len() * WIDTH * 7 {
            self.grow();
        }
        self.put(id, place);
        self.len += 1;
    }

    fn put(&mut self, id: u64, place: u32) {
        let mut home = self.home(id);
        while self.buckets[home].is_full() {
            home = (home + 1) & (self.buckets.len() - 1);
        }
        let bucket = &mut self.buckets[home];
        let free = bucket.places.iter().position(|place| *place == EMPTY).expect("it is not full");
        bucket.ids[free] = id;
        bucket.places[free] = place;
    }

    #[cold]
    fn grow(&mut self) {
        let doubled = vec![Bucket::NEW; self.buckets.len() * 2];
        let old = std::mem::replace(&mut self.buckets, doubled);
        for bucket in &old {
            let used = bucket.ids.iter().zip(&bucket.places).filter(|(_, place)| **place != EMPTY);
            used.for_each(|(id, place)| self.put(*id, *place));
        }
    }
}

impl Bucket {
    const NEW: Self = Self { ids: [0; WIDTH], places: [EMPTY; WIDTH] };

    /// Looks at every entry, because that is faster than guessing where to stop. Unused ones
    /// come last, so the first match is the one, if there is one.
    #[inline]
    fn get(&self, id: u64) -> u32 {
        let matches = (0..WIDTH).fold(0, |bits, i| bits | u32::from(self.ids[i] == id) << i);
        self.places.get(matches.trailing_zeros() as usize).copied().unwrap_or(EMPTY)
    }

    fn is_full(&self) -> bool {
        self.places[WIDTH - 1] != EMPTY
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_equals_a_map(ids in proptest::collection::vec(0..3000u64, 0..2000), capacity in 0..99usize) {
            let (mut index, mut map) = (Index::with_capacity(capacity), BTreeMap::new());
            for (place, id) in (0..).zip(ids) {
                prop_assert_eq!(index.get(id), map.get(&id).copied());
                if let std::collections::btree_map::Entry::Vacant(vacant) = map.entry(id) {
                    index.insert(id, place);
                    vacant.insert(place);
                }
            }
            prop_assert_eq!(index.len(), map.len());
            prop_assert!((0..3000).all(|id| index.get(id) == map.get(&id).copied()));
        }
    }

    #[test]
    fn a_bucket_is_one_cache_line() {
        assert_eq!((size_of::<Bucket>(), align_of::<Bucket>()), (64, 64));
    }
}
