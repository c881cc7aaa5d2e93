// SPDX-License-Identifier: Apache-2.0
//! Adam with Nesterov's momentum, whose weight grows from half of beta to beta.

use super::{Pass, bias};
use crate::optimizer::single;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct Nadam {
    /// Factors of the gathered gradient and of this one, with rate and bias corrections in them.
    alpha_m: f32,
    alpha_g: f32,
    gain_1: f32,
    gain_2: f32,
    epsilon: f32,
}

impl Nadam {
    pub(super) fn new(
        rate: f64,
        beta_1: f64,
        beta_2: f64,
        epsilon: f64,
        momentum_decay: f64,
        age: u64,
    ) -> Self {
        let age = age.max(1);
        #[expect(clippy::cast_precision_loss, reason = "steps stay far below 2^53")]
        let mu = |step: u64| beta_1 * (1.0 - 0.5 * 0.96f64.powf(step as f64 * momentum_decay));
        let product = product(mu, age);
        let root = bias(beta_2, age).sqrt();
        Self {
            alpha_m: single(rate * root * mu(age + 1) / (1.0 - product * mu(age + 1))),
            alpha_g: single(rate * root * (1.0 - mu(age)) / (1.0 - product)),
            gain_1: single(1.0 - beta_1),
            gain_2: single(1.0 - beta_2),
            epsilon: single(epsilon * root),
        }
    }

    pub(super) fn apply(self, pass: Pass<'_>) {
        let Self { alpha_m, alpha_g, gain_1, gain_2, epsilon } = self;
        pass.with_two(|w, m, v, g| {
            *m += (g - *m) * gain_1;
            *v += (g * g - *v) * gain_2;
            *w -= (alpha_m * *m + alpha_g * g) / (v.sqrt() + epsilon);
        });
    }
}

/// The product of `mu` over all steps until now, or zero once it is too small to matter.
fn product(mu: impl Fn(u64) -> f64, age: u64) -> f64 {
    const NEGLIGIBLE: f64 = 1e-18;
    let mut product = 1.0;
    for step in 1..=age {
        product *= mu(step);
        if product < NEGLIGIBLE {
            return 0.0;
        }
    }
    product
}
