// SPDX-License-Identifier: Apache-2.0
//! The shell of a master around the real machine: sessions, effects, and death in their midst.

use std::collections::BTreeMap;

use edl_core::id::{Incarnation, PsId, Term, WorkerId};
use edl_core::job::{Command, Config, Effect, End, Event, Holder, Job, PsOrder};
use edl_core::metric::{Measures, Metric};
use edl_core::platform::{Ended, Report};
use edl_core::servers::Member;
use edl_core::time::Time;

use crate::counter::Parts;
use crate::kernel::{ConnId, Kernel};
use crate::message::{Address, Message, Timer};
use crate::process::Context;

pub(crate) struct Master {
    pub(crate) term: Term,
    pub(crate) job: Job,
    started_at: Time,
    /// When the next tick is planned.
    tick_at: Option<Time>,
    sessions: BTreeMap<ConnId, Peer>,
    workers: BTreeMap<WorkerId, ConnId>,
    servers: BTreeMap<PsId, ConnId>,
    pub(crate) ended: Option<End>,
    pub(crate) exported: Option<Parts>,
}

#[derive(Clone, Copy)]
enum Peer {
    Worker(WorkerId, Incarnation),
    Server(PsId, Incarnation),
}

impl Master {
    /// Takes the next term, which shuts every earlier master out.
    pub(crate) fn start(context: &mut Context<'_>) -> Self {
        let term = context.disk.term.next();
        context.disk.term = term;
        context.disk.master = Some(context.pid);
        let scenario = context.scenario;
        let config = Config {
            spec: scenario.spec.clone(),
            term,
            n_records: scenario.n_records,
            n_validation_records: scenario.n_validation_records,
            n_prediction_records: 0,
        };
        let job = Job::new(config, context.disk.durable.clone(), Time::ZERO);
        context.kernel.schedule(context.pid, std::time::Duration::ZERO, Timer::Tick);
        Self {
            term,
            job,
            started_at: context.kernel.now,
            tick_at: Some(context.kernel.now),
            sessions: BTreeMap::new(),
            workers: BTreeMap::new(),
            servers: BTreeMap::new(),
            ended: None,
            exported: None,
        }
    }

    fn now(&self, kernel: &Kernel) -> Time {
        Time::since_origin(kernel.now.since(self.started_at))
    }

    pub(crate) fn on_message(&mut self, context: &mut Context<'_>, conn: ConnId, message: Message) {
        match message {
            Message::WorkerHello { worker, incarnation, pid } => {
                let (worker, incarnation) = (WorkerId(worker), Incarnation(incarnation));
                self.sessions.insert(conn, Peer::Worker(worker, incarnation));
                if let Some(before) = self.workers.insert(worker, conn) {
                    context.kernel.hang_up(before);
                }
                self.handle(context, Event::WorkerConnected { worker, incarnation, pid });
            }
            Message::PsHello { ps, incarnation, pid, generation, sets } => {
                let incarnation = Incarnation(incarnation);
                self.sessions.insert(conn, Peer::Server(ps, incarnation));
                if let Some(before) = self.servers.insert(ps, conn) {
                    context.kernel.hang_up(before);
                }
                let (address, unix_path) = (pid.to_string(), String::new());
                let member = Member { incarnation, address, unix_path, generation, sets };
                self.handle(context, Event::PsConnected { ps, pid, member: Box::new(member) });
            }
            other => match self.sessions.get(&conn) {
                Some(Peer::Worker(worker, incarnation)) => {
                    let is_current = self.workers.get(worker) == Some(&conn);
                    self.worker_said(context, (*worker, *incarnation), is_current, other);
                }
                Some(Peer::Server(ps, incarnation)) if self.servers.get(ps) == Some(&conn) => {
                    self.server_said(context, *ps, *incarnation, other);
                }
                Some(Peer::Server(..)) | None => {}
            },
        }
    }

    fn worker_said(
        &mut self,
        context: &mut Context<'_>,
        (worker, incarnation): (WorkerId, Incarnation),
        is_current: bool,
        message: Message,
    ) {
        // Facts about batches count whoever brings them; the rest only from the living.
        if let Message::Done { batch, generation } = message {
            return self.handle(context, Event::BatchDone { worker, batch, generation, loss: 0.0 });
        }
        if !is_current {
            return;
        }
        let event = match message {
            Message::Ready { held } => {
                let model = Box::new((*context.counter.model).clone());
                Event::WorkerReady { worker, incarnation, model, capacity: 2, held, peer: None }
            }
            Message::Evaluated { eval, shard, generation, value, n_records } => {
                let mut measures = Measures::new(&[Metric::loss()]);
                let sign = if context.scenario.improves { -1.0 } else { 1.0 };
                measures.add_loss(sign * value, n_records);
                Event::EvalDone { worker, eval, shard, generation, measures: Box::new(measures) }
            }
            Message::Failed { lease, item } => {
                let error = "user code failed".into();
                Event::Failed { worker, incarnation, lease, item, error }
            }
            Message::Leaving => Event::WorkerLeaving { worker, incarnation },
            Message::Heartbeat => {
                Event::WorkerHeard { worker, incarnation, waiting_for: String::new() }
            }
            other => panic!("a worker never says {other:?}"),
        };
        self.handle(context, event);
    }

