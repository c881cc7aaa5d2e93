// SPDX-License-Identifier: Apache-2.0
//! Adam, which all models that learn use unless the job names another optimizer.

use edl_core::optimizer::{OptimizerKind, OptimizerSpec};

/// Adam with Keras' numbers.
pub(crate) fn adam(learning_rate: f64) -> OptimizerSpec {
    let kind = OptimizerKind::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false };
    OptimizerSpec::new(kind, learning_rate)
}
