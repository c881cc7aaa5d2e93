// SPDX-License-Identifier: Apache-2.0
//! A 3×3 convolution with valid padding, bias and ReLU, image by image.
//!
//! Each image becomes a matrix of patches that stays in cache, and the engine's matrix product
//! does the rest. Backward makes the patches again: cheaper than keeping nine copies of a batch.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use crate::kernel::{self, matmul, narrow};

/// Taps of the window.
const TAPS: usize = 9;

/// `relu(x ∗ weight + bias)` for x `[n, channels, height, width]` and weight
/// `[filters, channels, 3, 3]`.
pub(crate) fn conv3x3_relu(x: Tensor<4>, weight: Tensor<4>, bias: Tensor<1>) -> Tensor<4> {
    if !weight.is_autodiff() {
        let (x, weight, bias) = (kernel::plain(x), kernel::plain(weight), kernel::plain(bias));
        return kernel::untracked(forward(&x, &weight, &bias));
    }
    let (x, x_node) = kernel::tracked(x);
    let (weight, weight_node) = kernel::tracked(weight);
    let (bias, bias_node) = kernel::tracked(bias);
    let output = forward(&x, &weight, &bias);
    let state = (x, weight, output.clone());
    kernel::enter(Conv, [x_node, weight_node, bias_node], state, output)
}

#[derive(Debug)]
struct Conv;

impl Backward<Flex, 3> for Conv {
    type State = (FlexTensor, FlexTensor, FlexTensor);

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (x, weight, output) = ops.state;
        let gradient = gradients.consume::<Flex>(&ops.node).to_contiguous();
        let [x_node, weight_node, bias_node] = ops.parents;
        let found = backward(&x, &weight, &output, &gradient, x_node.is_some());
        let parents = [(x_node, found.x), (weight_node, found.weight), (bias_node, found.bias)];
        for (node, gradient) in parents {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                gradients.register::<Flex>(node.id, gradient);
            }
        }
    }
}

/// The sizes of one convolution.
#[derive(Clone, Copy)]
struct Sizes {
    channels: usize,
    height: usize,
    width: usize,
    filters: usize,
}

impl Sizes {
    fn of(x: &FlexTensor, weight: &FlexTensor) -> Self {
        let [_, channels, height, width] = kernel::dims(x);
        let [filters, ..] = kernel::dims::<4>(weight);
        Self { channels, height, width, filters }
    }

    /// Numbers of one image of the input.
    fn image(self) -> usize {
        self.channels * self.height * self.width
    }

    /// Pixels of one output plane.
    fn pixels(self) -> usize {
        (self.height - 2) * (self.width - 2)
    }

    fn patches_shape(self) -> [usize; 2] {
        [self.channels * TAPS, self.pixels()]
    }
}

fn forward(x: &FlexTensor, weight: &FlexTensor, bias: &FlexTensor) -> FlexTensor {
    let sizes = Sizes::of(x, weight);
    let weight = weight.reshape([sizes.filters, sizes.channels * TAPS].into());
    let images = kernel::slice(x).chunks_exact(sizes.image());
    let mut output = Vec::with_capacity(images.len() * sizes.filters * sizes.pixels());
    for image in images.clone() {
        let product = matmul(weight.clone(), patches(image, sizes));
        let planes = kernel::slice(&product).chunks_exact(sizes.pixels());
        for (plane, bias) in planes.zip(kernel::slice(bias)) {
            output.extend(plane.iter().map(|value| (value + bias).max(0.0)));
        }
    }
    kernel::flex(output, &[images.len(), sizes.filters, sizes.height - 2, sizes.width - 2])
}

/// What flows back; `x` only when somebody needs it.
struct Found {
    x: Option<FlexTensor>,
    weight: Option<FlexTensor>,
    bias: Option<FlexTensor>,
}

fn backward(
    x: &FlexTensor,
    weight: &FlexTensor,
    output: &FlexTensor,
    gradient: &FlexTensor,
    needs_x: bool,
) -> Found {
    let sizes = Sizes::of(x, weight);
    let flat_weight = weight.reshape([sizes.filters, sizes.channels * TAPS].into());
    let mut x_gradient = if needs_x { vec![0.0; kernel::slice(x).len()] } else { vec![] };
    let mut weight_gradient = vec![0.0; kernel::slice(weight).len()];
    let mut bias_gradient = vec![0.0_f64; sizes.filters];
    let n_outputs = sizes.filters * sizes.pixels();
    let outputs = kernel::slice(output).chunks_exact(n_outputs);
    let incoming = kernel::slice(gradient).chunks_exact(n_outputs);
    let images = kernel::slice(x).chunks_exact(sizes.image());
    for (n, ((image, output), incoming)) in images.zip(outputs).zip(incoming).enumerate() {
        let open = |(g, y): (&f32, &f32)| if *y > 0.0 { *g } else { 0.0 };
        let delta: Vec<f32> = incoming.iter().zip(output).map(open).collect();
        for (sum, plane) in bias_gradient.iter_mut().zip(delta.chunks_exact(sizes.pixels())) {
            *sum += kernel::sum(plane, plane, |g, _| g);
        }
        let delta = kernel::flex(delta, &[sizes.filters, sizes.pixels()]);
        let outer = matmul(delta.clone(), patches(image, sizes).transpose(0, 1));
        weight_gradient.iter_mut().zip(kernel::slice(&outer)).for_each(|(sum, g)| *sum += g);
        if needs_x {
            let patches = matmul(flat_weight.transpose(0, 1), delta);
            let target = &mut x_gradient[n * sizes.image()..][..sizes.image()];
            add_patches(kernel::slice(&patches), target, sizes);
        }
    }
    let bias_gradient = bias_gradient.into_iter().map(narrow).collect();
    Found {
        x: needs_x.then(|| kernel::flex(x_gradient, &kernel::dims::<4>(x))),
        weight: Some(kernel::flex(weight_gradient, &kernel::dims::<4>(weight))),
        bias: Some(kernel::flex(bias_gradient, &[sizes.filters])),
    }
}

/// Row `(channel, tap)` holds, for each output pixel, the input pixel under that tap.
fn patches(image: &[f32], sizes: Sizes) -> FlexTensor {
    let shape = sizes.patches_shape();
    let mut patches = Vec::with_capacity(shape[0] * shape[1]);
    for plane in image.chunks_exact(sizes.height * sizes.width) {
        for (down, right) in taps() {
            for row in plane.chunks_exact(sizes.width).skip(down).take(sizes.height - 2) {
                patches.extend_from_slice(&row[right..right + sizes.width - 2]);
            }
        }
    }
    kernel::flex(patches, &shape)
}

/// Adds every number of the patches to the pixel that it was read from.
fn add_patches(patches: &[f32], image: &mut [f32], sizes: Sizes) {
    let mut rows = patches.chunks_exact(sizes.width - 2);
    for plane in image.chunks_exact_mut(sizes.height * sizes.width) {
        for (down, right) in taps() {
            let targets = plane.chunks_exact_mut(sizes.width).skip(down).take(sizes.height - 2);
            for (target, row) in targets.zip(&mut rows) {
                let target = &mut target[right..right + sizes.width - 2];
                target.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
            }
        }
    }
}

fn taps() -> impl Iterator<Item = (usize, usize)> {
    (0..3).flat_map(|down| (0..3).map(move |right| (down, right)))
}
