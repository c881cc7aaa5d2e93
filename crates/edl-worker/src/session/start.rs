// SPDX-License-Identifier: Apache-2.0
//! From the first welcome to a running worker: the job as the master tells it, and the threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use edl_core::id::{Incarnation, RunId};
use edl_core::model::ModelSpec;
use edl_core::rng;
use edl_core::spec::{JobSpec, JobType, Mode};
use edl_core::worker::{self, Item, Worker};
use edl_net::control::Job;
use edl_net::proto::worker_message::Kind;
use edl_tensor::first_values;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::oneshot;

use super::Error;
use crate::allreduce::{self, Identity, OpenMesh, Seat};
use crate::compute::{Compute, Event, Numbers, Task};
use crate::driver::{Channels, Driver, Output};
use crate::feed::{self, Counts, Feeder, OpenRecords, Read, Source};
use crate::link::{Ask, Link, News};
use crate::progress::Progress;
use crate::servers::{Dial, PsDial};
use crate::train::Trainer;
use crate::{Config, OpenModel, chain};

/// As much as a main thread has, and more: a model's own code may go deep. Untouched, it costs
/// nothing.
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

/// What the session and the compute thread both look at.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) progress: Arc<Progress>,
    pub(super) seat: Arc<Seat>,
}

/// How long a worker waits for others. What concerns its end fits into the two seconds that a
/// stopped process has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Until a master that cannot be reached is given up.
    pub(crate) master: Duration,
    /// Until the compute thread has finished the item in progress, answers included.
    pub(crate) finish: Duration,
    /// Until the servers have answered the last gradients.
    pub(crate) last_answers: Duration,
    /// AllReduce: until the master has named a world without this worker, whose lanes others
    /// take over then.
    pub(crate) hand_over: Duration,
    /// Until the last messages have reached the master.
    pub(crate) flush: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            master: Duration::from_secs(300),
            finish: Duration::from_millis(1200),
            last_answers: Duration::from_millis(700),
            hand_over: Duration::from_secs(10),
            flush: Duration::from_millis(300),
        }
    }
}

/// The compute thread's ends of the channels to the session.
pub(super) struct Ends {
    /// Of a worker with parameter servers.
    pub(super) outputs: UnboundedSender<Output>,
    /// Of a member of a world.
    pub(super) reports: mpsc::Sender<Kind>,
    pub(super) end: oneshot::Sender<Ended>,
}

/// How the session reaches the compute thread.
pub(super) enum Commands {
    Servers(Driver),
    Member(Sender<Event>),
}

/// How the compute thread ended.
pub(super) type Ended = Result<(), Error>;

impl Edges {
    pub(crate) fn real(config: &Config, open_model: OpenModel) -> Self {
        let key = config.key.clone();
        Self {
            open_model,
            open_records: Box::new(feed::open_records),
            open_dial: Box::new(|run, spec, model| {
                let layout = spec.layout(model.dense_len());
                let is_bounded = matches!(spec.mode(), Mode::Bounded { .. });
                let patience = spec.task_timeout();
                Box::new(PsDial { key, run, layout, model, patience, is_bounded })
            }),
            open_mesh: allreduce::open_mesh(config),
            limits: Limits::default(),
        }
    }
}

/// Starts the compute thread, which starts the others when it has the model.
pub(super) fn threads(
    edges: Edges,
    ends: Ends,
    (job, counts): (Job, Counts),
    (config, incarnation): (&Config, Incarnation),
    shared: Shared,
) -> Result<Commands, Error> {
    shared.progress.busy("building the model");
    let job_dir = config.job_dir.clone();
    let Ends { outputs, reports, end } = ends;
    // A panic drops the other half of `end`, which has the same meaning.
    if job.spec.is_allreduce() {
        let identity = Identity { run: job.run, worker: config.worker, incarnation };
        let (events, heard) = channel();
        let birth = Birth { edges, job, counts, shared, job_dir };
        let commands = Commands::Member(events.clone());
        let body = move || drop(end.send(birth.all_reduce(identity, events, heard, reports)));
        return spawn("compute", body).map(|()| commands);
    }
    let (compute, tasks) = channel();
    let (feed, reads) = channel();
    let (link, asks) = channel();
    let Limits { finish, last_answers, .. } = edges.limits;
    let limits = worker::Limits { finish, last_answers };
    let machine = Worker::new(worker::Config::new(&job.spec, counts.training, limits));
    let channels = Channels { session: outputs, compute, feed, link: link.clone() };
    let driver = Driver::new(machine, channels, Arc::clone(&shared.progress));
    let commands = Commands::Servers(driver.clone());
    let birth = Birth { edges, job, counts, shared, job_dir };
    let queues = Queues { driver, tasks, reads, link, asks };
    let body = move || drop(end.send(birth.compute(queues)));
    spawn("compute", body).map(|()| commands)
}

