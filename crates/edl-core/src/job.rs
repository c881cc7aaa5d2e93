// SPDX-License-Identifier: Apache-2.0
//! A whole job as one machine: events in, effects out, in order.
//!
//! `Job` makes every decision of a master. It conducts components that own their state, take facts
//! and return outcomes: durable facts, the roster of processes, the assignment of work, the strategy
//! that holds the parameters, checkpoints and stages. It reads no clock and does no I/O: the shell
//! around it (`edl-master`) turns messages into events and performs the effects.

mod books;
mod checkpoints;
mod course;
mod cuts;
mod durable;
mod effect;
mod event;
mod hybrid;
mod lending;
mod membership;
mod recovery;
mod refusal;
mod roster;
mod stages;
mod steps;
mod strategy;
mod work;
mod worlds;

use std::time::Duration;

use self::books::Books;
use self::checkpoints::Checkpoints;
pub use self::checkpoints::{CheckpointRef, CutFile, Holder};
pub use self::course::OWN_LOOP_GRACE;
use self::durable::Facts;
pub use self::durable::{Durable, Failure, Suspect};
pub use self::effect::{Command, Effect, End, LoadFrom, Note, PsOrder, Work};
pub use self::event::{Event, Held, News, Peer};
use self::lending::Lending;
pub use self::refusal::Refusal;
use self::roster::Roster;
use self::stages::{Stage, Stages};
use self::strategy::Strategy;
use self::worlds::GATHERING;
use crate::id::Term;
use crate::instances::Instances;
use crate::ledger::Ledger;
use crate::pod::Wait;
use crate::pool::Pool;
use crate::servers::Servers;
use crate::spec::{JobSpec, JobType};
use crate::time::Time;

/// Silence, processes and idle workers are checked this long after an event at the latest.
const TICK: Duration = Duration::from_millis(200);
/// A longer time between two checks means that the master itself was stopped.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// A job without any deadline is looked at this often.
const MAX_SLEEP: Duration = Duration::from_secs(3600);

/// What a job is made of when its master starts.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub spec: JobSpec,
    pub term: Term,
    pub n_records: u64,
    pub n_validation_records: u64,
    pub n_prediction_records: u64,
}

impl Config {
    /// Batches of an epoch.
    #[must_use]
    pub fn n_batches(&self) -> u32 {
        match self.spec.job_type {
            JobType::Train => self.spec.plan(self.n_records).n_batches(),
            // Nothing is trained, but applied sets need a size.
            JobType::Evaluate | JobType::Predict => 1,
        }
    }

    fn records_per_shard(&self) -> u64 {
        u64::from(self.spec.minibatch_size) * u64::from(self.spec.num_minibatches_per_task)
    }
}

/// The machine: a conductor over its components.
#[derive(Clone, Debug)]
pub struct Job {
    config: Config,
    durable: Facts,
    stages: Stages,
    lending: Lending,
    strategy: Strategy,
    instances: Instances,
    roster: Roster,
    /// Why the platform can start nothing at all.
    trouble: Option<Wait>,
    checkpoints: Checkpoints,
    next_number: u64,
    loss: Option<f32>,
    last_tick: Time,
    /// Nothing has happened since the last tick, and that tick changed nothing.
    is_quiet: bool,
    /// The most batches that were ever done.
    furthest: u64,
    books: Books,
    effects: Vec<Effect>,
}

impl Job {
    /// A job at its master's start, with what earlier masters have left.
    #[must_use]
    pub fn new(config: Config, durable: Durable, now: Time) -> Self {
        let spec = &config.spec;
        let strategy = Strategy::new(spec, &durable, now);
        let checkpoints = Checkpoints::new(spec, strategy.trains_in_steps(), now);
        let roster = Roster::new(spec);
        let wanted = durable.workers_wanted.unwrap_or(spec.num_workers);
        let n_ps = strategy.servers().n_ps();
        let instances = Instances::new(wanted, n_ps, spec.relaunch_on_worker_failure);
        let mut job = Self {
            stages: Stages::new(&config, now),
            lending: Lending::new(&config),
            strategy,
            instances,
            roster,
            trouble: None,
            checkpoints,
            next_number: 0,
            loss: None,
            last_tick: now,
            is_quiet: false,
            furthest: 0,
            books: Books::new(config.n_batches()),
            effects: Vec::new(),
            config,
            durable: Facts::new(durable),
        };
        job.set_limits();
        job
    }

