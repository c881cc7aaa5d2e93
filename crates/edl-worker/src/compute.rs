// SPDX-License-Identifier: Apache-2.0
//! The compute thread: takes what is lent, item by item, through the model.
//!
//! It owns the model and all decisions; what can block is done by others. Each item goes
//! read → pull → compute, and a batch further → push → acknowledged. While one item is computed
//! the next one's parameters are pulled and those after it are read. Whatever fails on the way
//! leaves the item where the servers' applied sets make a second try harmless.

mod servers;
pub(crate) mod shard;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use edl_core::batch::BatchPlan;
use edl_core::goodput;
use edl_core::id::{BatchId, Generation, LeaseId};
use edl_core::metric::Metric;
use edl_core::spec::{JobSpec, Mode};
use edl_net::data::{Route, Versions};
use edl_net::proto::{self, worker_message::Kind};
use tokio::sync::mpsc;
use tracing::{debug, info, trace, warn};

use crate::allreduce;
use crate::feed::{Decoded, Read};
use crate::link::{Ask, News};
use crate::progress::Progress;
use crate::servers::Pull;
use crate::train::{Lookups, Trainer};
use crate::work::{Item, Task, Work};

use servers::Connection;
use shard::Shard;

/// Items that are read beyond the one whose parameters are pulled.
const READ_AHEAD: usize = 2;
/// Gradients sent and not yet answered, where nothing else bounds them.
const MAX_UNANSWERED: usize = 4;
/// How long a wait lasts before it is looked at again.
const LOOK_UP: Duration = Duration::from_secs(1);

/// What the compute thread hears.
pub(crate) enum Event {
    Route(Route),
    Lease(LeaseId, Loan),
    Revoke(LeaseId),
    /// A master has taken this worker in again, and has lent its shards to others meanwhile.
    Rejoined,
    Decoded(Item, Result<Decoded, String>),
    Link(u64, News),
    /// For the loop of AllReduce.
    AllReduce(Box<allreduce::Event>),
    /// Finish the item at hand and go.
    Leave,
    /// Go.
    Stop,
    /// A thread that this one cannot do without has panicked.
    Died(&'static str),
}

/// Work as the master lends it.
#[derive(Debug)]
pub(crate) enum Loan {
    Train { epoch: u32, indices: Range<u32> },
    Evaluate(proto::EvalWork),
    Predict(proto::PredictWork),
}

/// How the loop ended, if not well.
#[derive(Debug, thiserror::Error)]
#[error("the {0} thread panicked")]
pub(crate) struct Died(pub(crate) &'static str);

/// The ends of all channels.
pub(crate) struct Channels {
    pub(crate) events: Receiver<Event>,
    pub(crate) reports: mpsc::Sender<Kind>,
    pub(crate) feed: Sender<(Item, Read)>,
    pub(crate) link: Sender<(u64, Ask)>,
}

/// What the loop starts with.
pub(crate) struct Setup<'a> {
    pub(crate) trainer: Trainer,
    pub(crate) spec: &'a JobSpec,
    pub(crate) plan: BatchPlan,
    /// Where a relative output folder is.
    pub(crate) job_dir: PathBuf,
    /// How long the servers may take to answer the last gradients of a worker that leaves.
    pub(crate) last_answers: Duration,
    pub(crate) work: Arc<Mutex<Work>>,
    pub(crate) progress: Arc<Progress>,
}

/// The loop's state.
pub(crate) struct Compute {
    trainer: Trainer,
    mode: Mode,
    plan: BatchPlan,
    log_loss_steps: u64,
    metrics: Vec<Metric>,
    job_dir: PathBuf,
    last_answers: Duration,
    work: Arc<Mutex<Work>>,
    progress: Arc<Progress>,
    channels: Channels,
    shards: BTreeMap<LeaseId, Shard>,
    /// Items asked of the feeder; with their records once it has answered.
    reading: BTreeMap<Item, Option<Decoded>>,
    flight: Option<Flight>,
    connection: Connection,
    /// Set when the worker was told to leave: how long answers are waited for.
    leaving: Option<Instant>,
    is_over: bool,
}

/// The item whose parameters are pulled, or were.
struct Flight {
    item: Item,
    decoded: Decoded,
    lookups: Lookups,
    pulled: Option<(Pull, Versions)>,
}

impl Compute {
    pub(crate) fn new(setup: Setup<'_>, channels: Channels) -> Self {
        let Setup { trainer, spec, plan, job_dir, last_answers, work, progress } = setup;
        Self {
            mode: spec.mode(),
            plan,
            log_loss_steps: u64::from(spec.log_loss_steps),
            metrics: trainer.spec().metrics.clone(),
            trainer,
            job_dir,
            last_answers,
            work,
            progress,
            connection: Connection::new(channels.link.clone()),
            channels,
            shards: BTreeMap::new(),
            reading: BTreeMap::new(),
            flight: None,
            leaving: None,
            is_over: false,
        }
    }

