// SPDX-License-Identifier: Apache-2.0
//! A worker with parameter servers as one machine: events in, effects out, in order.
//!
//! An item goes read → pull → compute, and a batch further → push → acknowledged. While one item
//! is computed, the parameters of the next are pulled and those after it are read. Whatever fails
//! on the way leaves the item where the servers' applied sets make a second attempt harmless.

mod connection;
mod effect;
mod event;
mod exit;
mod pipeline;
mod report;
mod work;

#[cfg(test)]
mod tests;

use std::time::Duration;

use self::connection::Connection;
pub use self::effect::{Effect, Records, Wants};
pub use self::event::{Computed, Event, Fault, Finished, Pass, Shard, Task, WorkItem};
use self::exit::Exit;
use self::pipeline::Pipeline;
pub use self::report::{Outbox, Priority, Report};
use self::work::Work;
use crate::activity::{Activity, WaitingFor};
use crate::goodput::TimeKind;
use crate::id::{BatchId, Generation, LeaseId};
use crate::job::Command;
use crate::machine::Machine;
use crate::model::ModelSpec;
use crate::route::Route;
use crate::spec::{JobSpec, Mode};
use crate::time::Time;

/// Leases held at once where acknowledgements come soon: one in progress and the next one.
const CAPACITY: u32 = 2;

/// What a worker knows when its first master has described the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub mode: Mode,
    /// Batches of an epoch.
    pub n_batches: u32,
    /// Records of a piece.
    pub minibatch_size: u32,
    /// Batches that share one pull of the dense parameters.
    pub dense_steps: u32,
    pub limits: Limits,
}

/// How long a worker that exits waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The job is over: until what is in progress has ended.
    pub finish: Duration,
    /// Until the servers have acknowledged the last gradients.
    pub last_answers: Duration,
    /// Asked to leave: until the batch in progress is finished. As a member of a world: until the
    /// master has announced a world without this worker, which takes over its lanes.
    pub hand_over: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            finish: Duration::from_millis(1200),
            last_answers: Duration::from_millis(700),
            hand_over: Duration::from_secs(10),
        }
    }
}

/// The machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    config: Config,
    /// Once it is built.
    model: Option<Box<ModelSpec>>,
    work: Work,
    pipeline: Pipeline,
    connection: Connection,
    /// Items computed by this process.
    n_computed: u64,
    /// The job stops or this worker leaves: nothing more is begun.
    is_draining: bool,
    exit: Option<Exit>,
    is_over: bool,
    effects: Vec<Effect>,
}

impl Config {
    #[must_use]
    pub fn new(spec: &JobSpec, n_records: u64, limits: Limits) -> Self {
        let mode = spec.mode();
        Self {
            mode,
            n_batches: spec.plan(n_records).n_batches(),
            minibatch_size: spec.minibatch_size,
            dense_steps: match mode {
                Mode::Async => spec.get_model_steps,
                // Where the age of parameters matters, a pull brings all of them.
                Mode::Bounded { .. } | Mode::Sync { .. } | Mode::Steps { .. } => 1,
            },
            limits,
        }
    }
}

/// The leases to hold at once. A round of batches is acknowledged together, so a worker that is
/// alone must be able to hold all of one.
#[must_use]
pub fn capacity(mode: Mode) -> u32 {
    match mode {
        Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => CAPACITY,
        Mode::Sync { grads_to_wait } => CAPACITY.max(grads_to_wait),
    }
}

impl Machine for Worker {
    type Event = Event;
    type Effect = Effect;

    fn handle(&mut self, event: Event, now: Time) -> Vec<Effect> {
        if self.is_over {
            return Vec::new();
        }
        match event {
            Event::Tick => {}
            Event::Built(model) => {
                self.model = Some(model);
                self.announce();
            }
            Event::Rejoined => {
                self.is_draining = false;
                self.release_shards();
                self.announce();
                if self.exit.is_some() {
                    self.hand_over();
                }
            }
            Event::Command(command) => self.obey(command, now),
            Event::Decoded { item, result: Ok(()) } => self.decoded(item),
            Event::Decoded { item, result: Err(error) } => self.not_decoded(item, error),
            Event::Connected { connection } => self.connection.connected(connection),
            Event::Pulled { connection, item } => self.pulled(connection, item),
            Event::NotPulled { connection, item, error } => {
                self.not_pulled(connection, item, error);
            }
            Event::Acknowledged { connection, batch, generation } => {
                self.acknowledged(connection, batch, generation);
            }
            Event::Broken { connection } => {
                if self.connection.broken(connection, now) {
                    self.disconnected();
                }
            }
            Event::Computed { item, result } => self.computed(item, result),
            Event::NotBegun { lease, fault } => self.fail_shard(lease, fault),
            Event::Finished { lease, result } => self.finished(lease, result),
            Event::Leave => self.leave(now),
        }
        self.advance(now);
        std::mem::take(&mut self.effects)
    }

