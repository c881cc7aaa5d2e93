// SPDX-License-Identifier: Apache-2.0
//! RMSProp, with momentum, centred, or both.

use edl_core::optimizer::Dialect;

use super::{Pass, Root};
use crate::optimizer::single;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct RmsProp {
    rho: f32,
    root: Root,
    momentum: f32,
    centered: bool,
    /// The factor of what momentum gathers; PyTorch gathers without the rate.
    inner: f32,
    /// The factor of what was gathered.
    outer: f32,
}

impl RmsProp {
    pub(super) fn new(
        dialect: Dialect,
        rate: f32,
        rho: f64,
        root: Root,
        momentum: f64,
        centered: bool,
    ) -> Self {
        let (inner, outer) = match dialect {
            Dialect::Torch if momentum > 0.0 => (1.0, rate),
            Dialect::Torch | Dialect::Keras => (rate, 1.0),
        };
        Self { rho: single(rho), root, momentum: single(momentum), centered, inner, outer }
    }

    pub(super) fn apply(self, pass: Pass<'_>) {
        match (self.momentum > 0.0, self.centered) {
            (false, false) => pass.with_one(|w, v, g| {
                *w -= self.scaled(v, 0.0, g);
            }),
            (true, false) => pass.with_two(|w, v, m, g| {
                *w -= self.gathered(m, self.scaled(v, 0.0, g));
            }),
            (false, true) => pass.with_two(|w, v, mean, g| {
                *w -= self.scaled(v, self.mean(mean, g), g);
            }),
            (true, true) => pass.with_three(|w, v, m, mean, g| {
                *w -= self.gathered(m, self.scaled(v, self.mean(mean, g), g));
            }),
        }
    }

    /// The gradient over the root of its mean square, or of its variance if it has a mean.
    fn scaled(&self, v: &mut f32, mean: f32, g: f32) -> f32 {
        *v = self.rho * *v + (1.0 - self.rho) * (g * g);
        // Rounding alone makes a variance negative.
        self.inner * g / self.root.of((*v - mean * mean).max(0.0))
    }

    fn mean(&self, mean: &mut f32, g: f32) -> f32 {
        *mean = self.rho * *mean + (1.0 - self.rho) * g;
        *mean
    }

    fn gathered(&self, m: &mut f32, step: f32) -> f32 {
        *m = self.momentum * *m + step;
        self.outer * *m
    }
}
