// SPDX-License-Identifier: Apache-2.0
//! Dropout whose choices follow from a seed alone.

use burn::tensor::Tensor;
use edl_core::rng::Rng;

use crate::pass::{Kind, Pass};

/// Drops a share of the numbers while training and scales the others up, so that sums keep their
/// mean; leaves them alone otherwise.
pub(crate) fn dropout(pass: &Pass<'_>, x: Tensor<2>, share: f64) -> Tensor<2> {
    match pass.kind() {
        Kind::Infer => x,
        Kind::Train { seed } => {
            let shape = x.dims();
            x * pass.constant(mask(shape[0] * shape[1], share, seed), shape)
        }
    }
}

/// One random word decides four numbers: 16 bits each are fine enough for a share.
fn mask(len: usize, share: f64, seed: u64) -> Vec<f32> {
    let threshold = (share * 65_536.0).round();
    #[expect(clippy::cast_possible_truncation, reason = "a scale needs no more digits")]
    let kept = (1.0 / (1.0 - threshold / 65_536.0)) as f32;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 65536")]
    let threshold = threshold as u64;
    let mut rng = Rng::new(seed);
    let mut mask = Vec::with_capacity(len + 3);
    while mask.len() < len {
        let word = rng.next_u64();
        for shift in [0, 16, 32, 48] {
            let is_dropped = (word >> shift) & 0xffff < threshold;
            mask.push(if is_dropped { 0.0 } else { kept });
        }
    }
    mask.truncate(len);
    mask
}

#[cfg(test)]
mod tests {
    use super::*;

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
