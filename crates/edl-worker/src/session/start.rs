// SPDX-License-Identifier: Apache-2.0
//! From the first welcome to a running worker: the job as the master tells it, and the threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use edl_core::id::{Incarnation, RunId};
use edl_core::model::ModelSpec;
use edl_core::rng;
use edl_core::spec::{JobSpec, JobType, Mode};
use edl_net::control::Job;
use edl_net::proto::{self, worker_message::Kind};
use edl_tensor::first_values;
use tokio::sync::{mpsc, oneshot};

use super::Error;
use crate::allreduce::{self, Identity, OpenMesh, Seat};
use crate::compute::{Channels, Compute, Event, Setup};
use crate::feed::{self, Counts, Decoded, Feeder, OpenRecords, Read, Source};
use crate::link::Link;
use crate::progress::Progress;
use crate::servers::{Dial, PsDial};
use crate::train::Trainer;
use crate::work::Work;
use crate::{Config, OpenModel, chain};

/// Leases held at once where answers come soon: one at hand and one to go on with.
const CAPACITY: u32 = 2;

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
    pub(super) work: Arc<Mutex<Work>>,
    pub(super) progress: Arc<Progress>,
    pub(super) seat: Arc<Seat>,
}

/// How long a worker waits for others. What concerns its end fits into the two seconds that a
/// stopped process has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Until a master that cannot be reached is given up.
    pub(crate) master: Duration,
    /// Until the compute thread has finished the batch at hand, answers included.
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
    pub(super) heard: Receiver<Event>,
    pub(super) report: mpsc::Sender<Kind>,
    pub(super) end: oneshot::Sender<Ended>,
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

/// The leases to hold at once. A round of batches is acknowledged together, so a worker that is
/// alone must be able to hold all of one.
pub(super) fn capacity(spec: &JobSpec) -> u32 {
    match spec.mode() {
        Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => CAPACITY,
        Mode::Sync { grads_to_wait } => CAPACITY.max(grads_to_wait),
    }
}

/// Starts the compute thread, which starts the others when it has the model.
pub(super) fn threads(
    edges: Edges,
    ends: Ends,
    events: Sender<Event>,
    (job, counts): (Job, Counts),
    (config, incarnation): (&Config, Incarnation),
    shared: Shared,
) -> Result<(), Error> {
    let identity = Identity { run: job.run, worker: config.worker, incarnation };
    let job_dir = config.job_dir.clone();
    let Ends { heard, report, end } = ends;
    let body = move || {
        shared.progress.busy("building the model");
        let birth = Birth { edges, heard, reports: report, events, job: &job, counts, shared };
        // A panic drops the other half of `end`, which says the same.
        let result = match job.spec.is_allreduce() {
            true => birth.all_reduce(identity, job_dir),
            false => birth.compute(job_dir),
        };
        let _ = end.send(result);
    };
    spawn("compute", body)
}

/// A compute thread that is about to start.
struct Birth<'a> {
    edges: Edges,
    heard: Receiver<Event>,
    reports: mpsc::Sender<Kind>,
    events: Sender<Event>,
    job: &'a Job,
    counts: Counts,
    shared: Shared,
}

impl Birth<'_> {
    /// Works with parameter servers.
    fn compute(self, job_dir: PathBuf) -> Result<(), Error> {
        let Self { edges, heard, reports, events, job, counts, shared } = self;
        let model = (edges.open_model)(&job.spec).map_err(Error::Model)?;
        let model_spec = model.spec().clone();
        model_spec.check().map_err(Error::Model)?;
        first_values::offer(&job_dir, &*model).map_err(|error| Error::Model(chain(&error)))?;
        let model_spec_json = serde_json::to_string(&model_spec)
            .map_err(|error| Error::Model(format!("cannot serialize its description: {error}")))?;
        let ready = proto::Ready { model_spec_json, ..proto::Ready::default() };
        if reports.blocking_send(Kind::Ready(ready)).is_err() {
            return Ok(());
        }
        let feeder = feeder(edges.open_records, &job.spec, counts, &model_spec);
        let plan = feeder.plan.clone();
        let feed = spawn_feeder(feeder, &events, Event::Decoded)?;

        let dial = (edges.open_dial)(job.run, &job.spec, model_spec);
        let (link, link_asks) = channel();
        let tell = events.clone();
        let news = move |connection, news| drop(tell.send(Event::Link(connection, news)));
        spawn_for(&events, "link", move || Link::new(dial, link_asks, news).run())?;
        drop(events);

        let channels = Channels { events: heard, reports, feed, link };
        let setup = Setup {
            trainer: Trainer::new(model, &job.spec),
            spec: &job.spec,
            plan,
            job_dir,
            last_answers: edges.limits.last_answers,
            work: shared.work,
            progress: shared.progress,
        };
        let compute = Compute::new(setup, channels);
        compute.run().map_err(|died| Error::Died(died.to_string()))
    }

    /// Works with other workers.
    fn all_reduce(self, identity: Identity, job_dir: PathBuf) -> Result<(), Error> {
        let Self { edges, heard, reports, events, job, counts, shared } = self;
        let model = (edges.open_model)(&job.spec).map_err(Error::Model)?;
        let feeder = feeder(edges.open_records, &job.spec, counts, model.spec());
        let plan = feeder.plan.clone();
        let decoded =
            |place, records| Event::AllReduce(Box::new(allreduce::Event::Decoded(place, records)));
        let feed = spawn_feeder(feeder, &events, decoded)?;
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
            tell: events,
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

/// Starts the feeder, whose answers become events; it is asked by what is returned.
fn spawn_feeder<T: Send + 'static>(
    feeder: Feeder,
    events: &Sender<Event>,
    event: impl Fn(T, Result<Decoded, String>) -> Event + Send + 'static,
) -> Result<Sender<(T, Read)>, Error> {
    let (feed, asks) = channel();
    let tell = events.clone();
    let decoded = move |tag, result| drop(tell.send(event(tag, result)));
    spawn_for(events, "feed", move || feeder.run(&asks, decoded))?;
    Ok(feed)
}

/// Starts a thread whose panic the compute thread hears of.
fn spawn_for(
    events: &Sender<Event>,
    name: &'static str,
    body: impl FnOnce() + Send + 'static,
) -> Result<(), Error> {
    let events = events.clone();
    spawn(name, move || {
        if catch_unwind(AssertUnwindSafe(body)).is_err() {
            // A compute thread that is gone needs nobody.
            let _ = events.send(Event::Died(name));
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
