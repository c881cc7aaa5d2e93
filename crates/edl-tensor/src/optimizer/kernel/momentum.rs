// SPDX-License-Identifier: Apache-2.0
//! Momentum, plain and Nesterov's.

use edl_core::optimizer::Dialect;

use super::Pass;
use crate::optimizer::single;

/// Keras gathers steps (`-rate * gradient`), PyTorch gathers gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct Momentum {
    momentum: f32,
    nesterov: bool,
    /// The factor of what is gathered.
    inner: f32,
    /// The factor of what is taken off the weight.
    outer: f32,
}

impl Momentum {
    pub(super) fn new(
        dialect: Dialect,
        rate: f32,
        momentum: f64,
        nesterov: bool,
        dampening: f64,
        age: u64,
    ) -> Self {
        let momentum = single(momentum);
        match dialect {
            Dialect::Keras => Self { momentum, nesterov, inner: -rate, outer: -1.0 },
            Dialect::Torch => {
                // Its first gradient enters whole.
                let inner = if age <= 1 { 1.0 } else { single(1.0 - dampening) };
                Self { momentum, nesterov, inner, outer: rate }
            }
        }
    }

    pub(super) fn apply(self, pass: Pass<'_>) {
        let Self { momentum, nesterov, inner, outer } = self;
        if nesterov {
            pass.with_one(|w, m, g| {
                *m = momentum * *m + inner * g;
                *w -= outer * (momentum * *m + inner * g);
            });
        } else {
            pass.with_one(|w, m, g| {
                *m = momentum * *m + inner * g;
                *w -= outer * *m;
            });
        }
    }
}
