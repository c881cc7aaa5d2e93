// SPDX-License-Identifier: Apache-2.0
//! Tries a model on the first records of a job that does not exist yet: an error that every worker
//! would have is found before any of them is started.
//!
//! It needs no server and no other worker, takes no optimizer step and writes no file.

use std::path::Path;
use std::sync::Arc;

use edl_core::id::BatchId;
use edl_core::metric::Measures;
use edl_core::model::{DType, Init, ModelSpec, TableSpec, unlabelled};
use edl_core::spec::{JobSpec, JobType};
use edl_core::upcoming::{batch_seed, lane_seed};
use edl_tensor::batch::{Batch, Column};
use edl_tensor::init::{InitialValues, name_key};
use edl_tensor::model::{Error, Gradient, Inputs, Model};

use crate::feed::{OpenRecords, Records, Source, open_records};
use crate::predict;
use crate::train;

/// The model cannot take the first batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {verb} the first batch of the {data} data: {batch}")]
pub struct Misfit {
    verb: &'static str,
    data: &'static str,
    /// The number of records and their columns.
    batch: String,
    /// What the model says: a sentence, or the user's traceback.
    pub cause: String,
}

/// Trains and evaluates the first batches of a job, or does what else the job is for. `indexes` is
/// a folder that can have the index of the data.
pub fn try_first_batches(
    spec: &JobSpec,
    model: &mut dyn Model,
    indexes: &Path,
) -> Result<(), Misfit> {
    Trial::new(spec, model, open_records(spec, indexes.to_owned())).run()
}

#[derive(Clone, Copy)]
enum Pass {
    Train,
    Evaluate,
    Predict,
}

struct Trial<'a> {
    spec: &'a JobSpec,
    model: &'a mut dyn Model,
    open: OpenRecords,
    /// Of all dense parameters, before the first step.
    dense: Vec<f32>,
}

impl<'a> Trial<'a> {
    fn new(spec: &'a JobSpec, model: &'a mut dyn Model, open: OpenRecords) -> Self {
        model.begin_trial();
        let dense = first_values(model, spec.seed);
        Self { spec, model, open, dense }
    }

    fn run(mut self) -> Result<(), Misfit> {
        match self.spec.job_type {
            JobType::Train => {
                self.pass(Pass::Train)?;
                if self.spec.validation_data.is_empty() {
                    return Ok(());
                }
                self.pass(Pass::Evaluate)
            }
            JobType::Evaluate => self.pass(Pass::Evaluate),
            JobType::Predict => self.pass(Pass::Predict),
        }
    }

    fn pass(&mut self, pass: Pass) -> Result<(), Misfit> {
        // Data that cannot be read is reported by the checks of the data, and by the job.
        let Ok(data) = (self.open)(pass.source()) else { return Ok(()) };
        let Some(batch) = self.first_batch(pass, &data) else { return Ok(()) };
        match self.compute(pass, &batch) {
            Ok(()) => Ok(()),
            // The job decides what happens to such a batch.
            Err(Error::NonFinite(_)) => Ok(()),
            Err(
                error @ (Error::Column { .. }
                | Error::Record { .. }
                | Error::Quit
                | Error::Other(_)),
            ) => Err(Misfit {
                verb: pass.verb(),
                data: pass.source().name(),
                batch: describe(&batch),
                cause: error.to_string(),
            }),
        }
    }

    fn first_batch(&self, pass: Pass, data: &Arc<dyn Records>) -> Option<Batch> {
        let n_records = data.n_records();
        let fields = &self.model.spec().inputs;
        let first = || (0..n_records.min(self.spec.minibatch_size.into())).collect();
        let (records, fields): (Vec<u64>, _) = match pass {
            Pass::Train => {
                let plan = self.spec.plan(n_records);
                let records = match self.spec.step_lanes() {
                    _ if plan.n_batches() == 0 => None,
                    Some(n_lanes) => plan.records_of_lane(FIRST, 0, n_lanes),
                    None => Some(plan.records(FIRST)),
                };
                (records?, fields.clone())
            }
            Pass::Evaluate => (first(), fields.clone()),
            Pass::Predict => (first(), unlabelled(fields)),
        };
        data.batch(&records, &fields).ok()
    }

