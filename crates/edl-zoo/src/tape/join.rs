// SPDX-License-Identifier: Apache-2.0
//! Operations that only move or add numbers.

use super::kernel::wide;
use super::{Tape, Var};

impl Tape<'_> {
    /// The sum of two values of one shape.
    ///
    /// # Panics
    ///
    /// If the shapes differ.
    pub fn add<const D: usize>(&mut self, a: Var<D>, b: Var<D>) -> Var<D> {
        assert_eq!(a.shape, b.shape, "the shapes of a sum");
        let mut output = self.buffer(a.size());
        let terms = self.value(a).iter().zip(self.value(b));
        output.iter_mut().zip(terms).for_each(|(sum, (a, b))| *sum = a + b);
        self.record(a.shape, output, &[a.id, b.id], move |back, gradient| {
            back.write(a, |target| target.copy_from_slice(gradient));
            back.write(b, |target| target.copy_from_slice(gradient));
        })
    }

    /// The rows of `a` followed by those of `b`: `[n, i]` and `[n, j]` give `[n, i + j]`.
    ///
    /// # Panics
    ///
    /// If one has more rows than the other.
    pub fn concat(&mut self, a: Var<2>, b: Var<2>) -> Var<2> {
        let ([n, left], [b_rows, right]) = (a.shape, b.shape);
        assert_eq!(n, b_rows, "the rows of values that are joined");
        let width = left + right;
        let mut output = self.buffer(n * width);
        let (a_values, b_values) = (self.value(a), self.value(b));
        for (i, row) in output.chunks_exact_mut(width.max(1)).enumerate() {
            row[..left].copy_from_slice(&a_values[i * left..][..left]);
            row[left..].copy_from_slice(&b_values[i * right..][..right]);
        }
        self.record([n, width], output, &[a.id, b.id], move |back, gradient| {
            let rows = || gradient.chunks_exact(width.max(1)).enumerate();
            back.write(a, |target| {
                rows().for_each(|(i, g)| target[i * left..][..left].copy_from_slice(&g[..left]));
            });
            back.write(b, |target| {
                rows().for_each(|(i, g)| target[i * right..][..right].copy_from_slice(&g[left..]));
            });
        })
    }

    /// The sum of each row: `[n, width]` gives `[n, 1]`.
    pub fn row_sums(&mut self, x: Var<2>) -> Var<2> {
        let [n, width] = x.shape;
        let mut output = self.buffer(n);
        let values = self.value(x);
        for (i, sum) in output.iter_mut().enumerate() {
            *sum = values[i * width..][..width].iter().sum();
        }
        self.record([n, 1], output, &[x.id], move |back, gradient| {
            back.write(x, |target| {
                for (row, g) in target.chunks_exact_mut(width.max(1)).zip(gradient) {
                    row.fill(*g);
                }
            });
        })
    }

    /// Images as rows of numbers, one channel after the other: `[n, height, width, channels]`
    /// gives `[n, channels * height * width]`, the order of PyTorch and of the built-in models'
    /// parameters.
    pub fn flatten_channels_first(&mut self, x: Var<4>) -> Var<2> {
        let [n, height, width, channels] = x.shape;
        let pixels = height * width;
        let mut output = self.buffer(x.size());
        transpose(self.value(x), &mut output, pixels, channels);
        self.record([n, channels * pixels], output, &[x.id], move |back, gradient| {
            back.write(x, |target| transpose(gradient, target, channels, pixels));
        })
    }
}

/// Exchanges rows and columns of each matrix `[rows, columns]` of a batch.
fn transpose(from: &[f32], to: &mut [f32], rows: usize, columns: usize) {
    let size = (rows * columns).max(1);
    wide!({
        for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(size)) {
            for (column, to) in to.chunks_exact_mut(rows).enumerate() {
                for (to, from) in to.iter_mut().zip(from.chunks_exact(columns)) {
                    *to = from[column];
                }
            }
        }
    });
}