    /// Takes one event and returns what is to be done, in order.
    pub fn handle(&mut self, event: Event, now: Time) -> Vec<Effect> {
        if matches!(self.stages.stage(), Stage::Ended) {
            return reply_after_end(&event).into_iter().collect();
        }
        self.forgive_pause(now);
        // Under load, other events may leave no time for a tick.
        let is_tick = event == Event::Tick || now.since(self.last_tick) >= TICK;
        let is_about_processes =
            is_tick || matches!(event, Event::Platform(_) | Event::Scale { .. });
        let n_done = self.ledger().n_done();
        let is_sign_of_life = matches!(
            event,
            Event::Tick | Event::WorkerHeard { .. } | Event::PsHeard { .. } | Event::Told { .. }
        );
        self.book(&event, now);
        self.take(event, now);
        if is_tick && !self.is_ended() {
            self.last_tick = now;
            self.check_silence(now);
            self.lending.add_idle(self.roster.workers().keys().copied());
        }
        if is_about_processes {
            self.reconcile(now);
        }
        self.advance(now);
        self.book_after(n_done, is_tick, now);
        let effects = std::mem::take(&mut self.effects);
        self.is_quiet = is_sign_of_life && effects.is_empty() && (is_tick || self.is_quiet);
        effects
    }

    fn take(&mut self, event: Event, now: Time) {
        match event {
            // Already recorded in the books.
            Event::Tick | Event::Told { .. } => {}
            Event::Platform(report) => self.platform(&report, now),
            Event::WorkerConnected { worker, incarnation, pid } => {
                self.worker_connected(worker, incarnation, pid, now);
            }
            Event::WorkerReady { worker, incarnation, model, capacity, held, peer } => {
                if self.roster.hears_worker(worker, incarnation, now) {
                    let peer = peer.map(|peer| *peer);
                    self.worker_ready(worker, *model, capacity, held, peer, now);
                }
            }
            Event::WorkerGone { worker, incarnation } => self.worker_gone(worker, incarnation),
            Event::WorkerLeaving { worker, incarnation } => {
                if self.roster.hears_worker(worker, incarnation, now) {
                    self.worker_leaving(worker);
                }
            }
            Event::WorkerHeard { worker, incarnation, waiting_for } => {
                if self.roster.hears_worker(worker, incarnation, now) {
                    self.roster.worker_waits(worker, waiting_for);
                }
            }
            Event::Member { worker, incarnation, news } => {
                if self.roster.hears_worker(worker, incarnation, now) {
                    self.world_news(worker, news, now);
                }
            }
            Event::BatchDone { worker, batch, generation, loss } => {
                self.batch_done(worker, batch, generation, loss, now);
            }
            Event::EvalDone { worker, eval, shard, generation, measures } => {
                self.eval_done(worker, (eval, shard), generation, *measures, now);
            }
            Event::PredictDone { worker, shard } => self.predict_done(worker, shard, now),
            Event::Failed { worker, incarnation, lease, item, error } => {
                if self.roster.hears_worker(worker, incarnation, now) {
                    self.work_failed(worker, lease, item, &error, now);
                }
            }
            Event::PsConnected { ps, pid, member } => self.ps_connected(ps, pid, *member, now),
            Event::PsGone { ps, incarnation } => self.roster.server_disconnected(ps, incarnation),
            Event::PsHeard { ps, incarnation } => self.roster.hears_server(ps, incarnation, now),
            Event::Loaded { ps, generation, sets } => self.ps_loaded(ps, generation, sets, now),
            Event::LoadFailed { ps, generation, error } => self.load_failed(ps, generation, &error),
            Event::CutDone { holder, cut, generation, files } => {
                self.cut_done(holder, cut, generation, files, now);
            }
            Event::CutFailed { cut, error } => self.cut_failed(cut, &error, now),
            Event::Committed { cut } => self.committed(cut, now),
            Event::Exported => self.end(End::Succeeded),
            Event::ExportFailed { error } => {
                self.end(End::Failed(format!("cannot write the result: {error}")));
            }
            Event::Scale { workers } => {
                let result = self.scale(workers);
                self.effects.push(Effect::Reply(result));
            }
            Event::Stop { reason, with_checkpoint } => {
                self.stop(&reason, with_checkpoint, now);
                // After what makes it durable, but the end comes last.
                let end = self.effects.pop_if(|effect| matches!(effect, Effect::Ended(_)));
                self.effects.push(Effect::Reply(Ok(())));
                self.effects.extend(end);
            }
            Event::Harm { instance, harm } => {
                let result = self.harm(instance, harm);
                self.effects.push(Effect::Reply(result));
            }
        }
    }

