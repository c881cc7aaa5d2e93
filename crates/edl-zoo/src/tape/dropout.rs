// SPDX-License-Identifier: Apache-2.0
//! Dropout whose choices follow from a seed alone.

use edl_core::rng::Rng;

use super::kernel::{narrow, wide};
use super::{Tape, Var};

impl Tape<'_> {
    /// Drops a share of the numbers and scales the others up, so sums keep their mean.
    pub fn dropout<const D: usize>(&mut self, x: Var<D>, share: f64, seed: u64) -> Var<D> {
        let mut factors = self.buffer(x.size());
        mask(&mut factors, share, seed);
        let mut output = self.buffer(x.size());
        multiply(&mut output, self.value(x), &factors);
        self.record(x.shape, output, &[x.id], move |back, gradient| {
            back.write(x, |target| multiply(target, gradient, &factors));
            back.pool().give(factors);
        })
    }
}

fn multiply(target: &mut [f32], values: &[f32], factors: &[f32]) {
    wide!({
        let pairs = values.iter().zip(factors);
        target.iter_mut().zip(pairs).for_each(|(target, (value, factor))| *target = value * factor);
    });
}

/// One random word decides four numbers: 16 bits each are fine enough for a share.
fn mask(factors: &mut [f32], share: f64, seed: u64) {
    let threshold = (share * 65_536.0).round();
    let kept = narrow(1.0 / (1.0 - threshold / 65_536.0));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 65536")]
    let threshold = threshold as u64;
    let mut rng = Rng::new(seed);
    for factors in factors.chunks_mut(4) {
        let word = rng.next_u64();
        for (factor, shift) in factors.iter_mut().zip([0, 16, 32, 48]) {
            let is_dropped = (word >> shift) & 0xffff < threshold;
            *factor = if is_dropped { 0.0 } else { kept };
        }
    }
}

#[cfg(test)]
mod tests {
    fn mask(len: usize, share: f64, seed: u64) -> Vec<f32> {
        let mut factors = vec![f32::NAN; len];
        super::mask(&mut factors, share, seed);
        factors
    }

    #[test]
    fn a_mask_drops_its_share_and_keeps_the_mean() {
        let mask = mask(100_001, 0.25, 3);
        assert_eq!(mask.len(), 100_001);
        let dropped = mask.iter().filter(|m| **m == 0.0).count();
        assert!((24_000..26_000).contains(&dropped), "{dropped}");
        let mean = mask.iter().map(|m| f64::from(*m)).sum::<f64>() / 100_001.0;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
    }

    #[test]
    fn a_mask_is_a_function_of_its_seed() {
        assert_eq!(mask(1000, 0.5, 1), mask(1000, 0.5, 1));
        assert_ne!(mask(1000, 0.5, 1), mask(1000, 0.5, 2));
    }
}
