// SPDX-License-Identifier: Apache-2.0
//! Compares every optimizer with Keras and PyTorch, using values that the real libraries computed
//! (`tests/reference/generate.py`, `tests/python/optimizer_golden.py`), and with the same formulas
//! in double precision.

use std::path::Path;

use edl_core::model::{Init, ModelSpec, ParamSpec, Rule};
use edl_core::optimizer::{OptimizerKind, OptimizerSpec};
use edl_tensor::clip;
use edl_tensor::model::Gradient;
use edl_tensor::optimizer::{Optimizer, Slots, Step};
use serde::Deserialize;
use serde::de::DeserializeOwned;

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

fn read<T: DeserializeOwned>(file: &str) -> T {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
    let text = std::fs::read(folder.join(file).with_extension("json"))
        .expect("the values are stored next to the test");
    serde_json::from_slice(&text).expect("the format of the script")
}

/// Our weights after each step.
fn run(case: &Case) -> Vec<Vec<f32>> {
    let optimizer = Optimizer::new(case.optimizer.clone());
    let mut weights = Weights::new(&optimizer, &case.start);
    let steps = (0..).zip(&case.gradients);
    let after = steps.map(|(version, gradient)| {
        weights.step(&optimizer, version, gradient, true);
        weights.weights.clone()
    });
    after.collect()
}

/// Weights with their slots.
struct Weights {
    weights: Vec<f32>,
    slots: Vec<Vec<f32>>,
}

impl Weights {
    fn new(optimizer: &Optimizer, start: &[f32]) -> Self {
        let slot = |slot| vec![optimizer.initial(slot); start.len()];
        Self { weights: start.to_vec(), slots: (0..optimizer.n_slots()).map(slot).collect() }
    }

    fn step(&mut self, optimizer: &Optimizer, version: u64, gradient: &[f32], decay: bool) {
        let update = optimizer.update(Step { version, age: version + 1, staleness: 1 });
        let mut parts: Slots<'_> = [&mut [], &mut [], &mut []];
        for (part, slot) in parts.iter_mut().zip(&mut self.slots) {
            *part = slot;
        }
        update.apply(&mut self.weights, parts, gradient, decay);
    }
}

fn expect_close(case: &Case, what: &str, ours: &[Vec<f32>], theirs: &[Vec<f64>]) {
    assert_eq!(ours.len(), theirs.len());
    for (step, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        expect_near(&format!("{}, {what}, step {step}", case.name), ours, theirs, 1e-6);
    }
}

fn expect_near(what: &str, ours: &[f32], theirs: &[f64], limit: f64) {
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(theirs) {
        let error = (f64::from(*ours) - theirs).abs();
        assert!(error <= limit * theirs.abs().max(1.0), "{what}: {ours} is not {theirs}");
    }
}

fn check(file: &str) {
    let cases = read::<File>(file).cases;
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

/// The output of optimizer_golden.py.
#[derive(Deserialize)]
struct Libraries {
    /// Lengths of the parameters.
    shapes: Vec<usize>,
    start: Vec<f32>,
    /// Steps after which weights were saved.
    kept: Vec<usize>,
    gradients: Vec<Vec<f32>>,
    cases: Vec<LibraryCase>,
}

#[derive(Deserialize)]
struct LibraryCase {
    name: String,
    optimizer: OptimizerSpec,
    /// Whether weight decay applies to each parameter.
    decays: Vec<bool>,
    single: Vec<Vec<f64>>,
    double: Vec<Vec<f64>>,
}

#[test]
fn every_optimizer_and_every_schedule_equals_its_library() {
    let libraries: Libraries = read("libraries");
    assert!(libraries.cases.len() > 70);
    for case in &libraries.cases {
        let ours = train(&libraries, case);
        for ((step, single), double) in libraries.kept.iter().zip(&case.single).zip(&case.double) {
            let (what, ours) = (format!("{}, step {step}", case.name), &ours[step - 1]);
            expect_near(&what, ours, double, 1e-6);
            // Keras in single precision differs by up to 5e-6, because it computes 1 - 0.999 in it.
            expect_near(
                &what,
                ours,
                single,
                if case.name.starts_with("keras") { 6e-6 } else { 1.5e-6 },
            );
        }
    }
}

/// Our weights after each step, parameter by parameter.
fn train(libraries: &Libraries, case: &LibraryCase) -> Vec<Vec<f32>> {
    let model = model(&libraries.shapes, &case.optimizer);
    let optimizer = Optimizer::new(case.optimizer.clone());
    let mut params: Vec<_> = split(&libraries.shapes, &libraries.start)
        .map(|part| Weights::new(&optimizer, part))
        .collect();
    let steps = (0..).zip(&libraries.gradients);
    let after = steps.map(|(version, gradient)| {
        let mut gradient = Gradient { dense: gradient.clone(), rows: vec![] };
        if let Some(limit) = case.optimizer.clip {
            clip::clip(&mut gradient, &model, limit);
        }
        let parts = split(&libraries.shapes, &gradient.dense);
        for ((param, part), decay) in params.iter_mut().zip(parts).zip(&case.decays) {
            param.step(&optimizer, version, part, *decay);
        }
        params.iter().flat_map(|param| param.weights.clone()).collect()
    });
    after.collect()
}

fn split<'a>(shapes: &'a [usize], flat: &'a [f32]) -> impl Iterator<Item = &'a [f32]> {
    let mut rest = flat;
    shapes.iter().map(move |len| rest.split_off(..*len).expect("shapes add up"))
}

fn model(shapes: &[usize], optimizer: &OptimizerSpec) -> ModelSpec {
    let rule = Rule::Trainable { decay: true };
    let param = |len: &usize| ParamSpec::new("p", vec![*len], Init::Constant(0.0), rule);
    ModelSpec {
        name: "test".into(),
        params: shapes.iter().map(param).collect(),
        tables: vec![],
        inputs: vec![],
        metrics: vec![],
        optimizer: optimizer.clone(),
    }
}

/// The optimizers as defined in their papers, one weight at a time, in double precision.
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
        | OptimizerKind::Lion { .. }
        | OptimizerKind::Script { .. } => unreachable!("generate.py generates no such case"),
    }
}