    fn compute(&mut self, pass: Pass, batch: &Batch) -> Result<(), Error> {
        let rows = self.first_rows(batch)?;
        let inputs = Inputs { batch, dense: &self.dense, rows: &rows };
        match pass {
            Pass::Train => {
                let seed = match self.spec.step_lanes() {
                    Some(_) => lane_seed(self.spec.seed, FIRST, 0),
                    None => batch_seed(self.spec.seed, FIRST),
                };
                let zeros = |rows: &Vec<f32>| vec![0.0; rows.len()];
                let mut gradient = Gradient {
                    dense: vec![0.0; self.dense.len()],
                    rows: rows.iter().map(zeros).collect(),
                };
                self.model.train(inputs, seed, &mut gradient)?;
                train::check_gradient(&gradient, (self.dense.len(), &rows))
            }
            Pass::Evaluate => {
                let mut measures = Measures::new(&self.model.spec().metrics);
                self.model.evaluate(inputs, &mut measures).map(drop)
            }
            Pass::Predict => {
                let predictions = self.model.predict(inputs)?;
                let checked = predict::check(&predictions, batch.len());
                checked.map_err(|error| Error::Other(error.to_string()))
            }
        }
    }

    /// One row for each id that `batch` looks up, as before the first step.
    fn first_rows(&self, batch: &Batch) -> Result<Vec<Vec<f32>>, Error> {
        let tables = &self.model.spec().tables;
        let lookups = self.model.lookups(batch)?;
        train::check_lookups(&lookups, tables.len())?;
        let rows = lookups.iter().zip(tables).enumerate().map(|(index, (ids, table))| {
            let given = (table.init == Init::Given).then(|| self.model.first_rows(index));
            rows_of(table, &given.flatten().unwrap_or_default(), ids, self.spec.seed)
        });
        Ok(rows.collect())
    }
}

const FIRST: BatchId = BatchId { epoch: 0, index: 0 };

impl Pass {
    fn verb(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Evaluate => "evaluate",
            Self::Predict => "predict",
        }
    }

    fn source(self) -> Source {
        match self {
            Self::Train => Source::Training,
            Self::Evaluate => Source::Validation,
            Self::Predict => Source::Prediction,
        }
    }
}

/// The dense parameters before the first step.
fn first_values(model: &dyn Model, seed: u64) -> Vec<f32> {
    let spec: &ModelSpec = model.spec();
    let mut dense = vec![0.0; spec.dense_len()];
    let given = spec.brings_first_values().then(|| model.first_values()).flatten();
    let given = given.filter(|given| given.len() == dense.len());
    let mut start = 0;
    for param in &spec.params {
        let place = start..start + param.len();
        start = place.end;
        match (&given, param.init) {
            (Some(given), Init::Given) => dense[place.clone()].copy_from_slice(&given[place]),
            (_, init) => InitialValues::param(init, seed, &param.name).fill(0, &mut dense[place]),
        }
    }
    dense
}

/// The rows of `ids`; `given` are those that the model provides, from id 0 on.
fn rows_of(table: &TableSpec, given: &[f32], ids: &[u64], seed: u64) -> Vec<f32> {
    let mut rows = vec![0.0; ids.len() * table.dim];
    let key = name_key(seed, &table.name);
    for (id, row) in ids.iter().zip(rows.chunks_exact_mut(table.dim.max(1))) {
        let place = usize::try_from(*id).ok().and_then(|id| id.checked_mul(table.dim));
        let own = place.and_then(|start| given.get(start..)?.get(..table.dim));
        match own {
            Some(own) => row.copy_from_slice(own),
            None => InitialValues::row(table.init, key, *id).fill(0, row),
        }
    }
    rows
}

