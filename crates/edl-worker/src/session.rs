// SPDX-License-Identifier: Apache-2.0
//! The stream to the master: who we are, what we are lent, what is done, that we are alive.
//!
//! A broken stream stops nothing: the compute thread goes on with what it holds, its reports
//! wait here, and the session connects again. Nothing about work is decided in this file.

mod address;
mod start;

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use edl_core::id::{Incarnation, LeaseId, WorldId};
use edl_net::proto::{
    self, master_client::MasterClient, worker_command::Kind as Command, worker_message::Kind,
};
use edl_net::tls;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};
use tracing::{debug, info, warn};

use crate::Config;
use crate::allreduce;
use crate::compute::{Event, Loan};
use crate::progress::Progress;

pub(crate) use start::{Edges, Limits};
use start::{Ended, Job, Shared};

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// From the opened stream to the welcome.
const WELCOME_LIMIT: Duration = Duration::from_secs(10);
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);
const FIRST_HEARTBEAT: Duration = Duration::from_secs(1);
/// Reports of the compute thread that may wait for a master.
const MAX_REPORTS: usize = 4096;
/// Messages that may be on their way into the stream; they are lost if it breaks.
const MAX_SENDING: usize = 16;

/// Why a worker ended without being told to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("could not reach the master for {} s: {reason}", limit.as_secs())]
    MasterLost { limit: Duration, reason: String },
    #[error("the master refused this worker: {0}")]
    Refused(String),
    #[error("the master at `{0}` uses another job's key; check --master_addr and the job's key")]
    OtherKey(String),
    #[error("the master sent {0}")]
    Protocol(String),
    #[error("the master's address belongs to another job: run {theirs} instead of {ours}")]
    OtherRun { ours: String, theirs: String },
    #[error("cannot build the model: {0}")]
    Model(String),
    #[error("{0}")]
    Died(String),
}

/// How one stream ended.
enum End {
    /// The worker is done.
    Over(Result<(), Error>),
    Broken(String),
}

/// A worker's session, across all its streams.
pub(crate) struct Session {
    config: Config,
    /// Taken when the first welcome says which job this is.
    edges: Option<Edges>,
    limits: Limits,
    shutdown: CancellationToken,
    incarnation: Incarnation,
    job: Option<Job>,
    /// The announcement of the model, once it is built.
    model_spec: Option<String>,
    events: Sender<Event>,
    /// Where the compute thread will hear, until there is one.
    start: Option<start::Ends>,
    reports: mpsc::Receiver<Kind>,
    ended: oneshot::Receiver<Ended>,
    shared: Shared,
    outbox: VecDeque<Kind>,
    leaving: Option<Instant>,
}

/// One stream.
struct Stream {
    commands: Streaming<proto::WorkerCommand>,
    messages: mpsc::Sender<proto::WorkerMessage>,
    is_welcome: bool,
}

impl Session {
    pub(crate) fn new(config: Config, edges: Edges, shutdown: CancellationToken) -> Self {
        let (events, heard) = std::sync::mpsc::channel();
        let (report, reports) = mpsc::channel(MAX_REPORTS);
        let (end, ended) = oneshot::channel();
        Self {
            config,
            limits: edges.limits,
            edges: Some(edges),
            shutdown,
            incarnation: start::incarnation(),
            job: None,
            model_spec: None,
            start: Some(start::Ends { heard, report, end }),
            events,
            reports,
            ended,
            shared: Shared {
                work: Arc::default(),
                progress: Arc::new(Progress::new()),
                seat: Arc::default(),
            },
            outbox: VecDeque::new(),
            leaving: None,
        }
    }

    /// One stream after another, until the worker is done or the master is given up.
    pub(crate) async fn run(mut self) -> Result<(), Error> {
        let (mut seen, mut retry, mut attempt) = (Instant::now(), FIRST_RETRY, 0);
        loop {
            let reason = match self.open(attempt).await {
                Ok(mut stream) => match self.serve(&mut stream).await {
                    End::Over(result) => return self.close(stream, result).await,
                    End::Broken(reason) if stream.is_welcome => {
                        warn!(reason, "lost the connection to the master");
                        self.hurry();
                        (seen, retry) = (Instant::now(), FIRST_RETRY);
                        reason
                    }
                    End::Broken(reason) => reason,
                },
                Err(End::Over(result)) => return result,
                Err(End::Broken(reason)) => reason,
            };
            self.config.place.master_answers(false);
            let limit = self.limits.master;
            if seen.elapsed() >= limit {
                return Err(Error::MasterLost { limit, reason });
            }
            // Loud once, for whoever started this worker by hand.
            if attempt == 0 && self.job.is_none() {
                warn!(reason, "cannot reach the master; retrying");
            }
            debug!(attempt, reason, "cannot reach the master");
            attempt += 1;
            if let Err(result) = self.unless_over(sleep(retry)).await {
                return result;
            }
            retry = (retry * 2).min(LAST_RETRY);
        }
    }

