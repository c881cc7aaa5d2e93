// SPDX-License-Identifier: Apache-2.0
//! A model written in Python, behind the trait that the training loop knows.
//!
//! Python's half is an adapter (`elasticdl._host`). It owns the flat array of parameters that its
//! framework computes with. A pass copies them in, unless they are in memory that the adapter shares.
//! The gradient stays where the framework wrote it.

use std::cell::{Cell, RefCell};
use std::path::Path;

use edl_core::metric::Measures;
use edl_core::model::ModelSpec;
use edl_core::spec::JobSpec;
use edl_tensor::batch::Batch;
use edl_tensor::model::{Error, Gradient, Inputs, Memory, Model, Outcome, Predictions};
use numpy::{
    PyArray1, PyArrayMethods as _, PyReadonlyArray1, PyReadonlyArrayDyn, PyUntypedArrayMethods as _,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::numbers::{Numbers, SharedArray};
use crate::{batch, thread_state};

/// The module that opens the user's model.
const HOST: &str = "elasticdl._host";

/// What a training pass returns: its loss, the gradient in pieces, and those of tables' rows.
type Trained<'py> = (f32, Vec<Bound<'py, PyArray1<f32>>>, Vec<Bound<'py, PyAny>>);

/// A Python model.
pub(crate) struct PyModel {
    adapter: Py<PyAny>,
    /// The adapter's own parameters, for those that lie where its framework cannot read.
    dense: Py<PyArray1<f32>>,
    /// Memory that others keep parameters in and the framework can read.
    shared: RefCell<Vec<SharedArray>>,
    /// Where the parameters are that the framework reads now.
    bound: Cell<usize>,
    /// The gradient of the last pass.
    pieces: Vec<Numbers>,
    spec: ModelSpec,
}

/// Opens the model that the job names; `indexes` is a folder that can have the index of its data.
/// An error contains the user's traceback.
pub(crate) fn open(spec: &JobSpec, indexes: Option<&Path>) -> Result<Box<dyn Model>, String> {
    let job = serde_json::to_string(spec).map_err(|error| error.to_string())?;
    thread_state::keep();
    Python::attach(|py| {
        let opened =
            py.import(HOST).and_then(|host| host.call_method1("open_model", (job, indexes)));
        let adapter = opened.map_err(|error| explain(py, &error))?;
        let model = PyModel::new(&adapter).map_err(|error| explain(py, &error))?;
        Ok(Box::new(model) as Box<dyn Model>)
    })
}

/// The job with its data as the user's own reader has it.
pub(crate) fn settle(spec: &JobSpec, original: &JobSpec) -> Result<JobSpec, String> {
    let json = |spec| serde_json::to_string(spec).map_err(|error| error.to_string());
    let (job, original) = (json(spec)?, json(original)?);
    thread_state::keep();
    let settled: String = Python::attach(|py| {
        let settled = py.import(HOST).and_then(|host| host.call_method1("settle", (job, original)));
        settled.and_then(|text| text.extract()).map_err(|error| explain(py, &error))
    })?;
    serde_json::from_str(&settled).map_err(|error| error.to_string())
}

/// The error as `_host.explain` formats it: a sentence, or the user's traceback.
fn explain(py: Python<'_>, error: &PyErr) -> String {
    let explained = py
        .import(HOST)
        // Its value has the traceback only when it leaves the error.
        .and_then(|host| host.call_method1("explain", (error.clone_ref(py).into_value(py),)))
        .and_then(|text| text.extract::<String>());
    explained.unwrap_or_else(|_| error.to_string())
}

impl PyModel {
    fn new(adapter: &Bound<'_, PyAny>) -> PyResult<Self> {
        let spec: String = adapter.call_method0("spec_json")?.extract()?;
        let spec: ModelSpec = serde_json::from_str(&spec).map_err(value_error)?;
        let dense = adapter.getattr("dense")?.cast_into::<PyArray1<f32>>()?;
        if dense.len() != spec.dense_len() || !dense.is_c_contiguous() {
            return Err(value_error("`dense` must be a flat, contiguous vector of all parameters"));
        }
        Ok(Self {
            bound: Cell::new(dense.data().addr()),
            dense: dense.unbind(),
            adapter: adapter.clone().unbind(),
            shared: RefCell::default(),
            pieces: Vec::new(),
            spec,
        })
    }

    /// Lets the framework read these parameters: in place if they are in memory that was shared.
    fn set(&self, py: Python<'_>, parameters: &[f32]) -> PyResult<()> {
        let at = parameters.as_ptr().addr();
        if at == self.bound.get() {
            return Ok(());
        }
        let mut shared = self.shared.borrow_mut();
        shared.retain(SharedArray::is_used);
        if let Some(shared) = shared.iter().find(|shared| shared.addr() == at) {
            self.adapter.bind(py).call_method1("bind", (shared.array(py),))?;
            self.bound.set(at);
            return Ok(());
        }
        let dense = self.dense.bind(py);
        let own = dense.data().addr();
        if self.bound.get() != own {
            self.adapter.bind(py).call_method1("bind", (dense,))?;
            self.bound.set(own);
        }
        dense.try_readwrite()?.as_slice_mut()?.copy_from_slice(parameters);
        Ok(())
    }

    /// Memory that the framework can read, if it is one that reads others' memory.
    fn share(&self, py: Python<'_>) -> PyResult<Option<Box<dyn Memory>>> {
        let memory = self.adapter.bind(py).call_method0("memory")?;
        if memory.is_none() {
            return Ok(None);
        }
        let (shared, memory) = SharedArray::new(memory.cast::<PyArray1<f32>>()?)?;
        self.shared.borrow_mut().push(shared);
        Ok(Some(Box::new(memory)))
    }

    /// Calls a pass of the adapter with the batch and rows, after its parameters were set.
    fn pass<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        inputs: Inputs<'_>,
        seed: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.set(py, inputs.dense)?;
        let batch = self.batch(py, inputs.batch)?;
        let rows = PyList::empty(py);
        for (values, table) in inputs.rows.iter().zip(&self.spec.tables) {
            let shape = [values.len() / table.dim.max(1), table.dim];
            rows.append(batch::array(py, &shape, values)?)?;
        }
        let adapter = self.adapter.bind(py);
        match seed {
            Some(seed) => adapter.call_method1(name, (batch, rows, seed)),
            None => adapter.call_method1(name, (batch, rows)),
        }
    }

    fn batch<'py>(&self, py: Python<'py>, batch: &Batch) -> PyResult<Bound<'py, PyAny>> {
        let columns = batch::columns(py, batch)?;
        let records = PyArray1::from_slice(py, &batch.records);
        self.adapter.bind(py).call_method1("batch", (columns, records, batch.source.as_deref()))
    }

    fn train_in(
        &mut self,
        py: Python<'_>,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> PyResult<Outcome> {
        self.pieces.clear();
        let passed = self.pass(py, "train", inputs, Some(seed))?;
        let (loss, pieces, rows): Trained<'_> = passed.extract()?;
        self.pieces = pieces.iter().map(Numbers::new).collect::<PyResult<_>>()?;
        let has: usize = self.pieces.iter().map(|piece| piece.get().len()).sum();
        if has != inputs.dense.len() {
            let needs = inputs.dense.len();
            return Err(value_error(format!("gradient has {has} values; expected {needs}")));
        }
        gradient.rows.resize_with(inputs.rows.len(), Vec::new);
        if rows.len() != inputs.rows.len() {
            let (has, needs) = (rows.len(), inputs.rows.len());
            return Err(value_error(format!("gradients of {has} tables; expected {needs}")));
        }
        for ((theirs, ours), before) in rows.iter().zip(&mut gradient.rows).zip(inputs.rows) {
            let theirs: PyReadonlyArrayDyn<'_, f32> = theirs.extract()?;
            if theirs.len() != before.len() {
                return Err(value_error("the gradient of a table differs in shape from its rows"));
            }
            ours.clear();
            ours.extend_from_slice(theirs.as_slice()?);
        }
        Ok(Outcome { loss })
    }

    fn evaluate_in(
        &self,
        py: Python<'_>,
        inputs: Inputs<'_>,
        measures: &mut Measures,
    ) -> PyResult<Outcome> {
        let passed = self.pass(py, "evaluate", inputs, None)?;
        let (loss, sums): (f32, Bound<'_, PyDict>) = passed.extract()?;
        for (name, sums) in sums {
            let (name, sums): (String, Vec<f64>) = (name.extract()?, sums.extract()?);
            if !measures.add_sums(&name, &sums) {
                return Err(value_error(format!("unexpected sums for metric `{name}`")));
            }
        }
        Ok(Outcome { loss })
    }

    fn predict_in(&self, py: Python<'_>, inputs: Inputs<'_>) -> PyResult<Predictions> {
        let passed = self.pass(py, "predict", inputs, None)?;
        let values: PyReadonlyArrayDyn<'_, f32> = passed.extract()?;
        let n_records = inputs.batch.len().max(1);
        let width = values.len() / n_records;
        Ok(Predictions { width, values: values.as_slice()?.to_vec() })
    }
}

