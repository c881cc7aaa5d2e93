// SPDX-License-Identifier: Apache-2.0
//! How the learning rate changes while a job runs.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// The learning rate's factor as a function of the step (updates applied so far).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    #[default]
    Constant,
    /// Times `factor` at each of `steps`.
    Steps { steps: Vec<u64>, factor: f64 },
    /// `factor` per `every` steps, smoothly or as a staircase.
    Exponential {
        every: u64,
        factor: f64,
        #[serde(default)]
        staircase: bool,
    },
    /// From 1 down to `floor` over `total` steps, after `warmup` linear steps up.
    Cosine {
        warmup: u64,
        total: u64,
        floor: f64,
        /// The factor of step 0, from which the warm-up rises; without it the first step already
        /// has `1 / warmup`.
        #[serde(default)]
        start: Option<f64>,
        /// Up again after `total`, and down, and so on.
        #[serde(default)]
        waves: bool,
    },
    /// Linear up over `warmup` steps, then linear down to zero at `total`.
    Linear { warmup: u64, total: u64 },
    /// From `start` to `end` over `total` steps along a power of what is left of the way. With
    /// `cycle` the way is made longer each time that its end is reached.
    Polynomial {
        start: f64,
        end: f64,
        total: u64,
        power: f64,
        #[serde(default)]
        cycle: bool,
    },
    /// One over `1 + factor * step / every`, smoothly or as a staircase.
    InverseTime {
        every: u64,
        factor: f64,
        #[serde(default)]
        staircase: bool,
    },
    /// Each of `factors` from the step of `starts` on. The first start is 0 and starts rise.
    Table { starts: Vec<u64>, factors: Vec<f64> },
}

impl Schedule {
    #[must_use]
    pub fn is_constant(&self) -> bool {
        *self == Self::Constant
    }

    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "steps stay far below 2^53")]
    pub(super) fn factor(&self, step: u64) -> f64 {
        match self {
            Self::Constant => 1.0,
            Self::Steps { steps, factor } => {
                let passed = steps.iter().filter(|at| step >= **at).count();
                factor.powi(i32::try_from(passed).unwrap_or(i32::MAX))
            }
            Self::Exponential { every, factor, staircase } => {
                factor.powf(periods(step, *every, *staircase))
            }
            Self::InverseTime { every, factor, staircase } => {
                1.0 / (1.0 + factor * periods(step, *every, *staircase))
            }
            Self::Cosine { warmup, start: Some(start), .. } if step < *warmup => {
                start + (1.0 - start) * (step as f64 / *warmup as f64)
            }
            Self::Cosine { warmup, .. } | Self::Linear { warmup, .. } if step < *warmup => {
                (step + 1) as f64 / *warmup as f64
            }
            Self::Cosine { warmup, total, floor, waves, start: _ } => {
                let way = (step - warmup) as f64 / total.saturating_sub(*warmup).max(1) as f64;
                let way = if *waves { way } else { way.min(1.0) };
                floor + (1.0 - floor) * 0.5 * (1.0 + (PI * way).cos())
            }
            Self::Linear { warmup, total } => {
                let left = total.saturating_sub(step) as f64;
                left / total.saturating_sub(*warmup).max(1) as f64
            }
            Self::Polynomial { start, end, total, power, cycle } => {
                let total = (*total).max(1);
                let n_cycles = if *cycle { step.div_ceil(total).max(1) } else { 1 };
                let way = (step as f64 / (total * n_cycles) as f64).min(1.0);
                end + (start - end) * (1.0 - way).powf(*power)
            }
            Self::Table { starts, factors } => {
                let passed = starts.partition_point(|at| *at <= step);
                factors.get(passed.saturating_sub(1)).copied().unwrap_or(1.0)
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "steps stay far below 2^53")]
fn periods(step: u64, every: u64, staircase: bool) -> f64 {
    let periods = step as f64 / every.max(1) as f64;
    if staircase { periods.floor() } else { periods }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schedule: &Schedule, expected: &[f64]) {
        for (step, expected) in (0..).zip(expected) {
            let found = schedule.factor(step);
            assert!((found - expected).abs() < 1e-12, "{schedule:?} at {step}: {found}");
        }
    }

    #[test]
    fn each_schedule_runs_as_it_says() {
        let factor = 0.5;
        check(&Schedule::Steps { steps: vec![1, 3, 3], factor }, &[1.0, 0.5, 0.5, 0.125]);
        let exponential = |staircase| Schedule::Exponential { every: 2, factor, staircase };
        check(&exponential(false), &[1.0, 0.5f64.sqrt(), 0.5]);
        check(&exponential(true), &[1.0, 1.0, 0.5, 0.5, 0.25]);
        let inverse = |staircase| Schedule::InverseTime { every: 2, factor, staircase };
        check(&inverse(false), &[1.0, 0.8, 1.0 / 1.5]);
        check(&inverse(true), &[1.0, 1.0, 1.0 / 1.5]);
        check(&Schedule::Linear { warmup: 2, total: 4 }, &[0.5, 1.0, 1.0, 0.5, 0.0, 0.0]);
        let table = Schedule::Table { starts: vec![0, 2, 3], factors: vec![1.0, 0.5, 0.25] };
        check(&table, &[1.0, 1.0, 0.5, 0.25, 0.25]);
        check(&Schedule::Table { starts: vec![], factors: vec![] }, &[1.0, 1.0]);
    }

    #[test]
    fn a_cosine_may_warm_up_from_a_start_and_may_come_back() {
        let cosine =
            |start, waves| Schedule::Cosine { warmup: 2, total: 4, floor: 0.2, start, waves };
        check(&cosine(None, false), &[0.5, 1.0, 1.0, 0.6, 0.2, 0.2]);
        check(&cosine(Some(0.0), false), &[0.0, 0.5, 1.0, 0.6, 0.2, 0.2]);
        check(&cosine(Some(0.5), true), &[0.5, 0.75, 1.0, 0.6, 0.2, 0.6, 1.0]);
    }

    #[test]
    fn a_polynomial_goes_either_way_and_may_start_again() {
        let polynomial =
            |start, end, cycle| Schedule::Polynomial { start, end, total: 2, power: 1.0, cycle };
        check(&polynomial(1.0, 0.5, false), &[1.0, 0.75, 0.5, 0.5]);
        check(&polynomial(0.25, 1.0, false), &[0.25, 0.625, 1.0, 1.0]);
        check(&polynomial(1.0, 0.0, true), &[1.0, 0.5, 0.0, 0.25, 0.0, 1.0 / 6.0]);
    }
}
