// SPDX-License-Identifier: Apache-2.0
//! Fully connected layers, and the first values of weights.

use edl_core::model::{Init, ParamSpec, Rule};

use crate::pass::Pass;
use crate::tape::Var;

/// Weight and bias of a layer from `n_in` to `n_out` numbers.
pub(crate) fn linear_params(name: &str, n_in: usize, n_out: usize) -> [ParamSpec; 2] {
    [
        weight(&format!("{name}/weight"), vec![n_in, n_out], glorot(n_in, n_out)),
        constant(&format!("{name}/bias"), n_out, 0.0),
    ]
}

impl Pass<'_> {
    /// Applies the layer whose weight is parameter number `index` and whose bias is the next one.
    pub(crate) fn linear(&mut self, index: usize, x: Var<2>) -> Var<2> {
        let (weight, bias) = (self.param(index), self.param(index + 1));
        self.tape.linear(x, weight, bias)
    }

    /// The same, with a ReLU after it.
    pub(crate) fn linear_relu(&mut self, index: usize, x: Var<2>) -> Var<2> {
        let (weight, bias) = (self.param(index), self.param(index + 1));
        self.tape.linear_relu(x, weight, bias)
    }
}

/// A weight that weight decay touches.
pub(crate) fn weight(name: &str, shape: Vec<usize>, init: Init) -> ParamSpec {
    ParamSpec::new(name, shape, init, Rule::Trainable { decay: true })
}

/// A vector that starts with equal numbers and that weight decay leaves alone.
pub(crate) fn constant(name: &str, len: usize, value: f32) -> ParamSpec {
    ParamSpec::new(name, vec![len], Init::Constant(value), Rule::Trainable { decay: false })
}

/// Keras' default: keeps the variance of what flows forward and back.
#[expect(clippy::cast_precision_loss, reason = "layers are far smaller than 2^24")]
pub(crate) fn glorot(fan_in: usize, fan_out: usize) -> Init {
    let limit = (6.0 / (fan_in + fan_out) as f32).sqrt();
    Init::Uniform { low: -limit, high: limit }
}
