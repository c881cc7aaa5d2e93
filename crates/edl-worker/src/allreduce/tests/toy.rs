// SPDX-License-Identifier: Apache-2.0
//! A model without tables whose sums depend on their order, and records that are numbers.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use edl_core::metric::{Measures, Metric};
use edl_core::model::{FieldSpec, Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::{OptimizerKind, OptimizerSpec};
use edl_core::rng;
use edl_tensor::batch::Batch;
use edl_tensor::double;
use edl_tensor::model::{Error, Gradient, Inputs, Mean, Model, Outcome, Predictions, is_finite};

use crate::feed::Records;

/// A record that the model cannot take.
pub(crate) const POISON: u64 = 1_000;
/// A record whose loss is not a number.
pub(crate) const ABYSS: u64 = 1_001;
/// A record whose gradient overflows.
pub(crate) const OVERFLOW: u64 = 1_003;
/// A record that cannot be read.
pub(crate) const CORRUPT: u64 = 1_002;

pub(crate) struct ToyModel {
    spec: ModelSpec,
    gate: Gate,
    first_values: Option<Vec<f32>>,
    /// What its own optimizer gathers, if it has one.
    momentum: Vec<f32>,
}

/// Lets a test hold the training of lanes, and counts them.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<Passed>, Condvar)>);

#[derive(Default)]
struct Passed {
    is_shut: bool,
    n_lanes: usize,
}

impl Gate {
    pub(crate) fn shut(&self, is_shut: bool) {
        self.0.0.lock().unwrap().is_shut = is_shut;
        self.0.1.notify_all();
    }

    /// Waits until this many lanes have passed.
    pub(crate) fn wait(&self, n_lanes: usize) {
        drop(self.until(|passed| passed.n_lanes >= n_lanes));
    }

    fn pass(&self) {
        self.until(|passed| !passed.is_shut).n_lanes += 1;
        self.0.1.notify_all();
    }

    fn until(&self, is_so: impl Fn(&Passed) -> bool) -> MutexGuard<'_, Passed> {
        let passed = self.0.0.lock().unwrap();
        let limit = Duration::from_secs(60);
        let waited = self.0.1.wait_timeout_while(passed, limit, |passed| !is_so(passed));
        let (passed, timed) = waited.unwrap();
        assert!(!timed.timed_out(), "the gate never opened");
        passed
    }
}

impl ToyModel {
    pub(crate) fn new() -> Self {
        let param = |name: &str, len: usize, rule: Rule| {
            ParamSpec::new(name, vec![len], Init::Uniform { low: -1.0, high: 1.0 }, rule)
        };
        let spec = ModelSpec {
            name: "toy".into(),
            params: vec![
                param("w", 19, Rule::Trainable { decay: true }),
                param("mean", 4, Rule::MovingAverage),
            ],
            tables: Vec::new(),
            inputs: Vec::new(),
            metrics: vec![Metric::mse()],
            optimizer: OptimizerSpec::sgd(0.1),
        };
        Self { spec, gate: Gate::default(), first_values: None, momentum: Vec::new() }
    }

    pub(crate) fn with_gate(gate: Gate) -> Self {
        Self { gate, ..Self::new() }
    }

    /// Takes its own steps, and has a parameter of 64-bit numbers.
    pub(crate) fn script() -> Self {
        let mut model = Self::new();
        let rule = Rule::Trainable { decay: true };
        let wide = ParamSpec::new("wide", vec![first_doubles().len()], Init::Given, rule);
        model.spec.params.insert(0, ParamSpec { is_double: true, ..wide });
        let mut values = vec![0.0; model.spec.dense_len()];
        let mut first = first_doubles().into_iter();
        double::each(&mut values[..model.spec.n_double_places()], |_| first.next().unwrap());
        model.first_values = Some(values);
        model.spec.optimizer.kind = OptimizerKind::Script { nonfinite: true };
        model.load_state(&Self::first_state()).expect("it has the model's size");
        model
    }

    pub(crate) fn first_state() -> Vec<u8> {
        (0..23_u8).flat_map(|place| f32::from(place).to_le_bytes()).collect()
    }

    /// Its parameter `w` starts from the first of these.
    pub(crate) fn bringing(values: Vec<f32>) -> Self {
        let mut model = Self { first_values: Some(values), ..Self::new() };
        model.spec.params[0].init = Init::Given;
        model
    }

    pub(crate) fn with_table() -> Self {
        let mut model = Self::new();
        let init = Init::Constant(0.0);
        model.spec.tables.push(TableSpec { name: "t".into(), dim: 2, init });
        model
    }
}

