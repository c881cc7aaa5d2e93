// SPDX-License-Identifier: Apache-2.0
//! What the operations' loops share: wide registers, rounding, sums per channel.

/// Runs a loop with the widest registers of this machine: the compiler makes one version of it per
/// instruction set, and the right one is chosen at run time. Results do not depend on the choice.
macro_rules! wide {
    ($body:expr) => {{
        // What is not inlined would be compiled for the oldest machine alone, and `inline` counts
        // only for closures that can be called just once: this one consumes something.
        let once = $crate::tape::kernel::Once;
        gemm_common::pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                let _once = once;
                $body
            },
        )
    }};
}
pub(crate) use wide;

/// For `wide` alone.
pub(crate) struct Once;

/// The larger of a number and zero, in one instruction where `f32::max` takes three.
#[inline(always)]
pub(crate) fn relu(value: f32) -> f32 {
    if value > 0.0 { value } else { 0.0 }
}

/// Back to single precision after a sum.
#[expect(clippy::cast_possible_truncation, reason = "parameters are f32")]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}

/// A count as a number to divide by.
#[expect(clippy::cast_precision_loss, reason = "batches are far smaller than 2^53")]
pub(crate) fn count(n: usize) -> f64 {
    n as f64
}

/// Channels that are added side by side, so the compiler can use vector registers.
const LANES: usize = 16;

/// Pixels whose sum stays in single precision.
const BLOCK: usize = 32;

/// Sums of `of(a, b, c)` per channel, always in the same order. `a` and `b` hold the channels of
/// one pixel after the other, `c` one number per channel.
#[inline(always)]
pub(crate) fn channel_sums<const N: usize>(
    a: &[f32],
    b: &[f32],
    c: &[f32],
    of: impl Fn(f32, f32, f32) -> [f32; N],
) -> Vec<[f64; N]> {
    let channels = c.len();
    let mut sums = vec![[0.0; N]; channels];
    for (a, b) in a.chunks(BLOCK * channels).zip(b.chunks(BLOCK * channels)) {
        for (i, (c, sums)) in c.chunks(LANES).zip(sums.chunks_mut(LANES)).enumerate() {
            let mut lanes = [[0.0; LANES]; N];
            let pixels = a.chunks_exact(channels).zip(b.chunks_exact(channels));
            let first = i * LANES;
            if let Ok(c) = <&[f32; LANES]>::try_from(c) {
                for (a, b) in pixels {
                    let (a, b) = (&a[first..first + LANES], &b[first..first + LANES]);
                    add(&mut lanes, a, b, c, &of);
                }
            } else {
                let end = first + c.len();
                pixels.for_each(|(a, b)| add(&mut lanes, &a[first..end], &b[first..end], c, &of));
            }
            for (lane, sums) in sums.iter_mut().enumerate() {
                sums.iter_mut().zip(&lanes).for_each(|(sum, more)| *sum += f64::from(more[lane]));
            }
        }
    }
    sums
}

#[inline(always)]
fn add<const N: usize>(
    lanes: &mut [[f32; LANES]; N],
    a: &[f32],
    b: &[f32],
    c: &[f32],
    of: &impl Fn(f32, f32, f32) -> [f32; N],
) {
    for lane in 0..c.len() {
        let more = of(a[lane], b[lane], c[lane]);
        for (lanes, more) in lanes.iter_mut().zip(more) {
            lanes[lane] += more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_per_channel_for_any_number_of_channels_and_pixels() {
        for (channels, pixels) in [(1, 1), (3, 100), (16, 33), (20, 31), (64, 40)] {
            let a: Vec<f32> = (0..5_u8).cycle().take(channels * pixels).map(f32::from).collect();
            let b: Vec<f32> = (0..7_u8).cycle().take(channels * pixels).map(f32::from).collect();
            let c: Vec<f32> = (0..4_u8).cycle().take(channels).map(f32::from).collect();
            let found = wide!(channel_sums(&a, &b, &c, |a, b, c| [a, a * b - c]));
            for (channel, found) in found.iter().enumerate() {
                let places = (channel..channels * pixels).step_by(channels);
                let terms = places.map(|i| [a[i], a[i] * b[i] - c[channel]].map(f64::from));
                let expected = terms.fold([0.0, 0.0], |[x, y], [u, v]| [x + u, y + v]);
                assert_eq!(found.to_vec(), expected, "{channels} channels, {pixels} pixels");
            }
        }
    }
}
