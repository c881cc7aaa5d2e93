// SPDX-License-Identifier: Apache-2.0
//! Batch normalisation over the channels of images.
//!
//! While training, a batch is normalised by its own mean and variance, through which gradients
//! flow; the moving statistics that inference uses live with the parameters.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use crate::kernel::{self, narrow, sum};

/// Keeps a constant channel from being divided by zero; Keras' value.
const EPSILON: f64 = 1e-3;

/// The mean and the variance of each channel.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Statistics {
    pub(crate) mean: Vec<f32>,
    pub(crate) variance: Vec<f32>,
}

/// Normalises x `[n, channels, height, width]` by its own statistics, which are returned too.
pub(crate) fn train(x: Tensor<4>, gamma: Tensor<1>, beta: Tensor<1>) -> (Tensor<4>, Statistics) {
    let (x, x_node) = kernel::tracked(x);
    let (gamma, gamma_node) = kernel::tracked(gamma);
    let (beta, beta_node) = kernel::tracked(beta);
    let statistics = Statistics::of(&x);
    let output = forward(&x, kernel::slice(&gamma), kernel::slice(&beta), &statistics);
    let state = (x, gamma, statistics.clone());
    let output = kernel::enter(BatchNorm, [x_node, gamma_node, beta_node], state, output);
    (output, statistics)
}

/// Normalises by given statistics.
pub(crate) fn infer(x: Tensor<4>, gamma: &[f32], beta: &[f32], known: &Statistics) -> Tensor<4> {
    kernel::untracked(forward(&kernel::plain(x), gamma, beta, known))
}

#[derive(Debug)]
struct BatchNorm;

impl Backward<Flex, 3> for BatchNorm {
    type State = (FlexTensor, FlexTensor, Statistics);

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (x, gamma, statistics) = ops.state;
        let gradient = gradients.consume::<Flex>(&ops.node).to_contiguous();
        let found = backward(&x, kernel::slice(&gamma), &statistics, &gradient);
        for (node, gradient) in ops.parents.into_iter().zip(found) {
            if let Some(node) = node {
                gradients.register::<Flex>(node.id, gradient);
            }
        }
    }
}

impl Statistics {
    fn of(x: &FlexTensor) -> Self {
        let planes = Planes::of(x);
        let sums = planes.sums(|_, plane| [sum(plane, plane, |value, _| value)]);
        let mean: Vec<f32> = sums.iter().map(|[s]| narrow(s / planes.per_channel)).collect();
        let squares = planes.sums(|channel, plane| {
            let mean = mean[channel];
            [sum(plane, plane, |value, _| (value - mean) * (value - mean))]
        });
        let variance = squares.iter().map(|[s]| narrow(s / planes.per_channel)).collect();
        Self { mean, variance }
    }

    /// One over the deviation of a channel. Late updates of many workers can push a moving
    /// variance below zero for a moment; it counts as zero then.
    fn inverse(&self, channel: usize) -> f32 {
        narrow(1.0 / (f64::from(self.variance[channel].max(0.0)) + EPSILON).sqrt())
    }
}

fn forward(x: &FlexTensor, gamma: &[f32], beta: &[f32], statistics: &Statistics) -> FlexTensor {
    let planes = Planes::of(x);
    let mut output = Vec::with_capacity(planes.values.len());
    for (channel, plane) in planes.iter() {
        let scale = gamma[channel] * statistics.inverse(channel);
        let (mean, beta) = (statistics.mean[channel], beta[channel]);
        output.extend(plane.iter().map(|value| (value - mean) * scale + beta));
    }
    kernel::flex(output, &kernel::dims::<4>(x))
}

/// The gradients of x, gamma and beta.
fn backward(
    x: &FlexTensor,
    gamma: &[f32],
    statistics: &Statistics,
    gradient: &FlexTensor,
) -> [FlexTensor; 3] {
    let (planes, incoming) = (Planes::of(x), Planes::of(gradient));
    let gradient_of = |place: usize| &incoming.values[place * planes.pixels..][..planes.pixels];
    let mut place = 0;
    let sums = planes.sums(|channel, plane| {
        let gradient = gradient_of(place);
        place += 1;
        let mean = statistics.mean[channel];
        [sum(gradient, gradient, |g, _| g), sum(gradient, plane, |g, value| g * (value - mean))]
    });
    let mut found = Vec::with_capacity(planes.values.len());
    for (place, (channel, plane)) in planes.iter().enumerate() {
        let [total, product] = sums[channel];
        let inverse = statistics.inverse(channel);
        let (mean, scale) = (statistics.mean[channel], gamma[channel] * inverse);
        let offset = narrow(total / planes.per_channel);
        let slope = narrow(product * f64::from(inverse) * f64::from(inverse) / planes.per_channel);
        let pairs = gradient_of(place).iter().zip(plane);
        found.extend(pairs.map(|(g, value)| (g - offset - (value - mean) * slope) * scale));
    }
    let gamma_gradient =
        (sums.iter().enumerate()).map(|(c, [_, p])| narrow(p * f64::from(statistics.inverse(c))));
    let beta_gradient = sums.iter().map(|[total, _]| narrow(*total));
    [
        kernel::flex(found, &kernel::dims::<4>(x)),
        kernel::flex(gamma_gradient.collect(), &[gamma.len()]),
        kernel::flex(beta_gradient.collect(), &[gamma.len()]),
    ]
}

/// A batch of images as planes of one channel each.
struct Planes<'a> {
    values: &'a [f32],
    channels: usize,
    pixels: usize,
    /// Numbers of one channel over the whole batch.
    per_channel: f64,
}

impl<'a> Planes<'a> {
    fn of(x: &'a FlexTensor) -> Self {
        let [n, channels, height, width] = kernel::dims(x);
        let pixels = height * width;
        #[expect(clippy::cast_precision_loss, reason = "batches are far smaller than 2^53")]
        let per_channel = (n * pixels) as f64;
        Self { values: kernel::slice(x), channels, pixels, per_channel }
    }

    /// Each plane with its channel.
    fn iter(&self) -> impl Iterator<Item = (usize, &'a [f32])> {
        (0..self.channels).cycle().zip(self.values.chunks_exact(self.pixels))
    }

    /// Sums per channel, in the order of the planes.
    fn sums<const N: usize>(
        &self,
        mut sum: impl FnMut(usize, &[f32]) -> [f64; N],
    ) -> Vec<[f64; N]> {
        let mut sums = vec![[0.0; N]; self.channels];
        for (channel, plane) in self.iter() {
            let more = sum(channel, plane);
            sums[channel].iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
        sums
    }
}
