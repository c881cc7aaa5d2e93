// SPDX-License-Identifier: Apache-2.0
//! Max pooling over 2×2 windows.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, unary};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use crate::kernel;

/// The largest number of each 2×2 window of x `[n, channels, height, width]`, whose height and
/// width must be even.
pub(crate) fn max_pool2(x: Tensor<4>) -> Tensor<4> {
    if !x.is_autodiff() {
        return kernel::untracked(forward(&kernel::plain(x)));
    }
    let (x, node) = kernel::tracked(x);
    let output = forward(&x);
    kernel::enter(MaxPool, [node], (x, output.clone()), output)
}

#[derive(Debug)]
struct MaxPool;

impl Backward<Flex, 1> for MaxPool {
    type State = (FlexTensor, FlexTensor);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (x, output) = ops.state;
        unary::<Flex, _>(ops.parents, ops.node, gradients, |gradient| {
            backward(&x, &output, &gradient.to_contiguous())
        });
    }
}

fn forward(x: &FlexTensor) -> FlexTensor {
    let [n, channels, height, width] = kernel::dims(x);
    let values = kernel::slice(x);
    let mut output = Vec::with_capacity(values.len() / 4);
    for rows in values.chunks_exact(2 * width) {
        let (above, below) = rows.split_at(width);
        let windows = above.chunks_exact(2).zip(below.chunks_exact(2));
        output.extend(windows.map(|(a, b)| a[0].max(a[1]).max(b[0].max(b[1]))));
    }
    kernel::flex(output, &[n, channels, height / 2, width / 2])
}

/// The gradient goes to the first of the window's numbers that equals the maximum.
fn backward(x: &FlexTensor, output: &FlexTensor, gradient: &FlexTensor) -> FlexTensor {
    let shape: [usize; 4] = kernel::dims(x);
    let width = shape[3];
    let mut found = vec![0.0; kernel::slice(x).len()];
    let rows = kernel::slice(x).chunks_exact(2 * width).zip(found.chunks_exact_mut(2 * width));
    let pooled = kernel::slice(output).chunks_exact(width / 2);
    let pooled = pooled.zip(kernel::slice(gradient).chunks_exact(width / 2));
    for ((x, found), (maxima, gradient)) in rows.zip(pooled) {
        for (window, (max, gradient)) in maxima.iter().zip(gradient).enumerate() {
            let first = 2 * window;
            let mut left = *gradient;
            for place in [first, first + 1, first + width, first + width + 1] {
                let is_max = x[place] >= *max;
                found[place] = if is_max { left } else { 0.0 };
                left = if is_max { 0.0 } else { left };
            }
        }
    }
    kernel::flex(found, &shape)
}