/// The number of records and the columns, for people.
fn describe(batch: &Batch) -> String {
    let n_records = match batch.len() {
        1 => "1 record".to_owned(),
        n => format!("{n} records"),
    };
    let column = |(name, column): (&String, &Column)| {
        format!("`{name}` {} {:?}", numpy_name(column.dtype()), column.shape())
    };
    let columns: Vec<String> = batch.columns.iter().map(column).collect();
    if columns.is_empty() {
        return n_records; // A custom data reader has read them.
    }
    format!("{n_records} with {}", columns.join(", "))
}

/// As users know the types from `feed`.
fn numpy_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::I64 => "int64",
        DType::U8 => "uint8",
        DType::Bytes | DType::Record => "bytes",
    }
}

#[cfg(test)]
mod tests {
    use edl_core::metric::Measures;
    use edl_core::model::FieldSpec;
    use edl_tensor::model::{Outcome, Predictions};

    use super::*;
    use crate::tests::toy::ToyRecords;

    /// Notes its passes, and fails in one of them.
    struct Tried {
        spec: ModelSpec,
        fails_in: &'static str,
        error: Error,
        passes: Vec<(&'static str, Vec<u64>)>,
        rows: Vec<Vec<f32>>,
        gradient_len: usize,
    }

    impl Tried {
        fn new(fails_in: &'static str) -> Self {
            let spec = serde_json::json!({
                "name": "tried",
                "params": [
                    {"name": "a", "shape": [2], "init": {"constant": 0.5}, "rule": "moving_average"},
                    {"name": "b", "shape": [1], "init": "given", "rule": "moving_average"},
                ],
                "tables": [
                    {"name": "t", "dim": 2, "init": "given"},
                    {"name": "u", "dim": 1, "init": {"constant": 0.25}},
                ],
                "inputs": [],
                "metrics": [],
                "optimizer": {"kind": "sgd", "learning_rate": 0.1},
            });
            Self {
                spec: serde_json::from_value(spec).unwrap(),
                fails_in,
                error: Error::Other("the model's words".into()),
                passes: Vec::new(),
                rows: Vec::new(),
                gradient_len: 3,
            }
        }

        fn pass(&mut self, name: &'static str, inputs: Inputs<'_>) -> Result<Outcome, Error> {
            assert_eq!(self.passes[0].0, "trial");
            assert_eq!(inputs.dense, [0.5, 0.5, 7.0]);
            self.passes.push((name, inputs.batch.records.clone()));
            self.rows = inputs.rows.to_vec();
            if self.fails_in == name { Err(self.error.clone()) } else { Ok(Outcome { loss: 0.0 }) }
        }
    }

    impl Model for Tried {
        fn spec(&self) -> &ModelSpec {
            &self.spec
        }

        fn first_values(&self) -> Option<Vec<f32>> {
            Some(vec![1.0, 2.0, 7.0])
        }

        fn first_rows(&self, table: usize) -> Option<Vec<f32>> {
            assert_eq!(table, 0);
            Some(vec![1.0, 2.0, 3.0, 4.0])
        }

        fn lookups(&self, _: &Batch) -> Result<Vec<Vec<u64>>, Error> {
            Ok(vec![vec![1, 5, 1], vec![9]])
        }

        fn begin_trial(&mut self) {
            self.passes.push(("trial", Vec::new()));
        }

        fn train(
            &mut self,
            inputs: Inputs<'_>,
            _: u64,
            to: &mut Gradient,
        ) -> Result<Outcome, Error> {
            to.dense.resize(self.gradient_len, 1.0);
            self.pass("train", inputs)
        }

        fn evaluate(&mut self, inputs: Inputs<'_>, _: &mut Measures) -> Result<Outcome, Error> {
            self.pass("evaluate", inputs)
        }

        fn predict(&mut self, inputs: Inputs<'_>) -> Result<Predictions, Error> {
            let n_values = inputs.batch.len() * 2 - usize::from(self.fails_in == "shape");
            self.pass("predict", inputs)?;
            Ok(Predictions { width: 2, values: vec![0.0; n_values] })
        }
    }

