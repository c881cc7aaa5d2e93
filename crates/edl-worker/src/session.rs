// SPDX-License-Identifier: Apache-2.0
//! The worker's side of the control session: starts the worker, passes commands to the compute
//! thread, and sends its reports and heartbeats.
//!
//! When the session breaks, the compute thread continues with the work it has, and its reports
//! wait here. Nothing about work is decided in this file.

mod start;

use std::future::ready;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use edl_core::id::{Incarnation, LeaseId, WorldId};
use edl_net::control;
use edl_net::convert;
use edl_net::proto::{self, worker_command::Kind as Command, worker_message::Kind};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::Config;
use crate::allreduce;
use crate::compute::{Event, Loan};
use crate::feed::Counts;
use crate::progress::Progress;

pub(crate) use start::{Edges, Limits};
use start::{Ended, Shared};

/// Reports of the compute thread that may wait for a master.
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
    /// The announcement of the model, once it is built.
    model_spec: Option<String>,
    events: Sender<Event>,
    /// What the compute thread needs, until the first welcome starts it.
    start: Option<(Edges, start::Ends)>,
    reports: mpsc::Receiver<Kind>,
    ended: oneshot::Receiver<Ended>,
    shared: Shared,
    leaving: Option<Instant>,
}

impl Session {
    pub(crate) fn new(config: Config, edges: Edges, shutdown: CancellationToken) -> Self {
        let (events, heard) = std::sync::mpsc::channel();
        let (report, reports) = mpsc::channel(MAX_REPORTS);
        let (end, ended) = oneshot::channel();
        let incarnation = start::incarnation();
        let hello = message(Kind::Hello(proto::WorkerHello {
            protocol: edl_net::CONTROL_PROTOCOL,
            worker: config.worker.0,
            incarnation: incarnation.0,
            pid: config.place.pid,
        }));
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
            model_spec: None,
            start: Some((edges, start::Ends { heard, report, end })),
            events,
            reports,
            ended,
            shared: Shared {
                work: Arc::default(),
                progress: Arc::new(Progress::new()),
                seat: Arc::default(),
            },
            leaving: None,
        }
    }

    /// Works until the worker is done or the master is given up.
    pub(crate) async fn run(mut self) -> Result<(), Error> {
        let result = loop {
            let limit = self.leaving.unwrap_or_else(Instant::now);
            tokio::select! {
                biased;
                ended = &mut self.ended => break start::result(ended),
                () = self.shutdown.cancelled(), if self.leaving.is_none() => self.leave(),
                () = sleep_until(limit), if self.leaving.is_some() => break Ok(()),
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

    fn beat(&mut self) {
        let state = self.shared.progress.state();
        // A loop that calls itself busy may be in a call that waits for other workers.
        let waiting_for = match state.waiting_for.is_empty() {
            true => self.shared.seat.waiting_for(),
            false => state.waiting_for.into(),
        };
        self.send(Kind::Heartbeat(proto::Heartbeat {
            step: state.step,
            phase: state.phase.into(),
            waiting_for,
        }));
        self.send(self.spending());
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

    /// The first welcome starts the worker.
    fn welcome(&mut self, welcome: &proto::WorkerWelcome) -> Result<(), Error> {
        if let (Some((edges, ends)), Some(job)) = (self.start.take(), self.control.job()) {
            let (events, shared) = (self.events.clone(), self.shared.clone());
            let identity = (&self.config, self.incarnation);
            let counts = Counts {
                training: welcome.n_records,
                validation: welcome.n_validation_records,
                prediction: welcome.n_prediction_records,
            };
            start::threads(edges, ends, events, (job.clone(), counts), identity, shared)?;
        } else {
            self.tell(Event::Rejoined);
        }
        // Announced on every stream, before late reports, so the master knows their leases.
        if self.model_spec.is_some() {
            self.control.outbox.retain(|message| !matches!(message.kind, Some(Kind::Ready(_))));
            self.control.outbox.push_front(message(self.ready()));
        }
        if self.leaving.is_some() && self.is_member() {
            self.send(leaving());
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
            capacity: self.control.job().map_or(1, |job| start::capacity(&job.spec)),
            held: held.collect(),
            peer: self.shared.seat.peer(),
        })
    }

    /// Passes a command on to the compute thread.
    fn obey(&mut self, command: proto::WorkerCommand) -> Result<(), Error> {
        match command.kind {
            Some(Command::Welcome(welcome)) => self.welcome(&welcome)?,
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
                let announced = convert::member::announced(&world);
                let is_due = announced.world.is_due_at_once(self.config.worker, self.incarnation);
                let id = announced.world.id;
                let peers = convert::member::peers(world);
                self.tell_member(allreduce::Event::World(announced, peers));
                if is_due {
                    self.shared.seat.abort(id);
                }
            }
            Some(Command::Go(proto::Go { world, until })) => {
                self.tell_member(allreduce::Event::Go { world: WorldId(world), until });
            }
            Some(Command::Cut(order)) => {
                let order = convert::member::order(order);
                self.tell_member(allreduce::Event::Checkpoint(order));
            }
            None => warn!("the master sent an unknown command"),
        }
        Ok(())
    }

    /// Sends a message after those that still wait.
    fn send(&mut self, kind: Kind) {
        self.control.outbox.push_back(message(kind));
    }

    fn tell(&self, event: Event) {
        // A compute thread that is gone has said so by its end.
        let _ = self.events.send(event);
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
        self.tell(Event::Leave);
        let has_lanes = self.shared.seat.peer().is_some_and(|peer| peer.world != 0);
        let limit = if has_lanes { self.limits.hand_over } else { self.limits.finish };
        self.leaving = Some(Instant::now() + limit);
        if self.is_member() {
            // Others take over its lanes when the master has named a world without it.
            self.send(leaving());
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
            self.control.outbox.push_front(message(self.ready()));
            return;
        }
        // Of the steps that are not sent yet, only the last one matters.
        if let Kind::Stepped(_) = report {
            self.control.outbox.pop_back_if(|last| matches!(last.kind, Some(Kind::Stepped(_))));
        }
        self.send(report);
    }

    /// Sends what the master must still know.
    async fn close(mut self, result: Result<(), Error>) -> Result<(), Error> {
        while let Ok(report) = self.reports.try_recv() {
            self.keep(report);
        }
        if result.is_err() && self.control.outbox.is_empty() {
            return result;
        }
        if self.shutdown.is_cancelled() && !self.is_member() {
            self.send(leaving());
        }
        self.send(self.spending());
        self.control.finish(self.limits.flush).await;
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
