// SPDX-License-Identifier: Apache-2.0
//! Losses, and the probabilities that belong to them.

use super::kernel::{count, narrow};
use super::{Tape, Var};

impl Tape<'_> {
    /// The mean cross entropy of `softmax(logits)`, logits `[n, classes]`, with each row's class.
    ///
    /// # Panics
    ///
    /// If there are more or fewer labels than rows, or a label is no class.
    pub fn softmax_cross_entropy(&mut self, logits: Var<2>, labels: &[usize]) -> Var<0> {
        let [n, classes] = logits.shape;
        assert_eq!(labels.len(), n, "one label per row");
        let mut probabilities = self.buffer(n * classes);
        probabilities.copy_from_slice(self.value(logits));
        let rows = probabilities.chunks_exact_mut(classes).zip(labels);
        let losses = rows.map(|(row, label)| {
            let of_label = row[*label];
            f64::from(log_sum_and_softmax(row) - of_label)
        });
        let loss = narrow(losses.sum::<f64>() / count(n));
        let labels = labels.to_vec();
        let value = self.scalar(loss);
        self.record([], value, &[logits.id], move |back, gradient| {
            let scale = gradient[0] * narrow(1.0 / count(n));
            back.write(logits, |target| {
                let rows = target.chunks_exact_mut(classes).zip(&labels);
                for ((target, label), row) in rows.zip(probabilities.chunks_exact(classes)) {
                    target.iter_mut().zip(row).for_each(|(target, p)| *target = p * scale);
                    target[*label] -= scale;
                }
            });
            back.pool().give(probabilities);
        })
    }

    /// The mean cross entropy of `sigmoid(logits)` with a yes or no per record. For label y and
    /// log-odds z it is `(1 - y) z - log(sigmoid(z))`, which stays finite for every finite z.
    ///
    /// # Panics
    ///
    /// If there are more or fewer labels than numbers.
    pub fn sigmoid_cross_entropy<const D: usize>(
        &mut self,
        logits: Var<D>,
        labels: &[bool],
    ) -> Var<0> {
        let n = logits.size();
        assert_eq!(labels.len(), n, "one label per number");
        let losses = self.value(logits).iter().zip(labels).map(|(z, label)| {
            let negative = if *label { 0.0 } else { *z };
            // -log(sigmoid(z)) = log(1 + exp(-z))
            let log_odds = (-z).max(0.0) + libm::log1pf(libm::expf(-z.abs()));
            f64::from(negative + log_odds)
        });
        let loss = narrow(losses.sum::<f64>() / count(n));
        let labels = labels.to_vec();
        let value = self.scalar(loss);
        self.record([], value, &[logits.id], move |back, gradient| {
            let scale = gradient[0] * narrow(1.0 / count(n));
            let logits_values = back.value(logits);
            back.write(logits, |target| {
                for ((target, z), label) in target.iter_mut().zip(logits_values).zip(labels) {
                    *target = (sigmoid(*z) - f32::from(u8::from(label))) * scale;
                }
            });
        })
    }

    fn scalar(&mut self, value: f32) -> Vec<f32> {
        let mut buffer = self.buffer(1);
        buffer[0] = value;
        buffer
    }
}

/// Makes probabilities of each row of `width` numbers.
pub fn softmax(values: &mut [f32], width: usize) {
    for row in values.chunks_exact_mut(width) {
        log_sum_and_softmax(row);
    }
}

/// The logarithm of the sum of the exponentials, which become probabilities.
fn log_sum_and_softmax(row: &mut [f32]) -> f32 {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|value| *value = libm::expf(*value - largest));
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|value| *value /= sum);
    largest + libm::logf(sum)
}

/// The probability that belongs to log-odds.
#[must_use]
pub fn sigmoid(z: f32) -> f32 {
    if z >= 0.0 {
        1.0 / (1.0 + libm::expf(-z))
    } else {
        let e = libm::expf(z);
        e / (1.0 + e)
    }
}
