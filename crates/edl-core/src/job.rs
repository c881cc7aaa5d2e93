// SPDX-License-Identifier: Apache-2.0
//! A whole job as one machine: events in, effects out, in order.
//!
//! `Job` makes every decision of a master. It conducts components that own their state, take facts
//! and return outcomes: durable facts, the roster of processes, the assignment of work, the strategy
//! that holds the parameters, checkpoints and stages. It reads no clock and does no I/O: the shell
//! around it (`edl-master`) turns messages into events and performs the effects.

mod accounting;
mod assignments;
mod checkpointing;
mod checkpoints;
mod durable;
mod effect;
mod event;
mod event_kind;
mod facts;
mod frozen;
mod hybrid;
mod lifecycle;
mod membership;
mod nonfinite;
mod pace;
mod recovery;
mod refusal;
mod roster;
mod spares;
mod stages;
mod stalled;
mod state;
mod step_control;
mod stopping;
mod strategy;
mod work;
mod worlds;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use self::accounting::Accounting;
use self::assignments::Assignments;
use self::checkpoints::Checkpoints;
pub use self::checkpoints::{CheckpointFile, CheckpointRef, CheckpointWriter};
use self::durable::Persisted;
pub use self::durable::{Durable, Failure, FoundCheckpoint, Suspect};
pub use self::effect::{Command, Effect, LoadFrom, MemberCheckpoint, Note};
pub use self::event::{Event, HeldLease, MemberReport, Peer};
pub use self::event_kind::EventKind;
pub use self::facts::Fact;
pub use self::lifecycle::CUSTOM_LOOP_GRACE;
use self::nonfinite::Losses;
use self::pace::Pace;
pub use self::refusal::Refusal;
use self::roster::Roster;
pub use self::stages::STOP_TIMEOUT;
use self::stages::{Stage, Stages};
pub use self::state::{End, JobState};
use self::strategy::Strategy;
use self::worlds::GATHERING;
use crate::id::{Incarnation, PsId, RunId, Term, WorkerId};
use crate::instances::Instances;
use crate::ledger::Ledger;
use crate::pod::Wait;
use crate::pool::Pool;
use crate::server;
use crate::servers::Servers;
use crate::spec::{JobSpec, JobType};
use crate::time::Time;
use crate::worker;

/// Silence, processes and idle workers are checked this long after an event at the latest.
const TICK: Duration = Duration::from_millis(200);
/// A longer time between two checks means that the master itself was stopped.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// A job without any deadline is checked this often.
const MAX_SLEEP: Duration = Duration::from_secs(3600);

