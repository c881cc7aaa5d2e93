// SPDX-License-Identifier: Apache-2.0
//! Optimizers, with their state next to the weights they change.
//!
//! The formulas are those of Keras 3, or those of PyTorch where the job's optimizer says so. Keras
//! adds epsilon to the root in Adam, AMSGrad and AdamW (after the bias correction has moved into
//! the rate) and under the root in Adagrad and RMSProp, and scales momentum by the rate when it is
//! gathered; PyTorch adds epsilon to the corrected root and gathers bare gradients. Weight decay is
//! the L2 penalty (its gradient `decay * weight` is added to the gradient) unless it is decoupled:
//! then weights shrink by `rate * decay` before the step. All state is single precision; the
//! numbers that a step needs once are computed in double precision.

mod kernel;

use edl_core::optimizer::{Dialect, OptimizerKind, OptimizerSpec};

use kernel::{Kernel, Pass};

/// The largest number of slots that an optimizer keeps per weight.
pub const MAX_SLOTS: usize = 3;

/// The slots of a run of weights; those that the optimizer does not keep are empty.
pub type Slots<'a> = [&'a mut [f32]; MAX_SLOTS];

/// An optimizer: makes the update of each step.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    spec: OptimizerSpec,
}

/// Where in a job's life a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Steps taken before in this job: the place in the schedule.
    pub version: u64,
    /// Steps that the slots have seen, with this one: the exponent of the bias correction.
    pub age: u64,
    /// Divides the rate; at least 1.
    pub staleness: u64,
}

/// One step's update, to be applied to any number of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    kernel: Kernel,
    /// Factor of the weight that joins the gradient.
    l2: f32,
    /// Factor by which a weight shrinks before the step.
    shrink: f32,
}

impl Optimizer {
    #[must_use]
    pub fn new(spec: OptimizerSpec) -> Self {
        Self { spec }
    }

    #[must_use]
    pub fn spec(&self) -> &OptimizerSpec {
        &self.spec
    }

    /// The names of the slots of each weight, in order. Slots of the same name mean
    /// the same, so one job can continue with those of another.
    #[must_use]
    pub fn slot_names(&self) -> &'static [&'static str] {
        let is_torch = self.spec.dialect == Dialect::Torch;
        match self.spec.kind {
            OptimizerKind::Sgd | OptimizerKind::Script { .. } => &[],
            // PyTorch gathers gradients, Keras steps.
            OptimizerKind::Momentum { .. } if is_torch => &["buffer"],
            OptimizerKind::Momentum { .. } => &["momentum"],
            OptimizerKind::Lion { .. } => &["m"],
            OptimizerKind::Adam { amsgrad: true, .. } => &["m", "v", "v_max"],
            OptimizerKind::Adam { .. }
            | OptimizerKind::AdamW { .. }
            | OptimizerKind::Nadam { .. } => &["m", "v"],
            OptimizerKind::Adagrad { .. } => &["accumulator"],
            OptimizerKind::RmsProp { momentum, centered, .. } => {
                match (momentum > 0.0, centered, is_torch) {
                    (false, false, _) => &["velocity"],
                    (false, true, _) => &["velocity", "mean"],
                    (true, false, false) => &["velocity", "momentum"],
                    (true, false, true) => &["velocity", "buffer"],
                    (true, true, false) => &["velocity", "momentum", "mean"],
                    (true, true, true) => &["velocity", "buffer", "mean"],
                }
            }
            OptimizerKind::Ftrl { .. } => &["accumulator", "linear"],
            OptimizerKind::Adadelta { .. } => &["velocity", "moved"],
            OptimizerKind::Adamax { .. } => &["m", "norm"],
        }
    }

    /// How many numbers of state each weight has.
    #[must_use]
    pub fn n_slots(&self) -> usize {
        self.slot_names().len()
    }

    /// The initial value of a slot.
    #[must_use]
    pub fn initial(&self, slot: usize) -> f32 {
        let (OptimizerKind::Adagrad { initial_accumulator, .. }
        | OptimizerKind::Ftrl { initial_accumulator, .. }) = self.spec.kind
        else {
            return 0.0;
        };
        if slot == 0 { single(initial_accumulator) } else { 0.0 }
    }

    /// The update of one step.
    #[must_use]
    pub fn update(&self, step: Step) -> Update {
        #[expect(clippy::cast_precision_loss, reason = "a staleness is small")]
        let rate = self.spec.rate(step.version) / step.staleness.max(1) as f64;
        let kind = self.spec.kind_at(step.version);
        let kernel = Kernel::new(&kind, self.spec.dialect, rate, step.age);
        let decay = self.spec.weight_decay;
        let (l2, shrink) =
            if self.spec.is_decoupled() { (0.0, decay * rate) } else { (decay, 0.0) };
        Update { kernel, l2: single(l2), shrink: single(shrink) }
    }
}

impl Update {
    /// Changes `weights` and `slots` by `gradient`; `decay` says whether weight decay takes part.
    pub fn apply(&self, weights: &mut [f32], slots: Slots<'_>, gradient: &[f32], decay: bool) {
        debug_assert_eq!(weights.len(), gradient.len(), "one gradient per weight");
        let l2 = if decay { self.l2 } else { 0.0 };
        if decay && self.shrink != 0.0 {
            weights.iter_mut().for_each(|weight| *weight -= *weight * self.shrink);
        }
        self.kernel.apply(Pass { weights, slots, gradient, l2 });
    }
}

#[expect(clippy::cast_possible_truncation, reason = "state is single precision")]
fn single(number: f64) -> f32 {
    number as f32
}

#[cfg(test)]
mod tests {
    use edl_core::optimizer::Schedule;

    use super::*;

    #[test]
    fn a_schedule_that_has_run_out_leaves_every_weight_finite() {
        let schedule = Schedule::Linear { warmup: 0, total: 5 };
        for kind in [
            OptimizerKind::Ftrl {
                learning_rate_power: -0.5,
                l1: 0.0,
                l2: 0.0,
                initial_accumulator: 0.0,
                l2_shrinkage: 0.0,
                beta: 0.5,
            },
            OptimizerKind::Adam { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-7, amsgrad: false },
        ] {
            let spec =
                OptimizerSpec { kind, schedule: schedule.clone(), ..OptimizerSpec::sgd(0.1) };
            let update = Optimizer::new(spec).update(Step { version: 9, age: 10, staleness: 1 });
            let mut weights = [0.5, -0.5];
            let slots: Slots<'_> = [&mut [0.0, 1.0], &mut [0.0, 1.0], &mut []];
            update.apply(&mut weights, slots, &[0.0, 1.0], true);
            assert_eq!(weights.map(f32::to_bits), [0.5f32, -0.5].map(f32::to_bits));
        }
    }

    #[test]
    fn weight_decay_follows_the_rule_of_a_parameter() {
        let kinds =
            [OptimizerKind::Sgd, OptimizerKind::AdamW { beta_1: 0.9, beta_2: 0.99, epsilon: 1e-7 }];
        for kind in kinds {
            let spec = OptimizerSpec { kind, weight_decay: 0.5, ..OptimizerSpec::sgd(0.1) };
            let update = Optimizer::new(spec).update(Step { version: 0, age: 1, staleness: 1 });
            let run = |decay| {
                let mut weights = [1.0];
                update.apply(&mut weights, [&mut [0.0], &mut [0.0], &mut []], &[0.0], decay);
                weights[0]
            };
            assert!((run(true) - 0.95f32).abs() < 1e-6, "shrinks by rate times decay");
            assert!((run(false) - 1.0f32).abs() < 1e-9, "stays without a gradient");
        }
    }
}
