// SPDX-License-Identifier: Apache-2.0
//! The loop around the machine: inputs one by one, effects in order.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use edl_core::id::{PsId, RunId, WorkerId};
use edl_core::job::{self, Durable, Effect, End, Event, Job};
use edl_core::platform::Order;
use edl_core::time::Time;
use edl_net::proto::master_server::MasterServer;
use edl_net::proto::{self, PsCommand, WorkerCommand};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use crate::audit::Audits;
use crate::checkpoints::Checkpoints;
use crate::http::Doors;
use crate::journal::{Journal, unix_secs};
use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::service::{self, Input, Reply, Service};
use crate::spans::Spans;
use crate::status::Progress;
use crate::store::Store;
use crate::{Addresses, Config, Data, Error, Port, http, page};

/// Inputs waiting for the machine; more of them make their senders wait.
const INPUTS: usize = 1024;
const STATUS_EVERY: Duration = Duration::from_millis(500);
/// How long everybody may take to hear of the end.
const FAREWELL: Duration = Duration::from_millis(700);

/// A master at work.
pub(crate) struct Engine {
    pub(crate) config: Config,
    pub(crate) run: RunId,
    pub(crate) data: Data,
    pub(crate) addresses: Addresses,
    pub(crate) job: Job,
    pub(crate) journal: Journal,
    pub(crate) metrics: Metrics,
    pub(crate) progress: Progress,
    pub(crate) workers: Peers<WorkerId, WorkerCommand>,
    pub(crate) servers: Peers<PsId, PsCommand>,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) audits: Audits,
    /// What servers have told of their load.
    pub(crate) loads: BTreeMap<PsId, proto::PsLoad>,
    news: watch::Sender<Arc<str>>,
    /// Grows whenever a process came or went.
    lives: u64,
    store: Store,
    origin: Instant,
    spans: Spans,
    /// Work on files that must not hold up the loop; each answers with an event.
    pub(crate) jobs: JoinSet<Event>,
    /// The request being handled: the number of workers before it, and where its reply goes.
    asked: Option<(u32, Reply)>,
    ended: Option<End>,
}

impl Engine {
    #[expect(clippy::too_many_arguments, reason = "the parts of a master, put together once")]
    pub(crate) fn new(
        config: Config,
        job_config: job::Config,
        durable: Durable,
        run: RunId,
        data: Data,
        store: Store,
        addresses: Addresses,
        origin: Instant,
    ) -> Self {
        let checkpoints = Checkpoints::new(&config, run, &data, job_config.term);
        if config.spec.checkpoint_dir.is_empty() {
            checkpoints.sweep(&durable.checkpoints);
        }
        let journal = Journal::open(&config.job_dir, &config.spec.tensorboard_dir, config.resume);
        let mut job = Job::new(job_config, durable, Time::ZERO);
        resume_books(&mut job, &journal, config.resume);
        Self {
            run,
            data,
            addresses,
            journal,
            metrics: Metrics::new(),
            progress: Progress::default(),
            workers: Peers::new(),
            servers: Peers::new(),
            checkpoints,
            audits: Audits::default(),
            loads: BTreeMap::new(),
            news: watch::Sender::new("".into()),
            lives: 0,
            spans: Spans::default(),
            store,
            origin,
            jobs: JoinSet::new(),
            asked: None,
            ended: None,
            job,
            config,
        }
    }

    pub(crate) fn now(&self) -> Time {
        Time::since_origin(self.origin.elapsed())
    }

    /// Serves until the job is over.
    pub(crate) async fn run(
        mut self,
        listener: TcpListener,
        http_listener: TcpListener,
        Port { orders, mut reports }: Port,
        shutdown: CancellationToken,
    ) -> Result<End, Error> {
        let (inputs, mut queue) = mpsc::channel(INPUTS);
        let (health, health_seen) = watch::channel("starting");
        let served = CancellationToken::new();
        let streams = TaskTracker::new();
        let doors = self.doors(&inputs, health_seen, &streams);
        let mut pages = JoinSet::new();
        pages.spawn(http::serve(http_listener, doors, served.clone()));
        let mut server = edl_net::tls::server(&self.config.key).map_err(Error::Tls)?;
        let service = MasterServer::new(Service::new(inputs.clone(), streams.clone()))
            .max_decoding_message_size(edl_net::MAX_MESSAGE);
        let stop_serving = served.clone();
        let mut serving = JoinSet::new();
        serving.spawn(
            server
                .add_service(service)
                .serve_with_incoming_shutdown(edl_net::tls::incoming(listener), async move {
                    stop_serving.cancelled().await
                }),
        );
        self.journal.write_address(&self.addresses, self.job.config().term);
        self.spans = self.start_spans();
        crate::evaluation::started(self.data.n_validation_records);

        let mut status_at = tokio::time::interval(STATUS_EVERY);
        let stop =
            || Event::Stop { reason: "the master was shut down".into(), with_checkpoint: false };
        while self.ended.is_none() {
            let deadline = self.origin + self.job.next_deadline(self.now()).since(Time::ZERO);
            let event = tokio::select! {
                Some(input) = queue.recv() => self.input(input),
                Some(done) = self.jobs.join_next() => done.ok(),
                () = tokio::time::sleep_until(deadline) => {
                    tracing::trace!("a deadline has passed");
                    Some(Event::Tick)
                }
                _ = status_at.tick() => {
                    self.publish(&health);
                    None
                }
                report = reports.recv() => Some(report.map_or_else(stop, Event::Platform)),
                () = shutdown.cancelled() => Some(stop()),
                Some(Ok(Err(error))) = serving.join_next() => return Err(Error::Serve(error)),
            };
            if let Some(event) = event {
                self.handle(event, &orders).await?;
            }
        }
        self.farewell(&mut queue, &orders).await;
        // Old checkpoints that are still being removed.
        let _ = tokio::time::timeout(FAREWELL, async {
            while self.jobs.join_next().await.is_some() {}
        })
        .await;
        crate::evaluation::stopped(self.data.n_validation_records);
        self.publish(&health);
        served.cancel();
        std::mem::take(&mut self.spans).close().await;
        // Those who watch shall see the end.
        let _ = tokio::time::timeout(FAREWELL, pages.join_next()).await;
        Ok(self.ended.take().expect("the loop ends with the job"))
    }

