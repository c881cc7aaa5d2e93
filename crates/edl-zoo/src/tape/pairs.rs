// SPDX-License-Identifier: Apache-2.0
//! The second-order term of a factorisation machine.

use super::kernel::wide;
use super::{Tape, Var};

impl Tape<'_> {
    /// The sum of the inner products of all pairs of a record's vectors: `[n, vectors, dim]` gives
    /// `[n, 1]`. It is half of the square of their sum less the sum of their squares.
    pub fn pairs(&mut self, x: Var<3>) -> Var<2> {
        let [n, vectors, dim] = x.shape;
        let size = (vectors * dim).max(1);
        let mut sums = self.buffer(n * dim);
        let mut output = self.buffer(n);
        let values = self.value(x);
        wide!({
            let records = values.chunks_exact(size).zip(sums.chunks_exact_mut(dim.max(1)));
            for ((record, sum), output) in records.zip(&mut output) {
                sum.fill(0.0);
                for vector in record.chunks_exact(dim) {
                    sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value);
                }
                let square_of_sum: f32 = sum.iter().map(|sum| sum * sum).sum();
                let sum_of_squares: f32 = record.iter().map(|value| value * value).sum();
                *output = (square_of_sum - sum_of_squares) * 0.5;
            }
        });
        self.record([n, 1], output, &[x.id], move |back, gradient| {
            let values = back.value(x);
            back.write(x, |target| {
                wide!({
                    let records = values.chunks_exact(size).zip(target.chunks_exact_mut(size));
                    let sums = sums.chunks_exact(dim.max(1)).zip(&*gradient);
                    for ((record, target), (sum, g)) in records.zip(sums) {
                        let vectors = record.chunks_exact(dim).zip(target.chunks_exact_mut(dim));
                        for (vector, target) in vectors {
                            let numbers = target.iter_mut().zip(sum.iter().zip(vector));
                            numbers.for_each(|(target, (sum, value))| *target = (sum - value) * g);
                        }
                    }
                });
            });
            back.pool().give(sums);
        })
    }
}