    fn job(job_type: JobType) -> JobSpec {
        JobSpec {
            job_type,
            minibatch_size: 4,
            shuffle: false,
            validation_data: "there".into(),
            ..JobSpec::default()
        }
    }

    fn tried(spec: &JobSpec, model: &mut Tried) -> Result<(), String> {
        let open: OpenRecords = Box::new(|source| match source {
            Source::Training => Ok(Arc::new(ToyRecords(90))),
            Source::Validation => Ok(Arc::new(ToyRecords(3))),
            Source::Prediction => Ok(Arc::new(ToyRecords(5))),
        });
        let tried = Trial::new(spec, model, open).run();
        tried.map_err(|misfit| format!("{misfit}: {}", misfit.cause))
    }

    #[test]
    fn each_type_of_job_tries_its_own_passes_on_its_first_minibatch() {
        let passes = |spec: &JobSpec| {
            let mut model = Tried::new("");
            tried(spec, &mut model).unwrap();
            assert_eq!(model.rows, [vec![3.0, 4.0, 0.0, 0.0, 3.0, 4.0], vec![0.25]]);
            model.passes.split_off(1)
        };
        let (train, evaluate) = (("train", vec![0, 1, 2, 3]), ("evaluate", vec![0, 1, 2]));
        assert_eq!(passes(&job(JobType::Train)), [train.clone(), evaluate.clone()]);
        assert_eq!(passes(&job(JobType::Evaluate)), [evaluate]);
        assert_eq!(passes(&job(JobType::Predict)), [("predict", vec![0, 1, 2, 3])]);
        let alone = JobSpec { validation_data: String::new(), ..job(JobType::Train) };
        assert_eq!(passes(&alone), std::slice::from_ref(&train));
        let strategy = edl_core::spec::Strategy::Allreduce;
        let lanes = JobSpec { distribution_strategy: strategy, lanes: Some(8), ..alone };
        assert_eq!(passes(&lanes), [train], "one lane of a step of 32 records");
    }

    #[test]
    fn a_misfit_names_what_was_tried_and_what_the_model_says() {
        let failed = |kind, pass| tried(&job(kind), &mut Tried::new(pass)).unwrap_err();
        assert_eq!(
            failed(JobType::Train, "train"),
            "cannot train the first batch of the training data: 4 records: the model's words"
        );
        assert_eq!(
            failed(JobType::Train, "evaluate"),
            "cannot evaluate the first batch of the validation data: 3 records: the model's words"
        );
        assert_eq!(
            failed(JobType::Predict, "shape"),
            "cannot predict the first batch of the prediction data: 4 records: the model returned \
             7 values of width 2 for 4 records"
        );
        let mut model = Tried { gradient_len: 4, ..Tried::new("") };
        let error = tried(&job(JobType::Train), &mut model).unwrap_err();
        assert!(error.ends_with("differs from that of its parameters"), "{error}");
    }

    #[test]
    fn a_loss_that_is_not_finite_is_left_to_the_job() {
        let mut model = Tried { error: Error::NonFinite("loss"), ..Tried::new("train") };
        assert_eq!(tried(&job(JobType::Train), &mut model), Ok(()));
    }

    #[test]
    fn data_that_cannot_be_read_is_left_to_the_checks_of_the_data() {
        let open: OpenRecords = Box::new(|_| Err("no such file".into()));
        let spec = job(JobType::Train);
        assert_eq!(Trial::new(&spec, &mut Tried::new("train"), open).run(), Ok(()));
        struct Corrupt;
        impl Records for Corrupt {
            fn n_records(&self) -> u64 {
                9
            }
            fn batch(&self, _: &[u64], _: &[FieldSpec]) -> Result<Batch, String> {
                Err("corrupt".into())
            }
            fn locate(&self, _: u64) -> String {
                String::new()
            }
        }
        let open: OpenRecords = Box::new(|_| Ok(Arc::new(Corrupt)));
        assert_eq!(Trial::new(&spec, &mut Tried::new("train"), open).run(), Ok(()));
    }
}