    /// Waits for `future` while there is no stream; an end of the worker comes first.
    async fn unless_over<F: Future>(&mut self, future: F) -> Result<F::Output, Result<(), Error>> {
        let mut future = pin!(future);
        loop {
            let leaving = self.leaving;
            tokio::select! {
                biased;
                ended = &mut self.ended => return Err(start::result(ended)),
                () = self.shutdown.cancelled(), if leaving.is_none() => self.leave(),
                () = until(leaving), if leaving.is_some() => return Err(Ok(())),
                Some(report) = self.reports.recv(), if self.outbox.len() < MAX_REPORTS => {
                    self.keep(report);
                }
                output = &mut future => return Ok(output),
            }
        }
    }

    async fn open(&mut self, attempt: usize) -> Result<Stream, End> {
        let address = address::choose(&self.config, attempt);
        let key = self.config.key.clone();
        let hello = proto::WorkerHello {
            protocol: edl_net::CONTROL_PROTOCOL,
            worker: self.config.worker.0,
            incarnation: self.incarnation.0,
            pid: self.config.place.pid,
        };
        // Later on it may be a stranger who was given the port of a master that is restarted.
        let is_first = self.job.is_none();
        let connect = async move {
            let channel = tls::connect(&address, &key, CONNECT_LIMIT).await;
            let channel = channel.map_err(|error| match error {
                error if is_first && error.is_untrusted() => {
                    End::Over(Err(Error::OtherKey(address)))
                }
                error => End::Broken(crate::chain(&error)),
            })?;
            let (messages, outgoing) = mpsc::channel(MAX_SENDING);
            messages.try_send(message(Kind::Hello(hello))).expect("the channel is new");
            let mut client =
                MasterClient::new(channel).max_decoding_message_size(edl_net::MAX_MESSAGE);
            let opened = client.worker_session(ReceiverStream::new(outgoing)).await;
            let commands = opened.map_err(|status| refused_or_broken(&status))?.into_inner();
            Ok(Stream { commands, messages, is_welcome: false })
        };
        match self.unless_over(timeout(WELCOME_LIMIT, connect)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(_)) => Err(End::Broken("the master did not open a stream in time".into())),
            Err(result) => Err(End::Over(result)),
        }
    }

    /// Serves one stream until it breaks or the worker is done.
    async fn serve(&mut self, stream: &mut Stream) -> End {
        let mut heartbeat = interval(self.heartbeat());
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let welcome_limit = Instant::now() + WELCOME_LIMIT;
        loop {
            let leaving = self.leaving;
            tokio::select! {
                biased;
                ended = &mut self.ended => {
                    self.drain();
                    return End::Over(start::result(ended));
                }
                () = self.shutdown.cancelled(), if leaving.is_none() => self.leave(),
                () = until(leaving), if leaving.is_some() => return End::Over(Ok(())),
                () = sleep_until(welcome_limit), if !stream.is_welcome => {
                    return End::Broken("the master did not send a welcome in time".into());
                }
                command = stream.commands.message() => match command {
                    Ok(Some(proto::WorkerCommand { kind: Some(Command::Welcome(welcome)) })) => {
                        match self.welcome(welcome) {
                            Ok(()) => {
                                stream.is_welcome = true;
                                self.config.place.master_answers(true);
                            }
                            Err(error) => return End::Over(Err(error)),
                        }
                        heartbeat = interval(self.heartbeat());
                        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
                    }
                    Ok(Some(command)) => self.obey(command),
                    Ok(None) => return End::Broken("the master closed the stream".into()),
                    Err(status) => return refused_or_broken(&status),
                },
                Some(report) = self.reports.recv(), if self.outbox.len() < MAX_REPORTS => {
                    self.keep(report);
                }
                permit = stream.messages.reserve(), if stream.is_welcome && !self.outbox.is_empty() => {
                    let Ok(permit) = permit else {
                        return End::Broken("the stream is closed".into());
                    };
                    if let Some(kind) = self.outbox.pop_front() {
                        permit.send(message(kind));
                    }
                }
                _ = heartbeat.tick(), if stream.is_welcome => self.beat(stream),
            }
        }
    }
}

