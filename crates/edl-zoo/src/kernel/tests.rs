// SPDX-License-Identifier: Apache-2.0
//! Our kernels against the engine's own operations: values and gradients, number by number.

use burn::tensor::activation::relu;
use burn::tensor::module::{conv2d, max_pool2d};
use burn::tensor::ops::{ConvOptions, MaxPoolOptions};
use burn::tensor::{Device, Tensor, TensorData};
use edl_core::rng::Rng;

use crate::batch_norm::{self, Statistics};
use crate::conv::conv3x3_relu;
use crate::kernel::narrow;
use crate::max_pool::max_pool2;
use crate::pass::numbers;

/// Numbers from -1 to 1 that collect gradients.
fn leaf<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D> {
    let mut rng = Rng::new(seed);
    let values: Vec<f32> =
        (0..shape.iter().product()).map(|_| narrow(rng.unit()) * 2.0 - 1.0).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex().autodiff()).require_grad()
}

/// The output, and the gradients of a weighted sum of it.
fn run<const N: usize>(
    x: &Tensor<4>,
    others: [&Tensor<1>; N],
    operation: impl Fn(Tensor<4>) -> Tensor<4>,
) -> Vec<Vec<f32>> {
    let output = operation(x.clone());
    let loss = (output.clone() * leaf(output.dims(), 99).detach()).sum();
    let gradients = loss.backward();
    let mut found = vec![numbers(output), numbers(x.grad(&gradients).unwrap())];
    found.extend(others.iter().map(|other| numbers(other.grad(&gradients).unwrap())));
    found
}

fn assert_close(ours: &[Vec<f32>], theirs: &[Vec<f32>]) {
    assert_eq!(ours.len(), theirs.len());
    for (piece, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!(ours.len(), theirs.len(), "piece {piece}");
        for (our, their) in ours.iter().zip(theirs) {
            let error = (our - their).abs();
            assert!(error <= 1e-4 * their.abs().max(1.0), "piece {piece}: {our} {their}");
        }
    }
}

#[test]
fn convolution_agrees_with_the_engine() {
    for [n, channels, filters, height, width] in [[3, 2, 5, 7, 9], [1, 1, 4, 3, 3], [2, 4, 1, 5, 4]]
    {
        let x = leaf([n, channels, height, width], 1);
        let weight = leaf([filters * channels * 9], 2);
        let bias = leaf([filters], 3);
        let kernel = || weight.clone().reshape([filters, channels, 3, 3]);
        let ours = run(&x, [&weight, &bias], |x| conv3x3_relu(x, kernel(), bias.clone()));
        let options = || ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
        let theirs =
            run(&x, [&weight, &bias], |x| relu(conv2d(x, kernel(), Some(bias.clone()), options())));
        assert_close(&ours, &theirs);
    }
}

#[test]
fn max_pooling_agrees_with_the_engine() {
    let x = leaf([2, 3, 6, 8], 1);
    let ours = run(&x, [], max_pool2);
    assert_close(&ours, &run(&x, [], |x| max_pool2d(x, MaxPoolOptions::new([2, 2]))));
}

#[test]
fn equal_numbers_share_one_gradient_in_max_pooling() {
    let x: Tensor<4> = Tensor::ones([1, 1, 2, 2], &Device::flex().autodiff()).require_grad();
    let gradients = max_pool2(x.clone()).sum().backward();
    assert_eq!(numbers(x.grad(&gradients).unwrap()), [1.0, 0.0, 0.0, 0.0]);
}

/// Batch norm in elementary operations.
fn normalise(x: Tensor<4>, gamma: &Tensor<1>, beta: &Tensor<1>) -> Tensor<4> {
    let [n, channels, height, width] = x.dims();
    let flat = x.swap_dims(0, 1).reshape([channels, n * height * width]);
    let centred = flat.clone() - flat.mean_dim(1);
    let variance = centred.clone().powi_scalar(2).mean_dim(1);
    let column = |v: &Tensor<1>| v.clone().reshape([channels, 1]);
    let scaled = centred / (variance + 1e-3).sqrt() * column(gamma) + column(beta);
    scaled.reshape([channels, n, height, width]).swap_dims(0, 1)
}

#[test]
fn batch_norm_agrees_with_the_engine() {
    for (n, height) in [(4, 5), (1, 6), (3, 16)] {
        let (x, gamma, beta) = (leaf([n, 3, height, 4], 1), leaf([3], 2), leaf([3], 3));
        let ours =
            run(&x, [&gamma, &beta], |x| batch_norm::train(x, gamma.clone(), beta.clone()).0);
        assert_close(&ours, &run(&x, [&gamma, &beta], |x| normalise(x, &gamma, &beta)));
    }
}

#[test]
fn inference_with_a_batchs_own_statistics_equals_training_on_it() {
    let (x, gamma, beta) = (leaf([4, 3, 6, 6], 1), leaf([3], 2), leaf([3], 3));
    let (trained, found) = batch_norm::train(x.clone(), gamma.clone(), beta.clone());
    let [gamma, beta] = [gamma, beta].map(numbers);
    let inferred = batch_norm::infer(x.inner(), &gamma, &beta, &found);
    assert_eq!(numbers(trained), numbers(inferred));
}

#[test]
fn a_variance_below_zero_counts_as_zero() {
    let x: Tensor<4> = Tensor::ones([1, 1, 2, 2], &Device::flex());
    let known = Statistics { mean: vec![0.0], variance: vec![-0.5] };
    let output = numbers(batch_norm::infer(x, &[1.0], &[0.0], &known));
    assert!(output.iter().all(|value| (value - 31.622_776).abs() < 1e-3), "{output:?}");
}