    fn server_said(
        &mut self,
        context: &mut Context<'_>,
        ps: PsId,
        incarnation: Incarnation,
        message: Message,
    ) {
        let event = match message {
            Message::Loaded { generation, sets } => Event::Loaded { ps, generation, sets },
            Message::LoadFailed { generation, error } => {
                Event::LoadFailed { ps, generation, error }
            }
            Message::CutDone { cut, generation, files } => {
                Event::CutDone { holder: Holder::Ps(ps), cut, generation, files }
            }
            Message::CutFailed { cut, error } => Event::CutFailed { cut, error },
            Message::Heartbeat => Event::PsHeard { ps, incarnation },
            other => panic!("a server never says {other:?}"),
        };
        self.handle(context, event);
    }

    pub(crate) fn on_broken(&mut self, context: &mut Context<'_>, conn: ConnId) {
        match self.sessions.remove(&conn) {
            Some(Peer::Worker(worker, incarnation)) if self.workers.get(&worker) == Some(&conn) => {
                self.workers.remove(&worker);
                self.handle(context, Event::WorkerGone { worker, incarnation });
            }
            Some(Peer::Server(ps, incarnation)) if self.servers.get(&ps) == Some(&conn) => {
                self.servers.remove(&ps);
                self.handle(context, Event::PsGone { ps, incarnation });
            }
            Some(_) | None => {}
        }
    }

    pub(crate) fn on_timer(&mut self, context: &mut Context<'_>, timer: Timer) {
        match timer {
            Timer::Tick => {
                // Otherwise it was planned again, for later.
                if self.tick_at.is_some_and(|at| at <= context.kernel.now) {
                    self.tick_at = None;
                    self.handle(context, Event::Tick);
                }
            }
            Timer::Answer(event) => self.handle(context, *event),
            Timer::Commit { cut, folder, files } => {
                let done = context.disk.commit(&folder, &files);
                let event = match done {
                    Ok(()) => Event::Committed { cut },
                    Err(error) => Event::CutFailed { cut, error },
                };
                // The manifest is there, but the master may die before it hears of it.
                context.after(0, 5, Timer::Answer(Box::new(event)));
            }
            Timer::Export { folder } => {
                let all = 0..context.scenario.spec.partitions;
                match context.disk.load(context.counter, &folder, all) {
                    Ok(parts) => {
                        self.exported = Some(parts);
                        self.handle(context, Event::Exported);
                    }
                    Err(error) => self.handle(context, Event::ExportFailed { error }),
                }
            }
            Timer::Report(report) => self.handle(context, Event::Platform(report)),
            other => panic!("a master never set {other:?}"),
        }
    }

    pub(crate) fn running(&mut self, context: &mut Context<'_>, report: Report) {
        self.handle(context, Event::Platform(report));
    }

    pub(crate) fn scale(&mut self, context: &mut Context<'_>, workers: u32) {
        self.handle(context, Event::Scale { workers });
    }

    fn handle(&mut self, context: &mut Context<'_>, event: Event) {
        let now = self.now(context.kernel);
        let mut effects = self.job.handle(event, now);
        // No caller waits for a reply here, so a master does not die just before or after one.
        effects.retain(|effect| !matches!(effect, Effect::Reply(_)));
        self.job.check_invariants();
        self.plan_tick(context);
        let n = effects.len();
        let dies = n > 0 && context.kernel.dies(context.scenario.master_deaths);
        let n_performed = match dies {
            true => usize::try_from(context.kernel.rng.below(n as u64 + 1)).expect("an index"),
            false => n,
        };
        for effect in effects.into_iter().take(n_performed) {
            self.perform(context, effect);
            if context.exit.is_some() {
                return;
            }
        }
        if dies && self.ended.is_none() {
            context.exit = Some(Ended::Signal(9));
        }
    }