impl Model for ToyModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn first_values(&self) -> Option<Vec<f32>> {
        self.first_values.clone()
    }

    fn lookups(&self, _: &Batch) -> Result<Vec<Vec<u64>>, Error> {
        Ok(Vec::new())
    }

    fn train(
        &mut self,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        self.gate.pass();
        let records = &inputs.batch.records;
        if records.contains(&POISON) {
            return Err(Error::Record { record: POISON, problem: "poison".into() });
        }
        if records.contains(&ABYSS) {
            return Ok(Outcome { loss: f32::NAN });
        }
        if records.contains(&OVERFLOW) {
            gradient.dense.fill(f32::INFINITY);
            return Ok(Outcome { loss: 1.0 });
        }
        let n_double = self.spec.n_double_places();
        let (doubles, singles) = gradient.dense.split_at_mut(n_double);
        let mut places = 0..;
        double::each_with(doubles, &inputs.dense[..n_double], |_, weight| {
            double_gradient(records, seed, places.next().unwrap(), weight)
        });
        let (dense, n_records) = (&inputs.dense[n_double..], records.len() as f32);
        for (place, number) in singles.iter_mut().enumerate() {
            let of = |record: &u64| number_of(*record, place);
            let mean = records.iter().map(of).sum::<f32>() / n_records;
            *number = mean + 0.1 * number_of(seed, place) - 0.3 * dense[place];
        }
        let loss = dense.iter().sum::<f32>() + records.iter().sum::<u64>() as f32;
        Ok(Outcome { loss: loss / n_records })
    }

    fn step(&mut self, mean: Mean<'_>, seed: u64, dense: &mut [f32]) -> Result<(), Error> {
        let n_double = self.spec.n_double_places();
        let (doubles, gradient) = mean.gradient.split_at(n_double);
        if !is_finite(gradient) {
            return Ok(()); // As a gradient scaler skips a step.
        }
        let (wide, dense) = dense.split_at_mut(n_double);
        double::each_with(wide, doubles, |weight, gradient| weight - 0.1 * gradient);
        for (place, (weight, momentum)) in dense.iter_mut().zip(&mut self.momentum).enumerate() {
            *momentum = 0.9 * *momentum + gradient[place] + 0.01 * number_of(seed, place);
            *weight -= 0.1 * *momentum;
        }
        Ok(())
    }

    fn state(&mut self) -> Result<Vec<u8>, Error> {
        Ok(self.momentum.iter().flat_map(|number| number.to_le_bytes()).collect())
    }

    fn load_state(&mut self, state: &[u8]) -> Result<(), Error> {
        let numbers = state.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        self.momentum = numbers.collect();
        match self.momentum.len() == self.spec.dense_len() - self.spec.n_double_places() {
            true => Ok(()),
            false => Err(Error::Other("the state of another model".into())),
        }
    }

    fn evaluate(&mut self, inputs: Inputs<'_>, measures: &mut Measures) -> Result<Outcome, Error> {
        let sum = inputs.dense.iter().sum::<f32>();
        inputs.batch.records.iter().for_each(|record| measures.add_value(*record as f32, sum));
        Ok(Outcome { loss: 0.0 })
    }

    fn predict(&mut self, _: Inputs<'_>) -> Result<Predictions, Error> {
        Err(Error::Other("not this one".into()))
    }
}

/// What the parameter of 64-bit numbers begins with.
pub(crate) fn first_doubles() -> [f64; 5] {
    [1.0, 1e-9, 0.1, -1e3, 1.0 / 3.0]
}

/// The gradient at a place of that parameter: a number that needs 64 bits.
pub(crate) fn double_gradient(records: &[u64], seed: u64, place: usize, weight: f64) -> f64 {
    let of = |record: &u64| f64::from(number_of(*record, place)) / 3.0;
    let mean = records.iter().map(of).sum::<f64>() / records.len() as f64;
    mean + f64::from(number_of(seed, place)) / 7.0 - 0.3 * weight
}

/// Some number below 1 that needs all the bits of its mantissa.
fn number_of(key: u64, place: usize) -> f32 {
    let bits = rng::key(&[key, place as u64]) >> 40;
    u32::try_from(bits).expect("24 bits") as f32 / 16_777_216.0
}

/// Records that are their own numbers, except for one that has the value of another.
pub(crate) struct ToyRecords {
    pub(crate) n_records: u64,
    pub(crate) swap: Option<(u64, u64)>,
}

impl Records for ToyRecords {
    fn n_records(&self) -> u64 {
        self.n_records
    }

    fn batch(&self, records: &[u64], _: &[FieldSpec]) -> Result<Batch, String> {
        let read = |record: &u64| match self.swap {
            Some((from, to)) if from == *record => to,
            Some(_) | None => *record,
        };
        let records: Vec<u64> = records.iter().map(read).collect();
        if records.contains(&CORRUPT) {
            return Err(format!("{} is corrupt", self.locate(CORRUPT)));
        }
        Ok(Batch { records, ..Batch::default() })
    }

    fn locate(&self, record: u64) -> String {
        format!("toy file, record {record}")
    }
}
