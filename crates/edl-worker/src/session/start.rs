// SPDX-License-Identifier: Apache-2.0
//! From the first welcome to a running worker: the job as the master tells it, and the threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use edl_core::id::RunId;
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::rng;
use edl_core::spec::{JobSpec, JobType, Mode};
use edl_net::proto::{self, worker_message::Kind};
use tokio::sync::{mpsc, oneshot};

use super::Error;
use crate::compute::{Channels, Compute, Event, Setup};
use crate::feed::{self, Counts, Feeder, OpenRecords, Source};
use crate::link::Link;
use crate::progress::Progress;
use crate::servers::{Dial, PsDial};
use crate::train::Trainer;
use crate::work::Work;
use crate::{Config, OpenModel};

/// Heartbeats are not sent more often than this, whatever the master says.
const MIN_HEARTBEAT: f64 = 0.05;
/// Leases held at once where answers come soon: one at hand and one to go on with.
const CAPACITY: u32 = 2;

/// The job as the welcome describes it.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) run: RunId,
    pub(super) heartbeat: Duration,
    spec: JobSpec,
    counts: Counts,
}

/// Makes what connects to the servers of one run.
pub(crate) type OpenDial = Box<dyn FnOnce(RunId, &JobSpec, ModelSpec) -> Box<dyn Dial> + Send>;

/// Everything that a worker touches and a test replaces.
pub(crate) struct Edges {
    pub(crate) open_model: OpenModel,
    pub(crate) open_records: Box<dyn FnOnce(&JobSpec) -> OpenRecords + Send>,
    pub(crate) open_dial: OpenDial,
    pub(crate) limits: Limits,
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
    /// Until the last messages have reached the master.
    pub(crate) flush: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            master: Duration::from_secs(300),
            finish: Duration::from_millis(1200),
            last_answers: Duration::from_millis(700),
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
                let n_partitions = spec.partitions;
                let layout = Layout { dense_len: model.dense_len(), n_partitions };
                let is_bounded = matches!(spec.mode(), Mode::Bounded { .. });
                let patience = spec.task_timeout();
                Box::new(PsDial { key, run, layout, model, patience, is_bounded })
            }),
            limits: Limits::default(),
        }
    }
}

impl Job {
    pub(super) fn parse(welcome: proto::WorkerWelcome) -> Result<Self, Error> {
        let bad = |what: &str| Error::Protocol(format!("a welcome with a bad {what}"));
        let spec: JobSpec = serde_json::from_str(&welcome.spec_json)
            .map_err(|error| bad(&format!("job description: {error}")))?;
        spec.check().map_err(|error| bad(&format!("job description: {error}")))?;
        let heartbeat = Duration::try_from_secs_f64(welcome.heartbeat_secs.max(MIN_HEARTBEAT));
        Ok(Self {
            run: RunId::parse(&welcome.run).ok_or_else(|| bad("run id"))?,
            heartbeat: heartbeat.map_err(|_| bad("heartbeat interval"))?,
            spec,
            counts: Counts {
                training: welcome.n_records,
                validation: welcome.n_validation_records,
                prediction: welcome.n_prediction_records,
            },
        })
    }

    /// The leases to hold at once. A round of batches is acknowledged together, so a worker that
    /// is alone must be able to hold all of one.
    pub(super) fn capacity(&self) -> u32 {
        match self.spec.mode() {
            Mode::Async | Mode::Bounded { .. } => CAPACITY,
            Mode::Sync { grads_to_wait } => CAPACITY.max(grads_to_wait),
        }
    }
}

/// Starts the compute thread, which starts the others when it has the model.
pub(super) fn threads(
    edges: Edges,
    ends: Ends,
    events: Sender<Event>,
    job: &Job,
    config: &Config,
    shared: (Arc<Mutex<Work>>, Arc<Progress>),
) -> Result<(), Error> {
    let (job, job_dir) = (job.clone(), config.job_dir.clone());
    let Ends { heard, report, end } = ends;
    let body = move || {
        shared.1.busy("building the model");
        // A panic drops the other half of `end`, which says the same.
        let result = compute(edges, (heard, report), events, &job, job_dir, shared);
        let _ = end.send(result);
    };
    spawn("compute", body)
}

fn compute(
    edges: Edges,
    (heard, reports): (Receiver<Event>, mpsc::Sender<Kind>),
    events: Sender<Event>,
    job: &Job,
    job_dir: PathBuf,
    shared: (Arc<Mutex<Work>>, Arc<Progress>),
) -> Result<(), Error> {
    let model = (edges.open_model)(&job.spec).map_err(Error::Model)?;
    let model_spec = model.spec().clone();
    let model_spec_json = serde_json::to_string(&model_spec)
        .map_err(|error| Error::Model(format!("its description cannot be written: {error}")))?;
    let ready = proto::Ready { model_spec_json, ..proto::Ready::default() };
    if reports.blocking_send(Kind::Ready(ready)).is_err() {
        return Ok(());
    }
    let plan = job.spec.plan(job.counts.training);
    let (feed, feed_asks) = channel();
    let feeder = Feeder {
        open: (edges.open_records)(&job.spec),
        first: match job.spec.job_type {
            JobType::Train => Source::Training,
            JobType::Evaluate => Source::Validation,
            JobType::Predict => Source::Prediction,
        },
        counts: job.counts,
        plan: plan.clone(),
        fields: model_spec.inputs.clone(),
    };
    let tell = events.clone();
    let decoded = move |item, result| drop(tell.send(Event::Decoded(item, result)));
    spawn_for(&events, "feed", move || feeder.run(&feed_asks, decoded))?;

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
        work: shared.0,
        progress: shared.1,
    };
    let compute = Compute::new(setup, channels);
    compute.run().map_err(|died| Error::Died(died.to_string()))
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
    let started = thread::Builder::new().name(name.into()).spawn(body);
    started
        .map(drop)
        .map_err(|error| Error::Died(format!("cannot start the {name} thread: {error}")))
}

/// How the worker ended, from how its compute thread did.
pub(super) fn result(ended: Result<Ended, oneshot::error::RecvError>) -> Result<(), Error> {
    ended.unwrap_or_else(|_| Err(Error::Died("the compute thread has panicked".into())))
}

/// A number that another start of a process will not have.
pub(super) fn incarnation() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    rng::key(&[now.as_secs(), u64::from(now.subsec_nanos()), u64::from(std::process::id())])
}
