// SPDX-License-Identifier: Apache-2.0
//! The border between the engine's tensors and kernels of our own.
//!
//! Burn's convolution backward, batch norm and pooling take three quarters of a step of
//! `mnist_cnn`; kernels over plain slices do the same in a fraction. They take part in the
//! engine's backward pass as custom operations.

use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::ops::{Backward, NodeGuard, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{Shape, Tensor, TensorData};

/// A tensor of a pass without gradients.
pub(crate) fn plain<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    let tensor = tensor.try_into_primitive::<Flex>().expect("a tensor of the flex engine");
    tensor.to_contiguous()
}

/// A tensor of a training pass, apart from its place in the graph.
pub(crate) fn tracked<const D: usize>(tensor: Tensor<D>) -> (FlexTensor, NodeGuard) {
    let tensor = tensor
        .autodiff()
        .try_into_primitive::<Autodiff<Flex>>()
        .expect("a tensor of the flex engine");
    let (tensor, node) = tensor.into_parts();
    (tensor.to_contiguous(), node)
}

/// Back to the tensors that models see.
pub(crate) fn untracked<const D: usize>(tensor: FlexTensor) -> Tensor<D> {
    Tensor::from_primitive::<Flex>(tensor)
}

/// Enters the result of a custom operation into the graph; `state` is what its backward needs.
pub(crate) fn enter<const D: usize, const N: usize, B: Backward<Flex, N>>(
    operation: B,
    parents: [NodeGuard; N],
    state: B::State,
    output: FlexTensor,
) -> Tensor<D> {
    let prepared = operation.prepare::<NoCheckpointing>(parents).compute_bound().stateful();
    let output = match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(state, output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(output)
}

/// A tensor over numbers that a kernel wrote.
pub(crate) fn flex(values: Vec<f32>, shape: &[usize]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, Shape::from(shape.to_vec())))
}

/// The numbers of a tensor, row by row.
pub(crate) fn slice(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("a contiguous f32 tensor")
}

/// The dimensions of a tensor that must have `D` of them.
pub(crate) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    let shape = tensor.layout().shape();
    std::array::from_fn(|i| shape[i])
}

/// The engine's matrix product; transposed views are read in place.
pub(crate) fn matmul(left: FlexTensor, right: FlexTensor) -> FlexTensor {
    Flex::float_matmul(left, right)
}

/// Numbers that are added side by side, so that the compiler can use vector registers.
const LANES: usize = 16;

/// The sum of `of` over pairs of numbers, always in the same order.
pub(crate) fn sum(a: &[f32], b: &[f32], of: impl Fn(f32, f32) -> f32) -> f64 {
    let mut lanes = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += of(*a, *b);
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| of(*a, *b));
    lanes.iter().copied().chain(rest).map(f64::from).sum()
}

/// Back to single precision after a sum.
#[expect(clippy::cast_possible_truncation, reason = "parameters are f32")]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests;