    fn next_deadline(&self) -> Option<Time> {
        if self.is_over {
            return None;
        }
        match &self.exit {
            Some(exit) => Some(exit.deadline()),
            None => self.connection.retry_at(),
        }
    }

    fn check_invariants(&self) {
        self.work.check_invariants();
        self.pipeline.check_invariants();
        assert!(self.effects.is_empty(), "effects are left over");
        let is_up = self.connection.is_up();
        assert!(is_up || self.work.n_pushed() == 0, "a pushed batch without a connection");
        assert!(is_up || self.pipeline.pull.is_none(), "a pull without a connection");
    }
}

impl Worker {
    /// A worker whose first master has described the job; its model is being built.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            pipeline: Pipeline::default(),
            config,
            model: None,
            work: Work::default(),
            connection: Connection::new(),
            n_computed: 0,
            is_draining: false,
            exit: None,
            is_over: false,
            effects: Vec::new(),
        }
    }

    /// What the worker is doing or waiting for.
    #[must_use]
    pub fn activity(&self) -> Activity {
        use TimeKind::{Communicate, Compute, DataWait, Heal, Idle};
        let activity = |waiting_for, spends| Activity { waiting_for, spends };
        if self.model.is_none() {
            return activity(WaitingFor::Nothing, Idle);
        }
        if self.pipeline.computing_item().is_some() || self.work.is_finishing() {
            return activity(WaitingFor::Nothing, Compute);
        }
        if self.exit.is_some() {
            return activity(WaitingFor::Acknowledgements, Communicate);
        }
        let (is_idle, n_pushed) = (self.work.upcoming().next().is_none(), self.work.n_pushed());
        if is_idle && n_pushed == 0 {
            return activity(WaitingFor::Work, Idle);
        }
        if !is_idle && !self.connection.is_up() {
            // Before the first work there is nothing to recover from.
            let spends = if self.pipeline.has_computed { Heal } else { Idle };
            return activity(self.connection.waiting_for(), spends);
        }
        if !is_idle && self.pipeline.pull.is_some() {
            return activity(WaitingFor::Parameters, Communicate);
        }
        if is_idle || n_pushed >= pipeline::MAX_UNANSWERED {
            return activity(WaitingFor::Acknowledgements, Communicate);
        }
        activity(WaitingFor::Nothing, DataWait)
    }

    /// Batches and minibatches computed by this process.
    #[must_use]
    pub fn progress(&self) -> u64 {
        self.n_computed
    }

    fn obey(&mut self, command: Command, now: Time) {
        match command {
            Command::Route(route) => self.route(route),
            Command::Lease { lease, task } => self.assign(lease, task),
            Command::Revoke(lease) => self.release(lease),
            Command::Drain { .. } => self.drain(),
            Command::Stop(_) => self.stop(now),
            // The session takes the first two, and the rest is for members of a world.
            Command::Welcome
            | Command::Ping
            | Command::World(_)
            | Command::Go { .. }
            | Command::Pause { .. }
            | Command::Checkpoint(_) => {}
        }
    }

    fn advance(&mut self, now: Time) {
        self.return_open();
        if self.exit.is_none() || self.completes_round() {
            self.connection.retry_if_due(now, &mut self.effects);
            self.advance_items();
        }
        self.exit_if_done(now);
    }

    /// The job stops. In synchronous mode, all that is held belongs to the open round: it is
    /// finished, because what others have computed for it must not be lost.
    fn drain(&mut self) {
        self.release_shards();
        if !self.config.mode.is_sync() {
            self.return_rest();
        }
    }

    /// Finishes only what is computed or pushed, from now on.
    fn return_rest(&mut self) {
        self.is_draining = true;
        self.work.return_open(self.pipeline.current());
        self.report_kept();
    }

    /// In a drain, what is not computed is returned; a broken connection makes that more.
    fn return_open(&mut self) {
        if self.is_draining && self.work.return_open(self.pipeline.current()) {
            self.report_kept();
        }
    }

    fn report_kept(&mut self) {
        let kept = self.work.batches().collect();
        self.effects.push(Effect::Report(Report::Returned { kept }));
    }

    fn announce(&mut self) {
        let Some(model) = self.model.clone() else { return };
        let generation = self.connection.generation();
        self.effects.push(Effect::Report(Report::Ready {
            model,
            capacity: capacity(self.config.mode),
            held: generation.map_or_else(Vec::new, |generation| self.work.announce(generation)),
            peer: None,
        }));
    }

    /// A new generation voids all leases: the master assigns again what the servers do not have.
    fn route(&mut self, route: Route) {
        let generation = self.connection.generation();
        if generation.is_some_and(|before| route.generation < before) {
            return;
        }
        if generation.is_some_and(|before| route.generation != before) {
            self.work.clear_batches();
            self.release_shards();
        }
        if self.connection.follow(route, &mut self.effects) {
            self.disconnected();
        }
    }

    fn assign(&mut self, lease: LeaseId, task: Task) {
        match task {
            Task::Train { epoch, indices, skipped } => {
                if self.work.shard(lease).is_some() {
                    self.release(lease);
                }
                self.work.assign_batches(lease, epoch, indices, &skipped);
            }
            Task::Shard(shard) => {
                self.release(lease);
                self.work.assign_shard(lease, shard.clone(), self.config.minibatch_size);
                self.effects.push(Effect::Begin { lease, shard });
                if !self.work.is_open(WorkItem::Piece { lease, piece: 0 }) {
                    self.effects.push(Effect::Finish(lease));
                }
            }
        }
    }

    fn acknowledged(&mut self, connection: u64, batch: BatchId, generation: Generation) {
        let is_current = connection == self.connection.number()
            && self.connection.generation() == Some(generation);
        if !is_current {
            return;
        }
        let Some(loss) = self.work.acknowledged(batch) else { return };
        let done = Report::BatchDone { batch, generation, loss };
        self.effects.push(Effect::Report(done));
    }

    fn finished(&mut self, lease: LeaseId, result: Result<Finished, Fault>) {
        let finished = match result {
            Ok(finished) => finished,
            Err(fault) => return self.fail_shard(lease, fault),
        };
        let Some(Shard { number, pass, .. }) = self.work.release(lease) else { return };
        let report = match (finished, pass) {
            (Finished::Evaluation(measures), Pass::Evaluate { eval, .. }) => {
                Report::EvalDone { eval, shard: number, measures }
            }
            (Finished::Prediction, Pass::Predict { .. }) => Report::PredictDone { shard: number },
            (Finished::Evaluation(_), Pass::Predict { .. })
            | (Finished::Prediction, Pass::Evaluate { .. }) => {
                unreachable!("the result of a shard fits its pass")
            }
        };
        self.effects.push(Effect::Report(report));
    }

    fn fail_shard(&mut self, lease: LeaseId, fault: Fault) {
        let Some(index) = self.work.shard(lease).map(|shard| shard.number) else { return };
        self.release(lease);
        self.effects.push(Effect::Report(fault.report(lease, index)));
    }

    /// Returns the lease of `item` with a reason; the worker continues with others.
    fn fail(&mut self, item: WorkItem, fault: Fault) {
        let Some(lease) = self.work.lease_of(item) else { return };
        match item {
            WorkItem::Batch(batch) => {
                self.release(lease);
                self.effects.push(Effect::Report(fault.report(lease, batch.index)));
            }
            WorkItem::Piece { .. } => self.fail_shard(lease, fault),
        }
    }

    /// Forgets a lease and what was prepared for it.
    fn release(&mut self, lease: LeaseId) {
        if self.work.release(lease).is_some() {
            self.drop_shard(lease);
        }
    }

    fn release_shards(&mut self) {
        for lease in self.work.release_shards() {
            self.drop_shard(lease);
        }
    }

    fn drop_shard(&mut self, lease: LeaseId) {
        self.pipeline.void_pieces(lease);
        self.effects.push(Effect::Drop(lease));
    }
}
