// SPDX-License-Identifier: Apache-2.0
//! What every model of this crate must pass, whatever it computes.

use std::collections::BTreeMap;

use edl_core::metric::Measures;
use edl_core::model::{Init, ModelSpec, Rule};
use edl_core::rng::{self, Rng};
use edl_core::spec::JobSpec;
use edl_tensor::batch::{Batch, Column};
use edl_tensor::model::{Error, Gradient, Inputs, Model, Outcome};

use crate::open;
use crate::tape::narrow;

/// A model with a batch and somewhere to start from.
pub(crate) struct Case {
    pub(crate) model: Box<dyn Model>,
    pub(crate) batch: Batch,
    pub(crate) dense: Vec<f32>,
    pub(crate) rows: Vec<Vec<f32>>,
}

/// A model of the catalogue with parameters by name.
pub(crate) fn model(name: &str, params: &[(&str, &str)]) -> Box<dyn Model> {
    let model_params = params.iter().map(|(name, value)| ((*name).into(), (*value).into()));
    let model_params = model_params.collect();
    open(&JobSpec { model_def: name.into(), model_params, ..JobSpec::default() }).unwrap()
}

/// Noisy images whose brightest stripe is their label.
pub(crate) fn images(n: usize) -> Batch {
    let mut rng = Rng::new(11);
    let labels: Vec<i64> = (0..10).cycle().take(n).collect();
    let mut pixels = Vec::new();
    for label in &labels {
        for row in 0..28 {
            let base = if row / 2 == *label { 160 } else { 0 };
            pixels.extend((0..28).map(|_| u8::try_from(base + rng.below(96) as i64).unwrap()));
        }
    }
    let columns = BTreeMap::from([
        ("image".into(), Column::U8 { shape: vec![n, 28, 28], values: pixels }),
        ("label".into(), Column::I64 { shape: vec![n], values: labels }),
    ]);
    Batch { records: (0..n as u64).collect(), columns, ..Batch::default() }
}

/// People with random features who earn much if they are educated.
pub(crate) fn people(n: usize) -> Batch {
    let mut rng = Rng::new(12);
    let mut columns = BTreeMap::new();
    for field in &model("deepfm", &[]).spec().inputs {
        let mut draw = || rng.below(4);
        let column = match field.name.as_str() {
            "label" => continue,
            "age" | "fnlwgt" | "education_num" | "capital_gain" | "capital_loss"
            | "hours_per_week" => {
                let values = (0..n).map(|_| draw() as f32 * 10.0).collect();
                Column::F32 { shape: vec![n], values }
            }
            _ => Column::Bytes((0..n).map(|_| format!("word {}", draw()).into_bytes()).collect()),
        };
        columns.insert(field.name.clone(), column);
    }
    let Some(Column::Bytes(words)) = columns.get("education") else { panic!("a column of words") };
    let values = words.iter().map(|word| i64::from(word.ends_with(b"3"))).collect();
    columns.insert("label".into(), Column::I64 { shape: vec![n], values });
    Batch { records: (0..n as u64).collect(), columns, ..Batch::default() }
}

/// Values as a server would make them, in spirit: a function of the seed.
fn draw(init: Init, rng: &mut Rng) -> f32 {
    match init {
        Init::Constant(value) => value,
        Init::Uniform { low, high } => low + (high - low) * narrow(rng.unit()),
        Init::Normal { mean, std } | Init::TruncatedNormal { mean, std } => {
            mean + std * (narrow(rng.unit()) * 2.0 - 1.0)
        }
        Init::Given => panic!("the built-in models bring no values"),
    }
}

impl Case {
    pub(crate) fn new(model: Box<dyn Model>, batch: Batch) -> Self {
        let spec = model.spec();
        let mut rng = Rng::new(13);
        let params = spec.params.iter().flat_map(|param| vec![param.init; param.len()]);
        let dense: Vec<f32> = params.map(|init| draw(init, &mut rng)).collect();
        let mut rows = Vec::new();
        for (table, ids) in spec.tables.iter().zip(model.lookups(&batch).unwrap()) {
            // Equal ids have equal rows. Zeros would hide mistakes, so all rows are drawn.
            let init = Init::Uniform { low: -0.3, high: 0.3 };
            let row = |id: &u64| {
                let mut rng = Rng::new(rng::key(&[rng::name_key(&table.name), *id]));
                (0..table.dim).map(|_| draw(init, &mut rng)).collect::<Vec<_>>()
            };
            rows.push(ids.iter().flat_map(row).collect());
        }
        Self { model, batch, dense, rows }
    }

    pub(crate) fn train(&mut self, seed: u64) -> Result<(Outcome, Gradient), Error> {
        // What an earlier batch left behind must not shine through.
        let mut gradient = Gradient { dense: vec![f32::NAN; 3], rows: vec![vec![f32::NAN]; 5] };
        let inputs = Inputs { batch: &self.batch, dense: &self.dense, rows: &self.rows };
        let outcome = self.model.train(inputs, seed, &mut gradient)?;
        Ok((outcome, gradient))
    }