    fn doors(
        &self,
        inputs: &mpsc::Sender<Input>,
        health: watch::Receiver<&'static str>,
        streams: &TaskTracker,
    ) -> Doors {
        Doors {
            registry: self.metrics.registry(),
            health,
            news: self.news.subscribe(),
            inputs: inputs.clone(),
            key: self.config.key.clone(),
            streams: streams.clone(),
        }
    }

    fn start_spans(&self) -> Spans {
        let names = (self.run, self.job.config().term);
        let counts = self.metrics.spans.clone();
        Spans::start(&self.config.spec, names, &self.journal.history, counts)
    }

    /// Takes one input; what concerns the machine becomes an event.
    fn input(&mut self, input: Input) -> Option<Event> {
        match input {
            Input::WorkerOpened { number, worker, incarnation, pid, outbound } => {
                self.workers.insert(worker, number, incarnation, outbound);
                Some(Event::WorkerConnected { worker, incarnation, pid })
            }
            Input::WorkerSaid { number, worker, event } => {
                // Facts about batches count whoever brings them; the rest only from the living.
                let is_fact = matches!(event, Event::BatchDone { .. });
                (is_fact || self.workers.is_current(worker, number)).then_some(event)
            }
            Input::WorkerClosed { number, worker, refused } => {
                let incarnation = self.workers.closed(worker, number, refused)?;
                Some(Event::WorkerGone { worker, incarnation })
            }
            Input::PsOpened { number, ps, incarnation, event, outbound } => {
                self.servers.insert(ps, number, incarnation, outbound);
                Some(event)
            }
            Input::PsSaid { number, ps, event, load } => {
                let is_current = self.servers.is_current(ps, number);
                self.loads.extend(load.filter(|_| is_current).map(|load| (ps, load)));
                is_current.then_some(event)
            }
            Input::PsSets { ps, request, generation, sets } => {
                self.answer_audit(ps, request, generation, sets);
                None
            }
            Input::PsClosed { number, ps, refused } => {
                let incarnation = self.servers.closed(ps, number, refused)?;
                self.audits.lost(ps);
                Some(Event::PsGone { ps, incarnation })
            }
            Input::Status(reply) => {
                let _ = reply.send(self.status());
                None
            }
            Input::Everything(reply) => {
                let history = &self.journal.history;
                let _ = reply.send(page::everything(&self.status(), history, self.lives));
                None
            }
            Input::Asked { event, reply } => {
                self.asked = Some((self.job.instances().workers_wanted(), reply));
                Some(event)
            }
            Input::Audit(reply) => {
                self.begin_audit(reply);
                None
            }
        }
    }

