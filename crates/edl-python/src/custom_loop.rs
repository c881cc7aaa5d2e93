// SPDX-License-Identifier: Apache-2.0
//! A custom training loop as a model: the worker runs on a separate thread, and each pass of its
//! model is one iteration of the user's loop. If the user's code takes the optimizer steps, each
//! step and each access to its state is one more request to the loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use edl_core::metric::Measures;
use edl_core::model::ModelSpec;
use edl_core::upcoming::Upcoming;
use edl_tensor::batch::Batch;
use edl_tensor::model::{Error, Gradient, Inputs, Mean, Model, Outcome, Predictions};
use numpy::{PyArray1, PyArrayMethods as _, PyUntypedArrayMethods as _};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

/// How long a failed loop waits for the next retry.
const RETRY_LIMIT: Duration = Duration::from_secs(5);

/// What the loop has to do next.
enum Request {
    /// One iteration.
    Turn { records: Vec<u64>, seed: u64, upcoming: Upcoming },
    /// An optimizer step by the gradient in the loop's array.
    Step { seed: u64, loss: f32 },
    /// The state of everything that the step depends on, for others.
    State,
    /// Replaces that state.
    Load(Vec<u8>),
}

/// The number of steps before, and whether this worker leads the others.
type At = (u64, bool);

/// The result of a request.
enum Answer {
    Computed {
        loss: f32,
    },
    /// The parameters were not set: repeat the iteration.
    Again,
    /// The loop was left: neither this nor a later request for a turn or a step is served.
    Quit,
    Stepped,
    State(Vec<u8>),
    Loaded,
}

/// What the worker and the user's loop share.
#[derive(Default)]
struct Shared {
    /// The user's arrays, once the model is known.
    arrays: Mutex<Option<Attached>>,
    /// Whether the user's code takes the optimizer steps.
    is_script: AtomicBool,
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
    requests: Mutex<Receiver<(Request, At)>>,
    /// What probably follows the last turn.
    upcoming: Mutex<Upcoming>,
    answers: Mutex<Option<Sender<Result<Answer, String>>>>,
    shared: Arc<Shared>,
    worker: Mutex<Option<thread::JoinHandle<Result<u8, String>>>>,
}

#[pymethods]
impl Loop {
    /// Joins the job that the environment names.
    #[new]
    fn new() -> PyResult<Self> {
        Self::start(|open| elasticdl::work(open))
    }

    /// Trains without a job. `description` is that of the script, and the initial values and the
    /// state are those before its first step.
    #[staticmethod]
    fn alone(
        description: String,
        values: &Bound<'_, PyArray1<f32>>,
        state: Vec<u8>,
        lanes: u32,
    ) -> PyResult<Self> {
        let first = (values.to_vec()?, state);
        Self::start(move |open| elasticdl::work_alone(&description, first, lanes, open))
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

    /// The next request, the number of steps before it, and whether this worker leads the others;
    /// None at the end of the job. A request is the records and the seed of a turn; `step` with a
    /// seed and the mean loss; `state` and None; or `load` and the state.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let request = py.detach(|| lock(&self.requests).recv());
        let Ok((request, (step, is_leader))) = request else {
            return self.ended(py).map(|()| None);
        };
        let request = match request {
            Request::Turn { records, seed, upcoming } => {
                *lock(&self.upcoming) = upcoming;
                (PyArray1::from_vec(py, records), seed, step, is_leader).into_pyobject(py)
            }
            Request::Step { seed, loss } => {
                ("step", (seed, loss), step, is_leader).into_pyobject(py)
            }
            Request::State => ("state", py.None(), step, is_leader).into_pyobject(py),
            Request::Load(state) => {
                ("load", PyBytes::new(py, &state), step, is_leader).into_pyobject(py)
            }
        };
        request.map(Some)
    }

    /// The records and seeds of the turns that probably follow the last one, at most `n`.
    fn upcoming<'py>(&self, py: Python<'py>, n: usize) -> Vec<(Bound<'py, PyArray1<u64>>, u64)> {
        let passes = lock(&self.upcoming).passes(n);
        passes.into_iter().map(|pass| (PyArray1::from_vec(py, pass.records), pass.seed)).collect()
    }

    /// Whether the user's code takes the optimizer steps; known from the first request on.
    #[getter]
    fn is_script(&self) -> bool {
        self.shared.is_script.load(Ordering::SeqCst)
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
        self.answer(Ok(Answer::Computed { loss }));
    }

    /// Asks for the same turn again, with the parameters set.
    fn again(&self) {
        self.answer(Ok(Answer::Again));
    }

    /// The user has left the loop: this turn or step is not computed.
    fn quit(&self) {
        self.answer(Ok(Answer::Quit));
    }

    /// The step is taken, and its parameters are in their array.
    fn stepped(&self) {
        self.answer(Ok(Answer::Stepped));
    }

    /// Hands over the state that was requested.
    fn state(&self, state: &[u8]) {
        self.answer(Ok(Answer::State(state.to_vec())));
    }

    /// The state is loaded.
    fn loaded(&self) {
        self.answer(Ok(Answer::Loaded));
    }

    /// Reports an error of the user's code for every retry until the job fails.
    fn fail(&self, py: Python<'_>, why: String) {
        self.answer(Err(why.clone()));
        py.detach(|| {
            while lock(&self.requests).recv_timeout(RETRY_LIMIT).is_ok() {
                self.answer(Err(why.clone()));
            }
        });
    }
}

