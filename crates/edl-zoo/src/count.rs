// SPDX-License-Identifier: Apache-2.0
//! `count`: a model that learns nothing and counts what is applied, the oracle of exactly-once.
//!
//! Each training of a record adds one to its row in the table `count`, and each batch adds its
//! number of records to every number of the dense vector `total`. After E epochs over N records
//! every row must be E and every dense number E times N, both exact in `f32` below 2^24.
//!
//! That holds for pushes that are applied one by one; a synchronous round averages its batches.

use std::collections::BTreeMap;
use std::time::Duration;

use edl_core::metric::{Measures, Metric};
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::OptimizerSpec;
use edl_tensor::batch::Batch;
use edl_tensor::model::{Error, Gradient, Inputs, Model, Outcome, Predictions};

use crate::catalog;
use crate::model_params::ModelParams;
use crate::pass;

/// Enough that each partition of a job by default holds some.
const N_TOTALS: usize = 64;

pub(crate) const NAME: &str = "count";

struct Count {
    spec: ModelSpec,
    /// How long each batch takes, so tests have time to kill a process.
    sleep: Duration,
    /// How much memory a worker allocates with its first batch, to test memory limits.
    memory: usize,
    held: Vec<u8>,
    /// Training this record is an error.
    fail_record: Option<u64>,
    /// Training this record aborts the process.
    crash_record: Option<u64>,
    /// Training this record panics.
    panic_record: Option<u64>,
    /// Training this record never ends.
    hang_record: Option<u64>,
    /// Training this record gives a loss that is not a number.
    nan_record: Option<u64>,
}

pub(crate) fn open(
    params: &BTreeMap<String, String>,
) -> Result<impl Model + use<>, catalog::Error> {
    Count::new(params)
}

impl Count {
    fn new(params: &BTreeMap<String, String>) -> Result<Self, catalog::Error> {
        let known = [
            "crash_record",
            "fail_record",
            "hang_record",
            "memory_mb",
            "nan_record",
            "panic_record",
            "sleep_ms",
        ];
        let params = ModelParams::new(NAME, params, &known)?;
        let record = "a record number";
        let sleep_ms = params.get("sleep_ms", 0, "a number of milliseconds", |_| true)?;
        Ok(Self {
            spec: spec(),
            sleep: Duration::from_millis(sleep_ms),
            memory: params.get("memory_mb", 0, "a number of megabytes", |_| true)? << 20,
            held: Vec::new(),
            fail_record: params.find("fail_record", record, |_| true)?,
            crash_record: params.find("crash_record", record, |_| true)?,
            panic_record: params.find("panic_record", record, |_| true)?,
            hang_record: params.find("hang_record", record, |_| true)?,
            nan_record: params.find("nan_record", record, |_| true)?,
        })
    }
}

fn spec() -> ModelSpec {
    ModelSpec {
        name: NAME.into(),
        params: vec![ParamSpec::new(
            "total",
            vec![N_TOTALS],
            Init::Constant(0.0),
            Rule::Trainable { decay: false },
        )],
        tables: vec![TableSpec { name: "count".into(), dim: 1, init: Init::Constant(0.0) }],
        inputs: vec![],
        metrics: vec![Metric::loss()],
        optimizer: OptimizerSpec::sgd(1.0),
    }
}

impl Model for Count {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn lookups(&self, batch: &Batch) -> Result<Vec<Vec<u64>>, Error> {
        Ok(vec![batch.records.clone()])
    }

    fn train(
        &mut self,
        inputs: Inputs<'_>,
        _seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        let n_ids = [inputs.batch.len()];
        pass::check(&self.spec, inputs, &n_ids)?;
        let records = &inputs.batch.records;
        if self.crash_record.is_some_and(|record| records.contains(&record)) {
            std::process::abort();
        }
        if let Some(record) = self.fail_record.filter(|record| records.contains(record)) {
            let problem = "the model parameter `fail_record` makes it fail".into();
            return Err(Error::Record { record, problem });
        }
        if let Some(record) = self.panic_record.filter(|record| records.contains(record)) {
            panic!("the model parameter `panic_record` makes record {record} panic");
        }
        while self.hang_record.is_some_and(|record| records.contains(&record)) {
            std::thread::park();
        }
        // Not zeros, which the system would only promise.
        self.held.resize(self.memory, 1);
        std::thread::sleep(self.sleep);
        let n_records = exact(inputs.batch.len());
        gradient.dense = vec![-n_records; N_TOTALS];
        gradient.rows = vec![vec![-1.0; inputs.batch.len()]];
        if self.nan_record.is_some_and(|record| records.contains(&record)) {
            return Ok(Outcome { loss: f32::NAN });
        }
        Ok(outcome(inputs))
    }

