// SPDX-License-Identifier: Apache-2.0
//! The shell of a master around the real job: streams, effects, and death in the middle of them.

use std::collections::{BTreeMap, VecDeque};

use edl_core::exit::Exit;
use edl_core::id::{CheckpointId, Generation, Incarnation, PsId, Term, WorkerId, WorldId};
use edl_core::job::{CheckpointFile, Command, Config, Effect, End, Event, Fact, Job, Note};
use edl_core::platform::{Ended, Order};
use edl_core::worker::Report;
use edl_core::world::Worlds;
use edl_net::convert::master as convert;
use edl_net::convert::worlds::SentWorlds;
use edl_net::proto::{PsMessage, WorkerMessage, ps_message, worker_message};
use edl_tensor::checkpoint::{self, Manifest};
use prost::Message as _;
use tonic::Status;

use crate::frames::RUN;
use crate::kernel::{Action, SITE, millis};
use crate::mesh::pid_of;
use crate::message::{MasterTimer, Message, SiteTimer, Timer};
use crate::network::{ConnId, Purpose};
use crate::process::{Clock, Context};

/// Between two tries to save the state on a full disk.
const SAVE_PAUSE_MS: u64 = 500;

pub(crate) struct Master {
    term: Term,
    pub(crate) job: Job,
    clock: Clock,
    sessions: BTreeMap<ConnId, Peer>,
    workers: BTreeMap<WorkerId, ConnId>,
    /// The last world that each worker was to enter at once, in it or not.
    replaced: BTreeMap<WorkerId, WorldId>,
    /// The last world whose members were all together: members of worlds before it have left.
    settled: WorldId,
    servers: BTreeMap<PsId, ConnId>,
    pub(crate) ended: Option<End>,
    sent: SentWorlds,
    /// Effects that wait until the state is saved, and what came meanwhile.
    held: VecDeque<Effect>,
    early: VecDeque<Action>,
}

/// Who is at the other end of a stream.
#[derive(Clone, Copy)]
enum Peer {
    Worker(WorkerId, Incarnation),
    Ps(PsId, Incarnation),
}

impl Master {
    /// Takes the next term, which locks every earlier master out.
    pub(crate) fn start(context: &mut Context<'_>) -> Self {
        let term = context.disk.term.next();
        context.disk.term = term;
        context.disk.sweep();
        context.disk.former_master = context.disk.master.replace(context.pid);
        let scenario = context.scenario;
        let config = Config {
            spec: scenario.spec.clone(),
            run: RUN,
            term,
            n_records: scenario.n_records,
            n_validation_records: scenario.n_validation_records,
            n_prediction_records: 0,
            output: "output".into(),
            evaluated_version: 0,
        };
        let clock = Clock::new(context.kernel);
        let now = clock.now(context.kernel);
        let mut durable = context.disk.durable.clone();
        durable.adopt(context.disk.complete());
        durable.end = None;
        context.disk.persist(&durable.changes(&context.disk.durable));
        let job = Job::new(config, durable, now);
        let (sessions, workers, servers, replaced) = Default::default();
        let (held, early, ended, sent) = Default::default();
        let mut master = Self {
            term,
            job,
            clock,
            sessions,
            workers,
            replaced,
            settled: WorldId(0),
            servers,
            ended,
            sent,
            held,
            early,
        };
        master.clock.wake_at(context, Some(now));
        master
    }

    pub(crate) fn state(&self) -> String {
        let (state, n_done) = (self.job.state(), self.job.ledger().n_done());
        let (servers, worlds) = (self.job.servers().phase(), self.job.worlds());
        format!("{state}, {n_done} batches done, servers {servers:?}, worlds {worlds:#?}")
    }