/// Makes the model of a worker's loop from its description.
type Open = Box<dyn FnOnce(ModelSpec) -> edl_worker::OpenModel + Send>;

impl Loop {
    /// Starts the worker's loop on a thread.
    fn start(work: impl FnOnce(Open) -> Result<u8, String> + Send + 'static) -> PyResult<Self> {
        let (request, requests) = channel();
        let (answers, answer) = channel();
        let shared = Arc::<Shared>::default();
        let of_model = Arc::clone(&shared);
        let open = move |spec: ModelSpec| -> edl_worker::OpenModel {
            of_model.is_script.store(spec.optimizer.is_script(), Ordering::SeqCst);
            let (at, upcoming) = ((0, false), Upcoming::Unknown);
            let model = LoopModel { spec, request, answer, shared: of_model, at, upcoming };
            Box::new(move |_| Ok(Box::new(model)))
        };
        let worker = thread::Builder::new().name("worker".into());
        let worker = worker.spawn(move || work(Box::new(open)));
        let worker = worker.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Self {
            requests: Mutex::new(requests),
            upcoming: Mutex::default(),
            answers: Mutex::new(Some(answers)),
            shared,
            worker: Mutex::new(Some(worker)),
        })
    }

    fn answer(&self, answer: Result<Answer, String>) {
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
    request: Sender<(Request, At)>,
    answer: Receiver<Result<Answer, String>>,
    shared: Arc<Shared>,
    at: At,
    upcoming: Upcoming,
}

impl LoopModel {
    /// Writes the parameters where the user's model reads them, if it is known.
    fn set(&self, dense: &[f32]) -> Result<(), Error> {
        self.write(|attached| &attached.dense, dense)
    }

    fn write(
        &self,
        array: impl FnOnce(&Attached) -> &Py<PyArray1<f32>>,
        numbers: &[f32],
    ) -> Result<(), Error> {
        Python::attach(|py| {
            let arrays = lock(&self.shared.arrays);
            let Some(attached) = &*arrays else { return Ok(()) };
            let written =
                array(attached).bind(py).try_readwrite().map_err(|error| error.to_string());
            let mut written = written.map_err(Error::Other)?;
            match written.as_slice_mut() {
                Ok(slice) if slice.len() == numbers.len() => {
                    slice.copy_from_slice(numbers);
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

    /// Passes the numbers of one of the loop's arrays to `use_them`.
    fn read(
        &self,
        array: impl FnOnce(&Attached) -> &Py<PyArray1<f32>>,
        use_them: impl FnOnce(&[f32]),
    ) -> Result<(), Error> {
        Python::attach(|py| {
            let arrays = lock(&self.shared.arrays);
            let attached = arrays.as_ref().ok_or_else(no_model)?;
            let read = array(attached).bind(py).try_readonly().map_err(|error| error.to_string());
            let read = read.map_err(Error::Other)?;
            use_them(read.as_slice().map_err(|_| no_model())?);
            Ok(())
        })
    }

    /// Has the loop do something, and waits for its answer.
    fn ask(&self, request: Request) -> Result<Answer, Error> {
        let over = || Error::Other("the training loop exited before the job finished".into());
        self.request.send((request, self.at)).map_err(|_| over())?;
        self.answer.recv().map_err(|_| over())?.map_err(Error::Other)
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
            let records = inputs.batch.records.clone();
            let upcoming = self.upcoming.clone();
            match self.ask(Request::Turn { records, seed, upcoming })? {
                Answer::Computed { loss } => {
                    let take = |numbers: &[f32]| {
                        gradient.dense.clear();
                        gradient.dense.extend_from_slice(numbers);
                    };
                    self.read(|attached| &attached.gradient, take)?;
                    return Ok(Outcome { loss });
                }
                Answer::Again => {}
                Answer::Quit => return Err(Error::Quit),
                Answer::Stepped | Answer::State(_) | Answer::Loaded => return Err(unexpected()),
            }
        }
    }

    fn step(&mut self, mean: Mean<'_>, seed: u64, dense: &mut [f32]) -> Result<(), Error> {
        self.set(dense)?;
        self.write(|attached| &attached.gradient, mean.gradient)?;
        let request = Request::Step { seed, loss: mean.loss };
        match self.ask(request)? {
            Answer::Stepped => {}
            Answer::Quit => return Err(Error::Quit),
            Answer::Computed { .. } | Answer::Again | Answer::State(_) | Answer::Loaded => {
                return Err(unexpected());
            }
        }
        self.read(|attached| &attached.dense, |numbers| dense.copy_from_slice(numbers))
    }

    fn state(&mut self) -> Result<Vec<u8>, Error> {
        let Answer::State(state) = self.ask(Request::State)? else { return Err(unexpected()) };
        Ok(state)
    }

    fn load_state(&mut self, state: &[u8]) -> Result<(), Error> {
        let Answer::Loaded = self.ask(Request::Load(state.to_vec()))? else {
            return Err(unexpected());
        };
        Ok(())
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

    fn upcoming(&mut self, passes: Upcoming) {
        self.upcoming = passes;
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

fn unexpected() -> Error {
    Error::Other("the training loop gave an answer to another request".into())
}

fn no_pass(what: &str) -> Error {
    Error::Other(format!("the job cannot run {what} with a custom training loop"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
