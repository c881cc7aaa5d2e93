// SPDX-License-Identifier: Apache-2.0
//! Numbers of 64 bits in a vector of 32-bit ones: each takes two adjacent places, as it lies in memory.
//!
//! Everything that only moves numbers moves places. Only code that calculates with them needs this.

/// A number in its places.
type Pair = [f32; 2];

/// Changes each number.
///
/// # Panics
/// If the places are an odd number.
pub fn each(places: &mut [f32], mut change: impl FnMut(f64) -> f64) {
    for pair in pairs_mut(places) {
        *pair = bytemuck::cast(change(bytemuck::cast(*pair)));
    }
}

/// Changes each number by the one at the same place of `others`.
///
/// # Panics
/// If the places are an odd number, or `others` are fewer.
pub fn each_with(places: &mut [f32], others: &[f32], mut change: impl FnMut(f64, f64) -> f64) {
    let others = pairs(&others[..places.len()]);
    for (pair, other) in pairs_mut(places).iter_mut().zip(others) {
        *pair = bytemuck::cast(change(bytemuck::cast(*pair), bytemuck::cast(*other)));
    }
}

/// Whether all numbers are finite.
///
/// # Panics
/// If the places are an odd number.
#[must_use]
pub fn is_finite(places: &[f32]) -> bool {
    // Without an early end, so that many numbers are compared at once.
    pairs(places).iter().fold(true, |all, pair| all & bytemuck::cast::<_, f64>(*pair).is_finite())
}

fn pairs(places: &[f32]) -> &[Pair] {
    let (pairs, rest) = places.as_chunks();
    assert!(rest.is_empty(), "a number of 64 bits takes two places");
    pairs
}

fn pairs_mut(places: &mut [f32]) -> &mut [Pair] {
    let (pairs, rest) = places.as_chunks_mut();
    assert!(rest.is_empty(), "a number of 64 bits takes two places");
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(numbers: &[f64]) -> Vec<f32> {
        numbers.iter().flat_map(|number| bytemuck::cast::<_, Pair>(*number)).collect()
    }

    #[test]
    fn numbers_keep_all_bits_at_any_address() {
        // The first half of this one is not a number in 32 bits.
        let odd = f64::from_bits(0x3ff0_0000_7fa0_0001);
        let numbers = [odd, -1e300, f64::MIN_POSITIVE, 0.1];
        let mut all = vec![0.0];
        all.extend(places(&numbers));
        each(&mut all[1..], |number| number * 3.0);
        let others = places(&[1e-17, 1e300, 0.0, -0.3]);
        each_with(&mut all[1..], &others, |number, other| number + other);
        let sums =
            [odd * 3.0 + 1e-17, -1e300 * 3.0 + 1e300, f64::MIN_POSITIVE * 3.0, 0.1 * 3.0 - 0.3];
        let bits = |places: &[f32]| places.iter().map(|place| place.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&all[1..]), bits(&places(&sums)));
    }

    #[test]
    fn only_numbers_of_64_bits_can_be_too_large() {
        let halves = [f64::from_bits(0x3ff0_0000_7f80_0000), 1e300];
        assert!(is_finite(&places(&halves)));
        assert!(!is_finite(&places(&[1.0, f64::INFINITY])) && !is_finite(&places(&[f64::NAN])));
    }
}