    pub(crate) fn act(&mut self, context: &mut Context<'_>, action: Action) {
        if !self.held.is_empty() && !continues_meanwhile(&action) {
            return self.early.push_back(action);
        }
        match action {
            Action::Deliver { conn, purpose, message: Message::Control(bytes), .. } => {
                match purpose {
                    Purpose::Worker => self.worker_message(context, conn, &bytes),
                    Purpose::Ps => self.ps_message(context, conn, &bytes),
                    Purpose::Pull { .. } | Purpose::Push { .. } | Purpose::Mesh => {
                        panic!("a control message on {purpose:?}")
                    }
                }
            }
            Action::Deliver { message, .. } => panic!("a master is never sent {message:?}"),
            Action::Broken { conn } => self.broken(context, conn),
            Action::Timer(Timer::Wake) => {
                if self.clock.woken(context.kernel) {
                    self.handle(context, Event::Tick);
                }
            }
            Action::Timer(Timer::Master(timer)) => self.on_timer(context, *timer),
            // A master that the supervisor stops reports the end of the job first.
            Action::Timer(timer) => panic!("a master never set {timer:?}"),
        }
    }

    fn worker_message(&mut self, context: &mut Context<'_>, conn: ConnId, bytes: &[u8]) {
        let message = WorkerMessage::decode(bytes).expect("a worker's message");
        let Some(Peer::Worker(worker, incarnation)) = self.sessions.get(&conn).copied() else {
            let Some(worker_message::Kind::Hello(hello)) = message.kind else { return };
            assert_eq!(hello.protocol, edl_net::CONTROL_PROTOCOL);
            let (worker, incarnation) = (WorkerId(hello.worker), Incarnation(hello.incarnation));
            self.sessions.insert(conn, Peer::Worker(worker, incarnation));
            if let Some(before) = self.workers.insert(worker, conn) {
                context.kernel.hang_up(before);
            }
            let pid = hello.pid;
            return self.handle(context, Event::WorkerConnected { worker, incarnation, pid });
        };
        let report = convert::worker_report(message).expect("it makes sense");
        // Facts about batches count from any stream; the rest only from the current one.
        let is_fact = matches!(report, Report::BatchDone { .. });
        if is_fact || self.workers.get(&worker) == Some(&conn) {
            context.judge.received(context.model, &self.job, worker, &report);
            let replaced = self.replaced.get(&worker).map(|world| *world.max(&self.settled));
            context.judge.heard(&self.job, replaced, &report);
            self.handle(context, Event::FromWorker { worker, incarnation, report });
        }
    }

    fn ps_message(&mut self, context: &mut Context<'_>, conn: ConnId, bytes: &[u8]) {
        let message = PsMessage::decode(bytes).expect("a server's message");
        let Some(Peer::Ps(ps, incarnation)) = self.sessions.get(&conn).copied() else {
            let Some(ps_message::Kind::Hello(hello)) = message.kind else { return };
            let (ps, incarnation) = (PsId(hello.ps), Incarnation(hello.incarnation));
            if self.job.is_replaced_server(incarnation) {
                context.kernel.count("replaced servers refused");
                return close(context, Some(conn), server_replaced());
            }
            self.sessions.insert(conn, Peer::Ps(ps, incarnation));
            let mut evicted = None;
            if let Some(before) = self.servers.insert(ps, conn) {
                context.kernel.hang_up(before);
                evicted = self.sessions.get(&before).copied();
            }
            let event = convert::ps_hello(hello).expect("it can be read");
            self.handle(context, event);
            // A master that dies before that is saved leaves no trace of it.
            if let Some(Peer::Ps(_, old)) = evicted
                && old != incarnation
                && context.exit.is_none()
                && self.held.is_empty()
            {
                context.judge.evicted(pid_of(old), pid_of(incarnation));
            }
            return;
        };
        let (report, _) = convert::ps_report(message).expect("it makes sense");
        if self.servers.get(&ps) == Some(&conn) {
            self.handle(context, Event::FromPs { ps, incarnation, report });
        }
    }

