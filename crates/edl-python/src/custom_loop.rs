// SPDX-License-Identifier: Apache-2.0
//! A custom training loop as a model: the worker runs on a separate thread, and each pass of its model
//! is one iteration of the user's loop.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use edl_core::metric::Measures;
use edl_core::model::ModelSpec;
use edl_tensor::batch::Batch;
use edl_tensor::model::{Error, Gradient, Inputs, Model, Outcome, Predictions};
use numpy::{PyArray1, PyArrayMethods as _, PyUntypedArrayMethods as _};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// How long a failed loop waits for the next retry.
const RETRY_LIMIT: Duration = Duration::from_secs(5);

/// One iteration of the user's loop.
struct Turn {
    records: Vec<u64>,
    seed: u64,
    at: At,
}

/// The number of steps before, and whether this worker leads the others.
type At = (u64, bool);

/// The result of an iteration.
enum Answer {
    Computed {
        loss: f32,
    },
    /// The parameters were not set: repeat the iteration.
    Again,
    Failed(String),
}

/// The same for Python: records, seed, step and whether this worker leads.
type PyTurn = (Py<PyArray1<u64>>, u64, u64, bool);

/// What the worker and the user's loop share.
#[derive(Default)]
struct Shared {
    /// The user's arrays, once the model is known.
    arrays: Mutex<Option<Attached>>,
    /// Where the job ended, if this worker has its final parameters.
    end: Mutex<Option<At>>,
}

struct Attached {
    dense: Py<PyArray1<f32>>,
    gradient: Py<PyArray1<f32>>,
}

/// The worker of this process, as Python's `Job` drives it.
#[pyclass(frozen)]
pub(crate) struct Loop {
    turns: Mutex<Receiver<Turn>>,
    answers: Mutex<Option<Sender<Answer>>>,
    shared: Arc<Shared>,
    worker: Mutex<Option<thread::JoinHandle<Result<u8, String>>>>,
}

#[pymethods]
impl Loop {
    /// Joins the job that the environment names.
    #[new]
    fn new() -> PyResult<Self> {
        let (turn, turns) = channel();
        let (answers, answer) = channel();
        let shared = Arc::<Shared>::default();
        let of_model = Arc::clone(&shared);
        let open = move |spec: ModelSpec| -> edl_worker::OpenModel {
            let model = LoopModel { spec, turn, answer, shared: of_model, at: (0, false) };
            Box::new(move |_| Ok(Box::new(model)))
        };
        let worker = thread::Builder::new().name("worker".into());
        let worker = worker.spawn(move || elasticdl::work(open));
        let worker = worker.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Self {
            turns: Mutex::new(turns),
            answers: Mutex::new(Some(answers)),
            shared,
            worker: Mutex::new(Some(worker)),
        })
    }

    /// The flat arrays of all parameters, which are set before each turn, and of their gradient,
    /// which the loop fills.
    fn attach(
        &self,
        dense: &Bound<'_, PyArray1<f32>>,
        gradient: &Bound<'_, PyArray1<f32>>,
    ) -> PyResult<()> {
        if dense.len() != gradient.len() {
            return Err(PyValueError::new_err("parameters and gradient differ in length"));
        }
        let (dense, gradient) = (dense.clone().unbind(), gradient.clone().unbind());
        *lock(&self.shared.arrays) = Some(Attached { dense, gradient });
        Ok(())
    }

    /// The records and the seed of the next turn, the number of steps before it, and whether this
    /// worker leads the others; none at the end of the job.
    fn next(&self, py: Python<'_>) -> PyResult<Option<PyTurn>> {
        let turn = py.detach(|| lock(&self.turns).recv());
        match turn {
            Ok(Turn { records, seed, at: (step, is_leader) }) => {
                Ok(Some((PyArray1::from_vec(py, records).unbind(), seed, step, is_leader)))
            }
            Err(_) => self.ended(py).map(|()| None),
        }
    }

    /// After the end of the job: the number of its steps, and whether this worker leads the others;
    /// none if this worker does not have the final parameters.
    fn end(&self) -> Option<At> {
        *lock(&self.shared.end)
    }

    /// Seconds until this process ends, once the job was asked to stop or this worker to exit.
    fn preemption(&self) -> Option<f64> {
        edl_worker::time_left().map(|left| left.as_secs_f64())
    }

    /// Hands the gradient of the turn over, with its mean loss.
    fn computed(&self, loss: f32) {
        self.answer(Answer::Computed { loss });
    }

    /// Asks for the same turn again, with the parameters set.
    fn again(&self) {
        self.answer(Answer::Again);
    }

    /// Reports an error of the user's code for every retry until the job fails.
    fn fail(&self, py: Python<'_>, why: String) {
        self.answer(Answer::Failed(why.clone()));
        py.detach(|| {
            while lock(&self.turns).recv_timeout(RETRY_LIMIT).is_ok() {
                self.answer(Answer::Failed(why.clone()));
            }
        });
    }
}

