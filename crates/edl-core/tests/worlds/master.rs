// SPDX-License-Identifier: Apache-2.0
//! The shell of a master around the real machine, and the judge of what the machine accepts.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::id::{Generation, Incarnation, Term, WorkerId};
use edl_core::job::{Config, Effect, End, Event, Holder, Job, News, Peer};
use edl_core::metric::{Measures, Metric};
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use edl_core::platform::{Ended, Report};
use edl_core::time::Time;

use crate::history::{State, measure};
use crate::kernel::{ConnId, Kernel, millis};
use crate::message::{Message, Timer};
use crate::site::Context;

pub(crate) struct Master {
    term: Term,
    pub(crate) job: Job,
    started_at: Time,
    /// When the next tick is planned.
    tick_at: Option<Time>,
    sessions: BTreeMap<ConnId, (WorkerId, Incarnation)>,
    workers: BTreeMap<WorkerId, ConnId>,
    pub(crate) ended: Option<End>,
    pub(crate) exported: Option<State>,
}

pub(crate) fn model() -> ModelSpec {
    ModelSpec {
        name: "digest".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: vec![Metric::loss()],
        optimizer: OptimizerSpec::sgd(1.0),
    }
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
        context.kernel.schedule(context.pid, millis(0), Timer::Tick);
        Self {
            term,
            job,
            started_at: context.kernel.now,
            tick_at: Some(context.kernel.now),
            sessions: BTreeMap::new(),
            workers: BTreeMap::new(),
            ended: None,
            exported: None,
        }
    }

    fn now(&self, kernel: &Kernel) -> Time {
        Time::since_origin(kernel.now.since(self.started_at))
    }

    pub(crate) fn on_message(&mut self, context: &mut Context<'_>, conn: ConnId, message: Message) {
        if let Message::Hello { worker, incarnation } = message {
            self.sessions.insert(conn, (worker, incarnation));
            if let Some(before) = self.workers.insert(worker, conn) {
                context.kernel.hang_up(before);
            }
            let pid = crate::worker::pid_of(incarnation);
            return self.handle(context, Event::WorkerConnected { worker, incarnation, pid });
        }
        let Some((worker, incarnation)) = self.sessions.get(&conn).copied() else { return };
        if self.workers.get(&worker) != Some(&conn) {
            return;
        }
        let event = match message {
            Message::Ready { step } => {
                let (address, unix_path) = (String::new(), String::new());
                let peer = Some(Box::new(Peer { address, unix_path, probe: 7, step }));
                let (model, held) = (Box::new(model()), Vec::new());
                Event::WorkerReady { worker, incarnation, model, capacity: 2, held, peer }
            }
            Message::Leaving => Event::WorkerLeaving { worker, incarnation },
            Message::Heartbeat { waiting_for } => {
                Event::WorkerHeard { worker, incarnation, waiting_for }
            }
            Message::News(news, state) => {
                self.judge(context, worker, &news, state);
                Event::Member { worker, incarnation, news }
            }
            Message::CutDone { cut, generation, files } => {
                Event::CutDone { holder: Holder::Worker(worker), cut, generation, files }
            }
            Message::CutFailed { cut } => Event::CutFailed { cut, error: "not written".into() },
            Message::EvalDone { eval, shard, generation, value } => {
                let mut measures = Measures::new(&[Metric::loss()]);
                measures.add_loss(value, 1);
                Event::EvalDone { worker, eval, shard, generation, measures: Box::new(measures) }
            }
            Message::Failed { lease, shard } => {
                let error = "step is over".into();
                Event::Failed { worker, incarnation, lease, item: shard, error }
            }
            other => panic!("a worker never says {other:?}"),
        };
        self.handle(context, event);
    }

    /// Whatever a member of a world that counts holds is what an undisturbed worker would hold.
    fn judge(&self, context: &Context<'_>, worker: WorkerId, news: &News, held: Option<State>) {
        let worlds = self.job.worlds().expect("this is AllReduce");
        match news {
            News::Formed { world, step, .. } => {
                let current = worlds.current().filter(|current| current.id == *world);
                if current.is_some_and(|c| c.members.iter().any(|m| m.worker == worker)) {
                    let expected = context.history.state(*step);
                    assert_eq!(held, Some(expected), "{worker} formed another state");
                }
            }
            News::Stepped { world, step, hash, .. } if worlds.is_heard(*world) => {
                assert_eq!(*hash, context.history.gradient_of(*step), "step {step} on {worker}");
            }
            News::Stepped { .. }
            | News::Pace { .. }
            | News::PeerLost { .. }
            | News::StepFailed { .. }
            | News::Torn { .. }
            | News::NotLoaded { .. } => {}
        }
    }

    pub(crate) fn on_broken(&mut self, context: &mut Context<'_>, conn: ConnId) {
        let Some((worker, incarnation)) = self.sessions.remove(&conn) else { return };
        if self.workers.get(&worker) == Some(&conn) {
            self.workers.remove(&worker);
            self.handle(context, Event::WorkerGone { worker, incarnation });
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
            Timer::Report(report) => self.handle(context, Event::Platform(report)),
            Timer::Commit { cut, folder, version, files } => {
                if !self.rules(context) {
                    return;
                }
                // Meanwhile it may have been given up, and its folder deleted.
                if context.disk.is_full || !context.disk.folders.contains_key(&folder) {
                    let error = "no space left on device".into();
                    return self.handle(context, Event::CutFailed { cut, error });
                }
                let n_partitions = context.scenario.spec.partitions;
                assert_eq!(files.len(), n_partitions as usize);
                let whole = context.disk.whole(&folder, n_partitions);
                assert_eq!(whole, context.history.state(version), "a cut of step {version}");
                let before = context.disk.manifests.insert(folder, version);
                assert_eq!(before, None, "a manifest is never overwritten");
                // The manifest is there, but the master may die before it hears of it.
                context.after(0, 5, Timer::Answer(Box::new(Event::Committed { cut })));
            }
            Timer::Export { folder } => {
                if self.rules(context) {
                    let n_partitions = context.scenario.spec.partitions;
                    self.exported = context.disk.load(&folder, n_partitions);
                    self.handle(context, Event::Exported);
                }
            }
            other => panic!("a master never set {other:?}"),
        }
    }

    /// Whether no other master has come since; else this one ends.
    fn rules(&self, context: &mut Context<'_>) -> bool {
        let rules = context.disk.term == self.term;
        if !rules {
            context.exit = Some(Ended::Exit(3));
        }
        rules
    }

    pub(crate) fn handle(&mut self, context: &mut Context<'_>, event: Event) {
        if self.ended.is_some() || context.exit.is_some() {
            return;
        }
        let now = self.now(context.kernel);
        let before = (self.job.durable().generation, self.job.ledger().n_done());
        let effects = self.job.handle(event, now);
        self.job.check_invariants();
        self.plan_tick(context);
        self.check_monotone(before);
        let dies = context.kernel.chance(context.scenario.master_deaths) && context.may_die();
        let survives =
            if dies { context.kernel.rng.below(effects.len() as u64 + 1) } else { u64::MAX };
        for (n, effect) in (0..).zip(effects) {
            if n == survives {
                context.kernel.note_text(context.pid, "master died in its effects", "");
                context.exit = Some(Ended::Signal(9));
            }
            if context.exit.is_some() {
                return;
            }
            self.perform(context, effect);
        }
    }

    /// Sleeps until the machine's next deadline, as the shell does.
    fn plan_tick(&mut self, context: &mut Context<'_>) {
        let now = self.now(context.kernel);
        let wait = self.job.next_deadline(now).since(now).max(millis(1));
        let at = context.kernel.now + wait;
        if self.tick_at.is_none_or(|planned| at < planned) {
            self.tick_at = Some(at);
            context.kernel.schedule_at(context.pid, at, Timer::Tick);
        }
    }

    /// Within one generation steps are taken back only if nobody of the world holds them.
    fn check_monotone(&self, (generation, n_done): (Generation, u64)) {
        let now_done = self.job.ledger().n_done();
        if self.job.durable().generation != generation || now_done >= n_done {
            return;
        }
        let worlds = self.job.worlds().expect("this is AllReduce");
        let members = worlds.current().map_or(&[][..], |world| &world.members);
        for member in members {
            let step = self.job.peer(member.worker).and_then(|peer| peer.step);
            let is_ahead = member.has_state && step > Some(now_done);
            assert!(!is_ahead, "{} holds step {step:?} and yet {now_done} counts", member.worker);
        }
    }

    fn perform(&mut self, context: &mut Context<'_>, effect: Effect) {
        match effect {
            Effect::Persist => {
                if self.rules(context) {
                    context.disk.durable = self.job.durable().clone();
                }
            }
            Effect::ToWorker(worker, command) => {
                if let Some(conn) = self.workers.get(&worker) {
                    let told = Message::Told { term: self.term, command };
                    context.kernel.send(*conn, context.pid, told);
                }
            }
            Effect::CloseWorker(worker, _) | Effect::RefuseWorker(worker, _) => {
                if let Some(conn) = self.workers.remove(&worker) {
                    self.sessions.remove(&conn);
                    context.kernel.hang_up(conn);
                }
            }
            Effect::Platform(order) => context.order(order),
            Effect::PrepareCut { folder, .. } => {
                let before = context.disk.folders.insert(folder, BTreeMap::new());
                assert_eq!(before, None, "a folder is of one cut");
            }
            Effect::Commit { cut, folder, version, files, .. } => {
                context.after(0, 10, Timer::Commit { cut, folder, version, files });
            }
            Effect::Delete(folder) => {
                if self.rules(context) {
                    context.disk.folders.remove(&folder);
                    context.disk.manifests.remove(&folder);
                }
            }
            Effect::Export { checkpoint } => {
                context.after(0, 20, Timer::Export { folder: checkpoint });
            }
            Effect::Evaluated(evaluated) => self.judge_evaluation(context, &evaluated),
            Effect::Note(note) => context.kernel.note_text(context.pid, note.kind, &note.text),
            Effect::EvaluationStarted { .. } | Effect::Reply(_) => {}
            Effect::Ended(end) => self.ended = Some(end),
            Effect::ToPs(..) | Effect::ClosePs(_) | Effect::JoinPredictions { .. } => {
                panic!("there are no servers and no predictions")
            }
        }
    }

    /// An evaluation of a version measures the state of that version, in all its shards.
    fn judge_evaluation(
        &self,
        context: &mut Context<'_>,
        evaluated: &edl_core::evaluation::Evaluated,
    ) {
        let spec = &context.scenario.spec;
        let per_shard = u64::from(spec.minibatch_size * spec.num_minibatches_per_task);
        let n_shards = context.scenario.n_validation_records.div_ceil(per_shard);
        let state = context.history.state(evaluated.version);
        let mut all = Measures::new(&[Metric::loss()]);
        for shard in 0..u32::try_from(n_shards).expect("few shards") {
            let mut measures = Measures::new(&[Metric::loss()]);
            measures.add_loss(measure(state, shard), 1);
            all.merge(&measures);
        }
        assert_eq!(evaluated.metrics, all.values(), "of version {}", evaluated.version);
        context.kernel.count("evaluations");
    }

    /// The model that was kept as the best one is one that was evaluated as such.
    pub(crate) fn check_best(&self, context: &Context<'_>) {
        let durable = self.job.durable();
        let Some(best) = &durable.best else { return };
        let version = context.disk.manifests.get(best).expect("the best model is there");
        let best: BTreeSet<u64> =
            durable.evaluations.iter().filter(|e| e.is_best).map(|e| e.version).collect();
        assert!(best.contains(version), "version {version} is none of the best {best:?}");
    }

    pub(crate) fn running(&mut self, context: &mut Context<'_>, report: Report) {
        self.handle(context, Event::Platform(report));
    }
}