    async fn perform(
        &mut self,
        effects: Vec<Effect>,
        orders: &mpsc::Sender<Order>,
    ) -> Result<(), Error> {
        for effect in effects {
            self.spans.effect(&effect);
            match effect {
                Effect::Persist => self.persist()?,
                Effect::ToWorker(worker, command) => self.tell_worker(worker, command),
                Effect::ToPs(ps, order) => self.tell_ps(ps, order),
                Effect::CloseWorker(worker, why) => {
                    self.workers.close(worker, Status::unavailable(why));
                }
                Effect::RefuseWorker(worker, why) => {
                    self.workers.close(worker, Status::failed_precondition(why));
                }
                Effect::ClosePs(ps) => {
                    self.servers.close(ps, Status::failed_precondition("this server was replaced"));
                }
                Effect::Platform(order) => {
                    // A platform that is gone stops the job by the end of its reports.
                    let _ = orders.send(order).await;
                }
                Effect::PrepareCut { cut, folder } => {
                    if let Some(event) = self.checkpoints.prepare(cut, &folder) {
                        self.jobs.spawn(async move { event });
                    }
                }
                Effect::Commit { cut, folder, version, generation, files } => {
                    let manifest =
                        self.checkpoints.manifest(&self.job, cut, version, generation, files);
                    let path = self.checkpoints.path(&folder);
                    self.jobs
                        .spawn_blocking(move || crate::checkpoints::commit(cut, &path, manifest));
                }
                Effect::Delete(folder) => {
                    let path = self.checkpoints.path(&folder);
                    self.jobs.spawn_blocking(move || crate::checkpoints::delete(&path));
                }
                Effect::Export { checkpoint } => {
                    let (from, to) = (self.checkpoints.path(&checkpoint), self.output());
                    self.jobs.spawn_blocking(move || crate::checkpoints::export(&from, &to));
                }
                Effect::JoinPredictions { n_shards } => {
                    let output = self.output();
                    self.jobs
                        .spawn_blocking(move || crate::checkpoints::join_parts(&output, n_shards));
                }
                Effect::EvaluationStarted { version } => crate::evaluation::begin(version),
                Effect::Evaluated(evaluated) => {
                    crate::evaluation::complete(&evaluated);
                    self.journal.evaluated(&evaluated);
                    self.metrics.evaluated(&evaluated);
                }
                Effect::Note(note) => self.journal.note(note.kind, &note.text),
                Effect::Reply(result) => {
                    // A stop by signal awaits no reply.
                    if let Some((before, reply)) = self.asked.take() {
                        let _ = reply.send(result.map(|()| before).map_err(service::to_status));
                    }
                }
                Effect::Ended(end) => {
                    self.journal.ended(&end);
                    self.ended = Some(end);
                }
            }
        }
        Ok(())
    }

    fn persist(&mut self) -> Result<(), Error> {
        let mut durable = self.job.durable().clone();
        durable.elapsed_secs = self.job.elapsed(self.now()).as_secs_f64();
        self.store.persist(&durable).map_err(Error::Persist)
    }

    async fn handle(&mut self, event: Event, orders: &mpsc::Sender<Order>) -> Result<(), Error> {
        let has_come = matches!(event, Event::WorkerConnected { .. });
        let effects = self.job.handle(event, self.now());
        self.perform(effects, orders).await?;
        if has_come {
            self.note_lives();
        }
        Ok(())
    }

    /// Takes down who is there at once: a worker may be gone before the next look.
    fn note_lives(&mut self) {
        let status = self.status();
        self.lives += u64::from(self.journal.history.live(&status, unix_secs()));
        self.spans.look(&status, &self.journal.history);
    }

    /// Writes what others may look at without asking.
    fn publish(&mut self, health: &watch::Sender<&'static str>) {
        let now = self.now();
        // Until the servers have said what they hold, nothing is known to be done.
        if self.job.is_serving() {
            self.progress.sample(now, self.job.progress().0);
        }
        let status = self.status();
        self.metrics.publish(&status);
        self.journal.publish(&status);
        self.lives += u64::from(self.journal.history.sample(&status, unix_secs()));
        self.spans.look(&status, &self.journal.history);
        let is_ended = self.job.is_ended();
        self.journal.keep_history(|| self.job.goodput().saved(now), is_ended);
        if is_ended {
            self.journal.write_report(&status);
        }
        // The server itself always listens; nothing is made for nobody else.
        if self.news.receiver_count() > 1 {
            self.news.send_replace(page::news(&status, &self.journal.history, self.lives));
        }
        health.send_replace(self.job.state());
    }

    /// Gives everybody the time to hear of the end and to hang up.
    async fn farewell(&mut self, queue: &mut mpsc::Receiver<Input>, orders: &mpsc::Sender<Order>) {
        let all_gone = async {
            while !(self.workers.is_empty() && self.servers.is_empty()) {
                let Some(input) = queue.recv().await else { return };
                if let Some(event) = self.input(input) {
                    // A machine that has ended only replies, which cannot fail.
                    let _ = self.handle(event, orders).await;
                }
            }
        };
        // Those who stay away are ended by the platform.
        let _ = tokio::time::timeout(FAREWELL, all_gone).await;
    }

    /// Where the result goes.
    pub(crate) fn output(&self) -> PathBuf {
        self.config.job_dir.output(&self.config.spec)
    }
}

/// Goes on with the books of time that the master before has kept.
fn resume_books(job: &mut Job, journal: &Journal, is_by_hand: bool) {
    let before = journal.history.goodput.clone();
    // By hand everybody is new; the time in between belongs to nobody.
    if is_by_hand {
        return job.resume_books(before.all_gone(), Duration::ZERO, Time::ZERO);
    }
    let gap = unix_secs() - journal.history.saved_at;
    let gap = Duration::try_from_secs_f64(gap).unwrap_or_default();
    job.resume_books(before, gap, Time::ZERO);
}

#[cfg(test)]
mod tests;