impl Session {
    fn heartbeat(&self) -> Duration {
        self.job.as_ref().map_or(FIRST_HEARTBEAT, |job| job.heartbeat)
    }

    /// A heartbeat tells what is, so one that finds no room is not sent later.
    fn beat(&self, stream: &Stream) {
        let state = self.shared.progress.state();
        // A loop that calls itself busy may be in a call that waits for other workers.
        let waiting_for = match state.waiting_for.is_empty() {
            true => self.shared.seat.waiting_for(),
            false => state.waiting_for.into(),
        };
        let _ = stream.messages.try_send(message(Kind::Heartbeat(proto::Heartbeat {
            step: state.step,
            phase: state.phase.into(),
            waiting_for,
        })));
        let _ = stream.messages.try_send(message(self.spending()));
    }

    fn spending(&self) -> Kind {
        let (spent, last) = self.shared.progress.spending.read();
        // Without lanes a step is this process's own count, which is no step of the job.
        let step = if self.is_member() { self.shared.progress.state().step } else { 0 };
        Kind::Spending(proto::Spending {
            spent: Some(spent.into()),
            last: last.name().into(),
            step,
            load: None,
        })
    }

    /// The first welcome starts the worker; a later one must be of the same job.
    fn welcome(&mut self, welcome: proto::WorkerWelcome) -> Result<(), Error> {
        let term = welcome.term;
        let job = Job::parse(welcome)?;
        match &self.job {
            Some(before) if before.run != job.run => {
                return Err(Error::OtherRun {
                    ours: before.run.to_string(),
                    theirs: job.run.to_string(),
                });
            }
            Some(_) => self.tell(Event::Rejoined),
            None => {}
        }
        info!(term, run = %job.run, worker = %self.config.worker, "connected to the master");
        if let (Some(edges), Some(ends)) = (self.edges.take(), self.start.take()) {
            let (events, shared) = (self.events.clone(), self.shared.clone());
            let identity = (&self.config, self.incarnation);
            start::threads(edges, ends, events, &job, identity, shared)?;
        }
        self.job = Some(job);
        // Announced anew on every stream: first of all, so that late reports find their leases.
        if self.model_spec.is_some() {
            self.outbox.retain(|kind| !matches!(kind, Kind::Ready(_)));
            self.outbox.push_front(self.ready());
        }
        if self.leaving.is_some() && self.is_member() {
            self.outbox.push_back(leaving());
        }
        Ok(())
    }

    fn ready(&self) -> Kind {
        let work = self.shared.work.lock();
        let held = work.expect("the lock on the work is poisoned").announce();
        let held = held.into_iter().map(|held| proto::HeldLease {
            lease: held.lease.0,
            epoch: held.epoch,
            indices: held.indices,
        });
        Kind::Ready(proto::Ready {
            model_spec_json: self.model_spec.clone().unwrap_or_default(),
            capacity: self.job.as_ref().map_or(1, Job::capacity),
            held: held.collect(),
            peer: self.shared.seat.peer(),
        })
    }

    /// Passes a command on to the compute thread.
    fn obey(&mut self, command: proto::WorkerCommand) {
        match command.kind {
            Some(Command::Route(route)) => self.tell(Event::Route(route.into())),
            Some(Command::Lease(lease)) => {
                let id = LeaseId(lease.lease);
                match lease.work {
                    Some(work) => self.tell(Event::Lease(id, loan(work))),
                    None => warn!(lease = %id, "the master sent an unknown kind of work"),
                }
            }
            Some(Command::Revoke(revoke)) => self.tell(Event::Revoke(LeaseId(revoke.lease))),
            Some(Command::Stop(stop)) => {
                info!(reason = stop.reason, "stopped by the master");
                self.tell(Event::Stop);
                self.shared.seat.close();
                self.leaving = Some(Instant::now() + self.limits.finish);
            }
            Some(Command::World(world)) => {
                let world = allreduce::World::from(world);
                let is_due = world.is_due_at_once(self.config.worker, self.incarnation);
                let id = world.id;
                self.tell_member(allreduce::Event::World(world));
                if is_due {
                    self.shared.seat.abort(id);
                }
            }
            Some(Command::Go(proto::Go { world, until })) => {
                self.tell_member(allreduce::Event::Go { world: WorldId(world), until });
            }
            Some(Command::Cut(cut)) => self.tell_member(allreduce::Event::Cut(cut)),
            Some(Command::Welcome(_)) | None => {
                warn!("the master sent an unknown command");
            }
        }
    }

