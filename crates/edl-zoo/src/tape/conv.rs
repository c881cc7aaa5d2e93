// SPDX-License-Identifier: Apache-2.0
//! A 3×3 convolution with valid padding, bias and ReLU, without a matrix of patches.
//!
//! In an image `[height, width, channels]` the three pixels under one row of the window lie one
//! after the other, and the window's next place begins one pixel later: a row of the image is a
//! matrix of overlapping rows `3 * channels` wide. So a row of the output is the sum of three
//! matrix products that read the image in place, and gradients are products of the same kind.

use super::kernel::{channel_sums, narrow, relu, wide};
use super::{Backward, Matrix, Tape, Var, matmul};

/// Rows, and columns, of the window.
const SIDE: usize = 3;

impl Tape<'_> {
    /// `max(0, x ∗ weight + bias)` for x `[n, height, width, channels]` and weight
    /// `[filters, channels, 3, 3]`; the answer is `[n, height - 2, width - 2, filters]`.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit, or an image is smaller than the window.
    pub fn conv3x3_relu(&mut self, x: Var<4>, weight: Var<4>, bias: Var<1>) -> Var<4> {
        let sizes = Sizes::of(x, weight, bias);
        let shape = [x.shape[0], sizes.height - 2, sizes.width - 2, sizes.filters];
        let mut turned = self.buffer(weight.size());
        sizes.turn_weight(self.value(weight), &mut turned);
        let mut output = self.buffer(shape.iter().product());
        let images = self.value(x).chunks_exact(sizes.image());
        for (image, output) in images.zip(output.chunks_exact_mut(sizes.output())) {
            forward(sizes, image, &turned, self.value(bias), output);
        }
        self.pool.give(turned);
        self.record(shape, output, &[x.id, weight.id, bias.id], move |back, gradient| {
            backward(sizes, back, gradient, x, weight, bias);
        })
    }
}

/// The sizes of one convolution.
#[derive(Clone, Copy)]
struct Sizes {
    height: usize,
    width: usize,
    channels: usize,
    filters: usize,
}

impl Sizes {
    fn of(x: Var<4>, weight: Var<4>, bias: Var<1>) -> Self {
        let [_, height, width, channels] = x.shape;
        let filters = weight.shape[0];
        assert_eq!(
            weight.shape,
            [filters, channels, SIDE, SIDE],
            "a window of {channels} channels"
        );
        assert_eq!(bias.shape, [filters], "the bias of {filters} filters");
        assert!(height >= SIDE && width >= SIDE, "an image as large as the window");
        Self { height, width, channels, filters }
    }

    /// Numbers of one image.
    fn image(self) -> usize {
        self.height * self.width * self.channels
    }

    /// Numbers of one image of the output.
    fn output(self) -> usize {
        (self.height - 2) * self.output_row()
    }

    fn output_row(self) -> usize {
        (self.width - 2) * self.filters
    }

    /// Numbers of the weight that belong to one row of the window.
    fn window_row(self) -> usize {
        SIDE * self.channels * self.filters
    }

    /// From `[filter, channel, down, right]` to `[down, right, channel, filter]`.
    fn turn_weight(self, weight: &[f32], turned: &mut [f32]) {
        self.pairs(|place, down, right, channel, filter| {
            turned[((down * SIDE + right) * self.channels + channel) * self.filters + filter] =
                weight[place];
        });
    }

    /// The other way round, for the gradient.
    fn turn_back(self, turned: &[f32], weight: &mut [f32]) {
        self.pairs(|place, down, right, channel, filter| {
            weight[place] =
                turned[((down * SIDE + right) * self.channels + channel) * self.filters + filter];
        });
    }

    /// To `[down, 2 - right, filter, channel]`: what a pixel of the image gets from the three
    /// pixels of the output that it went into by one row of the window, from left to right.
    fn mirror_weight(self, weight: &[f32], mirrored: &mut [f32]) {
        self.pairs(|place, down, right, channel, filter| {
            let from_left = SIDE - 1 - right;
            let row = (down * SIDE + from_left) * self.filters + filter;
            mirrored[row * self.channels + channel] = weight[place];
        });
    }

    /// Calls `visit` with each place of the weight and its `down, right, channel, filter`.
    fn pairs(self, mut visit: impl FnMut(usize, usize, usize, usize, usize)) {
        let mut place = 0;
        for filter in 0..self.filters {
            for channel in 0..self.channels {
                for tap in 0..SIDE * SIDE {
                    visit(place, tap / SIDE, tap % SIDE, channel, filter);
                    place += 1;
                }
            }
        }
    }
}

/// One image.
fn forward(sizes: Sizes, image: &[f32], turned: &[f32], bias: &[f32], output: &mut [f32]) {
    let Sizes { width, channels, filters, .. } = sizes;
    for (y, output) in output.chunks_exact_mut(sizes.output_row()).enumerate() {
        for (down, weight) in turned.chunks_exact(sizes.window_row()).enumerate() {
            let row = &image[(y + down) * width * channels..][..width * channels];
            let row = Matrix::strided(row, [width - 2, SIDE * channels], [channels, 1]);
            matmul(output, row, Matrix::new(weight, [SIDE * channels, filters]), down > 0);
        }
        wide!({
            for pixel in output.chunks_exact_mut(filters) {
                for (value, bias) in pixel.iter_mut().zip(bias) {
                    *value = relu(*value + bias);
                }
            }
        });
    }
}