/// A compute thread that is about to start.
struct Birth {
    edges: Edges,
    job: Job,
    counts: Counts,
    shared: Shared,
    job_dir: PathBuf,
}

/// What the threads of a worker with parameter servers read from.
struct Queues {
    driver: Driver,
    tasks: Receiver<Task>,
    reads: Receiver<(Item, Read)>,
    link: Sender<(u64, Ask)>,
    asks: Receiver<(u64, Ask)>,
}

impl Birth {
    /// Works with parameter servers.
    fn compute(self, queues: Queues) -> Result<(), Error> {
        let Self { edges, job, counts, job_dir, .. } = self;
        let Queues { driver, tasks, reads, link, asks } = queues;
        let model = (edges.open_model)(&job.spec).map_err(Error::Model)?;
        let model_spec = model.spec().clone();
        model_spec.check().map_err(Error::Model)?;
        first_values::offer(&job_dir, &*model).map_err(|error| Error::Model(chain(&error)))?;
        driver.tell(worker::Event::Built(Box::new(model_spec.clone())));

        let feeder = feeder(edges.open_records, &job.spec, counts, &model_spec);
        let to = driver.clone();
        let decoded = move |item, result| match result {
            Ok(decoded) => {
                let event = worker::Event::Decoded { item, result: Ok(()) };
                to.tell_with(Task::Records(item, decoded), event);
            }
            Err(error) => to.tell(worker::Event::Decoded { item, result: Err(error) }),
        };
        let panicked = |name| {
            let driver = driver.clone();
            move || driver.died(name)
        };
        spawn_for("feed", move || feeder.run(&reads, decoded), panicked("feed"))?;

        let dial = (edges.open_dial)(job.run, &job.spec, model_spec.clone());
        let to = driver.clone();
        let news = move |connection, news| pass_on(&to, connection, news);
        spawn_for("link", move || Link::new(dial, asks, news).run(), panicked("link"))?;

        Compute {
            trainer: Trainer::new(model, &job.spec),
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
        events: Sender<Event>,
        heard: Receiver<Event>,
        reports: mpsc::Sender<Kind>,
    ) -> Result<(), Error> {
        let Self { edges, job, counts, shared, job_dir } = self;
        let model = (edges.open_model)(&job.spec).map_err(Error::Model)?;
        let feeder = feeder(edges.open_records, &job.spec, counts, model.spec());
        let plan = feeder.plan.clone();
        let (feed, reads) = channel();
        let to = events.clone();
        let decoded = move |place, records| {
            let decoded = allreduce::Event::Decoded(place, records);
            drop(to.send(Event::AllReduce(Box::new(decoded))));
        };
        let panicked = move || drop(events.send(Event::Died("feed")));
        spawn_for("feed", move || feeder.run(&reads, decoded), panicked)?;
        let dial = || (edges.open_dial)(job.run, &job.spec, model.spec().clone());
        let dial = job.spec.is_hybrid().then(dial);
        let start = allreduce::Start {
            identity,
            spec: &job.spec,
            plan,
            model,
            dial,
            job_dir,
            open_mesh: edges.open_mesh,
            events: heard,
            feed,
            reports,
            seat: shared.seat,
            progress: shared.progress,
        };
        allreduce::run(start).map_err(|error| match error {
            allreduce::Error::Unfit(why) => Error::Model(why),
            error @ (allreduce::Error::Died(_)
            | allreduce::Error::Mesh(_)
            | allreduce::Error::Probe(_)
            | allreduce::Error::Thread(_)) => Error::Died(error.to_string()),
        })
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
        n_lanes: if spec.is_allreduce() { spec.n_lanes() } else { 1 },
        fields: model.inputs.clone(),
    }
}

/// Passes news of the servers to the machine.
fn pass_on(driver: &Driver, connection: u64, news: News) {
    match news {
        News::Connected(abort) => driver.connected(connection, abort),
        News::Pulled(item, pull, versions) => driver.tell_with(
            Task::Parameters { connection, item, pull, versions },
            worker::Event::Pulled { connection, item },
        ),
        News::Sent(push) => driver.sent(push),
        News::Acknowledged { batch, generation } => {
            driver.tell(worker::Event::Acknowledged { connection, batch, generation });
        }
        News::Broken => driver.tell(worker::Event::Broken { connection }),
    }
}

/// Starts a thread that reports its panic.
fn spawn_for(
    name: &'static str,
    body: impl FnOnce() + Send + 'static,
    panicked: impl FnOnce() + Send + 'static,
) -> Result<(), Error> {
    spawn(name, move || {
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            panicked();
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

/// A number that another start of a process will not have.
pub(super) fn incarnation() -> Incarnation {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let words = [now.as_secs(), now.subsec_nanos().into(), std::process::id().into()];
    Incarnation(rng::key(&words))
}