    /// Works until it is told to go, or until the session is gone.
    pub(crate) fn run(mut self) -> Result<(), Died> {
        while !self.is_over {
            match self.channels.events.try_recv() {
                Ok(event) => {
                    self.hear(event)?;
                    continue;
                }
                Err(std::sync::mpsc::TryRecvError::Empty) => {}
                Err(std::sync::mpsc::TryRecvError::Disconnected) => break,
            }
            self.connection.retry_if_due();
            if self.leaving.is_none() {
                self.read_ahead();
                self.pull_ahead(None);
                if let Some(flight) = self.take_pulled() {
                    self.pull_ahead(Some(flight.item));
                    self.compute(flight);
                    continue;
                }
            } else if self.has_left() {
                break;
            }
            match self.channels.events.recv_timeout(self.wait_limit()) {
                Ok(event) => self.hear(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.connection.abort();
        Ok(())
    }

    fn hear(&mut self, event: Event) -> Result<(), Died> {
        match event {
            Event::Route(route) => self.hear_route(route),
            Event::Lease(lease, loan) => self.take(lease, loan),
            Event::Revoke(lease) => {
                debug!(%lease, "lease revoked");
                self.drop_lease(lease);
            }
            Event::Rejoined => {
                let released = self.work().release_shards();
                released.iter().for_each(|lease| drop(self.shards.remove(lease)));
            }
            Event::Decoded(item, Ok(decoded)) => {
                if let Some(slot) = self.reading.get_mut(&item) {
                    *slot = Some(decoded);
                }
            }
            Event::Decoded(item, Err(error)) => {
                self.reading.remove(&item);
                self.fail(item, error);
            }
            Event::Link(connection, news) => self.hear_link(connection, news),
            Event::AllReduce(_) => warn!("ignored a command for another strategy"),
            Event::Leave => {
                self.progress.waiting("leaving", "acknowledgements");
                self.leaving = Some(Instant::now() + self.last_answers);
            }
            Event::Stop => self.is_over = true,
            Event::Died(thread) => return Err(Died(thread)),
        }
        Ok(())
    }

    /// A new generation voids all leases: the master lends again what the servers do not have.
    fn hear_route(&mut self, route: Route) {
        if self.connection.generation().is_some_and(|before| before != route.generation) {
            self.work().clear();
            self.shards.clear();
            self.reading.clear();
            self.flight = None;
        }
        if self.connection.follow(route) {
            self.disconnected();
        }
    }

    fn hear_link(&mut self, number: u64, news: News) {
        if let News::Sent(push) = news {
            self.trainer.recycle(push);
            return;
        }
        if number != self.connection.number() {
            return;
        }
        match news {
            News::Connected(abort) => self.connection.connected(abort),
            News::Pulled(pull, versions) => {
                self.connection.works();
                if let Some(flight) = &mut self.flight {
                    flight.pulled = Some((pull, versions));
                }
            }
            News::Acknowledged { batch, generation } => self.acknowledged(batch, generation),
            News::Broken(error) => {
                self.connection.broken(&error);
                self.disconnected();
            }
            News::Sent(_) => {}
        }
    }

    /// Nothing that was under way on a connection will be answered.
    fn disconnected(&mut self) {
        self.work().reopen();
        self.trainer.forget();
        if let Some(flight) = self.flight.take() {
            self.reading.insert(flight.item, Some(flight.decoded));
        }
    }

    fn take(&mut self, lease: LeaseId, loan: Loan) {
        debug!(%lease, ?loan, "lease received");
        let minibatch = self.plan.minibatch_size;
        let (task, shard) = match loan {
            Loan::Train { epoch, indices } => (Task::Train { epoch, indices }, None),
            Loan::Evaluate(work) => {
                let shard = Shard::evaluation(work, &self.metrics, minibatch);
                (Task::Shard { n_pieces: shard.n_pieces() }, Some(shard))
            }
            Loan::Predict(work) => {
                let number = work.shard;
                match Shard::prediction(work, &self.job_dir, lease, minibatch) {
                    Ok(shard) => (Task::Shard { n_pieces: shard.n_pieces() }, Some(shard)),
                    Err(error) => {
                        self.report_failure(lease, number, error.to_string());
                        return;
                    }
                }
            }
        };
        let is_empty = task == Task::Shard { n_pieces: 0 };
        self.work().lend(lease, task);
        if let Some(shard) = shard {
            self.shards.insert(lease, shard);
        }
        if is_empty {
            self.finish_shard(lease);
        }
    }

    fn drop_lease(&mut self, lease: LeaseId) {
        self.work().release(lease);
        self.shards.remove(&lease);
    }

    /// Asks for the records of the next items.
    fn read_ahead(&mut self) {
        let work = lock(&self.work);
        self.reading.retain(|item, _| work.is_open(*item));
        let pulling = self.flight.as_ref().map(|flight| flight.item);
        let next = work.upcoming().filter(|item| Some(*item) != pulling).take(READ_AHEAD);
        for item in next {
            if self.reading.contains_key(&item) {
                continue;
            }
            let read = match item {
                Item::Batch(batch) => Read::Batch(batch),
                Item::Piece { lease, piece } => match self.shards.get(&lease) {
                    Some(shard) => shard.read(piece),
                    None => continue,
                },
            };
            // A feeder that is gone says so by an event.
            let _ = self.channels.feed.send((item, read));
            self.reading.insert(item, None);
        }
    }

    /// Asks for the parameters of the next item, if it is read and nothing is in its way.
    fn pull_ahead(&mut self, current: Option<Item>) {
        if self.flight.is_some() || !self.connection.is_up() {
            return;
        }
        let next = {
            let work = lock(&self.work);
            let next = work.upcoming().find(|item| Some(*item) != current);
            next.filter(|next| self.may_pull(&work, current, *next))
        };
        let Some(item) = next else { return };
        let Some(decoded) = self.reading.get_mut(&item).and_then(Option::take) else { return };
        self.reading.remove(&item);
        let (will_push, min_round) = match item {
            Item::Batch(batch) => (true, self.round(batch)),
            Item::Piece { .. } => (false, None),
        };
        match self.trainer.prepare(&decoded.batch, will_push, min_round) {
            Ok((lookups, pull)) => {
                self.connection.ask(Ask::Pull(pull));
                self.flight = Some(Flight { item, decoded, lookups, pulled: None });
            }
            Err(error) => self.fail(item, describe(&error, item, &decoded)),
        }
    }

    /// Whether the parameters of `next` may be pulled while `current` is computed.
    fn may_pull(&self, work: &Work, current: Option<Item>, next: Item) -> bool {
        let Item::Batch(next) = next else { return true };
        let current = match current {
            Some(Item::Batch(current)) => Some(current),
            Some(Item::Piece { .. }) | None => None,
        };
        match self.mode {
            Mode::Async => work.n_pushed() < MAX_UNANSWERED,
            // The servers may hold the pull back until the batch at hand has arrived.
            Mode::Bounded { .. } | Mode::Steps { .. } => {
                current.is_none() && work.n_pushed() < MAX_UNANSWERED
            }
            // A round starts from parameters that have the round before; all of it from the same.
            Mode::Sync { .. } => current.is_none_or(|it| self.round(it) == self.round(next)),
        }
    }

    /// The rounds that must have been applied before `batch` starts.
    fn round(&self, batch: BatchId) -> Option<u64> {
        match self.mode {
            Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => None,
            Mode::Sync { grads_to_wait } => {
                let per_epoch = self.plan.n_batches().div_ceil(grads_to_wait);
                let before = u64::from(batch.epoch) * u64::from(per_epoch);
                Some(before + u64::from(batch.index / grads_to_wait))
            }
        }
    }

    fn take_pulled(&mut self) -> Option<Flight> {
        self.flight.take_if(|flight| flight.pulled.is_some())
    }

    fn compute(&mut self, flight: Flight) {
        let Flight { item, decoded, lookups, pulled } = flight;
        let (true, Some((pull, versions))) = (self.work().is_open(item), pulled) else {
            return;
        };
        let ids = self.trainer.accept(&lookups, pull, versions);
        match item {
            Item::Batch(batch) => self.train(batch, &decoded, &lookups, ids),
            Item::Piece { lease, .. } => self.compute_piece(lease, item, &decoded),
        }
        self.trainer.recycle_lookups(lookups);
    }

    fn train(&mut self, batch: BatchId, decoded: &Decoded, lookups: &Lookups, ids: Vec<Vec<u64>>) {
        self.progress.busy("training");
        self.progress.spending.on(goodput::Kind::Compute);
        let item = Item::Batch(batch);
        match self.trainer.train(batch, &decoded.batch, lookups, ids) {
            Ok((trained, push)) => {
                let step = self.progress.step();
                let is_due = self.log_loss_steps > 0 && step.is_multiple_of(self.log_loss_steps);
                if step == 1 || is_due {
                    info!("{}", loss_line(trained.loss, step));
                }
                trace!(%batch, loss = trained.loss, "batch trained");
                if self.connection.is_up() && self.work().pushed(batch, trained) {
                    self.connection.ask(Ask::Push(push));
                }
            }
            Err(error) => self.fail(item, describe(&error, item, decoded)),
        }
    }

    fn acknowledged(&mut self, batch: BatchId, generation: Generation) {
        let Some(done) = self.work().acknowledged(batch) else { return };
        self.report(Kind::BatchDone(proto::BatchDone {
            lease: done.lease.0,
            epoch: batch.epoch,
            index: batch.index,
            generation: generation.0,
            loss: done.trained.loss,
            n_records: done.trained.n_records,
        }));
    }

    fn compute_piece(&mut self, lease: LeaseId, item: Item, decoded: &Decoded) {
        let Some(shard) = self.shards.get_mut(&lease) else { return };
        self.progress.busy(shard.phase());
        self.progress.spending.on(goodput::Kind::Compute);
        let added = self.trainer.pass(&decoded.batch, |model, inputs| shard.add(model, inputs));
        match added {
            Ok(()) => {
                if self.work().piece_done(lease) {
                    self.finish_shard(lease);
                }
            }
            Err(error) => self.fail(item, describe(&error, item, decoded)),
        }
    }

    fn finish_shard(&mut self, lease: LeaseId) {
        self.work().release(lease);
        let Some(shard) = self.shards.remove(&lease) else { return };
        let number = shard.number();
        let generation = self.connection.generation().unwrap_or_default();
        match shard.done(lease, generation) {
            Ok(done) => self.report(done),
            Err(error) => self.report_failure(lease, number, error.to_string()),
        }
    }

    /// Gives the lease of `item` back with a reason; the worker goes on with others.
    fn fail(&mut self, item: Item, error: String) {
        let Some(lease) = self.work().lease_of(item) else { return };
        let index = match item {
            Item::Batch(batch) => batch.index,
            Item::Piece { lease, .. } => self.shards.get(&lease).map_or(0, Shard::number),
        };
        self.drop_lease(lease);
        self.report_failure(lease, index, error);
    }

    fn report_failure(&mut self, lease: LeaseId, index: u32, error: String) {
        warn!(%lease, index, error, "work failed; returning it to the master");
        self.report(Kind::Failed(proto::Failed { lease: lease.0, index, error }));
    }

    fn report(&mut self, report: Kind) {
        // The session drains reports as long as it lives, connected or not.
        self.is_over |= self.channels.reports.blocking_send(report).is_err();
    }

    fn has_left(&self) -> bool {
        let is_late = self.leaving.is_some_and(|limit| Instant::now() >= limit);
        is_late || self.work().n_pushed() == 0
    }

    /// Names what the loop waits for, and says how long it may before it looks again.
    fn wait_limit(&self) -> Duration {
        let now = Instant::now();
        if let Some(limit) = self.leaving {
            return limit.saturating_duration_since(now).min(LOOK_UP);
        }
        let (is_idle, n_pushed) = {
            let work = self.work();
            (work.upcoming().next().is_none(), work.n_pushed())
        };
        let is_pulling = self.flight.is_some();
        let spending = &self.progress.spending;
        let kind = match (is_idle, self.connection.is_up()) {
            (true, _) if n_pushed == 0 => {
                self.progress.waiting("idle", "work");
                goodput::Kind::Idle
            }
            (false, false) => {
                self.progress.waiting("waiting for servers", self.connection.waiting_for());
                // Before the first work there was nothing to heal from.
                if spending.has_worked() { goodput::Kind::Heal } else { goodput::Kind::Idle }
            }
            (false, true) if is_pulling => {
                self.progress.waiting("pulling", "parameters");
                goodput::Kind::Communicate
            }
            (true, _) | (false, true) if is_idle || n_pushed >= MAX_UNANSWERED => {
                self.progress.waiting("pushed", "acknowledgements");
                goodput::Kind::Communicate
            }
            (true | false, _) => {
                self.progress.busy("reading");
                goodput::Kind::DataWait
            }
        };
        spending.on(kind);
        let retry = self.connection.retry_at().map(|at| at.saturating_duration_since(now));
        retry.map_or(LOOK_UP, |retry| retry.min(LOOK_UP))
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        lock(&self.work)
    }
}

fn lock(work: &Mutex<Work>) -> MutexGuard<'_, Work> {
    work.lock().expect("the lock on the work is poisoned")
}

/// An error of the model with the place of the records in the data.
fn describe(error: &dyn std::error::Error, item: Item, decoded: &Decoded) -> String {
    let records = decoded.describe();
    match item {
        Item::Batch(batch) => format!("{error} (batch {batch}: {records})"),
        Item::Piece { .. } => format!("{error} ({records})"),
    }
}

/// The line that users look for in a worker's log.
pub(crate) fn loss_line(loss: f32, step: u64) -> String {
    format!("Loss = {loss:.3}, steps = {step}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_logged_in_the_form_that_users_grep_for() {
        assert_eq!(loss_line(0.0834, 100), "Loss = 0.083, steps = 100");
    }
}