    fn broken(&mut self, context: &mut Context<'_>, conn: ConnId) {
        match self.sessions.remove(&conn) {
            Some(Peer::Worker(worker, incarnation)) if self.workers.get(&worker) == Some(&conn) => {
                self.workers.remove(&worker);
                self.handle(context, Event::WorkerGone { worker, incarnation });
            }
            Some(Peer::Ps(ps, incarnation)) if self.servers.get(&ps) == Some(&conn) => {
                self.servers.remove(&ps);
                self.handle(context, Event::PsGone { ps, incarnation });
            }
            Some(Peer::Worker(..) | Peer::Ps(..)) | None => {}
        }
    }

    fn on_timer(&mut self, context: &mut Context<'_>, timer: MasterTimer) {
        match timer {
            MasterTimer::Event(event) => self.handle(context, event),
            MasterTimer::Save => self.go_on(context),
            MasterTimer::Commit { checkpoint, folder, version, write } => {
                let event = match write.and_then(|write| context.disk.finish(write)) {
                    Ok(()) => {
                        // What a master writes that was replaced is unknown to the next one.
                        if context.disk.term == self.term {
                            context.judge.committed(context.model, context.disk, &folder, version);
                        }
                        Event::Committed { checkpoint }
                    }
                    Err(error) => Event::CheckpointFailed { checkpoint, error },
                };
                // The manifest is written, but the master may die before it learns of it.
                context.after(0, 5, Timer::Master(Box::new(MasterTimer::Event(event))));
            }
            MasterTimer::Export { .. } if context.disk.is_full => {
                let error = "no space left on device".into();
                self.handle(context, Event::ExportFailed { error, is_disk_full: true });
            }
            MasterTimer::Export { folder } => {
                context.judge.exported = Some(folder);
                self.handle(context, Event::Exported);
            }
        }
    }

    fn handle(&mut self, context: &mut Context<'_>, event: Event) {
        if self.ended.is_some() || context.exit.is_some() {
            return;
        }
        if !self.held.is_empty() {
            assert_eq!(event, Event::Tick, "everything else waits");
            return;
        }
        let now = self.clock.now(context.kernel);
        context.kernel.detail(context.pid, || format!("job <- {event:?}"));
        let before = (self.job.durable().generation, self.job.ledger().n_done());
        let death = context.kernel.master_death.take_if(|death| (death.on)(&event));
        let effects = self.job.handle(event, now);
        self.job.check_invariants();
        context.judge.advanced(&self.job, before);
        let settled = self.job.worlds().filter(|worlds| worlds.is_settled());
        if let Some(world) = settled.and_then(Worlds::current) {
            self.settled = world.id;
        }
        let n_effects = effects.len();
        let survives = match death {
            Some(death) => death.n_effects,
            None => self.survives(context, n_effects),
        };
        for (n, effect) in effects.into_iter().enumerate() {
            if n == survives {
                context.kernel.note(context.pid, "master died in its effects", "");
                context.exit = Some(Ended::Signal(9));
            }
            if context.exit.is_some() {
                return;
            }
            // What follows a state that is not saved has to wait with it.
            let must_save = matches!(effect, Effect::Persist(_));
            if !self.held.is_empty() || must_save && !self.can_save(context) {
                self.held.push_back(effect);
            } else {
                self.perform(context, effect);
            }
        }
        if survives == n_effects {
            context.exit.get_or_insert(Ended::Signal(9));
            return;
        }
        let deadline = self.job.next_deadline(now).max(now + millis(1));
        self.clock.wake_at(context, Some(deadline));
    }

    /// Whether there is room for the state; otherwise it is tried again.
    fn can_save(&mut self, context: &mut Context<'_>) -> bool {
        let is_full = context.disk.is_full && context.kernel.chance(200);
        if is_full && context.disk.term == self.term {
            context.kernel.note(context.pid, "waits for room on the disk", "");
            let save = Timer::Master(Box::new(MasterTimer::Save));
            context.after(SAVE_PAUSE_MS, SAVE_PAUSE_MS, save);
            return false;
        }
        true
    }

