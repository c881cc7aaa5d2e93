// SPDX-License-Identifier: Apache-2.0
//! A shuffled order of the numbers below `n`, computed number by number: it needs no table, so its
//! cost does not depend on `n`.
//!
//! A number is split into two halves, and each round adds to one half a hash of the other (a
//! Feistel network). Each round can be undone, so all of them together are a permutation of
//! the pairs of halves. Slightly more pairs exist than numbers; from one that is no number below
//! `n`, the rounds are repeated until they arrive at one (cycle walking), which can be undone too.

use crate::rng;

/// With fewer rounds, some orders of a few numbers are more frequent than others.
const ROUNDS: usize = 12;

/// The numbers below `n` in an order that `seed` fixes.
#[derive(Clone, Debug)]
pub struct Permutation {
    n: u64,
    /// Values of each half; their product is at least `n`.
    n_high: u64,
    n_low: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// # Panics
    /// If `n` is zero.
    #[must_use]
    pub fn new(n: u64, seed: u64) -> Self {
        assert!(n > 0, "an order has at least one number");
        let n_high = (n - 1).isqrt() + 1;
        let keys = std::array::from_fn(|round| rng::key(&[seed, round as u64]));
        Self { n, n_high, n_low: n.div_ceil(n_high), keys }
    }

    /// The number at `place`.
    ///
    /// # Panics
    /// If `place` is not below `n`.
    #[must_use]
    pub fn at(&self, place: u64) -> u64 {
        assert!(place < self.n, "place {place} of {} numbers", self.n);
        let mut number = self.rounds(place);
        // Ends: the walk follows a cycle on which `place` lies.
        while number >= self.n {
            number = self.rounds(number);
        }
        number
    }

    fn rounds(&self, number: u64) -> u64 {
        let (mut high, mut low) = (number / self.n_low, number % self.n_low);
        for keys in self.keys.chunks_exact(2) {
            high = shift(high, self.n_high, rng::mix(keys[0] ^ low));
            low = shift(low, self.n_low, rng::mix(keys[1] ^ high));
        }
        high * self.n_low + low
    }
}

/// `value` moved by a random distance in a circle of `n` values.
fn shift(value: u64, n: u64, random: u64) -> u64 {
    let distance = ((u128::from(random) * u128::from(n)) >> 64) as u64;
    let moved = value + distance;
    if moved < n { moved } else { moved - n }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn order(n: u64, seed: u64) -> Vec<u64> {
        let order = Permutation::new(n, seed);
        (0..n).map(|place| order.at(place)).collect()
    }

    #[test]
    fn it_names_each_number_once() {
        for n in (1..200).chain([1_000, 4_095, 4_096, 4_097, 65_537]) {
            let mut sorted = order(n, n);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn every_order_of_a_few_numbers_is_about_equally_frequent() {
        let n_seeds = 24 * 1_000;
        let mut counts: BTreeMap<Vec<u64>, u32> = BTreeMap::new();
        (0..n_seeds).for_each(|seed| *counts.entry(order(4, rng::key(&[seed]))).or_default() += 1);
        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|count| (850..1_150).contains(count)), "{counts:?}");
    }

    #[test]
    fn neighbours_are_far_apart_in_a_large_set() {
        let n = 1_000_000_000;
        let order = Permutation::new(n, 1);
        let places: Vec<u64> = (0..10_000).map(|place| order.at(place)).collect();
        let n_near = places.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < n / 100).count();
        assert!((100..300).contains(&n_near), "{n_near} of about 199");
        let n_low = places.iter().filter(|number| **number < n / 2).count();
        assert!((4_800..5_200).contains(&n_low), "{n_low}");
    }

    #[test]
    fn orders_are_pinned_forever() {
        // Computed by tests/python/test_batch_plan.py.
        assert_eq!(order(10, 42), [8, 5, 7, 0, 1, 2, 6, 3, 9, 4]);
        let large = Permutation::new(1_000_000_000, 42);
        let ends = [0, 1, 999_999_999].map(|place| large.at(place));
        assert_eq!(ends, [69_570_678, 93_864_434, 735_958_764]);
    }
}
