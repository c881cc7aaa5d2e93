// SPDX-License-Identifier: Apache-2.0
//! The loop around the machine: inputs one by one, effects in order.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use edl_core::evaluation::Evaluated;
use edl_core::id::{PsId, WorkerId};
use edl_core::job::{self, Durable, Effect, End, Event, Job, JobState, STOP_TIMEOUT};
use edl_core::platform::Order;
use edl_core::server;
use edl_core::time::Time;
use edl_core::worker::Report;
use edl_net::convert::worlds::SentWorlds;
use edl_net::proto::master_server::MasterServer;
use edl_net::proto::{self, PsCommand, WorkerCommand};
use edl_page::http::Hosts;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use crate::about::About;
use crate::audit::Audits;
use crate::checkpoints::{Checkpoints, or_failed};
use crate::data::Data;
use crate::http::HttpContext;
use crate::journal::{Journal, unix_secs};
use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::saving;
use crate::service::{self, Input, Inputs, Reply, Service};
use crate::spans::Spans;
use crate::status::Progress;
use crate::store::Store;
use crate::{Addresses, Config, Error, Port, http, page, usage};

/// Inputs waiting for the machine; more of them make their senders wait.
pub(crate) const INPUTS: usize = 1024;
const STATUS_EVERY: Duration = Duration::from_millis(500);
/// When many workers connect, their processes are not recorded more often than this.
const RECORD_PAUSE: Duration = Duration::from_millis(50);
/// How long the other processes may take to disconnect at the end.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(700);

/// A master at work.
pub(crate) struct Engine {
    pub(crate) config: Config,
    pub(crate) data: Data,
    pub(crate) addresses: Addresses,
    pub(crate) job: Job,
    pub(crate) journal: Journal,
    pub(crate) metrics: Metrics,
    pub(crate) progress: Progress,
    pub(crate) workers: Peers<WorkerId, WorkerCommand>,
    pub(crate) servers: Peers<PsId, PsCommand>,
    pub(crate) sent_worlds: SentWorlds,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) audits: Audits,
    /// The load of each server, as it reported last.
    pub(crate) loads: BTreeMap<PsId, proto::PsLoad>,
    updates: watch::Sender<Arc<str>>,
    /// Grows whenever a process came, went or changed.
    n_process_changes: u64,
    /// When the processes were last recorded, and whether a worker has connected since.
    recorded_at: Time,
    has_unrecorded: bool,
    pub(crate) store: Store,
    origin: Instant,
    spans: Spans,
    /// Work on files that must not hold up the loop; each answers with an event.
    pub(crate) jobs: JoinSet<Event>,
    /// What was read and written for the result by now, and when that was last reported.
    pub(crate) exported_bytes: (Arc<AtomicU64>, u64),
    /// The request being handled: the number of workers before it, and where its reply goes.
    pending_reply: Option<(u32, Reply)>,
    ended: Option<End>,
    /// What the loop takes next; `early` came while the state could not be saved.
    pub(crate) queue: mpsc::Receiver<Input>,
    inputs: Inputs,
    pub(crate) early: VecDeque<Input>,
    /// Why the state cannot be saved at present.
    pub(crate) unsaved: Option<String>,
    pub(crate) shutdown: CancellationToken,
}