    pub(crate) fn evaluate(&mut self) -> (Outcome, BTreeMap<String, f64>) {
        let inputs = Inputs { batch: &self.batch, dense: &self.dense, rows: &self.rows };
        let mut measures = Measures::new(&self.model.spec().metrics);
        let outcome = self.model.evaluate(inputs, &mut measures).unwrap();
        (outcome, measures.values())
    }

    pub(crate) fn predict(&mut self) -> Vec<f32> {
        let inputs = Inputs { batch: &self.batch, dense: &self.dense, rows: &self.rows };
        let predictions = self.model.predict(inputs).unwrap();
        assert_eq!(predictions.values.len(), predictions.width * self.batch.len());
        predictions.values
    }

    /// Compares the gradient of each parameter and table with differences of the loss, along a
    /// random direction and along the gradient itself, where it is steepest.
    pub(crate) fn check_gradient(&mut self) {
        let (_, gradient) = self.train(5).unwrap();
        let mut rng = Rng::new(17);
        for (name, range) in trainable(self.model.spec()) {
            let found = gradient.dense[range.clone()].to_vec();
            for direction in directions(&found, &mut rng) {
                let mut along = |step: f32| {
                    let before = self.dense.clone();
                    let moved = self.dense[range.clone()].iter_mut().zip(&direction);
                    moved.for_each(|(value, d)| *value += step * d);
                    let (outcome, _) = self.train(5).unwrap();
                    self.dense = before;
                    outcome.loss
                };
                compare(&name, &found, &direction, &mut along);
            }
        }
        for table in 0..self.rows.len() {
            let found = gradient.rows[table].clone();
            assert_eq!(found.len(), self.rows[table].len());
            for direction in directions(&found, &mut rng) {
                let mut along = |step: f32| {
                    let before = self.rows[table].clone();
                    let moved = self.rows[table].iter_mut().zip(&direction);
                    moved.for_each(|(value, d)| *value += step * d);
                    let (outcome, _) = self.train(5).unwrap();
                    self.rows[table] = before;
                    outcome.loss
                };
                compare("table", &found, &direction, &mut along);
            }
        }
    }

    /// The same inputs and seed give the same bits.
    pub(crate) fn check_repeat(&mut self) {
        let (first, second) = (self.train(9).unwrap(), self.train(9).unwrap());
        assert_eq!(first.0.loss.to_bits(), second.0.loss.to_bits());
        assert_eq!(bits(&first.1.dense), bits(&second.1.dense));
        for (first, second) in first.1.rows.iter().zip(&second.1.rows) {
            assert_eq!(bits(first), bits(second));
        }
    }

    /// Plain descent on one batch; answers with the first and the last loss.
    pub(crate) fn fit(&mut self, n_steps: u64, rate: f32) -> (f32, f32) {
        let mut losses = Vec::new();
        for step in 0..n_steps {
            let (outcome, gradient) = self.train(step).unwrap();
            losses.push(outcome.loss);
            let params = self.model.spec().params.iter();
            let rates = params.flat_map(|param| match param.rule {
                Rule::Trainable { .. } => vec![-rate; param.len()],
                Rule::MovingAverage => vec![1.0; param.len()],
            });
            for ((value, g), rate) in self.dense.iter_mut().zip(&gradient.dense).zip(rates) {
                *value += rate * g;
            }
            for (values, gradient) in self.rows.iter_mut().zip(&gradient.rows) {
                values.iter_mut().zip(gradient).for_each(|(value, g)| *value -= rate * g);
            }
        }
        (losses[0], losses[losses.len() - 1])
    }
}

fn trainable(spec: &ModelSpec) -> Vec<(String, std::ops::Range<usize>)> {
    let mut start = 0;
    let mut found = Vec::new();
    for param in &spec.params {
        let range = start..start + param.len();
        start = range.end;
        if matches!(param.rule, Rule::Trainable { .. }) {
            found.push((param.name.clone(), range));
        }
    }
    found
}

/// Two directions of length one.
fn directions(gradient: &[f32], rng: &mut Rng) -> [Vec<f32>; 2] {
    let random = gradient.iter().map(|_| narrow(rng.unit()) - 0.5).collect();
    [random, gradient.to_vec()].map(|mut direction| {
        let length = narrow(dot(&direction, &direction).sqrt());
        assert!(length > 0.0, "a gradient must not vanish");
        direction.iter_mut().for_each(|value| *value /= length);
        direction
    })
}

fn compare(name: &str, gradient: &[f32], direction: &[f32], along: &mut impl FnMut(f32) -> f32) {
    let expected = dot(gradient, direction);
    let size = dot(gradient, gradient).sqrt();
    // A step that moves the loss enough to be seen in f32, but not over many kinks.
    let step = narrow((2e-4 / size.max(1e-3)).clamp(1e-3, 2e-2));
    let difference = f64::from(along(step) - along(-step)) / f64::from(2.0 * step);
    let error = (difference - expected).abs();
    let allowed = 0.03 * expected.abs() + 0.01 * size + 3e-4;
    assert!(error < allowed, "{name}: {difference} by differences, {expected} by gradient");
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