    /// Continues with what waited for room on the disk.
    fn go_on(&mut self, context: &mut Context<'_>) {
        if context.disk.is_full && !self.can_save(context) {
            return;
        }
        for effect in std::mem::take(&mut self.held) {
            if context.exit.is_none() {
                self.perform(context, effect);
            }
        }
        while self.held.is_empty()
            && context.exit.is_none()
            && let Some(action) = self.early.pop_front()
        {
            self.act(context, action);
        }
        self.handle(context, Event::Tick);
    }

    /// How many effects are performed before the master dies.
    fn survives(&self, context: &mut Context<'_>, n_effects: usize) -> usize {
        let may_die = *context.n_deaths_left > 0 && n_effects > 0;
        if !may_die || !context.kernel.chance(context.scenario.master_deaths) {
            return usize::MAX;
        }
        *context.n_deaths_left -= 1;
        context.kernel.pick(n_effects)
    }

    fn perform(&mut self, context: &mut Context<'_>, effect: Effect) {
        context.kernel.detail(context.pid, || format!("job -> {effect:?}"));
        match effect {
            Effect::Persist(facts) => self.persist(context, &facts),
            Effect::ToWorker(worker, command) => self.send_to_worker(context, worker, command),
            Effect::ToPs(ps, order) => {
                if let Some(conn) = self.servers.get(&ps) {
                    let message = self.encode(|encoder| encoder.ps(order)).encode_to_vec();
                    context.send(*conn, Message::Control(message));
                }
            }
            Effect::CloseWorker(worker, why) => {
                let conn = self.workers.remove(&worker);
                close(context, conn, Status::unavailable(why));
            }
            Effect::RefuseWorker(worker, why) => {
                let conn = self.workers.remove(&worker);
                close(context, conn, Status::failed_precondition(why));
            }
            Effect::ClosePs(ps) => {
                let conn = self.servers.remove(&ps);
                close(context, conn, server_replaced());
            }
            Effect::Platform(order) => send_order(context, order),
            Effect::PrepareCheckpoint { checkpoint, folder } => {
                if context.disk.is_full {
                    let error = "no space left on device".into();
                    let event = MasterTimer::Event(Event::CheckpointFailed { checkpoint, error });
                    context.after(0, 1, Timer::Master(Box::new(event)));
                } else {
                    context.disk.create(folder);
                    self.delay_a_server(context);
                }
            }
            Effect::Commit { checkpoint, folder, version, exact, generation, files } => {
                let facts = (checkpoint, version, exact, generation);
                let manifest = self.manifest(context, facts, files);
                let write = context.disk.begin_manifest(context.pid, &folder, &manifest);
                let commit = MasterTimer::Commit { checkpoint, folder, version, write };
                context.after(0, 20, Timer::Master(Box::new(commit)));
            }
            Effect::Delete(folder) => {
                context.disk.delete(&folder);
            }
            Effect::Export { checkpoint } => {
                let export = MasterTimer::Export { folder: checkpoint };
                context.after(5, 50, Timer::Master(Box::new(export)));
            }
            Effect::JoinPredictions { .. } => panic!("nothing is predicted here"),
            Effect::Evaluated(evaluated) => {
                context.judge.evaluated(context.model, context.scenario, &self.job, &evaluated);
                context.kernel.count("evaluations");
            }
            Effect::Reply(Err(_)) => context.kernel.count("requests refused"),
            Effect::EvaluationStarted { .. } => freeze_meanwhile(context),
            Effect::Reply(Ok(())) => {}
            Effect::Note(note) => self.note(context, &note),
            Effect::Ended(end) => {
                context.judge.ended(context.scenario, context.disk, &self.job);
                context.exit = Some(end.exit().into());
                self.ended = Some(end);
            }
        }
    }

    fn send_to_worker(&mut self, context: &mut Context<'_>, worker: WorkerId, command: Command) {
        if let Command::World(announced) = &command
            && announced.world.after.is_none()
        {
            self.replaced.insert(worker, announced.world.id);
        }
        if let Some(conn) = self.workers.get(&worker).copied() {
            let mut sent = std::mem::take(&mut self.sent);
            let message = self.encode(|encoder| encoder.worker(worker, command, &mut sent));
            self.sent = sent;
            context.send(conn, Message::Control(message.encode_to_vec()));
        }
    }