/// What a job is made of when its master starts.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub spec: JobSpec,
    pub run: RunId,
    pub term: Term,
    pub n_records: u64,
    pub n_validation_records: u64,
    pub n_prediction_records: u64,
    /// The folder for predictions.
    pub output: String,
    /// The version of the model that is evaluated, in a job that does not train.
    pub evaluated_version: u64,
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
    durable: Persisted,
    stages: Stages,
    assignments: Assignments,
    strategy: Strategy,
    instances: Instances,
    roster: Roster,
    /// Those that are ready, as of the last change of workers or tick.
    spares: BTreeSet<WorkerId>,
    /// Servers that are asked to exit stay for a checkpoint, also after they have reconnected.
    keeps_servers: bool,
    /// Why the platform can start nothing at all.
    trouble: Option<Wait>,
    /// Workers whose predictions had no room on their disks when they last tried.
    without_room: BTreeSet<WorkerId>,
    /// When there was no room for predictions of a worker the last time.
    last_without_room: BTreeMap<WorkerId, Time>,
    checkpoints: Checkpoints,
    next_number: u64,
    losses: Losses,
    pace: Pace,
    last_tick: Time,
    /// Set if nothing has happened since the last tick, and that tick changed nothing: when the
    /// next decision could become possible. Signs of life can only postpone that.
    wake_at: Option<Time>,
    /// The world needed no change, or its members were not all ready for one, when its count of
    /// changes and the maximum number of its members were these, and only routine reports have come
    /// since.
    unchanged_world: Option<(u64, Option<u32>)>,
    /// The most batches that were ever done.
    furthest: u64,
    accounting: Accounting,
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
        let instances =
            Instances::new(wanted, n_ps, spec.relaunch_on_worker_failure).with_spares(spec.spares);
        let mut job = Self {
            stages: Stages::new(&config, now),
            assignments: Assignments::new(&config),
            strategy,
            instances,
            roster,
            spares: BTreeSet::new(),
            keeps_servers: false,
            trouble: None,
            without_room: BTreeSet::new(),
            last_without_room: BTreeMap::new(),
            checkpoints,
            next_number: 0,
            losses: Losses::default(),
            pace: Pace::default(),
            last_tick: now,
            wake_at: None,
            unchanged_world: None,
            furthest: 0,
            accounting: Accounting::new(config.n_batches()),
            effects: Vec::new(),
            config,
            durable: Persisted::new(durable),
        };
        job.set_limits();
        job
    }

    /// Takes one event and returns what is to be done, in order.
    pub fn handle(&mut self, event: Event, now: Time) -> Vec<Effect> {
        if matches!(self.stages.stage(), Stage::Ended) {
            // Processes report how they spent their time until they leave.
            if event.is_time_report() {
                self.account(&event, now);
            }
            return reply_after_end(&event).into_iter().collect();
        }
        self.forgive_pause(now);
        // Under load, other events may leave no time for a tick.
        let is_tick = matches!(event, Event::Tick) || now.since(self.last_tick) >= TICK;
        let is_about_processes =
            is_tick || matches!(event, Event::Platform(_) | Event::Scale { .. });
        let n_done = self.ledger().n_done();
        let is_sign_of_life = event.is_sign_of_life();
        if is_tick || !event.is_routine() {
            self.unchanged_world = None;
        }
        let is_about_workers = is_tick || event.changes_workers();
        self.account(&event, now);
        self.take(event, now);
        if is_tick && !self.is_ended() {
            self.last_tick = now;
            self.check_silence(now);
            self.check_frozen(now);
            self.keep_holders();
            self.assignments.add_idle(self.roster.worker_ids());
        }
        if is_about_processes {
            self.reconcile(now);
        }
        if is_about_workers {
            self.choose_trainers(now);
        }
        self.advance(now);
        if is_about_workers && !self.is_ended() {
            self.update_spares(now);
        }
        self.account_after(n_done, is_tick, now);
        let effects = std::mem::take(&mut self.effects);
        if !is_sign_of_life || !effects.is_empty() {
            self.wake_at = None;
        } else if is_tick {
            // The tick has dealt with everything before it.
            let first = self.deadlines().filter(|deadline| *deadline > now).min();
            self.wake_at = Some(first.unwrap_or(now + MAX_SLEEP));
        }
        effects
    }

    fn take(&mut self, event: Event, now: Time) {
        match event {
            Event::Tick => {}
            Event::Platform(report) => self.platform(&report, now),
            Event::WorkerConnected { worker, incarnation, pid } => {
                self.worker_connected(worker, incarnation, pid, now);
            }
            Event::WorkerGone { worker, incarnation } => self.worker_gone(worker, incarnation),
            Event::FromWorker { worker, incarnation, report } => {
                if self.unchanged_world.is_some() && self.roster.is_frozen(worker) {
                    // It is heard again, so it can be in a world.
                    self.unchanged_world = None;
                }
                if report.counts_from_any_process()
                    || self.roster.hears_worker(worker, incarnation, now)
                {
                    self.worker_reported(worker, report, now);
                }
            }
            Event::PsConnected { ps, pid, member } => self.ps_connected(ps, pid, *member, now),
            Event::PsGone { ps, incarnation } => self.roster.server_disconnected(ps, incarnation),
            Event::FromPs { ps, incarnation, report } => {
                self.ps_reported(ps, incarnation, report, now);
            }
            Event::CheckpointFailed { checkpoint, error } => {
                self.checkpoint_failed(checkpoint, &error, now)
            }
            Event::Committed { checkpoint } => self.committed(checkpoint, now),
            Event::Exported => self.end(End::Succeeded),
            Event::ExportProgressed => self.stages.export_progressed(now),
            Event::ExportFailed { error, is_disk_full } => {
                self.export_failed(&error, is_disk_full, now);
            }
            Event::Scale { workers } => {
                let result = self.scale(workers);
                self.effects.push(Effect::Reply(result));
            }
            Event::Stop { reason, within } => {
                self.stop(&reason, within, now);
                self.reply_before_end();
            }
            Event::Chaos { instance, action } => {
                let result = self.chaos(instance, action);
                self.effects.push(Effect::Reply(result));
            }
        }
    }

    fn worker_reported(&mut self, worker: WorkerId, report: worker::Report, now: Time) {
        use worker::Report;
        match report {
            Report::Ready { model, capacity, held, peer } => {
                let peer = peer.map(|peer| *peer);
                self.worker_ready(worker, *model, capacity, held, peer, now);
            }
            Report::Returned { kept } => self.work_returned(worker, &kept),
            Report::Leaving => self.worker_leaving(worker),
            Report::Heartbeat { waiting_for, progress } => {
                let time = self.roster.worker_heartbeat(worker, waiting_for, progress, now);
                if let Some(time) = time {
                    self.worker_progressed(worker, time, now);
                }
            }
            // Already accounted.
            Report::Spending(_) => {}
            Report::Member(report) => self.member_reported(worker, report, now),
            Report::BatchPushed { batch } => self.batch_pushed(worker, batch, now),
            Report::BatchDone { batch, generation, loss } => {
                self.batch_done(worker, batch, generation, loss, now);
            }
            Report::EvalDone { eval, shard, measures } => {
                self.eval_done(worker, (eval, shard), *measures, now);
            }
            Report::PredictDone { shard } => self.predict_done(worker, shard, now),
            Report::Failed { lease, index, error } => {
                self.work_failed(worker, lease, index, &error, now);
            }
            Report::NonFinite { lease, index, error } => {
                self.batch_nonfinite(worker, lease, index, &error, now);
            }
            Report::DiskFull { lease, index, error } => {
                self.output_not_written(worker, lease, index, &error, now);
            }
            Report::CheckpointDone { checkpoint, generation, files } => {
                let writer = CheckpointWriter::Worker(worker);
                self.checkpoint_done(writer, checkpoint, generation, files, now);
            }
            Report::CheckpointFailed { checkpoint, error } => {
                self.checkpoint_failed(checkpoint, &error, now);
            }
        }
    }

    fn ps_reported(
        &mut self,
        ps: PsId,
        incarnation: Incarnation,
        report: server::Report,
        now: Time,
    ) {
        use server::Report;
        match report {
            Report::Heartbeat => self.roster.hears_server(ps, incarnation, now),
            // Already accounted; and what only the shell has asked for.
            Report::Spending(_) | Report::States { .. } => {}
            Report::Loaded { generation, states } => self.ps_loaded(ps, generation, states, now),
            Report::LoadFailed { generation, error } => self.load_failed(ps, generation, &error),
            Report::CheckpointStarted { checkpoint } => self.checkpoints.started(ps, checkpoint),
            Report::CheckpointDone { checkpoint, generation, files } => {
                let writer = CheckpointWriter::Ps(ps);
                self.checkpoint_done(writer, checkpoint, generation, files, now);
            }
            Report::CheckpointFailed { checkpoint, error } => {
                self.checkpoint_failed(checkpoint, &error, now);
            }
        }
    }

    /// Replies after what makes the stop durable, but the end comes last.
    fn reply_before_end(&mut self) {
        let end = self.effects.pop_if(|effect| matches!(effect, Effect::Ended(_)));
        self.effects.push(Effect::Reply(Ok(())));
        self.effects.extend(end);
    }

    /// Makes every decision that has become possible.
    fn advance(&mut self, now: Time) {
        if matches!(self.stages.stage(), Stage::Ended) {
            return;
        }
        self.expire(now);
        self.check_export(now);
        if self.is_ended() {
            return;
        }
        self.begin_load(now);
        if self.is_ended() {
            return;
        }
        self.advance_world(now);
        if self.is_ended() {
            return;
        }
        if self.is_serving() {
            self.advance_stage(now);
            self.grant(now);
        } else if let Some(stop) = self.stages.stopping()
            && (now >= stop.deadline || !self.is_world_expected())
        {
            // There is no state to save.
            self.end_stop(None);
        }
    }

    /// What keeps the job from working as it should, if anything: the platform can start nothing at
    /// all, or something cannot be written.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let unwritten = || {
            let why = self.checkpoints.failure()?;
            let is_last = *self.stages.stage() == Stage::Finishing;
            let is_result = self.config.spec.job_type == JobType::Predict
                || matches!(self.stages.stage(), Stage::Exporting { .. })
                || is_last && self.is_exportable();
            Some(match (is_result, is_last) {
                (true, _) => format!("cannot write the result: {why}; retrying"),
                (false, true) => format!("cannot write the final checkpoint: {why}; retrying"),
                (false, false) => format!("cannot write checkpoints: {why}; retrying"),
            })
        };
        self.trouble.as_ref().map(ToString::to_string).or_else(unwritten)
    }

    /// Starts and stops processes until those that run are those that are wanted.
    fn reconcile(&mut self, now: Time) {
        if self.is_ended() {
            return;
        }
        if let Some(reason) = self.instances.give_up_reason() {
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
        let tick = || self.assignments.deadlines().chain([self.last_tick + TICK]).min();
        self.wake_at.or_else(tick).unwrap_or(now + MAX_SLEEP).max(now)
    }

    /// All times at which a decision can become possible without another event.
    fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let timeout = self.config.spec.heartbeat_timeout();
        let before = Duration::from_secs_f64(self.durable.elapsed_secs.max(0.0));
        // Only a master that was not stopped itself can detect silent processes.
        let listens = (!self.roster.is_empty()).then(|| self.last_tick + self.max_pause() / 2);
        (self.assignments.deadlines())
            .chain(self.roster.deadlines())
            .chain(self.instances.next_deadline())
            .chain(self.checkpoints.deadlines())
            .chain(self.stages.deadlines(before))
            .chain(self.strategy.group().next_deadline())
            .chain(
                self.strategy.steps().into_iter().flat_map(move |steps| {
                    steps.deadlines(self.hang_timeout(), [GATHERING, timeout])
                }),
            )
            .chain(self.freeze_timeout().map(|_| self.last_tick + TICK))
            .chain(listens)
    }

    /// No check for this long means that the master itself was stopped.
    fn max_pause(&self) -> Duration {
        MIN_PAUSE.max(self.config.spec.heartbeat_timeout() / 2)
    }

    /// If no check was made for long, the master itself was stopped: others were not silent, it did
    /// not listen.
    fn forgive_pause(&mut self, now: Time) {
        let pause = now.since(self.last_tick);
        if pause < MIN_PAUSE || pause < self.max_pause() {
            return;
        }
        self.roster.forgive_silence(now);
        if let Some(steps) = self.strategy.steps_mut() {
            steps.progressed(now);
        }
        self.assignments.extend_all(now);
    }

    /// A number that this master has not used before.
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn note(&mut self, kind: EventKind, text: impl Into<String>) {
        self.effects.push(Effect::Note(Note { kind, text: text.into() }));
    }

    /// Changes what is durable; it is on disk before any effect that follows.
    fn change<T>(&mut self, change: impl FnOnce(&mut Durable) -> T) -> T {
        self.durable.change(&mut self.effects, change)
    }

    /// The parameters are available, and can be trained and evaluated.
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
        self.assignments.ledger()
    }

    #[must_use]
    pub fn loss(&self) -> Option<f32> {
        self.losses.smoothed()
    }

    #[must_use]
    pub fn is_ended(&self) -> bool {
        matches!(self.stages.stage(), Stage::Ended)
    }

    #[must_use]
    pub fn state(&self) -> JobState {
        match self.stages.stage() {
            Stage::Ended => self.durable.end.as_ref().map_or(JobState::Stopped, End::state),
            _ if !self.is_serving() && !self.stages.has_started() => JobState::Starting,
            _ if !self.is_serving() => JobState::Recovering,
            Stage::Evaluating { .. } => JobState::Evaluating,
            Stage::Working => JobState::Running,
            Stage::BestCheckpoint
            | Stage::Finishing
            | Stage::Exporting { .. }
            | Stage::Stopping(_) => JobState::Finishing,
        }
    }

    /// Records trained (or predicted) so far, and in all (none: no end).
    #[must_use]
    pub fn progress(&self) -> (u64, Option<u64>) {
        let in_shards = |total: u64| {
            let n_shards = u64::from(self.assignments.shards().map_or(0, Pool::n_done));
            (total.min(n_shards * self.config.records_per_shard()), Some(total))
        };
        match self.config.spec.job_type {
            JobType::Train => {
                let n_done = self.records_before(self.ledger().n_done());
                (n_done, self.stages.limit().map(|limit| self.records_before(limit)))
            }
            JobType::Evaluate => {
                let total = self.config.n_validation_records;
                let has_succeeded = self.durable.end == Some(End::Succeeded);
                if has_succeeded { (total, Some(total)) } else { in_shards(total) }
            }
            JobType::Predict => in_shards(self.config.n_prediction_records),
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
        self.assignments.check_invariants();
        self.strategy.check_invariants(self.durable.generation);
        assert_eq!(self.durable.end.is_some(), self.is_ended());
    }
}

/// A job that has ended does nothing, but it answers requests.
#[expect(clippy::wildcard_enum_match_arm, reason = "the rest asks nothing")]
fn reply_after_end(event: &Event) -> Option<Effect> {
    match event {
        Event::Stop { .. } => Some(Effect::Reply(Ok(()))),
        Event::Scale { .. } | Event::Chaos { .. } => Some(Effect::Reply(Err(Refusal::Ended))),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
