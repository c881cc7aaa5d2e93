// SPDX-License-Identifier: Apache-2.0
//! The worker's side of the control session: starts the worker, passes commands to its machine,
//! and sends reports and heartbeats.
//!
//! When the session breaks, the worker continues with the work it has, and its reports wait here.

mod start;

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use edl_core::goodput::TimeReport;
use edl_core::id::{Incarnation, LeaseId, WorldId};
use edl_core::worker::Report;
use edl_net::convert::worlds::ReceivedWorlds;
use edl_net::proto::{self, worker_command::Kind as Command};
use edl_net::{control, convert};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::Config;
use crate::driver::{Input, Output, Worker};
use crate::feed::Counts;
use crate::notice;
use crate::priority;
use crate::progress::Progress;

pub(crate) use start::{Edges, Limits};
use start::{Ended, Ends};

/// Why a worker ended without being asked to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Control(#[from] control::Error),
    #[error("cannot build the model: {0}")]
    Model(String),
    #[error("unexpected description of world {0}; run the same build everywhere")]
    World(WorldId),
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
    worker: Option<Box<dyn Worker>>,
    outputs: UnboundedReceiver<Output>,
    ended: oneshot::Receiver<Ended>,
    progress: Arc<Progress>,
    worlds: ReceivedWorlds,
    /// How the worker ended.
    over: Option<Ended>,
}

impl Session {
    pub(crate) fn new(config: Config, edges: Edges, shutdown: CancellationToken) -> Self {
        let (output, outputs) = mpsc::unbounded_channel();
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
            start: Some((edges, Ends { outputs: output, end })),
            worker: None,
            outputs,
            ended,
            progress: Arc::new(Progress::new()),
            worlds: ReceivedWorlds::default(),
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
            let deadline = self.worker.as_ref().and_then(|worker| worker.next_deadline());
            let tick = deadline.map_or_else(Instant::now, Instant::from_std);
            tokio::select! {
                biased;
                ended = &mut self.ended => break start::result(ended),
                () = self.shutdown.cancelled(), if !is_leaving => {
                    info!("leaving");
                    notice::give(self.limits.exit.hand_over);
                    is_leaving = true;
                    if self.worker.is_none() {
                        // There is no work to finish yet.
                        break Ok(());
                    }
                    self.input(Input::Leave);
                }
                () = sleep_until(tick), if deadline.is_some() => self.input(Input::Tick),
                Some(output) = self.outputs.recv() => self.take(output),
                event = self.control.event() => match event? {
                    control::Event::Command(command) => self.obey(command)?,
                    control::Event::Heartbeat => self.heartbeat(),
                    control::Event::Lost => self.input(Input::MasterLost),
                },
            }
        };
        self.close(result).await
    }

    fn input(&self, input: Input) {
        if let Some(worker) = &self.worker {
            worker.input(input);
        }
    }

    fn heartbeat(&mut self) {
        let (waiting_for, progress) = (self.progress.waiting_for(), self.progress.n_computed());
        self.send(Report::Heartbeat { waiting_for, progress });
        self.send(self.spending());
    }

    fn spending(&self) -> Report {
        let (spent, last) = self.progress.spending.read();
        let (step, records) = (self.progress.step(), self.progress.n_records());
        Report::Spending(TimeReport { spent, last, step, records })
    }

    /// The first welcome starts the worker.
    fn welcome(&mut self, welcome: &proto::WorkerWelcome) -> Result<(), Error> {
        self.worlds.welcome();
        if let (Some((edges, ends)), Some(job)) = (self.start.take(), self.control.job()) {
            let identity = (&self.config, self.incarnation);
            let counts = Counts {
                training: welcome.n_records,
                validation: welcome.n_validation_records,
                prediction: welcome.n_prediction_records,
            };
            let (job, progress) = ((job.clone(), counts), Arc::clone(&self.progress));
            self.worker = Some(start::worker(edges, ends, job, identity, progress)?);
            return Ok(());
        }
        self.input(Input::Rejoined);
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
            Output::Report(report) => {
                if matches!(report, Report::Ready { .. }) {
                    priority::restore();
                }
                self.send(report);
            }
            Output::Deadline => {}
            Output::End => self.over = Some(Ok(())),
            Output::Died(thread) => {
                self.over = Some(Err(Error::Died(format!("the {thread} thread panicked"))));
            }
        }
    }

    /// Passes a command on.
    fn obey(&mut self, command: proto::WorkerCommand) -> Result<(), Error> {
        match command.kind {
            Some(Command::Welcome(welcome)) => return self.welcome(&welcome),
            Some(Command::Ping(_)) => self.heartbeat(),
            Some(Command::World(world)) => {
                let id = WorldId(world.world);
                let world = self.worlds.receive(world).ok_or(Error::World(id))?;
                self.input(Input::Command(Box::new(Command::World(world))));
            }
            Some(command) => {
                log(&command);
                if let Command::Drain(drain) = &command {
                    notice::give(Duration::from_millis(drain.within_ms));
                }
                self.input(Input::Command(Box::new(command)));
            }
            None => warn!("the master sent an unknown command"),
        }
        Ok(())
    }

    /// Queues a report.
    fn send(&mut self, report: Report) {
        self.control.outbox.push(report.priority(), convert::worker::message(report));
    }

    /// Sends what the master must still know.
    async fn close(mut self, result: Result<(), Error>) -> Result<(), Error> {
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
        if let Some(worker) = &self.worker {
            worker.close();
        }
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
        Command::Drain(_) => info!("the job is stopping; finishing the batches in progress"),
        Command::Welcome(_)
        | Command::Ping(_)
        | Command::World(_)
        | Command::Go(_)
        | Command::Pause(_)
        | Command::Checkpoint(_) => {}
    }
}