impl Loop {
    fn answer(&self, answer: Answer) {
        if let Some(answers) = &*lock(&self.answers) {
            // A worker that is gone needs no answer.
            let _gone = answers.send(answer);
        }
    }

    /// How the worker ended.
    fn ended(&self, py: Python<'_>) -> PyResult<()> {
        lock(&self.answers).take();
        let Some(worker) = lock(&self.worker).take() else { return Ok(()) };
        match py.detach(|| worker.join()) {
            Ok(Ok(0)) => Ok(()),
            Ok(Ok(code)) => Err(PyRuntimeError::new_err(format!("worker exited with code {code}"))),
            Ok(Err(why)) => Err(PyRuntimeError::new_err(why)),
            Err(_) => Err(PyRuntimeError::new_err("the worker thread panicked")),
        }
    }
}

/// The model that the worker's loop sees.
struct LoopModel {
    spec: ModelSpec,
    turn: Sender<Turn>,
    answer: Receiver<Answer>,
    shared: Arc<Shared>,
    at: At,
}

impl LoopModel {
    /// Writes the parameters where the user's model reads them, if it is known.
    fn set(&self, dense: &[f32]) -> Result<(), Error> {
        Python::attach(|py| {
            let arrays = lock(&self.shared.arrays);
            let Some(attached) = &*arrays else { return Ok(()) };
            let written =
                attached.dense.bind(py).try_readwrite().map_err(|error| error.to_string());
            let mut written = written.map_err(Error::Other)?;
            match written.as_slice_mut() {
                Ok(slice) if slice.len() == dense.len() => {
                    slice.copy_from_slice(dense);
                    Ok(())
                }
                Ok(_) | Err(_) => Err(Error::Other(
                    "the model in the training loop has different parameters from the model that \
                     the job started with"
                        .into(),
                )),
            }
        })
    }

    fn take(&self, gradient: &mut Gradient) -> Result<(), Error> {
        Python::attach(|py| {
            let arrays = lock(&self.shared.arrays);
            let attached = arrays.as_ref().ok_or_else(no_model)?;
            let read = attached.gradient.bind(py).try_readonly().map_err(|error| error.to_string());
            let read = read.map_err(Error::Other)?;
            gradient.dense.clear();
            gradient.dense.extend_from_slice(read.as_slice().map_err(|_| no_model())?);
            Ok(())
        })
    }
}

impl Model for LoopModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn lookups(&self, _batch: &Batch) -> Result<Vec<Vec<u64>>, Error> {
        Ok(Vec::new())
    }

    fn train(
        &mut self,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        loop {
            self.set(inputs.dense)?;
            let turn = Turn { records: inputs.batch.records.clone(), seed, at: self.at };
            let over = |_| Error::Other("the training loop exited before the job finished".into());
            self.turn.send(turn).map_err(|_| over(()))?;
            match self.answer.recv().map_err(|_| over(()))? {
                Answer::Computed { loss } => {
                    self.take(gradient)?;
                    return Ok(Outcome { loss });
                }
                Answer::Again => {}
                Answer::Failed(why) => return Err(Error::Other(why)),
            }
        }
    }

    fn evaluate(&mut self, _inputs: Inputs<'_>, _: &mut Measures) -> Result<Outcome, Error> {
        Err(no_pass("evaluation"))
    }

    fn predict(&mut self, _inputs: Inputs<'_>) -> Result<Predictions, Error> {
        Err(no_pass("prediction"))
    }

    fn at(&mut self, step: u64, is_leader: bool) {
        self.at = (step, is_leader);
    }

    fn finish(&mut self, dense: &[f32]) {
        // The loop keeps what it has if its arrays do not fit.
        let _kept = self.set(dense);
        *lock(&self.shared.end) = Some(self.at);
    }
}

fn no_model() -> Error {
    Error::Other("the training loop passed a gradient without a model".into())
}

fn no_pass(what: &str) -> Error {
    Error::Other(format!("the job cannot run {what} with a custom training loop"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
