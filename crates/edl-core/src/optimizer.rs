// SPDX-License-Identifier: Apache-2.0
//! Which optimizer a job uses, with its numbers; the arithmetic is in `edl-tensor`.

mod resolve;

use serde::{Deserialize, Serialize};

pub use self::resolve::{Error, resolve};

/// An optimizer, its schedule and its weight decay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpec {
    pub kind: OptimizerKind,
    pub learning_rate: f64,
    #[serde(default)]
    pub schedule: Schedule,
    /// L2 for all but AdamW, decoupled for AdamW.
    #[serde(default)]
    pub weight_decay: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    Sgd,
    Momentum { momentum: f64, nesterov: bool },
    Adam { beta_1: f64, beta_2: f64, epsilon: f64, amsgrad: bool },
    AdamW { beta_1: f64, beta_2: f64, epsilon: f64 },
    Adagrad { initial_accumulator: f64, epsilon: f64 },
    RmsProp { rho: f64, epsilon: f64, momentum: f64 },
    Ftrl { learning_rate_power: f64, l1: f64, l2: f64, initial_accumulator: f64 },
}

/// The learning rate's factor as a function of the step (updates applied so far).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    #[default]
    Constant,
    /// Times `factor` at each of `steps`.
    Steps { steps: Vec<u64>, factor: f64 },
    /// `factor` per `every` steps, smoothly.
    Exponential { every: u64, factor: f64 },
    /// From 1 down to `floor` over `total` steps, after `warmup` linear steps up.
    Cosine { warmup: u64, total: u64, floor: f64 },
    /// Linear up over `warmup` steps, then linear down to zero at `total`.
    Linear { warmup: u64, total: u64 },
}

impl OptimizerSpec {
    #[must_use]
    pub fn sgd(learning_rate: f64) -> Self {
        Self {
            kind: OptimizerKind::Sgd,
            learning_rate,
            schedule: Schedule::Constant,
            weight_decay: 0.0,
        }
    }

    /// The learning rate for the update number `step`, counted from zero.
    #[must_use]
    pub fn rate(&self, step: u64) -> f64 {
        self.learning_rate * self.schedule.factor(step)
    }
}

impl Schedule {
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "steps stay far below 2^53")]
    fn factor(&self, step: u64) -> f64 {
        match self {
            Self::Constant => 1.0,
            Self::Steps { steps, factor } => {
                let passed = steps.iter().filter(|at| step >= **at).count();
                factor.powi(i32::try_from(passed).unwrap_or(i32::MAX))
            }
            Self::Exponential { every, factor } => {
                factor.powf(step as f64 / (*every).max(1) as f64)
            }
            Self::Cosine { warmup, total, floor } => {
                if step < *warmup {
                    return (step + 1) as f64 / *warmup as f64;
                }
                let way = (step - warmup) as f64 / total.saturating_sub(*warmup).max(1) as f64;
                let cosine = 0.5 * (1.0 + (std::f64::consts::PI * way.min(1.0)).cos());
                floor + (1.0 - floor) * cosine
            }
            Self::Linear { warmup, total } => {
                if step < *warmup {
                    return (step + 1) as f64 / *warmup as f64;
                }
                let left = total.saturating_sub(step) as f64;
                left / total.saturating_sub(*warmup).max(1) as f64
            }
        }
    }
}
