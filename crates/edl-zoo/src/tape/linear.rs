// SPDX-License-Identifier: Apache-2.0
//! Fully connected layers.

use super::kernel::{relu, wide};
use super::{Backward, Matrix, Tape, Var, matmul};

impl Tape<'_> {
    /// `x · weight + bias` for x `[n, n_in]`, weight `[n_in, n_out]`, bias `[n_out]`.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit.
    pub fn linear(&mut self, x: Var<2>, weight: Var<2>, bias: Var<1>) -> Var<2> {
        let (shape, output) = self.affine(x, weight, bias, |value| value);
        self.record(shape, output, &[x.id, weight.id, bias.id], move |back, gradient| {
            backward(back, gradient, x, weight, bias);
        })
    }

    /// `max(0, x · weight + bias)`.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit.
    pub fn linear_relu(&mut self, x: Var<2>, weight: Var<2>, bias: Var<1>) -> Var<2> {
        let (shape, output) = self.affine(x, weight, bias, relu);
        self.record(shape, output, &[x.id, weight.id, bias.id], move |back, gradient| {
            let output = back.output();
            wide!({
                for (g, y) in gradient.iter_mut().zip(output) {
                    *g = if *y > 0.0 { *g } else { 0.0 };
                }
            });
            backward(back, gradient, x, weight, bias);
        })
    }

    fn affine(
        &mut self,
        x: Var<2>,
        weight: Var<2>,
        bias: Var<1>,
        activation: impl Fn(f32) -> f32,
    ) -> ([usize; 2], Vec<f32>) {
        let ([n, _], [_, n_out]) = (x.shape, weight.shape);
        assert_eq!(bias.shape, [n_out], "the bias of a layer with {n_out} outputs");
        let mut output = self.buffer(n * n_out);
        let left = Matrix::new(self.value(x), x.shape);
        matmul(&mut output, left, Matrix::new(self.value(weight), weight.shape), false);
        let bias = self.value(bias);
        wide!({
            for row in output.chunks_exact_mut(n_out.max(1)) {
                for (value, bias) in row.iter_mut().zip(bias) {
                    *value = activation(*value + bias);
                }
            }
        });
        ([n, n_out], output)
    }
}

fn backward(
    back: &mut Backward<'_, '_>,
    gradient: &[f32],
    x: Var<2>,
    weight: Var<2>,
    bias: Var<1>,
) {
    let incoming = Matrix::new(gradient, [x.shape[0], weight.shape[1]]);
    let (x_values, weight_values) = (back.value(x), back.value(weight));
    back.write(weight, |target| {
        matmul(target, Matrix::new(x_values, x.shape).transposed(), incoming, false);
    });
    back.write(bias, |target| {
        target.fill(0.0);
        wide!({
            for row in gradient.chunks_exact(target.len().max(1)) {
                target.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
            }
        });
    });
    back.write(x, |target| {
        matmul(target, incoming, Matrix::new(weight_values, weight.shape).transposed(), false);
    });
}