    /// Sleeps until the machine's next deadline, as the shell does.
    fn plan_tick(&mut self, context: &mut Context<'_>) {
        let now = self.now(context.kernel);
        let wait = self.job.next_deadline(now).since(now).max(crate::kernel::millis(1));
        let at = context.kernel.now + wait;
        if self.tick_at.is_none_or(|planned| at < planned) {
            self.tick_at = Some(at);
            context.kernel.schedule_at(context.pid, at, Timer::Tick);
        }
    }

    fn perform(&mut self, context: &mut Context<'_>, effect: Effect) {
        match effect {
            Effect::Persist => {
                if context.disk.term == self.term {
                    context.disk.durable = self.job.durable().clone();
                } else {
                    // Another master has the job: this one has no business any more.
                    context.exit = Some(Ended::Exit(1));
                }
            }
            Effect::ToWorker(worker, command) => {
                if let Some(conn) = self.workers.get(&worker) {
                    let message = self.to_worker(command, context);
                    context.send(*conn, message);
                }
            }
            Effect::ToPs(ps, order) => {
                if let Some(conn) = self.servers.get(&ps) {
                    let message = match order {
                        PsOrder::Welcome => Message::Welcome { term: self.term },
                        PsOrder::Stop(_) => Message::Stop,
                        PsOrder::Load { .. } | PsOrder::Serve { .. } | PsOrder::Cut { .. } => {
                            Message::Order(order)
                        }
                    };
                    context.send(*conn, message);
                }
            }
            Effect::CloseWorker(worker, _) | Effect::RefuseWorker(worker, _) => {
                if let Some(conn) = self.workers.remove(&worker) {
                    context.kernel.hang_up(conn);
                }
            }
            Effect::ClosePs(ps) => {
                if let Some(conn) = self.servers.remove(&ps) {
                    context.kernel.hang_up(conn);
                }
            }
            Effect::Platform(order) => {
                let master = context.pid;
                context.kernel.order(master, order);
            }
            Effect::PrepareCut { cut, folder } => {
                if context.disk.is_full {
                    let error = "no space left on device".into();
                    context.after(0, 1, Timer::Answer(Box::new(Event::CutFailed { cut, error })));
                } else {
                    let before = context.disk.folders.insert(folder, Default::default());
                    assert!(before.is_none(), "no folder is used twice");
                }
            }
            Effect::Commit { cut, folder, files, .. } => {
                context.after(0, 20, Timer::Commit { cut, folder, files });
            }
            Effect::Delete(folder) => {
                context.disk.folders.remove(&folder);
            }
            Effect::Export { checkpoint } => {
                context.after(5, 50, Timer::Export { folder: checkpoint });
            }
            Effect::JoinPredictions { .. } => panic!("nothing is predicted here"),
            Effect::Evaluated(evaluated) => self.check_evaluation(context, &evaluated),
            Effect::EvaluationStarted { .. } | Effect::Reply(_) => {}
            Effect::Note(note) => context.kernel.note_text(context.pid, note.kind, &note.text),
            Effect::Ended(end) => self.ended = Some(end),
        }
    }

    fn to_worker(&self, command: Command, context: &Context<'_>) -> Message {
        match command {
            Command::Welcome => Message::Welcome { term: self.term },
            Command::Route => {
                let n_ps = context.scenario.spec.num_ps_pods;
                let members = self.job.servers().members().iter();
                let address = |(ps, member): (&PsId, &Member)| Address {
                    ps: *ps,
                    pid: member.address.parse().expect("an address is a process here"),
                    partitions: context.counter.layout.hosted(*ps, n_ps),
                };
                let servers = members.map(address).collect();
                Message::Route { generation: self.job.servers().generation(), servers }
            }
            Command::Lease { lease, work, .. } => Message::Lease { lease, work },
            Command::Revoke(lease) => Message::Revoke { lease },
            Command::World { .. } | Command::Go { .. } | Command::Cut { .. } => {
                panic!("the servers hold the parameters")
            }
            Command::Stop(_) => Message::Stop,
        }
    }

    /// An evaluation is of an exact version: every batch before it, no other.
    fn check_evaluation(&self, context: &Context<'_>, evaluated: &edl_core::evaluation::Evaluated) {
        if context.scenario.spec.evaluation_secs > 0 && self.term > Term(1) {
            // Where the clock sets the barrier, a new master cannot know what the one before it
            // has lent past it to a worker that has not called yet.
            return;
        }
        let position = self.job.ledger().position_of(evaluated.version);
        #[expect(clippy::cast_precision_loss, reason = "counts stay small")]
        let expected = context.counter.records_before(position) as f64;
        let found = evaluated.metrics["loss"].abs();
        assert!(
            (found - expected).abs() < 0.01,
            "version {} was evaluated with {found} records in it, not {expected}",
            evaluated.version
        );
    }
}
