// SPDX-License-Identifier: Apache-2.0
//! One step's formula of each optimizer, and the passes over slices that apply it.

mod momentum;
mod nadam;
mod pass;
mod rms_prop;

use edl_core::optimizer::{Dialect, OptimizerKind};

use self::momentum::Momentum;
use self::nadam::Nadam;
pub(super) use self::pass::Pass;
use self::rms_prop::RmsProp;
use super::single;

/// An optimizer's numbers for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kernel {
    Sgd {
        rate: f32,
    },
    Momentum(Momentum),
    Adam(Adam),
    AmsGrad(Adam),
    Adagrad {
        rate: f32,
        root: Root,
    },
    RmsProp(RmsProp),
    Ftrl(Ftrl),
    Adadelta {
        rate: f32,
        rho: f32,
        epsilon: f32,
    },
    Adamax(Adamax),
    Nadam(Nadam),
    Lion {
        rate: f32,
        beta_1: f32,
        beta_2: f32,
    },
    /// A step that changes nothing.
    Nothing,
}

/// A root that epsilon keeps from zero: Keras adds it under the root, PyTorch to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Root {
    inside: f32,
    outside: f32,
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
pub(super) struct Adamax {
    /// The rate with the bias correction in it.
    alpha: f32,
    gain_1: f32,
    beta_2: f32,
    /// Keras adds epsilon to the norm, PyTorch to what enters it.
    entering: f32,
    leaving: f32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ftrl {
    rate: f32,
    /// The accumulator's exponent.
    power: f32,
    l1: f32,
    l2: f32,
    /// Twice the shrinkage.
    pull: f32,
}

impl Kernel {
    pub(super) fn new(kind: &OptimizerKind, dialect: Dialect, rate: f64, age: u64) -> Self {
        let small = single(rate);
        match *kind {
            OptimizerKind::Script { .. } => Self::Nothing,
            OptimizerKind::Sgd => Self::Sgd { rate: small },
            OptimizerKind::Momentum { momentum, nesterov, dampening } => {
                Self::Momentum(Momentum::new(dialect, small, momentum, nesterov, dampening, age))
            }
            OptimizerKind::Adam { beta_1, beta_2, epsilon, amsgrad: false }
            | OptimizerKind::AdamW { beta_1, beta_2, epsilon } => {
                Self::Adam(Adam::new(dialect, rate, beta_1, beta_2, epsilon, age))
            }
            OptimizerKind::Adam { beta_1, beta_2, epsilon, amsgrad: true } => {
                Self::AmsGrad(Adam::new(dialect, rate, beta_1, beta_2, epsilon, age))
            }
            OptimizerKind::Adagrad { epsilon, initial_accumulator: _ } => {
                Self::Adagrad { rate: small, root: Root::new(dialect, epsilon) }
            }
            OptimizerKind::RmsProp { rho, epsilon, momentum, centered } => {
                let root = Root::new(dialect, epsilon);
                Self::RmsProp(RmsProp::new(dialect, small, rho, root, momentum, centered))
            }
            // The formula divides by the rate; a schedule that has run out must not end in NaN.
            OptimizerKind::Ftrl { .. } if small == 0.0 => Self::Nothing,
            OptimizerKind::Ftrl { learning_rate_power, l1, l2, l2_shrinkage, beta, .. } => {
                Self::Ftrl(Ftrl {
                    rate: small,
                    power: single(-learning_rate_power),
                    l1: single(l1),
                    l2: single(l2 + beta / (2.0 * rate)),
                    pull: single(2.0 * l2_shrinkage),
                })
            }
            OptimizerKind::Adadelta { rho, epsilon } => {
                Self::Adadelta { rate: small, rho: single(rho), epsilon: single(epsilon) }
            }
            OptimizerKind::Adamax { beta_1, beta_2, epsilon } => {
                Self::Adamax(Adamax::new(dialect, rate, beta_1, beta_2, epsilon, age))
            }
            OptimizerKind::Nadam { beta_1, beta_2, epsilon, momentum_decay } => {
                Self::Nadam(Nadam::new(rate, beta_1, beta_2, epsilon, momentum_decay, age))
            }
            OptimizerKind::Lion { beta_1, beta_2 } => {
                Self::Lion { rate: small, beta_1: single(beta_1), beta_2: single(beta_2) }
            }
        }
    }