    fn tell(&self, event: Event) {
        // A compute thread that is gone has said so by its end.
        let _ = self.events.send(event);
    }

    /// Whether other workers train together with this one.
    fn is_member(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.spec.is_allreduce())
    }

    fn tell_member(&self, event: allreduce::Event) {
        self.tell(Event::AllReduce(Box::new(event)));
    }

    fn leave(&mut self) {
        info!("leaving");
        self.tell(Event::Leave);
        let has_lanes = self.shared.seat.peer().is_some_and(|peer| peer.world != 0);
        let limit = if has_lanes { self.limits.hand_over } else { self.limits.finish };
        self.leaving = Some(Instant::now() + limit);
        if self.is_member() {
            // Others take over its lanes when the master has named a world without it.
            self.outbox.push_back(leaving());
        }
        if self.start.is_some() {
            // There is no compute thread yet that could finish anything.
            self.leaving = Some(Instant::now());
        }
    }

    /// A worker that leaves waits for the master's word; without a master it does not wait long.
    fn hurry(&mut self) {
        if let Some(limit) = &mut self.leaving {
            *limit = (*limit).min(Instant::now() + self.limits.finish);
        }
    }

    /// Keeps a report until a stream takes it.
    fn keep(&mut self, report: Kind) {
        if let Kind::Ready(ready) = report {
            self.model_spec = Some(ready.model_spec_json);
            self.outbox.push_front(self.ready());
            return;
        }
        // Of steps that nobody has heard of yet only the last one matters.
        if let (Kind::Stepped(_), Some(Kind::Stepped(_))) = (&report, self.outbox.back()) {
            self.outbox.pop_back();
        }
        self.outbox.push_back(report);
    }

    fn drain(&mut self) {
        while let Ok(report) = self.reports.try_recv() {
            self.keep(report);
        }
    }

    /// Says the last words on a stream that still stands.
    async fn close(mut self, stream: Stream, result: Result<(), Error>) -> Result<(), Error> {
        let Stream { mut commands, messages, is_welcome } = stream;
        if !is_welcome || (result.is_err() && self.outbox.is_empty()) {
            return result;
        }
        if self.shutdown.is_cancelled() && !self.is_member() {
            self.outbox.push_back(leaving());
        }
        let last_words = self.spending();
        self.outbox.push_back(last_words);
        let flush = async {
            for kind in self.outbox.drain(..) {
                if messages.send(message(kind)).await.is_err() {
                    return;
                }
            }
            // The master closes its half when it has read ours to the end.
            drop(messages);
            while let Ok(Some(_)) = commands.message().await {}
        };
        if timeout(self.limits.flush, flush).await.is_err() {
            debug!("the master did not read the last messages in time");
        }
        result
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // However the session ends, nobody is left to compute for.
        self.tell(Event::Stop);
        self.shared.seat.close();
    }
}

fn leaving() -> Kind {
    Kind::Leaving(proto::Leaving { reason: "asked to exit".into() })
}

fn message(kind: Kind) -> proto::WorkerMessage {
    proto::WorkerMessage { kind: Some(kind) }
}

fn loan(work: proto::lease::Work) -> Loan {
    match work {
        proto::lease::Work::Train(proto::TrainWork { epoch, first, count }) => {
            Loan::Train { epoch, indices: first..first.saturating_add(count) }
        }
        proto::lease::Work::Eval(work) => Loan::Evaluate(work),
        proto::lease::Work::Predict(work) => Loan::Predict(work),
    }
}

/// A refusal is final; everything else may be mended by another try.
fn refused_or_broken(status: &Status) -> End {
    let is_final = matches!(
        status.code(),
        Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
    );
    if is_final {
        End::Over(Err(Error::Refused(status.message().to_owned())))
    } else {
        End::Broken(format!("{}: {}", status.code(), status.message()))
    }
}

async fn until(limit: Option<Instant>) {
    match limit {
        Some(limit) => sleep_until(limit).await,
        None => std::future::pending().await,
    }
}