    /// Makes every decision that has become possible.
    fn advance(&mut self, now: Time) {
        if matches!(self.stages.stage(), Stage::Ended) {
            return;
        }
        self.expire(now);
        if self.is_ended() {
            return;
        }
        self.begin_load(now);
        self.advance_world(now);
        if self.is_ended() {
            return;
        }
        if self.is_serving() {
            self.advance_stage(now);
            self.grant(now);
        } else if let Stage::Stopping { reason, deadline } = self.stages.stage()
            && (now >= *deadline || !self.is_world_expected())
        {
            // There is no state to save.
            let end = End::Stopped(reason.clone());
            self.end(end);
        }
    }

    /// Why the platform can start nothing at all, if so.
    #[must_use]
    pub fn trouble_of_platform(&self) -> Option<&Wait> {
        self.trouble.as_ref()
    }

    /// Starts and stops processes until those that run are those that are wanted.
    fn reconcile(&mut self, now: Time) {
        if self.is_ended() {
            return;
        }
        if let Some(reason) = self.instances.hopeless() {
            return self.end(End::Failed(reason));
        }
        for order in self.instances.reconcile(now) {
            self.note_order(&order, now);
            self.effects.push(Effect::Platform(order));
        }
    }

    /// When `handle` must be called again at the latest, with `Event::Tick`.
    #[must_use]
    pub fn next_deadline(&self, now: Time) -> Time {
        let first = if self.is_quiet {
            // The last tick has dealt with everything before it.
            self.deadlines().filter(|deadline| *deadline > self.last_tick).min()
        } else {
            self.lending.deadlines().chain([self.last_tick + TICK]).min()
        };
        first.unwrap_or(now + MAX_SLEEP).max(now)
    }

