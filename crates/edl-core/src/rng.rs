// SPDX-License-Identifier: Apache-2.0
//! Randomness that can be repeated: a splitmix generator and functions keyed by words.
//!
//! Implemented here because seeds must replay forever, and general-purpose generators promise no
//! stability between versions.

/// Mixes 64 bits: every input bit affects every output bit.
#[must_use]
pub fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One word from many: order matters, and no word is lost.
#[must_use]
pub fn key(words: &[u64]) -> u64 {
    words.iter().fold(0x5851_f42d_4c95_7f2d, |state, word| mix(state ^ mix(*word)))
}

/// A word for a name, the same on every machine.
#[must_use]
pub fn name_key(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A stream of random words from one seed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rng {
    state: u64,
}

impl Rng {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    pub fn next_u64(&mut self) -> u64 {
        let word = mix(self.state);
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word
    }

    /// Uniform below `limit`, without bias.
    ///
    /// # Panics
    /// If `limit` is zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0, "a range must hold something");
        let threshold = limit.wrapping_neg() % limit;
        loop {
            let wide = u128::from(self.next_u64()) * u128::from(limit);
            #[expect(clippy::cast_possible_truncation, reason = "the low half is what is meant")]
            let low = wide as u64;
            if low >= threshold {
                return (wide >> 64) as u64;
            }
        }
    }

    /// Uniform in [0, 1), with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        unit(self.next_u64())
    }
}

/// Maps a word to [0, 1).
#[must_use]
pub fn unit(word: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    let numerator = (word >> 11) as f64;
    numerator * (1.0 / 9_007_199_254_740_992.0)
}

/// The numbers below `n` in an order that `seed` fixes.
#[must_use]
pub fn permutation(n: usize, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> =
        (0..n).map(|i| u32::try_from(i).expect("an epoch has fewer than 2^32 shards")).collect();
    let mut rng = Rng::new(seed);
    for last in (1..order.len()).rev() {
        let other = usize::try_from(rng.below(last as u64 + 1)).expect("an index fits");
        order.swap(last, other);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_names_each_number_once() {
        let mut order = permutation(1000, 7);
        assert_ne!(order[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        order.sort_unstable();
        assert!(order.iter().enumerate().all(|(i, n)| i == *n as usize));
    }

    #[test]
    fn streams_are_pinned_forever() {
        let mut rng = Rng::new(42);
        assert_eq!(rng.next_u64(), 13_679_457_532_755_275_413);
        assert!((0.0..1.0).contains(&rng.unit()));
    }
}
