// SPDX-License-Identifier: Apache-2.0
//! The worker's side of the control session: starts the worker, passes commands to its machine or
//! to the loop of AllReduce, and sends reports and heartbeats.
//!
//! When the session breaks, the worker continues with the work it has, and its reports wait here.

mod start;

use std::future::ready;
use std::sync::Arc;

use edl_core::goodput::Told;
use edl_core::id::{Incarnation, LeaseId, WorldId};
use edl_core::worker::{self, Priority, Report};
use edl_net::proto::{self, worker_command::Kind as Command, worker_message::Kind};
use edl_net::{control, convert};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::Config;
use crate::allreduce;
use crate::compute::{Event, Loan};
use crate::driver::Output;
use crate::feed::Counts;
use crate::progress::Progress;

use start::{Commands, Ended, Ends, Shared};
pub(crate) use start::{Edges, Limits};

/// Reports of a member that may wait for a master.
const MAX_REPORTS: usize = 4096;

/// Why a worker ended without being told to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Control(#[from] control::Error),
    #[error("cannot build the model: {0}")]
    Model(String),
    #[error("{0}")]
    Died(String),
}

/// A worker's session, across all its streams.
pub(crate) struct Session {
    config: Config,
    limits: Limits,
    shutdown: CancellationToken,
    incarnation: Incarnation,
    control: control::Session<proto::WorkerCommand>,
    /// What the worker needs, until the first welcome starts it.
    start: Option<(Edges, Ends)>,
    commands: Option<Commands>,
    outputs: UnboundedReceiver<Output>,
    /// Of a member.
    reports: mpsc::Receiver<Kind>,
    ended: oneshot::Receiver<Ended>,
    shared: Shared,
    /// A member's announcement of its model, once it is built.
    model_spec: Option<String>,
    /// When a member that was asked to exit is given up.
    leaving: Option<Instant>,
    /// How the worker ended.
    over: Option<Ended>,
}

impl Session {
    pub(crate) fn new(config: Config, edges: Edges, shutdown: CancellationToken) -> Self {
        let (output, outputs) = mpsc::unbounded_channel();
        let (report, reports) = mpsc::channel(MAX_REPORTS);
        let (end, ended) = oneshot::channel();
        let incarnation = start::incarnation();
        let hello = convert::worker::hello(config.worker, incarnation, config.place.pid);
        let master = control::Config {
            master_addr: config.master_addr.clone(),
            key: config.key.clone(),
            job_dir: config.job_dir.clone(),
            place: config.place.clone(),
            patience: Some(edges.limits.master),
        };
        Self {
            control: control::Session::new(master, move || Box::pin(ready(hello.clone()))),
            config,
            limits: edges.limits,
            shutdown,
            incarnation,
            start: Some((edges, Ends { outputs: output, reports: report, end })),
            commands: None,
            outputs,
            reports,
            ended,
            shared: Shared { progress: Arc::new(Progress::new()), seat: Arc::default() },
            model_spec: None,
            leaving: None,
            over: None,
        }
    }