    pub(super) fn apply(&self, pass: Pass<'_>) {
        match *self {
            Self::Sgd { rate } => pass.alone(|w, g| *w -= rate * g),
            Self::Momentum(numbers) => numbers.apply(pass),
            Self::Adam(numbers) => pass.with_two(|w, m, v, g| {
                numbers.gather(m, v, g);
                *w -= *m * numbers.alpha / (v.sqrt() + numbers.epsilon);
            }),
            Self::AmsGrad(numbers) => pass.with_three(|w, m, v, top, g| {
                numbers.gather(m, v, g);
                *top = top.max(*v);
                *w -= *m * numbers.alpha / (top.sqrt() + numbers.epsilon);
            }),
            Self::Adagrad { rate, root } => pass.with_one(|w, v, g| {
                *v += g * g;
                *w -= rate * g / root.of(*v);
            }),
            Self::RmsProp(numbers) => numbers.apply(pass),
            #[expect(clippy::float_cmp, reason = "the usual exponent, exactly")]
            Self::Ftrl(numbers) if numbers.power == 0.5 => numbers.apply(f32::sqrt, pass),
            Self::Ftrl(numbers) => numbers.apply(|x| x.powf(numbers.power), pass),
            Self::Adadelta { rate, rho, epsilon } => pass.with_two(|w, v, moved, g| {
                *v = rho * *v + (1.0 - rho) * (g * g);
                let step = (*moved + epsilon).sqrt() * g / (*v + epsilon).sqrt();
                *moved = rho * *moved + (1.0 - rho) * (step * step);
                *w -= rate * step;
            }),
            Self::Adamax(numbers) => pass.with_two(|w, m, norm, g| {
                *m += (g - *m) * numbers.gain_1;
                *norm = (numbers.beta_2 * *norm).max(g.abs() + numbers.entering);
                *w -= numbers.alpha * *m / (*norm + numbers.leaving);
            }),
            Self::Nadam(numbers) => numbers.apply(pass),
            Self::Lion { rate, beta_1, beta_2 } => pass.with_one(|w, m, g| {
                *w -= rate * sign(beta_1 * *m + (1.0 - beta_1) * g);
                *m = beta_2 * *m + (1.0 - beta_2) * g;
            }),
            Self::Nothing => {}
        }
    }
}

impl Root {
    fn new(dialect: Dialect, epsilon: f64) -> Self {
        match dialect {
            Dialect::Keras => Self { inside: single(epsilon), outside: 0.0 },
            Dialect::Torch => Self { inside: 0.0, outside: single(epsilon) },
        }
    }

    fn of(self, square: f32) -> f32 {
        (square + self.inside).sqrt() + self.outside
    }
}

impl Adam {
    fn new(dialect: Dialect, rate: f64, beta_1: f64, beta_2: f64, epsilon: f64, age: u64) -> Self {
        let root = bias(beta_2, age).sqrt();
        // PyTorch adds it to the corrected root, which is the same as a smaller one here.
        let epsilon = match dialect {
            Dialect::Keras => epsilon,
            Dialect::Torch => epsilon * root,
        };
        Self {
            alpha: single(rate * root / bias(beta_1, age)),
            gain_1: single(1.0 - beta_1),
            gain_2: single(1.0 - beta_2),
            epsilon: single(epsilon),
        }
    }

    fn gather(&self, m: &mut f32, v: &mut f32, g: f32) {
        *m += (g - *m) * self.gain_1;
        *v += (g * g - *v) * self.gain_2;
    }
}

impl Adamax {
    fn new(dialect: Dialect, rate: f64, beta_1: f64, beta_2: f64, epsilon: f64, age: u64) -> Self {
        let (entering, leaving) = match dialect {
            Dialect::Keras => (0.0, epsilon),
            Dialect::Torch => (epsilon, 0.0),
        };
        Self {
            alpha: single(rate / bias(beta_1, age)),
            gain_1: single(1.0 - beta_1),
            beta_2: single(beta_2),
            entering: single(entering),
            leaving: single(leaving),
        }
    }
}

impl Ftrl {
    fn apply(&self, power: impl Fn(f32) -> f32, pass: Pass<'_>) {
        let Self { rate, power: _, l1, l2, pull } = *self;
        pass.with_two(|w, sum, linear, g| {
            let before = power(*sum);
            *sum += g * g;
            let after = power(*sum);
            *linear += g + pull * *w - (after - before) / rate * *w;
            let quadratic = after / rate + 2.0 * l2;
            let clipped = linear.max(-l1).min(l1);
            // Nothing gathered and no penalty: the weight has no reason to be anything but zero.
            *w = if quadratic > 0.0 { (clipped - *linear) / quadratic } else { 0.0 };
        });
    }
}

/// What a mean that started at zero has seen of its weight after `age` steps.
#[expect(clippy::cast_precision_loss, reason = "steps stay far below 2^53")]
fn bias(beta: f64, age: u64) -> f64 {
    1.0 - beta.powf(age.max(1) as f64)
}

/// Zero for zero, unlike `signum`.
fn sign(number: f32) -> f32 {
    if number == 0.0 { 0.0 } else { number.signum() }
}