    fn note(&self, context: &mut Context<'_>, note: &Note) {
        let is_unexpected = context.scenario.is_unexpected(note);
        assert!(!is_unexpected, "{}: {}", note.kind.name(), note.text);
        context.judge.noted(&self.job, note);
        context.kernel.note(context.pid, note.kind.name(), &note.text);
    }

    /// What is sent to one of the servers from now on may take long, while the others keep training.
    fn delay_a_server(&self, context: &mut Context<'_>) {
        if !self.servers.is_empty() && context.kernel.chance(context.scenario.late_orders) {
            let conns: Vec<ConnId> = self.servers.values().copied().collect();
            let conn = conns[context.kernel.pick(conns.len())];
            let time = context.kernel.between(20, 1000);
            if let Some([a, b]) = context.kernel.network.ends(conn) {
                context.kernel.count("late orders");
                context.kernel.block(a, b, time);
            }
        }
    }

    fn manifest(
        &self,
        context: &Context<'_>,
        (checkpoint, version, exact, generation): (CheckpointId, u64, Option<u64>, Generation),
        files: Vec<CheckpointFile>,
    ) -> Manifest {
        let (spec, model) = (&context.scenario.spec, context.model);
        Manifest {
            format: checkpoint::format(model.layout.is_apart),
            version,
            exact,
            generation,
            checkpoint,
            term: self.term,
            run: RUN.to_string(),
            job: spec.job_name.clone(),
            seed: spec.seed,
            model: (*model.model).clone(),
            optimizer: model.model.optimizer.clone(),
            n_batches: model.plan.n_batches(),
            n_partitions: model.layout.n_partitions,
            fingerprint: String::new(),
            files: files.into_iter().map(Into::into).collect(),
            metrics: BTreeMap::new(),
            skipped: self.job.durable().skipped.clone(),
        }
    }

    fn persist(&mut self, context: &mut Context<'_>, facts: &[Fact]) {
        if context.disk.term != self.term {
            // Another master has the job.
            context.exit = Some(Exit::Relaunch.into());
        } else {
            context.disk.persist(facts);
        }
    }

    fn encode<T>(&self, encode: impl FnOnce(&convert::Encoder<'_>) -> T) -> T {
        let path = |folder: &str, _| folder.to_owned();
        encode(&convert::Encoder { job: &self.job, path: &path })
    }
}

/// A worker may be frozen while the model is evaluated.
fn freeze_meanwhile(context: &mut Context<'_>) {
    if context.kernel.chance(context.scenario.frozen_evaluations) {
        let after = context.kernel.between(0, 2 * context.scenario.eval_ms);
        context.kernel.schedule(SITE, after, Timer::Site(SiteTimer::Freeze));
    }
}

/// Whether something happens although the master waits until its state is saved.
fn continues_meanwhile(action: &Action) -> bool {
    match action {
        Action::Deliver { .. } | Action::Broken { .. } => false,
        Action::Timer(Timer::Master(timer)) => {
            matches!(**timer, MasterTimer::Save | MasterTimer::Commit { .. })
        }
        Action::Timer(_) => true,
    }
}

fn server_replaced() -> Status {
    Status::failed_precondition("this server was replaced")
}

/// Closes a stream with a status, after what was sent before.
fn close(context: &mut Context<'_>, conn: Option<ConnId>, status: Status) {
    if let Some(conn) = conn {
        context.send(conn, Message::Close(status));
    }
}

/// An order on its way to the platform, after those before it.
fn send_order(context: &mut Context<'_>, order: Order) {
    let delay = context.kernel.between(0, 5);
    *context.orders_until = (*context.orders_until).max(context.kernel.now + delay);
    let obey = SiteTimer::Obey { master: context.pid, order };
    context.kernel.schedule_at(SITE, *context.orders_until, Timer::Site(obey));
}