impl Model for PyModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn first_values(&self) -> Option<Vec<f32>> {
        Python::attach(|py| {
            let dense = self.dense.bind(py).try_readonly().ok()?;
            Some(dense.as_slice().ok()?.to_vec())
        })
    }

    fn first_rows(&self, table: usize) -> Option<Vec<f32>> {
        Python::attach(|py| {
            let rows = self.adapter.bind(py).call_method1("first_rows", (table,)).ok()?;
            let rows: PyReadonlyArrayDyn<'_, f32> = rows.extract().ok()?;
            Some(rows.as_slice().ok()?.to_vec())
        })
    }

    fn lookups(&self, batch: &Batch) -> Result<Vec<Vec<u64>>, Error> {
        if self.spec.tables.is_empty() {
            return Ok(Vec::new());
        }
        attached(|py| {
            let batch = self.batch(py, batch)?;
            let ids = self.adapter.bind(py).call_method1("lookups", (batch,))?;
            let ids: Vec<PyReadonlyArray1<'_, u64>> = ids.extract()?;
            ids.iter().map(|ids| Ok(ids.as_slice()?.to_vec())).collect()
        })
    }

    fn train(
        &mut self,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        let outcome = self.train_in_place(inputs, seed, gradient)?;
        gradient.dense.clear();
        self.pieces.iter().for_each(|piece| gradient.dense.extend_from_slice(piece.get()));
        Ok(outcome)
    }

    fn train_in_place(
        &mut self,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        attached(|py| self.train_in(py, inputs, seed, gradient))
    }

    fn pieces<'a>(&'a self, _gradient: &'a Gradient) -> Vec<&'a [f32]> {
        self.pieces.iter().map(Numbers::get).collect()
    }

    fn begin_trial(&mut self) {
        // Without it, only the effects of callbacks would be more than those of a worker.
        let _ = attached(|py| self.adapter.bind(py).call_method0("begin_trial").map(drop));
    }

    fn memory(&self) -> Box<dyn Memory> {
        // An adapter that cannot share memory gets its parameters as copies.
        let shared = attached(|py| self.share(py)).ok().flatten();
        shared.unwrap_or_else(|| Box::new(vec![0.0; self.spec.dense_len()]))
    }

    fn evaluate(&mut self, inputs: Inputs<'_>, measures: &mut Measures) -> Result<Outcome, Error> {
        attached(|py| self.evaluate_in(py, inputs, measures))
    }

    fn predict(&mut self, inputs: Inputs<'_>) -> Result<Predictions, Error> {
        attached(|py| self.predict_in(py, inputs))
    }
}

/// Runs a pass with the interpreter. An error contains the user's traceback.
fn attached<T>(pass: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, Error> {
    Python::attach(|py| pass(py).map_err(|error| Error::Other(explain(py, &error))))
}

fn value_error(error: impl ToString) -> PyErr {
    pyo3::exceptions::PyValueError::new_err(error.to_string())
}