    /// Works until the worker is done or the master is given up.
    pub(crate) async fn run(mut self) -> Result<(), Error> {
        let mut is_leaving = false;
        let result = loop {
            if let Some(result) = self.over.take() {
                break result;
            }
            let deadline = self.deadline();
            tokio::select! {
                biased;
                ended = &mut self.ended => break start::result(ended),
                () = self.shutdown.cancelled(), if !is_leaving => {
                    is_leaving = true;
                    self.leave();
                }
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    match &self.commands {
                        Some(Commands::Servers(driver)) => driver.tell(worker::Event::Tick),
                        Some(Commands::Member(_)) | None => break Ok(()),
                    }
                }
                Some(output) = self.outputs.recv() => self.take(output),
                event = self.control.event() => match event? {
                    control::Event::Command(command) => self.obey(command)?,
                    control::Event::Heartbeat => self.beat(),
                    control::Event::Lost => self.hurry(),
                },
                Some(report) = self.reports.recv(), if self.control.outbox.len() < MAX_REPORTS => {
                    self.keep(report);
                }
            }
        };
        self.close(result).await
    }

    fn deadline(&self) -> Option<Instant> {
        match &self.commands {
            Some(Commands::Servers(driver)) => driver.next_deadline().map(Instant::from_std),
            Some(Commands::Member(_)) | None => self.leaving,
        }
    }

    fn beat(&mut self) {
        let state = self.shared.progress.state();
        // A loop that calls itself busy may be in a call that waits for other workers.
        let waiting_for = match state.waiting_for.is_empty() {
            true => self.shared.seat.waiting_for(),
            false => state.waiting_for.into(),
        };
        let (step, phase) = (state.step, state.phase.into());
        self.send(Report::Heartbeat { step, phase, waiting_for });
        self.send(self.spending());
    }

    fn spending(&self) -> Report {
        let (spent, last) = self.shared.progress.spending.read();
        // Without lanes a step is this process's own count, which is no step of the job.
        let step = if self.is_member() { self.shared.progress.state().step } else { 0 };
        Report::Spending(Told { spent, last, step })
    }

    /// The first welcome starts the worker.
    fn welcome(&mut self, welcome: &proto::WorkerWelcome) -> Result<(), Error> {
        if let (Some((edges, ends)), Some(job)) = (self.start.take(), self.control.job()) {
            let identity = (&self.config, self.incarnation);
            let counts = Counts {
                training: welcome.n_records,
                validation: welcome.n_validation_records,
                prediction: welcome.n_prediction_records,
            };
            let (job, shared) = ((job.clone(), counts), self.shared.clone());
            self.commands = Some(start::threads(edges, ends, job, identity, shared)?);
            return Ok(());
        }
        match &self.commands {
            Some(Commands::Servers(driver)) => driver.tell(worker::Event::Rejoined),
            Some(Commands::Member(_)) => self.rejoin(),
            None => {}
        }
        // The announcement goes out before reports that wait.
        self.take_outputs();
        Ok(())
    }

    fn take_outputs(&mut self) {
        while let Ok(output) = self.outputs.try_recv() {
            self.take(output);
        }
    }

    fn take(&mut self, output: Output) {
        match output {
            Output::Report(report) => self.send(report),
            Output::Deadline => {}
            Output::End => self.over = Some(Ok(())),
            Output::Died(thread) => {
                self.over = Some(Err(Error::Died(format!("the {thread} thread panicked"))));
            }
        }
    }

    /// A member announces itself on every stream, before late reports.
    fn rejoin(&mut self) {
        self.tell(Event::Rejoined);
        if self.model_spec.is_some() {
            self.control.outbox.push(Priority::First, message(self.ready()));
        }
        if self.leaving.is_some() {
            self.send(Report::Leaving);
        }
    }

    fn ready(&self) -> Kind {
        Kind::Ready(proto::Ready {
            model_spec_json: self.model_spec.clone().unwrap_or_default(),
            capacity: self.control.job().map_or(1, |job| worker::capacity(job.spec.mode())),
            held: Vec::new(),
            peer: self.shared.seat.peer(),
        })
    }

    /// Passes a command on.
    fn obey(&mut self, command: proto::WorkerCommand) -> Result<(), Error> {
        let Some(command) = command.kind else {
            warn!("the master sent an unknown command");
            return Ok(());
        };
        if let Command::Welcome(welcome) = command {
            return self.welcome(&welcome);
        }
        log(&command);
        match &self.commands {
            Some(Commands::Servers(driver)) => match convert::worker::event(command) {
                Some(event) => driver.tell(event),
                None => warn!("ignored a command for another strategy"),
            },
            Some(Commands::Member(_)) => self.obey_as_member(command),
            None => {}
        }
        Ok(())
    }

    fn obey_as_member(&mut self, command: Command) {
        match command {
            Command::Route(route) => self.tell(Event::Route(route.into())),
            Command::Lease(lease) => {
                let loan = match lease.work {
                    Some(proto::lease::Work::Eval(work)) => Loan::Evaluate(work),
                    Some(_) | None => Loan::Other,
                };
                self.tell(Event::Lease(LeaseId(lease.lease), loan));
            }
            Command::Revoke(revoke) => self.tell(Event::Revoke(LeaseId(revoke.lease))),
            Command::Stop(_) => {
                self.tell(Event::Stop);
                self.shared.seat.close();
                self.leaving = Some(Instant::now() + self.limits.finish);
            }
            Command::World(world) => {
                let world = allreduce::World::from(world);
                let is_due = world.is_due_at_once(self.config.worker, self.incarnation);
                let id = world.id;
                self.tell_member(allreduce::Event::World(world));
                if is_due {
                    self.shared.seat.abort(id);
                }
            }
            Command::Go(proto::Go { world, until }) => {
                self.tell_member(allreduce::Event::Go { world: WorldId(world), until });
            }
            Command::Cut(cut) => self.tell_member(allreduce::Event::Cut(cut)),
            Command::Welcome(_) => {}
        }
    }

    /// Queues a report.
    fn send(&mut self, report: Report) {
        self.control.outbox.push(report.priority(), convert::worker::message(report));
    }

    /// Passes an event to the loop of AllReduce.
    fn tell(&self, event: Event) {
        if let Some(Commands::Member(events)) = &self.commands {
            // A compute thread that is gone is known by its end.
            let _ = events.send(event);
        }
    }

    /// Whether other workers train together with this one.
    fn is_member(&self) -> bool {
        self.control.job().is_some_and(|job| job.spec.is_allreduce())
    }

    fn tell_member(&self, event: allreduce::Event) {
        self.tell(Event::AllReduce(Box::new(event)));
    }

    fn leave(&mut self) {
        info!("leaving");
        match &self.commands {
            Some(Commands::Servers(driver)) => driver.tell(worker::Event::Leave),
            Some(Commands::Member(_)) => {
                self.tell(Event::Leave);
                let has_lanes = self.shared.seat.peer().is_some_and(|peer| peer.world != 0);
                let limit = if has_lanes { self.limits.hand_over } else { self.limits.finish };
                self.leaving = Some(Instant::now() + limit);
                // Others take over its lanes when the master has named a world without it.
                self.send(Report::Leaving);
            }
            // There is no work to finish yet.
            None => self.leaving = Some(Instant::now()),
        }
    }

    /// A member that leaves waits for the master; without a master it does not wait long.
    fn hurry(&mut self) {
        if let Some(limit) = &mut self.leaving {
            *limit = (*limit).min(Instant::now() + self.limits.finish);
        }
    }

    /// Keeps a member's report until a stream takes it.
    fn keep(&mut self, report: Kind) {
        if let Kind::Ready(ready) = report {
            self.model_spec = Some(ready.model_spec_json);
            self.control.outbox.push(Priority::First, message(self.ready()));
            return;
        }
        let is_step = matches!(report, Kind::Stepped(_));
        let priority = if is_step { Priority::Newest } else { Priority::Last };
        self.control.outbox.push(priority, message(report));
    }

    /// Sends what the master must still know.
    async fn close(mut self, result: Result<(), Error>) -> Result<(), Error> {
        while let Ok(report) = self.reports.try_recv() {
            self.keep(report);
        }
        self.take_outputs();
        if result.is_err() && self.control.outbox.is_empty() {
            return result;
        }
        self.send(self.spending());
        self.control.finish(self.limits.flush).await;
        result
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(Commands::Servers(driver)) = &self.commands {
            driver.close();
        }
        self.tell(Event::Stop);
        self.shared.seat.close();
    }
}

fn log(command: &Command) {
    match command {
        Command::Route(route) => {
            let n_servers = route.servers.len();
            info!(generation = route.generation, servers = n_servers, "route received");
        }
        Command::Lease(lease) => {
            debug!(lease = %LeaseId(lease.lease), work = ?lease.work, "lease received");
        }
        Command::Revoke(revoke) => debug!(lease = %LeaseId(revoke.lease), "lease revoked"),
        Command::Stop(stop) => info!(reason = stop.reason, "stopped by the master"),
        Command::Welcome(_) | Command::World(_) | Command::Go(_) | Command::Cut(_) => {}
    }
}

fn message(kind: Kind) -> proto::WorkerMessage {
    proto::WorkerMessage { kind: Some(kind) }
}
