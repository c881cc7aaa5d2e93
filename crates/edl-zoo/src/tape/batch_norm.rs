// SPDX-License-Identifier: Apache-2.0
//! Batch normalisation over the channels of images.
//!
//! While training, a batch is normalised by its own mean and variance, through which gradients
//! flow; the moving statistics that inference uses live with the parameters.

use super::kernel::{channel_sums, count, narrow, wide};
use super::{Backward, Tape, Var};

/// Keeps a constant channel from being divided by zero; Keras' value.
const EPSILON: f64 = 1e-3;

/// The mean and the variance of each channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    pub mean: Vec<f32>,
    pub variance: Vec<f32>,
}

impl Tape<'_> {
    /// Normalises x `[n, height, width, channels]` by its own statistics, which are returned too,
    /// then multiplies each channel by its gamma and adds its beta.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit.
    pub fn batch_norm(&mut self, x: Var<4>, gamma: Var<1>, beta: Var<1>) -> (Var<4>, Statistics) {
        let statistics = Statistics::of(self.value(x), x.shape[3]);
        let output = self.normalise(x, gamma, beta, &statistics);
        let known = statistics.clone();
        let inputs = [x.id, gamma.id, beta.id];
        let output = self.record(x.shape, output, &inputs, move |back, gradient| {
            backward(&known, back, gradient, x, gamma, beta);
        });
        (output, statistics)
    }

    /// Normalises by given statistics, for inference: nothing is learnt through it.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit.
    pub fn batch_norm_by(
        &mut self,
        x: Var<4>,
        gamma: Var<1>,
        beta: Var<1>,
        known: &Statistics,
    ) -> Var<4> {
        let output = self.normalise(x, gamma, beta, known);
        self.record(x.shape, output, &[], |_, _| {})
    }

    fn normalise(
        &mut self,
        x: Var<4>,
        gamma: Var<1>,
        beta: Var<1>,
        statistics: &Statistics,
    ) -> Vec<f32> {
        let channels = x.shape[3];
        assert_eq!((gamma.shape, beta.shape), ([channels], [channels]), "gamma and beta");
        let mut output = self.buffer(x.size());
        let scales = statistics.scales(self.value(gamma));
        let (values, beta) = (self.value(x), &self.value(beta)[..channels]);
        let (scales, mean) = (&scales[..channels], &statistics.mean[..channels]);
        wide!({
            let pixels = output.chunks_exact_mut(channels).zip(values.chunks_exact(channels));
            for (output, pixel) in pixels {
                for c in 0..channels {
                    output[c] = (pixel[c] - mean[c]) * scales[c] + beta[c];
                }
            }
        });
        output
    }
}

impl Statistics {
    fn of(x: &[f32], channels: usize) -> Self {
        let per_channel = count(x.len() / channels);
        let zeros = vec![0.0; channels];
        let sums = wide!(channel_sums(x, x, &zeros, |value, _, _| [value]));
        let mean: Vec<f32> = sums.iter().map(|[s]| narrow(s / per_channel)).collect();
        let square = |value: f32, _, mean: f32| [(value - mean) * (value - mean)];
        let squares = wide!(channel_sums(x, x, &mean, square));
        let variance = squares.iter().map(|[s]| narrow(s / per_channel)).collect();
        Self { mean, variance }
    }

    /// One over the deviation of a channel. Late updates of many workers can push a moving
    /// variance below zero for a moment; it counts as zero then.
    fn inverse(&self, channel: usize) -> f32 {
        narrow(1.0 / (f64::from(self.variance[channel].max(0.0)) + EPSILON).sqrt())
    }

    fn scales(&self, gamma: &[f32]) -> Vec<f32> {
        gamma.iter().enumerate().map(|(c, gamma)| gamma * self.inverse(c)).collect()
    }
}

fn backward(
    statistics: &Statistics,
    back: &mut Backward<'_, '_>,
    gradient: &[f32],
    x: Var<4>,
    gamma: Var<1>,
    beta: Var<1>,
) {
    let (values, channels) = (back.value(x), x.shape[3]);
    let mean = &statistics.mean[..channels];
    let terms = |g: f32, value: f32, mean: f32| [g, g * (value - mean)];
    let sums = wide!(channel_sums(gradient, values, mean, terms));
    let inverses: Vec<f64> = (0..channels).map(|c| f64::from(statistics.inverse(c))).collect();
    back.write(gamma, |target| {
        for ((target, [_, product]), inverse) in target.iter_mut().zip(&sums).zip(&inverses) {
            *target = narrow(product * inverse);
        }
    });
    back.write(beta, |target| {
        target.iter_mut().zip(&sums).for_each(|(target, [total, _])| *target = narrow(*total));
    });
    let per_channel = count(values.len() / channels);
    let offsets: Vec<f32> = sums.iter().map(|[total, _]| narrow(total / per_channel)).collect();
    let slopes = sums.iter().zip(&inverses);
    let slopes: Vec<f32> = slopes
        .map(|([_, product], inverse)| narrow(product * inverse * inverse / per_channel))
        .collect();
    let scales = statistics.scales(back.value(gamma));
    let (offsets, slopes, scales) =
        (&offsets[..channels], &slopes[..channels], &scales[..channels]);
    back.write(x, |target| {
        wide!({
            let pixels = values.chunks_exact(channels).zip(gradient.chunks_exact(channels));
            for (target, (pixel, g)) in target.chunks_exact_mut(channels).zip(pixels) {
                for c in 0..channels {
                    let slope = (pixel[c] - mean[c]) * slopes[c];
                    target[c] = (g[c] - offsets[c] - slope) * scales[c];
                }
            }
        });
    });
}
