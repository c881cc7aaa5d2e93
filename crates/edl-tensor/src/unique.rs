// SPDX-License-Identifier: Apache-2.0
//! De-duplicates the ids of a lookup list, so each row is sent once.
//!
//! Remembers how rows expand back to the list, and how the gradients of equal ids add up. The
//! same value serves one batch after another without allocating.

use hashbrown::HashTable;

use crate::table::hash;

/// The distinct ids of one list, in the order of their first appearance.
#[derive(Clone, Debug, Default)]
pub struct Unique {
    ids: Vec<u64>,
    inverse: Vec<u32>,
    index: HashTable<(u64, u32)>,
}

impl Unique {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a new list.
    ///
    /// # Panics
    /// If the list has 2^32 distinct ids or more.
    pub fn set(&mut self, lookups: &[u64]) {
        self.ids.clear();
        self.inverse.clear();
        self.index.clear();
        for id in lookups {
            let entry = self.index.entry(hash(*id), |entry| entry.0 == *id, |entry| hash(entry.0));
            let place = entry.or_insert_with(|| {
                let place = u32::try_from(self.ids.len()).expect("a batch has fewer than 2^32 ids");
                self.ids.push(*id);
                (*id, place)
            });
            self.inverse.push(place.get().1);
        }
    }

    /// The distinct ids.
    #[must_use]
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// For each place of the list, the place of its id in `ids`.
    #[must_use]
    pub fn inverse(&self) -> &[u32] {
        &self.inverse
    }

    /// Copies one row per distinct id to one row per place of the list.
    ///
    /// # Panics
    /// If `rows` does not hold `dim` numbers per distinct id.
    pub fn expand(&self, dim: usize, rows: &[f32], out: &mut Vec<f32>) {
        assert_eq!(rows.len(), self.ids.len() * dim, "one row per distinct id");
        out.clear();
        out.reserve(self.inverse.len() * dim);
        for place in &self.inverse {
            let start = *place as usize * dim;
            out.extend_from_slice(&rows[start..start + dim]);
        }
    }

    /// Adds up the gradients of equal ids, in the order of the list.
    ///
    /// # Panics
    /// If `grads` does not hold `dim` numbers per place of the list.
    pub fn sum(&self, dim: usize, grads: &[f32], out: &mut Vec<f32>) {
        self.clear_sums(dim, out);
        self.add_scaled(dim, 0, grads, 1.0, out);
    }

    /// Makes room for one sum per distinct id.
    pub(crate) fn clear_sums(&self, dim: usize, out: &mut Vec<f32>) {
        out.clear();
        out.resize(self.ids.len() * dim, 0.0);
    }

    /// Adds `grads * scale`, which belong to the places of the list from number `first` on.
    pub(crate) fn add_scaled(
        &self,
        dim: usize,
        first: usize,
        grads: &[f32],
        scale: f32,
        out: &mut [f32],
    ) {
        if dim == 0 {
            return;
        }
        let places = &self.inverse[first..];
        assert!(grads.len() <= places.len() * dim, "one row per place of the list");
        for (place, grad) in places.iter().zip(grads.chunks_exact(dim)) {
            let start = *place as usize * dim;
            for (sum, number) in out[start..start + dim].iter_mut().zip(grad) {
                *sum += scale * number;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_expands_and_sums_like_a_map(
            lists in proptest::collection::vec(proptest::collection::vec(0..20u64, 0..60), 1..4),
            dim in 1..4usize,
        ) {
            let (mut unique, mut expanded, mut sums) = (Unique::new(), Vec::new(), Vec::new());
            for list in lists {
                unique.set(&list);
                let rows: Vec<f32> =
                    unique.ids().iter().flat_map(|id| vec![*id as f32; dim]).collect();
                unique.expand(dim, &rows, &mut expanded);
                let naive: Vec<f32> = list.iter().flat_map(|id| vec![*id as f32; dim]).collect();
                prop_assert_eq!(&expanded, &naive);

                let grads: Vec<f32> = (0..list.len() * dim).map(|i| (i % 7) as f32).collect();
                let mut naive = BTreeMap::new();
                for (id, grad) in list.iter().zip(grads.chunks(dim)) {
                    let sum = naive.entry(*id).or_insert_with(|| vec![0.0; dim]);
                    sum.iter_mut().zip(grad).for_each(|(sum, number)| *sum += number);
                }
                unique.sum(dim, &grads, &mut sums);
                prop_assert_eq!(unique.ids().len(), naive.len());
                for (id, sum) in unique.ids().iter().zip(sums.chunks(dim)) {
                    prop_assert_eq!(sum, naive[id].as_slice());
                }
            }
        }
    }
}