fn backward(
    sizes: Sizes,
    back: &mut Backward<'_, '_>,
    gradient: &[f32],
    x: Var<4>,
    weight: Var<4>,
    bias: Var<1>,
) {
    let (images, output) = (back.value(x), back.output());
    let mut mirrored = back.pool().take(weight.size());
    sizes.mirror_weight(back.value(weight), &mut mirrored);
    let mut turned = back.pool().take(weight.size());
    turned.fill(0.0);
    let mut bias_sums = vec![0.0; sizes.filters];
    let mut buffer = back.pool().take(Padded::len(sizes));
    // Image by image, while it is in the caches.
    let mut visit = |mut target: Option<&mut [f32]>| {
        let images = images.chunks_exact(sizes.image());
        let deltas = gradient.chunks_exact(sizes.output()).zip(output.chunks_exact(sizes.output()));
        for (i, (image, (gradient, output))) in images.zip(deltas).enumerate() {
            let padded = Padded::fill(sizes, &mut buffer, gradient, output);
            padded.add_bias_gradient(&mut bias_sums);
            padded.add_weight_gradient(image, &mut turned);
            if let Some(target) = &mut target {
                let target = &mut target[i * sizes.image()..][..sizes.image()];
                padded.image_gradient(&mirrored, target);
            }
        }
    };
    if back.has_gradient(x.id) {
        back.write(x, |target| visit(Some(target)));
    } else {
        visit(None);
    }
    back.write(weight, |target| sizes.turn_back(&turned, target));
    back.write(bias, |target| {
        target.iter_mut().zip(&bias_sums).for_each(|(target, sum)| *target = narrow(*sum));
    });
    [buffer, turned, mirrored].into_iter().for_each(|buffer| back.pool().give(buffer));
}

/// The gradient of one output image with rows as long as the input's: two pixels of zeros before
/// the first row and after each row.
struct Padded<'a> {
    sizes: Sizes,
    values: &'a [f32],
}

impl<'a> Padded<'a> {
    fn len(sizes: Sizes) -> usize {
        (2 + (sizes.height - 2) * sizes.width) * sizes.filters
    }

    /// The gradient passes where the output is above zero.
    fn fill(sizes: Sizes, values: &'a mut [f32], gradient: &[f32], output: &[f32]) -> Self {
        let (first, rows) = values.split_at_mut(2 * sizes.filters);
        first.fill(0.0);
        let (row, output_row) = (sizes.width * sizes.filters, sizes.output_row());
        wide!({
            let deltas = gradient.chunks_exact(output_row).zip(output.chunks_exact(output_row));
            for (row, (gradient, output)) in rows.chunks_exact_mut(row).zip(deltas) {
                let (row, rest) = row.split_at_mut(output_row);
                for (target, (g, y)) in row.iter_mut().zip(gradient.iter().zip(output)) {
                    *target = if *y > 0.0 { *g } else { 0.0 };
                }
                rest.fill(0.0);
            }
        });
        Self { sizes, values }
    }

    fn add_bias_gradient(&self, bias_sums: &mut [f64]) {
        let zeros = &self.values[..self.sizes.filters];
        let sums = wide!(channel_sums(self.values, self.values, zeros, |g, _, _| [g]));
        bias_sums.iter_mut().zip(sums).for_each(|(total, [sum])| *total += sum);
    }

    /// Each place of the window has seen the image from another pixel on; where the window would
    /// leave the image, the gradient is zero.
    fn add_weight_gradient(&self, image: &[f32], turned: &mut [f32]) {
        let Sizes { height, width, channels, filters } = self.sizes;
        // The last two pixels of the last row are zeros that the image has no pixels for.
        let n_pixels = (height - 2) * width - 2;
        let delta = &self.values[2 * filters..][..n_pixels * filters];
        let delta = Matrix::new(delta, [n_pixels, filters]);
        for (down, target) in turned.chunks_exact_mut(self.sizes.window_row()).enumerate() {
            let image = &image[down * width * channels..];
            let image = Matrix::strided(image, [n_pixels, SIDE * channels], [channels, 1]);
            matmul(target, image.transposed(), delta, true);
        }
    }

    /// A row of the image went into up to three rows of the output.
    fn image_gradient(&self, mirrored: &[f32], target: &mut [f32]) {
        let Sizes { height, width, channels, filters } = self.sizes;
        for (y, target) in target.chunks_exact_mut(width * channels).enumerate() {
            let mut is_sum = false;
            for (down, weight) in mirrored.chunks_exact(self.sizes.window_row()).enumerate() {
                if y < down || y - down >= height - 2 {
                    continue;
                }
                let row = &self.values[(y - down) * width * filters..];
                let row = Matrix::strided(row, [width, SIDE * filters], [filters, 1]);
                let weight = Matrix::new(weight, [SIDE * filters, channels]);
                matmul(target, row, weight, is_sum);
                is_sum = true;
            }
        }
    }
}