    fn evaluate(&mut self, inputs: Inputs<'_>, measures: &mut Measures) -> Result<Outcome, Error> {
        pass::check(&self.spec, inputs, &[inputs.batch.len()])?;
        let outcome = outcome(inputs);
        let n_records = u32::try_from(inputs.batch.len()).unwrap_or(u32::MAX);
        measures.add_loss(f64::from(outcome.loss), n_records);
        Ok(outcome)
    }

    /// The number of times that each record was trained.
    fn predict(&mut self, inputs: Inputs<'_>) -> Result<Predictions, Error> {
        pass::check(&self.spec, inputs, &[inputs.batch.len()])?;
        Ok(Predictions { width: 1, values: inputs.rows[0].clone() })
    }
}

/// The loss whose descent counts upwards: minus the mean count of the batch's records.
fn outcome(inputs: Inputs<'_>) -> Outcome {
    Outcome { loss: -inputs.rows[0].iter().sum::<f32>() / exact(inputs.batch.len()) }
}

#[expect(clippy::cast_precision_loss, reason = "batches are far smaller than 2^24")]
fn exact(n: usize) -> f32 {
    n as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(params: &[(&str, &str)]) -> Count {
        let params = params.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Count::new(&params).unwrap()
    }

    fn batch(records: &[u64]) -> Batch {
        Batch { records: records.to_vec(), ..Batch::default() }
    }

    #[test]
    fn training_by_sgd_counts_records_and_their_total() {
        let mut model = model(&[]);
        let (batch, mut gradient) = (batch(&[7, 3, 9]), Gradient::default());
        assert_eq!(model.lookups(&batch), Ok(vec![vec![7, 3, 9]]));
        let (mut dense, mut rows) = (vec![0.0; N_TOTALS], vec![vec![0.0; 3]]);
        for _ in 0..5 {
            let inputs = Inputs { batch: &batch, dense: &dense, rows: &rows };
            model.train(inputs, 0, &mut gradient).unwrap();
            dense.iter_mut().zip(&gradient.dense).for_each(|(value, g)| *value -= g);
            rows[0].iter_mut().zip(&gradient.rows[0]).for_each(|(value, g)| *value -= g);
        }
        assert_eq!((dense, &rows), (vec![15.0; N_TOTALS], &vec![vec![5.0; 3]]));
        let inputs = Inputs { batch: &batch, dense: &[0.0; N_TOTALS], rows: &rows };
        assert_eq!(model.predict(inputs).unwrap().values, [5.0; 3]);
    }

    #[test]
    fn a_forbidden_record_fails_in_training_alone() {
        let mut model = model(&[("fail_record", "3")]);
        let (dense, mut gradient) = ([0.0; N_TOTALS], Gradient::default());
        let (poisoned, fine) = (batch(&[2, 3]), batch(&[4, 5]));
        let rows = [vec![0.0; 2]];
        let inputs = |batch| Inputs { batch, dense: &dense, rows: &rows };
        let error = model.train(inputs(&poisoned), 0, &mut gradient).unwrap_err();
        assert!(matches!(error, Error::Record { record: 3, .. }));
        model.train(inputs(&fine), 0, &mut gradient).unwrap();
        let mut measures = Measures::new(&model.spec.metrics);
        model.evaluate(inputs(&poisoned), &mut measures).unwrap();
    }

    #[test]
    fn rows_that_do_not_match_the_batch_are_refused() {
        let batch = batch(&[1, 2]);
        let inputs = Inputs { batch: &batch, dense: &[0.0; N_TOTALS], rows: &[vec![0.0; 3]] };
        assert!(model(&[]).train(inputs, 0, &mut Gradient::default()).is_err());
    }
}
