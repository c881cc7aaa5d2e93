// SPDX-License-Identifier: Apache-2.0
//! Which optimizer a job uses, with its numbers; the arithmetic is in `edl-tensor`.

mod resolve;
mod schedule;

use serde::{Deserialize, Serialize};

pub use self::resolve::{Error, NAMES, clip, resolve};
pub use self::schedule::Schedule;

/// An optimizer, its schedule, its weight decay and how gradients are clipped for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OptimizerSpec {
    pub kind: OptimizerKind,
    pub learning_rate: f64,
    #[serde(default)]
    pub schedule: Schedule,
    /// Factors of the momentum, or of the first beta.
    #[serde(default, skip_serializing_if = "Schedule::is_constant")]
    pub momentum_schedule: Schedule,
    /// An L2 penalty unless it is decoupled.
    #[serde(default)]
    pub weight_decay: f64,
    /// Weights shrink by rate times decay before the step; always so for AdamW.
    #[serde(default)]
    pub decoupled: bool,
    #[serde(default)]
    pub dialect: Dialect,
    #[serde(default)]
    pub clip: Option<Clip>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    Sgd,
    Momentum {
        momentum: f64,
        nesterov: bool,
        /// PyTorch alone has it.
        #[serde(default)]
        dampening: f64,
    },
    Adam {
        beta_1: f64,
        beta_2: f64,
        epsilon: f64,
        amsgrad: bool,
    },
    AdamW {
        beta_1: f64,
        beta_2: f64,
        epsilon: f64,
    },
    Adagrad {
        initial_accumulator: f64,
        epsilon: f64,
    },
    RmsProp {
        rho: f64,
        epsilon: f64,
        momentum: f64,
        #[serde(default)]
        centered: bool,
    },
    Ftrl {
        learning_rate_power: f64,
        l1: f64,
        l2: f64,
        initial_accumulator: f64,
        #[serde(default)]
        l2_shrinkage: f64,
        #[serde(default)]
        beta: f64,
    },
    Adadelta {
        rho: f64,
        epsilon: f64,
    },
    Adamax {
        beta_1: f64,
        beta_2: f64,
        epsilon: f64,
    },
    /// `momentum_decay` is 1 in Keras and 0.004 by default in PyTorch.
    Nadam {
        beta_1: f64,
        beta_2: f64,
        epsilon: f64,
        momentum_decay: f64,
    },
    Lion {
        beta_1: f64,
        beta_2: f64,
    },
    /// The training script takes the steps, with its own optimizer and state.
    Script {
        /// It handles gradients that are not finite, as a gradient scaler does.
        #[serde(default)]
        nonfinite: bool,
    },
}

impl OptimizerKind {
    /// How much of the steps before a step keeps, where a schedule can change it.
    fn momentum_mut(&mut self) -> Option<&mut f64> {
        match self {
            Self::Momentum { momentum, .. } | Self::RmsProp { momentum, .. } => Some(momentum),
            Self::Adam { beta_1, .. }
            | Self::AdamW { beta_1, .. }
            | Self::Adamax { beta_1, .. }
            | Self::Lion { beta_1, .. } => Some(beta_1),
            // Nadam multiplies its betas over all steps.
            Self::Nadam { .. }
            | Self::Sgd
            | Self::Adagrad { .. }
            | Self::Ftrl { .. }
            | Self::Adadelta { .. }
            | Self::Script { .. } => None,
        }
    }
}

/// Whose formula it is, where libraries differ under the same name: in the place of epsilon, and
/// in whether momentum gathers gradients or steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    #[default]
    Keras,
    Torch,
}

/// What happens to a gradient whose norm is too large.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clip {
    /// The norm of the whole gradient is at most this.
    GlobalNorm(f64),
    /// The norm of each parameter's and each table's gradient is at most this.
    Norm(f64),
    /// Each number is at most this far from zero.
    Value(f64),
}

impl OptimizerSpec {
    #[must_use]
    pub fn sgd(learning_rate: f64) -> Self {
        Self::new(OptimizerKind::Sgd, learning_rate)
    }

    /// With a constant rate, and nothing else.
    #[must_use]
    pub fn new(kind: OptimizerKind, learning_rate: f64) -> Self {
        Self {
            kind,
            learning_rate,
            schedule: Schedule::Constant,
            momentum_schedule: Schedule::Constant,
            weight_decay: 0.0,
            decoupled: false,
            dialect: Dialect::Keras,
            clip: None,
        }
    }

    /// The learning rate for the update number `step`, counted from zero.
    #[must_use]
    pub fn rate(&self, step: u64) -> f64 {
        self.learning_rate * self.schedule.factor(step)
    }

    /// The optimizer with its momentum for the update number `step`, counted from zero.
    #[must_use]
    pub fn kind_at(&self, step: u64) -> OptimizerKind {
        let mut kind = self.kind.clone();
        if !self.momentum_schedule.is_constant()
            && let Some(momentum) = kind.momentum_mut()
        {
            *momentum *= self.momentum_schedule.factor(step);
        }
        kind
    }

    /// Whether the training script takes the steps.
    #[must_use]
    pub fn is_script(&self) -> bool {
        matches!(self.kind, OptimizerKind::Script { .. })
    }

    /// Whether weights shrink before the step, rather than their penalty joining the gradient.
    #[must_use]
    pub fn is_decoupled(&self) -> bool {
        self.decoupled || matches!(self.kind, OptimizerKind::AdamW { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_older_builds_wrote_means_the_same() {
        let text = r#"{"kind": {"rms_prop": {"rho": 0.9, "epsilon": 1e-7, "momentum": 0.5}},
            "learning_rate": 0.25, "schedule": {"exponential": {"every": 10, "factor": 0.5}},
            "weight_decay": 0.125}"#;
        let kind =
            OptimizerKind::RmsProp { rho: 0.9, epsilon: 1e-7, momentum: 0.5, centered: false };
        let schedule = Schedule::Exponential { every: 10, factor: 0.5, staircase: false };
        let expected =
            OptimizerSpec { schedule, weight_decay: 0.125, ..OptimizerSpec::new(kind, 0.25) };
        assert_eq!(serde_json::from_str::<OptimizerSpec>(text).unwrap(), expected);
        let old = [
            r#"{"kind": "sgd", "learning_rate": 1}"#,
            r#"{"kind": {"momentum": {"momentum": 0.9, "nesterov": true}}, "learning_rate": 1}"#,
            r#"{"kind": {"ftrl": {"learning_rate_power": -0.5, "l1": 0, "l2": 0,
                "initial_accumulator": 0}}, "learning_rate": 1,
                "schedule": {"cosine": {"warmup": 1, "total": 2, "floor": 0}}}"#,
        ];
        for text in old {
            let spec: OptimizerSpec = serde_json::from_str(text).unwrap();
            assert_eq!(spec.dialect, Dialect::Keras);
            assert!(spec.clip.is_none() && !spec.is_decoupled());
        }
    }
}
