// SPDX-License-Identifier: Apache-2.0
//! Every optimizer against Keras and PyTorch: values computed once with the real libraries and kept
//! as data (`tests/reference/generate.py`, `tests/python/optimizer_golden.py`), and against the
//! same formulas in double precision.

use std::path::Path;

use edl_core::metric::Metric;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule};
use edl_core::optimizer::{OptimizerKind, OptimizerSpec};
use edl_tensor::clip;
use edl_tensor::model::Gradient;
use edl_tensor::optimizer::{Optimizer, Slots, Step};
use serde::Deserialize;

#[derive(Deserialize)]
struct File {
    cases: Vec<Case>,
}

/// One run of an optimizer.
#[derive(Deserialize)]
struct Case {
    name: String,
    optimizer: OptimizerSpec,
    start: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    /// The weights that Keras had after each step, in single precision.
    single: Vec<Vec<f64>>,
    /// The same in double precision.
    double: Vec<Vec<f64>>,
}

fn cases(file: &str) -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
    let text = std::fs::read(folder.join(file).with_extension("json"))
        .expect("the values are kept beside the test");
    serde_json::from_slice::<File>(&text).expect("generate.py writes this form").cases
}

/// Our weights after each step.
fn run(case: &Case) -> Vec<Vec<f32>> {
    let optimizer = Optimizer::new(case.optimizer.clone());
    let mut weights = case.start.clone();
    let mut slots: Vec<Vec<f32>> =
        (0..optimizer.n_slots()).map(|slot| vec![optimizer.initial(slot); weights.len()]).collect();
    let mut after = Vec::new();
    for (version, gradient) in (0..).zip(&case.gradients) {
        let update = optimizer.update(Step { version, age: version + 1, staleness: 1 });
        let mut parts: Slots<'_> = [&mut [], &mut [], &mut []];
        for (part, slot) in parts.iter_mut().zip(&mut slots) {
            *part = slot;
        }
        update.apply(&mut weights, parts, gradient, true);
        after.push(weights.clone());
    }
    after
}

fn expect_close(case: &Case, what: &str, ours: &[Vec<f32>], theirs: &[Vec<f64>]) {
    assert_eq!(ours.len(), theirs.len());
    for (step, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        for (ours, theirs) in ours.iter().zip(theirs) {
            let limit = 1e-6 * theirs.abs().max(1.0);
            let error = (f64::from(*ours) - theirs).abs();
            assert!(error <= limit, "{}, {what}, step {step}: {ours} is not {theirs}", case.name);
        }
    }
}

fn check(file: &str) {
    let cases = cases(file);
    assert!(!cases.is_empty());
    for case in &cases {
        let ours = run(case);
        expect_close(case, "Keras in single precision", &ours, &case.single);
        expect_close(case, "Keras in double precision", &ours, &case.double);
        expect_close(case, "the formula", &ours, &formula(case));
    }
}

#[test]
fn sgd_and_every_schedule_equal_keras() {
    check("sgd");
}

#[test]
fn momentum_and_nesterov_equal_keras() {
    check("momentum");
}

#[test]
fn adam_and_amsgrad_equal_keras() {
    check("adam");
}

#[test]
fn adamw_equals_keras() {
    check("adam_w");
}

#[test]
fn adagrad_equals_keras() {
    check("adagrad");
}

#[test]
fn rmsprop_equals_keras() {
    check("rms_prop");
}

#[test]
fn ftrl_equals_keras() {
    check("ftrl");
}

/// The optimizers as their papers have them, one weight at a time, in double precision.
fn formula(case: &Case) -> Vec<Vec<f64>> {
    let optimizer = Optimizer::new(case.optimizer.clone());
    let mut weights: Vec<f64> = case.start.iter().map(|w| f64::from(*w)).collect();
    let fresh = [0, 1, 2].map(|slot| f64::from(optimizer.initial(slot)));
    let mut slots = vec![fresh; weights.len()];
    let mut after = Vec::new();
    for (step, gradient) in (0..).zip(&case.gradients) {
        for ((w, slots), g) in weights.iter_mut().zip(&mut slots).zip(gradient) {
            naive_step(&case.optimizer, step, w, slots, f64::from(*g));
        }
        after.push(weights.clone());
    }
    after
}

fn naive_step(spec: &OptimizerSpec, step: u64, w: &mut f64, slots: &mut [f64; 3], g: f64) {
    let rate = spec.rate(step);
    let t = i32::try_from(step).expect("cases are short") + 1;
    let g = if matches!(spec.kind, OptimizerKind::AdamW { .. }) {
        *w *= 1.0 - rate * spec.weight_decay;
        g
    } else {
        g + spec.weight_decay * *w
    };
    let [a, b, c] = slots;
    let mut adam = |beta_1: f64, beta_2: f64, epsilon: f64, amsgrad: bool| {
        *a = beta_1 * *a + (1.0 - beta_1) * g;
        *b = beta_2 * *b + (1.0 - beta_2) * g * g;
        *c = c.max(*b);
        let second = if amsgrad { *c } else { *b };
        let (m, root) = (*a / (1.0 - beta_1.powi(t)), (1.0 - beta_2.powi(t)).sqrt());
        *w -= rate * m * root / (second.sqrt() + epsilon);
    };
    match spec.kind {
        OptimizerKind::Sgd => *w -= rate * g,
        OptimizerKind::Momentum { momentum, nesterov, dampening: _ } => {
            *a = momentum * *a - rate * g;
            *w += if nesterov { momentum * *a - rate * g } else { *a };
        }
        OptimizerKind::Adam { beta_1, beta_2, epsilon, amsgrad } => {
            adam(beta_1, beta_2, epsilon, amsgrad);
        }
        OptimizerKind::AdamW { beta_1, beta_2, epsilon } => adam(beta_1, beta_2, epsilon, false),
        OptimizerKind::Adagrad { epsilon, .. } => {
            *a += g * g;
            *w -= rate * g / (*a + epsilon).sqrt();
        }
        OptimizerKind::RmsProp { rho, epsilon, momentum, centered: _ } => {
            *a = rho * *a + (1.0 - rho) * g * g;
            *b = momentum * *b + rate * g / (*a + epsilon).sqrt();
            *w -= *b;
        }
        OptimizerKind::Ftrl { learning_rate_power, l1, l2, .. } => {
            let before = a.powf(-learning_rate_power);
            *a += g * g;
            let after = a.powf(-learning_rate_power);
            *b += g - (after - before) / rate * *w;
            *w = if b.abs() <= l1 {
                0.0
            } else {
                (l1 * b.signum() - *b) / (after / rate + 2.0 * l2)
            };
        }
        OptimizerKind::Adadelta { .. }
        | OptimizerKind::Adamax { .. }
        | OptimizerKind::Nadam { .. }
        | OptimizerKind::Lion { .. } => unreachable!("generate.py makes no such case"),
    }
}
