// SPDX-License-Identifier: Apache-2.0
//! From the first welcome to a running worker: its machine and its threads.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use edl_core::id::{Incarnation, RunId};
use edl_core::job_dir::JobDir;
use edl_core::member;
use edl_core::model::ModelSpec;
use edl_core::rng;
use edl_core::spec::{JobSpec, JobType, Mode};
use edl_core::worker::{self, Records, WorkItem, Worker};
use edl_net::control::JobInfo;
use edl_net::mesh::Transport;
use edl_tensor::first_values;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::Error;
use crate::allreduce::{self, Identity, MemberShell, OpenMesh};
use crate::compute::{Compute, Numbers, Task};
use crate::driver::{self, Driver, Output, Shell};
use crate::feed::{self, Counts, Feeder, OpenRecords, Source};
use crate::link::{Ask, Link};
use crate::progress::Progress;
use crate::ps_worker::PsWorker;
use crate::servers::{Dial, PsDial};
use crate::train::Trainer;
use crate::{Config, OpenModel, chain};

/// More than a main thread has: a model's own code may need it. Unused stack costs nothing.
const STACK: usize = 64 << 20;

/// Makes what connects to the servers of one run.
pub(crate) type OpenDial = Box<dyn FnOnce(RunId, &JobSpec, ModelSpec) -> Box<dyn Dial> + Send>;

/// Everything that a worker touches and a test replaces.
pub(crate) struct Edges {
    pub(crate) open_model: OpenModel,
    pub(crate) open_records: Box<dyn FnOnce(&JobSpec) -> OpenRecords + Send>,
    pub(crate) open_dial: OpenDial,
    pub(crate) open_mesh: OpenMesh,
    pub(crate) limits: Limits,
}

/// How long a worker waits for others. What concerns its end fits into the two seconds that a
/// stopped process has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Until a master that cannot be reached is given up.
    pub(crate) master: Duration,
    /// Until the machine that was asked to exit stops waiting.
    pub(crate) exit: worker::Limits,
    /// Until the last messages have reached the master.
    pub(crate) flush: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            master: Duration::from_secs(300),
            exit: worker::Limits::default(),
            flush: Duration::from_millis(300),
        }
    }
}

/// The worker's ends of the channels to the session.
pub(super) struct Ends {
    pub(super) outputs: UnboundedSender<Output>,
    pub(super) end: oneshot::Sender<Ended>,
}

/// How the compute thread ended.
pub(super) type Ended = Result<(), Error>;

impl Edges {
    pub(crate) fn real(config: &Config, open_model: OpenModel) -> Self {
        let key = config.key.clone();
        let indexes = JobDir::new(&config.job_dir).indexes();
        Self {
            open_model,
            open_records: Box::new(move |spec| feed::open_records(spec, indexes)),
            open_dial: Box::new(|run, spec, model| {
                let layout = spec.layout(model.dense_len());
                let is_bounded = matches!(spec.mode(), Mode::Bounded { .. });
                Box::new(PsDial {
                    key,
                    run,
                    encryption: spec.encrypt_data.into(),
                    is_tcp: Transport::from_env() == Ok(Some(Transport::Tcp)),
                    layout,
                    model,
                    patience: spec.round_timeout(),
                    is_bounded,
                })
            }),
            open_mesh: allreduce::open_mesh(config),
            limits: Limits::default(),
        }
    }
}

/// Starts the compute thread, which starts the others when it has the model.
pub(super) fn worker(
    edges: Edges,
    ends: Ends,
    (job, counts): (JobInfo, Counts),
    (config, incarnation): (&Config, Incarnation),
    progress: Arc<Progress>,
) -> Result<Box<dyn driver::Worker>, Error> {
    let Ends { outputs, end } = ends;
    let limits = edges.limits.exit;
    let start = Start { edges, job, counts, job_dir: config.job_dir.clone() };
    // A panic drops the other half of `end`, which has the same meaning.
    if start.job.spec.step_lanes().is_some() {
        let identity = Identity { run: start.job.run, worker: config.worker, incarnation };
        let worker = (config.worker, incarnation);
        let machine = member::Config::new(&start.job.spec, counts.training, worker, limits);
        let (driver, queues) = Driver::of_member(machine, outputs, &progress);
        let ours = driver.clone();
        let body = move || start.all_reduce(identity, driver, queues, progress);
        spawn("compute", move || drop(end.send(body())))?;
        return Ok(Box::new(ours));
    }
    let (compute, tasks) = channel();
    let (feed, reads) = channel();
    let (link, requests) = channel();
    let machine = Worker::new(worker::Config::new(&start.job.spec, counts.training, limits));
    let (abort, gradient, n_records) = (None, None, 0);
    let shell = PsWorker { machine, compute, feed, link: link.clone(), abort, gradient, n_records };
    let driver = Driver::new(shell, outputs, progress);
    let ours = driver.clone();
    let queues = Queues { driver, tasks, reads, link, requests };
    spawn("compute", move || drop(end.send(start.compute(queues))))?;
    Ok(Box::new(ours))
}

