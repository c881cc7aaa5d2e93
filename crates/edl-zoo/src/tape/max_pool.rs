// SPDX-License-Identifier: Apache-2.0
//! Max pooling over 2×2 windows.

use super::kernel::wide;
use super::{Tape, Var};

impl Tape<'_> {
    /// The largest number of each 2×2 window, per channel: `[n, height, width, channels]` gives
    /// `[n, height / 2, width / 2, channels]`. A gradient goes to the first of the window's
    /// numbers that equals the maximum.
    ///
    /// # Panics
    ///
    /// If height or width is odd.
    pub fn max_pool2(&mut self, x: Var<4>) -> Var<4> {
        let [n, height, width, channels] = x.shape;
        assert!(height % 2 == 0 && width % 2 == 0, "an image of whole windows");
        let mut output = self.buffer(x.size() / 4);
        let values = self.value(x);
        let row = (width * channels).max(1);
        wide!({
            let rows = values.chunks_exact(2 * row).zip(output.chunks_exact_mut((row / 2).max(1)));
            for (rows, output) in rows {
                let (above, below) = rows.split_at(row);
                for (i, output) in output.chunks_exact_mut(channels).enumerate() {
                    let [a, b] = pixels(above, i, channels);
                    let [c, d] = pixels(below, i, channels);
                    for (j, output) in output.iter_mut().enumerate() {
                        *output = larger(larger(a[j], b[j]), larger(c[j], d[j]));
                    }
                }
            }
        });
        self.record([n, height / 2, width / 2, channels], output, &[x.id], move |back, gradient| {
            let (values, maxima) = (back.value(x), back.output());
            back.write(x, |target| {
                wide!({
                    let rows = values.chunks_exact(2 * row).zip(target.chunks_exact_mut(2 * row));
                    let pooled = maxima.chunks_exact(row / 2).zip(gradient.chunks_exact(row / 2));
                    for ((x, target), (maxima, gradient)) in rows.zip(pooled) {
                        scatter(x, maxima, gradient, target, channels);
                    }
                });
            });
        })
    }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The two pixels of window `i` in one row of an image.
#[inline(always)]
fn pixels(row: &[f32], i: usize, channels: usize) -> [&[f32]; 2] {
    let (left, right) = row[2 * i * channels..][..2 * channels].split_at(channels);
    [left, right]
}

/// Two rows of an image, and one of the pooled image.
#[inline(always)]
fn scatter(x: &[f32], maxima: &[f32], gradient: &[f32], target: &mut [f32], channels: usize) {
    let (above, below) = x.split_at(x.len() / 2);
    let (target_above, target_below) = target.split_at_mut(x.len() / 2);
    let windows = maxima.chunks_exact(channels).zip(gradient.chunks_exact(channels));
    for (i, (maxima, gradient)) in windows.enumerate() {
        let [a, b] = pixels(above, i, channels);
        let [c, d] = pixels(below, i, channels);
        let place = 2 * i * channels..2 * (i + 1) * channels;
        let (to_a, to_b) = target_above[place.clone()].split_at_mut(channels);
        let (to_c, to_d) = target_below[place].split_at_mut(channels);
        for j in 0..channels {
            let (max, mut left) = (maxima[j], gradient[j]);
            for (value, to) in [
                (a[j], &mut to_a[j]),
                (b[j], &mut to_b[j]),
                (c[j], &mut to_c[j]),
                (d[j], &mut to_d[j]),
            ] {
                let is_max = value >= max;
                *to = if is_max { left } else { 0.0 };
                left = if is_max { 0.0 } else { left };
            }
        }
    }
}