    /// All times at which a decision can become possible without another event.
    fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let timeout = self.config.spec.heartbeat_timeout();
        let before = Duration::from_secs_f64(self.durable.elapsed_secs.max(0.0));
        // Whether a process is silent can be told only by a master that was not stopped itself.
        let listens = (!self.roster.is_empty()).then(|| self.last_tick + self.max_pause() / 2);
        (self.lending.deadlines())
            .chain(self.roster.deadlines())
            .chain(self.instances.next_deadline())
            .chain(self.checkpoints.deadlines())
            .chain(self.stages.deadlines(before))
            .chain(self.strategy.group().next_deadline())
            .chain(self.strategy.steps().into_iter().flat_map(move |steps| {
                steps.deadlines(self.config.spec.task_timeout(), [GATHERING, timeout])
            }))
            .chain(listens)
    }

    /// No check for this long means that the master itself was stopped.
    fn max_pause(&self) -> Duration {
        MIN_PAUSE.max(self.config.spec.heartbeat_timeout() / 2)
    }

    /// If no check was made for long, the master itself was stopped: others were not silent, it did
    /// not listen.
    fn forgive_pause(&mut self, now: Time) {
        if now.since(self.last_tick) < self.max_pause() {
            return;
        }
        self.roster.forgive_silence(now);
        if let Some(steps) = self.strategy.steps_mut() {
            steps.progressed(now);
        }
        self.lending.extend_all(now);
    }

    /// A number that this master has not used before.
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn note(&mut self, kind: &'static str, text: impl Into<String>) {
        self.effects.push(Effect::Note(Note { kind, text: text.into() }));
    }

    /// Changes what is durable; it is on disk before any effect that follows.
    fn change<T>(&mut self, change: impl FnOnce(&mut Durable) -> T) -> T {
        self.durable.change(&mut self.effects, change)
    }

    /// The parameters are there, and can be trained and evaluated.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.strategy.is_serving()
    }

    #[must_use]
    pub fn durable(&self) -> &Durable {
        &self.durable
    }

    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    #[must_use]
    pub fn servers(&self) -> &Servers {
        self.strategy.servers()
    }

    #[must_use]
    pub fn instances(&self) -> &Instances {
        &self.instances
    }

    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        self.lending.ledger()
    }

    #[must_use]
    pub fn loss(&self) -> Option<f32> {
        self.loss
    }

    #[must_use]
    pub fn is_ended(&self) -> bool {
        matches!(self.stages.stage(), Stage::Ended)
    }

    /// The state in one word.
    #[must_use]
    pub fn state(&self) -> &'static str {
        match (self.stages.stage(), &self.durable.end) {
            (Stage::Ended, Some(End::Succeeded)) => "succeeded",
            (Stage::Ended, Some(End::Failed(_))) => "failed",
            (Stage::Ended, _) => "stopped",
            _ if !self.is_serving() && !self.stages.has_started() => "starting",
            _ if !self.is_serving() => "recovering",
            (Stage::Evaluating { .. }, _) => "evaluating",
            (Stage::Working, _) => "running",
            (Stage::BestCut | Stage::Finishing | Stage::Exporting | Stage::Stopping { .. }, _) => {
                "finishing"
            }
        }
    }

    /// Records trained (or predicted) so far, and in all (none: no end).
    #[must_use]
    pub fn progress(&self) -> (u64, Option<u64>) {
        let in_shards = |n_shards: u32, total: u64| {
            (total.min(u64::from(n_shards) * self.config.records_per_shard()), Some(total))
        };
        match self.config.spec.job_type {
            JobType::Train => {
                let n_done = self.records_before(self.ledger().n_done());
                (n_done, self.stages.limit().map(|limit| self.records_before(limit)))
            }
            JobType::Evaluate => {
                let total = self.config.n_validation_records;
                if self.durable.end == Some(End::Succeeded) {
                    return (total, Some(total));
                }
                in_shards(self.lending.evaluation().map_or(0, |e| e.shards.n_done()), total)
            }
            JobType::Predict => {
                let n_shards = self.lending.predictions().map_or(0, Pool::n_done);
                in_shards(n_shards, self.config.n_prediction_records)
            }
        }
    }

    fn records_before(&self, position: u64) -> u64 {
        let plan = self.config.spec.plan(self.config.n_records);
        let n_batches = u64::from(plan.n_batches());
        let in_epoch = position % n_batches * u64::from(plan.minibatch_size);
        position / n_batches * self.config.n_records + in_epoch.min(self.config.n_records)
    }

    /// Panics if the components contradict each other.
    pub fn check_invariants(&self) {
        self.lending.check_invariants();
        self.strategy.check_invariants(self.durable.generation);
        assert_eq!(self.durable.end.is_some(), self.is_ended());
    }
}

/// A job that has ended does nothing, but it answers requests.
#[expect(clippy::wildcard_enum_match_arm, reason = "the rest asks nothing")]
fn reply_after_end(event: &Event) -> Option<Effect> {
    match event {
        Event::Stop { .. } => Some(Effect::Reply(Ok(()))),
        Event::Scale { .. } | Event::Harm { .. } => Some(Effect::Reply(Err(Refusal::Ended))),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
