// SPDX-License-Identifier: Apache-2.0
//! The inner loops, one per optimizer: plain passes over slices that the compiler vectorises.

use edl_core::optimizer::OptimizerKind;

use super::{Slots, single};

/// An optimizer's numbers for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kernel {
    Sgd {
        rate: f32,
    },
    Momentum {
        rate: f32,
        momentum: f32,
    },
    Nesterov {
        rate: f32,
        momentum: f32,
    },
    Adam(Adam),
    AmsGrad(Adam),
    Adagrad {
        rate: f32,
        epsilon: f32,
    },
    RmsProp {
        rate: f32,
        rho: f32,
        epsilon: f32,
    },
    RmsPropMomentum {
        rate: f32,
        rho: f32,
        epsilon: f32,
        momentum: f32,
    },
    Ftrl(Ftrl),
    /// A step that changes nothing.
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Adam {
    /// The rate with both bias corrections in it.
    alpha: f32,
    /// One minus each beta.
    gain_1: f32,
    gain_2: f32,
    epsilon: f32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ftrl {
    rate: f32,
    /// The accumulator's exponent.
    power: f32,
    l1: f32,
    l2: f32,
}

impl Kernel {
    pub(super) fn new(kind: &OptimizerKind, rate: f64, age: u64) -> Self {
        let adam = |beta_1: f64, beta_2: f64, epsilon| {
            let bias = |beta: f64| 1.0 - beta.powf(exponent(age));
            Adam {
                alpha: single(rate * bias(beta_2).sqrt() / bias(beta_1)),
                gain_1: single(1.0 - beta_1),
                gain_2: single(1.0 - beta_2),
                epsilon: single(epsilon),
            }
        };
        let small = single(rate);
        match *kind {
            OptimizerKind::Sgd => Self::Sgd { rate: small },
            OptimizerKind::Momentum { momentum, nesterov: false } => {
                Self::Momentum { rate: small, momentum: single(momentum) }
            }
            OptimizerKind::Momentum { momentum, nesterov: true } => {
                Self::Nesterov { rate: small, momentum: single(momentum) }
            }
            OptimizerKind::Adam { beta_1, beta_2, epsilon, amsgrad: false }
            | OptimizerKind::AdamW { beta_1, beta_2, epsilon } => {
                Self::Adam(adam(beta_1, beta_2, epsilon))
            }
            OptimizerKind::Adam { beta_1, beta_2, epsilon, amsgrad: true } => {
                Self::AmsGrad(adam(beta_1, beta_2, epsilon))
            }
            OptimizerKind::Adagrad { epsilon, initial_accumulator: _ } => {
                Self::Adagrad { rate: small, epsilon: single(epsilon) }
            }
            OptimizerKind::RmsProp { rho, epsilon, momentum } => {
                let (rho, epsilon) = (single(rho), single(epsilon));
                if momentum > 0.0 {
                    let momentum = single(momentum);
                    Self::RmsPropMomentum { rate: small, rho, epsilon, momentum }
                } else {
                    Self::RmsProp { rate: small, rho, epsilon }
                }
            }
            // The formula divides by the rate; a schedule that has run out must not end in NaN.
            OptimizerKind::Ftrl { .. } if small == 0.0 => Self::Nothing,
            OptimizerKind::Ftrl { learning_rate_power, l1, l2, initial_accumulator: _ } => {
                let power = single(-learning_rate_power);
                Self::Ftrl(Ftrl { rate: small, power, l1: single(l1), l2: single(l2) })
            }
        }
    }

    pub(super) fn apply(&self, l2: f32, weights: &mut [f32], slots: Slots<'_>, gradient: &[f32]) {
        let [a, b, c] = slots;
        match *self {
            Self::Sgd { rate } => {
                for (w, g) in weights.iter_mut().zip(gradient) {
                    *w -= rate * (g + l2 * *w);
                }
            }
            Self::Momentum { rate, momentum } => {
                for ((w, m), g) in weights.iter_mut().zip(a).zip(gradient) {
                    *m = momentum * *m - rate * (g + l2 * *w);
                    *w += *m;
                }
            }
            Self::Nesterov { rate, momentum } => {
                for ((w, m), g) in weights.iter_mut().zip(a).zip(gradient) {
                    let pull = rate * (g + l2 * *w);
                    *m = momentum * *m - pull;
                    *w += momentum * *m - pull;
                }
            }
            Self::Adam(numbers) => numbers.adam(l2, weights, a, b, gradient),
            Self::AmsGrad(numbers) => numbers.amsgrad(l2, weights, [a, b, c], gradient),
            Self::Adagrad { rate, epsilon } => {
                for ((w, v), g) in weights.iter_mut().zip(a).zip(gradient) {
                    let g = g + l2 * *w;
                    *v += g * g;
                    *w -= rate * g / (*v + epsilon).sqrt();
                }
            }
            Self::RmsProp { rate, rho, epsilon } => {
                for ((w, v), g) in weights.iter_mut().zip(a).zip(gradient) {
                    let g = g + l2 * *w;
                    *v = rho * *v + (1.0 - rho) * (g * g);
                    *w -= rate * g / (*v + epsilon).sqrt();
                }
            }
            Self::RmsPropMomentum { rate, rho, epsilon, momentum } => {
                for (((w, v), m), g) in weights.iter_mut().zip(a).zip(b).zip(gradient) {
                    let g = g + l2 * *w;
                    *v = rho * *v + (1.0 - rho) * (g * g);
                    *m = momentum * *m + rate * g / (*v + epsilon).sqrt();
                    *w -= *m;
                }
            }
            #[expect(clippy::float_cmp, reason = "the usual exponent, exactly")]
            Self::Ftrl(numbers) if numbers.power == 0.5 => {
                numbers.apply(f32::sqrt, l2, weights, a, b, gradient);
            }
            Self::Ftrl(numbers) => {
                numbers.apply(|x| x.powf(numbers.power), l2, weights, a, b, gradient);
            }
            Self::Nothing => {}
        }
    }
}

impl Adam {
    fn adam(&self, l2: f32, weights: &mut [f32], m: &mut [f32], v: &mut [f32], gradient: &[f32]) {
        let Self { alpha, gain_1, gain_2, epsilon } = *self;
        for (((w, m), v), g) in weights.iter_mut().zip(m).zip(v).zip(gradient) {
            let g = g + l2 * *w;
            *m += (g - *m) * gain_1;
            *v += (g * g - *v) * gain_2;
            *w -= *m * alpha / (v.sqrt() + epsilon);
        }
    }

    fn amsgrad(&self, l2: f32, weights: &mut [f32], slots: Slots<'_>, gradient: &[f32]) {
        let Self { alpha, gain_1, gain_2, epsilon } = *self;
        let [m, v, top] = slots;
        for ((((w, m), v), top), g) in weights.iter_mut().zip(m).zip(v).zip(top).zip(gradient) {
            let g = g + l2 * *w;
            *m += (g - *m) * gain_1;
            *v += (g * g - *v) * gain_2;
            *top = top.max(*v);
            *w -= *m * alpha / (top.sqrt() + epsilon);
        }
    }
}

impl Ftrl {
    fn apply(
        &self,
        power: impl Fn(f32) -> f32,
        decay: f32,
        weights: &mut [f32],
        sums: &mut [f32],
        linears: &mut [f32],
        gradient: &[f32],
    ) {
        let Self { rate, power: _, l1, l2 } = *self;
        for (((w, sum), linear), g) in weights.iter_mut().zip(sums).zip(linears).zip(gradient) {
            let g = g + decay * *w;
            let before = power(*sum);
            *sum += g * g;
            let after = power(*sum);
            *linear += g - (after - before) / rate * *w;
            let quadratic = after / rate + 2.0 * l2;
            let clipped = linear.max(-l1).min(l1);
            // Nothing gathered and no penalty: the weight has no reason to be anything but zero.
            *w = if quadratic > 0.0 { (clipped - *linear) / quadratic } else { 0.0 };
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "steps stay far below 2^53")]
fn exponent(age: u64) -> f64 {
    age.max(1) as f64
}