/// A compute thread that is about to start.
struct Start {
    edges: Edges,
    job: JobInfo,
    counts: Counts,
    job_dir: PathBuf,
}

/// What the threads of a worker with parameter servers read from.
struct Queues {
    driver: Driver<PsWorker>,
    tasks: Receiver<Task>,
    reads: Receiver<(WorkItem, Records)>,
    link: Sender<(u64, Ask)>,
    requests: Receiver<(u64, Ask)>,
}

impl Start {
    /// Works with parameter servers.
    fn compute(self, queues: Queues) -> Result<(), Error> {
        let Self { edges, job, counts, job_dir } = self;
        let Queues { driver, tasks, reads, link, requests } = queues;
        let model = (edges.open_model)(&job.spec).map_err(Error::Model)?;
        let model_spec = model.spec().clone();
        model_spec.check().map_err(Error::Model)?;
        first_values::offer(&job_dir, &*model).map_err(|error| Error::Model(chain(&error)))?;
        driver.handle(worker::Event::Built(Box::new(model_spec.clone())));

        let feeder = feeder(edges.open_records, &job.spec, counts, &model_spec);
        let plan = feeder.plan.clone();
        let to = driver.clone();
        let decoded = move |item, result| match result {
            Ok(decoded) => {
                let event = worker::Event::Decoded { item, result: Ok(()) };
                to.handle_data(Task::Records(item, decoded), event);
            }
            Err(error) => to.handle(worker::Event::Decoded { item, result: Err(error) }),
        };
        spawn_for("feed", move || feeder.run(&reads, decoded), driver.clone())?;

        let dial = (edges.open_dial)(job.run, &job.spec, model_spec.clone());
        let to = driver.clone();
        let news = move |connection, news| to.news(connection, news);
        spawn_for("link", move || Link::new(dial, requests, news).run(), driver.clone())?;

        Compute {
            trainer: Trainer::new(model, &job.spec, plan),
            metrics: model_spec.metrics,
            log_loss_steps: u64::from(job.spec.log_loss_steps),
            job_dir,
            driver,
            tasks,
            link,
            numbers: Numbers::default(),
        }
        .run();
        Ok(())
    }

    /// Works with other workers.
    fn all_reduce(
        self,
        identity: Identity,
        driver: Driver<MemberShell>,
        queues: allreduce::Queues,
        progress: Arc<Progress>,
    ) -> Result<(), Error> {
        let allreduce::Queues { tasks, reads, interrupt } = queues;
        let Self { edges, job, counts, job_dir } = self;
        let model = (edges.open_model)(&job.spec).map_err(Error::Model)?;
        let feeder = feeder(edges.open_records, &job.spec, counts, model.spec());
        let dial = || (edges.open_dial)(job.run, &job.spec, model.spec().clone());
        let dial = (job.spec.n_servers() > 0).then(dial);
        let (open_mesh, to) = (edges.open_mesh, driver.clone());
        let start_feed = move |feeder: Feeder| {
            let (to, panicked) = (to.clone(), to);
            let decoded = move |place, records| to.decoded(place, records);
            spawn_for("feed", move || feeder.run(&reads, decoded), panicked)
        };
        let spec = &job.spec;
        let start = allreduce::Start {
            identity,
            spec,
            model,
            dial,
            job_dir,
            open_mesh,
            driver,
            tasks,
            interrupt,
            progress,
        };
        allreduce::run(start, feeder, start_feed)
    }
}

fn feeder(
    open_records: impl FnOnce(&JobSpec) -> OpenRecords,
    spec: &JobSpec,
    counts: Counts,
    model: &ModelSpec,
) -> Feeder {
    Feeder {
        open: open_records(spec),
        first: match spec.job_type {
            JobType::Train => Source::Training,
            JobType::Evaluate => Source::Validation,
            JobType::Predict => Source::Prediction,
        },
        counts,
        plan: spec.plan(counts.training),
        n_lanes: spec.step_lanes().unwrap_or(1),
        fields: model.inputs.clone(),
        opened: BTreeMap::new(),
    }
}

/// Starts a thread whose panic ends the worker.
fn spawn_for<S: Shell>(
    name: &'static str,
    body: impl FnOnce() + Send + 'static,
    driver: Driver<S>,
) -> Result<(), Error> {
    spawn(name, move || {
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            driver.output(Output::Died(name));
        }
    })
}

fn spawn(name: &'static str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let started = thread::Builder::new().name(name.into()).stack_size(STACK).spawn(body);
    started
        .map(drop)
        .map_err(|error| Error::Died(format!("cannot start the {name} thread: {error}")))
}

/// How the worker ended, from how its compute thread did.
pub(super) fn result(ended: Result<Ended, oneshot::error::RecvError>) -> Result<(), Error> {
    ended.unwrap_or_else(|_| Err(Error::Died("the compute thread panicked".into())))
}

/// Unique to this start of the process.
pub(super) fn incarnation() -> Incarnation {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Incarnation(rng::key(&[now.as_secs(), now.subsec_nanos().into(), std::process::id().into()]))
}