impl Engine {
    #[expect(clippy::too_many_arguments, reason = "the parts of a master, put together once")]
    pub(crate) fn new(
        config: Config,
        job_config: job::Config,
        durable: Durable,
        data: Data,
        store: Store,
        addresses: Addresses,
        origin: Instant,
        shutdown: CancellationToken,
    ) -> Self {
        let (inputs, queue) = mpsc::channel(INPUTS);
        let checkpoints = Checkpoints::new(&config, &job_config, &data);
        checkpoints.sweep();
        let mut journal =
            Journal::open(&config.job_dir, &config.spec.tensorboard_dir, config.resume);
        journal.history.about = About::new(&config.job_dir, &config.spec, &data, config.build);
        if config.resume {
            // The script may evaluate in another way now. Workers recreate the folder.
            let _ = std::fs::remove_dir_all(config.job_dir.evaluations());
        }
        let mut job = Job::new(job_config, durable, Time::ZERO);
        resume_accounting(&mut job, &journal, config.resume);
        Self {
            data,
            addresses,
            journal,
            metrics: Metrics::new(),
            progress: Progress::default(),
            workers: Peers::new(),
            servers: Peers::new(),
            sent_worlds: SentWorlds::default(),
            checkpoints,
            audits: Audits::default(),
            loads: BTreeMap::new(),
            updates: watch::Sender::new("".into()),
            n_process_changes: 0,
            recorded_at: Time::ZERO,
            has_unrecorded: false,
            spans: Spans::default(),
            store,
            origin,
            jobs: JoinSet::new(),
            exported_bytes: Default::default(),
            pending_reply: None,
            ended: None,
            queue,
            inputs: Inputs(inputs),
            early: VecDeque::new(),
            unsaved: None,
            shutdown,
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
    ) -> Result<End, Error> {
        let inputs = self.inputs.clone();
        let (health, health_seen) = watch::channel(JobState::Starting);
        let served = CancellationToken::new();
        let streams = TaskTracker::new();
        let http_context = self.http_context(&inputs, health_seen, &streams);
        let mut pages = JoinSet::new();
        let hosts = self.config.http_hosts.iter().chain(&self.config.spec.http_hosts.0);
        let hosts = Hosts::new(hosts.cloned());
        pages.spawn(http::serve(http_listener, http_context, hosts, served.clone()));
        let incoming = edl_net::tls::incoming(listener, &self.config.key).map_err(Error::Tls)?;
        let service = MasterServer::new(Service::new(inputs.clone(), streams.clone()))
            .max_decoding_message_size(edl_net::MAX_MESSAGE);
        let stop_serving = served.clone();
        let mut serving = JoinSet::new();
        serving.spawn(
            edl_net::tls::server().add_service(service).serve_with_incoming_shutdown(
                incoming,
                async move { stop_serving.cancelled().await },
            ),
        );
        self.journal.write_address(&self.addresses, self.job.config());
        self.spans = self.start_spans();
        crate::evaluation::started(self.data.n_validation_records);

        let mut status_at = tokio::time::interval(STATUS_EVERY);
        let mut is_shut_down = false;
        while self.ended.is_none() {
            let deadline = self.origin + self.job.next_deadline(self.now()).since(Time::ZERO);
            let event = tokio::select! {
                Some(input) = saving::next(&mut self.early, &mut self.queue) => self.input(input),
                Some(done) = self.jobs.join_next() => done.ok(),
                () = tokio::time::sleep_until(deadline) => {
                    tracing::trace!("a deadline has passed");
                    Some(Event::Tick)
                }
                _ = status_at.tick() => {
                    self.publish(&health);
                    self.export_progressed()
                }
                report = reports.recv() => {
                    Some(report.map_or_else(|| stop(Duration::ZERO), Event::Platform))
                }
                () = self.shutdown.cancelled(), if !is_shut_down => {
                    is_shut_down = true;
                    Some(stop(STOP_TIMEOUT))
                }
                Some(Ok(Err(error))) = serving.join_next() => return Err(Error::Serve(error)),
            };
            if let Some(event) = event {
                self.handle(event, &orders).await?;
            }
        }
        self.disconnect_all(&orders).await;
        self.checkpoints.sweep();
        // Old checkpoints that are still being removed.
        let _ = tokio::time::timeout(SHUTDOWN_GRACE, async {
            while self.jobs.join_next().await.is_some() {}
        })
        .await;
        crate::evaluation::stopped(self.data.n_validation_records);
        self.publish(&health);
        served.cancel();
        std::mem::take(&mut self.spans).close().await;
        // Watchers of the page see the end.
        let _ = tokio::time::timeout(SHUTDOWN_GRACE, pages.join_next()).await;
        Ok(self.ended.take().expect("the loop ends with the job"))
    }

    /// Whether more of the result has been written since the last call.
    fn export_progressed(&mut self) -> Option<Event> {
        let (n_bytes, before) = &mut self.exported_bytes;
        let n_bytes = n_bytes.load(Relaxed);
        (std::mem::replace(before, n_bytes) != n_bytes).then_some(Event::ExportProgressed)
    }

    fn http_context(
        &self,
        inputs: &Inputs,
        health: watch::Receiver<JobState>,
        streams: &TaskTracker,
    ) -> HttpContext {
        HttpContext {
            registry: self.metrics.registry(),
            health,
            updates: self.updates.subscribe(),
            inputs: inputs.clone(),
            key: self.config.key.clone(),
            job_dir: self.config.job_dir.clone(),
            streams: streams.clone(),
        }
    }

    fn start_spans(&self) -> Spans {
        let names = (self.job.config().run, self.job.config().term);
        let counts = self.metrics.spans.clone();
        Spans::start(&self.config.spec, names, &self.journal.history, counts)
    }

    /// Takes one input; what concerns the machine becomes an event.
    pub(crate) fn input(&mut self, input: Input) -> Option<Event> {
        match input {
            Input::WorkerOpened { number, worker, incarnation, pid, outbound } => {
                self.workers.insert(worker, number, incarnation, outbound);
                Some(Event::WorkerConnected { worker, incarnation, pid })
            }
            Input::WorkerMessage { number, worker, incarnation, report } => {
                // A report about a batch counts from any stream; the rest only from the current one.
                let is_fact = matches!(report, Report::BatchDone { .. });
                (is_fact || self.workers.is_current(worker, number)).then_some(Event::FromWorker {
                    worker,
                    incarnation,
                    report,
                })
            }
            Input::WorkerClosed { number, worker, refused } => {
                let incarnation = self.workers.closed(worker, number, refused)?;
                Some(Event::WorkerGone { worker, incarnation })
            }
            Input::PsOpened { incarnation, outbound, .. }
                if self.job.is_replaced_server(incarnation) =>
            {
                // The queue of a new stream is empty, so there is room for the status.
                let _ = outbound.try_send(Err(service::server_replaced()));
                None
            }
            Input::PsOpened { number, ps, incarnation, event, outbound } => {
                self.servers.insert(ps, number, incarnation, outbound);
                Some(event)
            }
            Input::PsMessage {
                ps,
                report: server::Report::States { request, generation, states },
                ..
            } => {
                self.answer_audit(ps, request, generation, states);
                None
            }
            Input::PsMessage { number, ps, incarnation, report, load } => {
                let is_current = self.servers.is_current(ps, number);
                self.loads.extend(load.filter(|_| is_current).map(|load| (ps, load)));
                is_current.then_some(Event::FromPs { ps, incarnation, report })
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
                let _ =
                    reply.send(page::everything(&self.status(), history, self.n_process_changes));
                None
            }
            Input::Request { event, reply } => {
                self.pending_reply = Some((self.job.instances().workers_wanted(), reply));
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
                Effect::Persist(facts) => self.persist(facts).await?,
                Effect::ToWorker(worker, command) => self.send_to_worker(worker, command),
                Effect::ToPs(ps, order) => self.send_to_ps(ps, order),
                Effect::CloseWorker(worker, why) => {
                    self.workers.close(worker, Status::unavailable(why));
                }
                Effect::RefuseWorker(worker, why) => {
                    self.workers.close(worker, Status::failed_precondition(why));
                }
                Effect::ClosePs(ps) => {
                    self.servers.close(ps, service::server_replaced());
                }
                Effect::Platform(order) => {
                    // A platform that is gone stops the job by the end of its reports.
                    let _ = orders.send(order).await;
                }
                Effect::PrepareCheckpoint { checkpoint, folder } => {
                    if let Some(event) = self.checkpoints.prepare(checkpoint, &folder) {
                        self.jobs.spawn(async move { event });
                    }
                }
                Effect::Commit { checkpoint, folder, version, exact, generation, files } => {
                    let at = (version, exact);
                    let manifest =
                        self.checkpoints.manifest(&self.job, checkpoint, at, generation, files);
                    let (run, path) = (self.job.config().run, self.checkpoints.path(&folder));
                    let commit =
                        move || crate::checkpoints::commit(checkpoint, run, &path, manifest);
                    let failed = move |error| Event::CheckpointFailed { checkpoint, error };
                    self.jobs.spawn_blocking(move || or_failed(commit, failed));
                }
                Effect::Delete(folder) => {
                    let path = self.checkpoints.path(&folder);
                    self.jobs.spawn_blocking(move || crate::checkpoints::delete(&path));
                }
                Effect::Export { checkpoint } => {
                    let (from, to) = (self.checkpoints.path(&checkpoint), self.output());
                    let n_bytes = Arc::clone(&self.exported_bytes.0);
                    let export = move || crate::checkpoints::export(&from, &to, &n_bytes);
                    self.jobs.spawn_blocking(|| or_failed(export, export_failed));
                }
                Effect::JoinPredictions { n_shards } => {
                    let output = self.output();
                    let n_bytes = Arc::clone(&self.exported_bytes.0);
                    let join = move || crate::checkpoints::join_parts(&output, n_shards, &n_bytes);
                    self.jobs.spawn_blocking(|| or_failed(join, export_failed));
                }
                Effect::EvaluationStarted { version } => crate::evaluation::begin(version),
                Effect::Evaluated(evaluated) => self.evaluated(&evaluated),
                Effect::Note(note) => self.journal.note(note.kind, &note.text),
                Effect::Reply(result) => {
                    // A stop by signal awaits no reply.
                    if let Some((before, reply)) = self.pending_reply.take() {
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

    fn evaluated(&mut self, evaluated: &Evaluated) {
        crate::evaluation::complete(evaluated);
        self.journal.evaluated(evaluated);
        self.metrics.evaluated(evaluated);
    }

    async fn handle(&mut self, event: Event, orders: &mpsc::Sender<Order>) -> Result<(), Error> {
        // A worker may be gone before the next sample.
        if self.has_unrecorded && matches!(event, Event::WorkerGone { .. } | Event::Platform(_)) {
            self.record_processes();
        }
        self.has_unrecorded |= matches!(event, Event::WorkerConnected { .. });
        let effects = self.job.handle(event, self.now());
        if cfg!(debug_assertions) {
            self.job.check_invariants();
        }
        self.perform(effects, orders).await?;
        if self.has_unrecorded && self.now().since(self.recorded_at) >= RECORD_PAUSE {
            self.record_processes();
        }
        Ok(())
    }

    fn record_processes(&mut self) {
        let status = self.status();
        self.n_process_changes +=
            u64::from(self.journal.history.record_processes(&status, unix_secs()));
        self.spans.poll(&status, &self.journal.history);
        (self.recorded_at, self.has_unrecorded) = (self.now(), false);
    }

    /// Publishes the status to files, metrics and the page.
    fn publish(&mut self, health: &watch::Sender<JobState>) {
        let now = self.now();
        // Until the servers have reported what they hold, no progress is known.
        if self.job.is_serving() {
            self.progress.sample(now, self.job.progress().0);
        }
        self.journal.take_logged();
        let status = self.status();
        self.metrics.publish(&status);
        self.journal.publish(&status);
        self.n_process_changes += u64::from(self.journal.sample(&status));
        (self.recorded_at, self.has_unrecorded) = (now, false);
        self.spans.poll(&status, &self.journal.history);
        let is_ended = self.job.is_ended();
        self.journal.keep_history(|| self.job.goodput().saved(now), is_ended);
        if is_ended {
            self.journal.write_report(&status);
        }
        // The HTTP server itself always subscribes.
        if self.updates.receiver_count() > 1 {
            // On Kubernetes, the processes are on other machines.
            let is_local = self.config.ip.is_none();
            let usage = if is_local { usage::of_job(&status) } else { BTreeMap::new() };
            let history = &self.journal.history;
            let update = page::update(&status, history, &usage, self.n_process_changes);
            self.updates.send_replace(update);
        }
        health.send_replace(self.job.state());
    }

    /// Gives all processes time to learn of the end and disconnect.
    async fn disconnect_all(&mut self, orders: &mpsc::Sender<Order>) {
        let all_gone = async {
            while !(self.workers.is_empty() && self.servers.is_empty()) {
                let Some(input) = self.queue.recv().await else { return };
                if let Some(event) = self.input(input) {
                    // A machine that has ended only replies, which cannot fail.
                    let _ = self.handle(event, orders).await;
                }
            }
        };
        // The platform stops those that stay.
        let _ = tokio::time::timeout(SHUTDOWN_GRACE, all_gone).await;
    }

    /// Where the result goes.
    pub(crate) fn output(&self) -> PathBuf {
        self.config.job_dir.output(&self.config.spec)
    }
}

/// Continues the time accounting of the master before.
fn resume_accounting(job: &mut Job, journal: &Journal, is_manual: bool) {
    let before = journal.history.goodput.clone();
    // After a manual resume all processes are new; the time in between is not counted.
    if is_manual {
        return job.resume_accounting(before.all_gone(), Duration::ZERO, Time::ZERO);
    }
    let gap = unix_secs() - journal.history.saved_at;
    let gap = Duration::try_from_secs_f64(gap).unwrap_or_default();
    job.resume_accounting(before, gap, Time::ZERO);
}

fn stop(within: Duration) -> Event {
    Event::Stop { reason: "the master was shut down".into(), within }
}

fn export_failed(error: String) -> Event {
    Event::ExportFailed { error, is_disk_full: false }
}

#[cfg(test)]
mod tests;
