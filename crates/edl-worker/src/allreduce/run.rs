// SPDX-License-Identifier: Apache-2.0
//! The training loop: passes events to the machine, and performs what it returns.
//!
//! Nothing about the protocol is decided here. Activities block this thread; between two of them
//! it takes everything from its inbox.

mod activity;
mod told;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use edl_core::goodput;
use edl_core::id::{LeaseId, WorldId};
use edl_core::member::{Activity, Effect, Event, Member, Order, Place, Records};
use edl_core::metric::{Measures, Metric};
use edl_core::optimizer::Clip;
use edl_core::time::Time;
use edl_core::worker::Finished;
use edl_net::mesh::Peer;
use edl_net::proto::worker_message::Kind;
use tokio::sync::mpsc;

use super::inbox::Inbox;
use super::lanes::Lanes;
use super::mesh::Mesh;
use super::replica::{Recipe, Replica};
use super::seat::Seat;
use super::writer::Writer;
use crate::compute::Died;
use crate::feed::{Decoded, Read, Source};
use crate::progress::Progress;

/// What the loop starts with.
pub(super) struct Setup {
    pub(super) member: Member,
    /// The origin of the machine's time.
    pub(super) origin: Instant,
    pub(super) lanes: Lanes,
    pub(super) recipe: Recipe,
    pub(super) clip: Option<Clip>,
    pub(super) log_loss_steps: u64,
    pub(super) metrics: Vec<Metric>,
    pub(super) mesh: Box<dyn Mesh>,
    pub(super) inbox: Inbox,
    pub(super) feed: Sender<(Place, Read)>,
    pub(super) writer: Writer,
    pub(super) reports: mpsc::Sender<Kind>,
    pub(super) seat: Arc<Seat>,
    pub(super) progress: Arc<Progress>,
}

/// The numbers that the machine's effects are about.
pub(super) struct Run {
    setup: Setup,
    /// What the machine has yet to be told.
    answers: VecDeque<Event>,
    todo: Option<Activity>,
    is_cancelled: bool,
    is_over: bool,
    died: Option<Died>,
    replica: Option<Replica>,
    /// How the members of announced worlds are reached.
    peers: BTreeMap<WorldId, Vec<Peer>>,
    /// Records that were requested; with what came, once it is there.
    records: BTreeMap<Place, Option<Decoded>>,
    shards: BTreeMap<LeaseId, Sums>,
    /// Memory for the mean gradient and the loss.
    mean: Vec<f32>,
    made: activity::Made,
}

/// What was measured on a shard.
struct Sums {
    measures: Measures,
    n_records: u64,
}

impl Run {
    pub(super) fn new(setup: Setup) -> Self {
        Self {
            mean: vec![0.0; setup.lanes.len()],
            setup,
            answers: VecDeque::new(),
            todo: None,
            is_cancelled: false,
            is_over: false,
            died: None,
            replica: None,
            peers: BTreeMap::new(),
            records: BTreeMap::new(),
            shards: BTreeMap::new(),
            made: activity::Made::Nothing,
        }
    }

    /// Trains until the machine ends it.
    pub(super) fn run(mut self) -> Result<(), Died> {
        self.handle(Event::Tick);
        while !self.is_over {
            self.hear_all();
            if let Some(died) = self.died.take() {
                return Err(died);
            }
            match self.todo.take() {
                Some(activity) => {
                    let result = self.perform(activity);
                    self.handle(Event::Ended(result));
                }
                None if self.is_over => break,
                None => self.wait(),
            }
        }
        if let Some(replica) = &self.replica {
            self.setup.lanes.finish(replica.dense());
        }
        Ok(())
    }

    /// Takes everything from the inbox.
    fn hear_all(&mut self) {
        while self.died.is_none()
            && !self.is_over
            && let Some(event) = self.setup.inbox.look()
        {
            self.hear(event);
        }
    }

    fn wait(&mut self) {
        let deadline = self.setup.member.next_deadline();
        let limit = deadline.map(|at| at.since(self.now()));
        match self.setup.inbox.wait(limit) {
            Some(event) => self.hear(event),
            None => self.handle(Event::Tick),
        }
    }

    fn now(&self) -> Time {
        Time::since_origin(self.setup.origin.elapsed())
    }

    /// Passes an event to the machine, and performs what it returns.
    fn handle(&mut self, event: Event) {
        self.answers.push_back(event);
        while let Some(event) = self.answers.pop_front() {
            let now = self.now();
            let effects = self.setup.member.handle(event, now);
            if cfg!(debug_assertions) {
                self.setup.member.check_invariants();
            }
            self.publish();
            effects.into_iter().for_each(|effect| self.effect(effect));
        }
    }

    /// Shows the session how this worker stands.
    fn publish(&self) {
        let Setup { member, seat, progress, .. } = &self.setup;
        seat.holds(member.claim());
        let status = member.status();
        progress.waiting(status.phase, status.waiting_for);
        progress.spending.on(status.spends);
        if let Some(step) = member.step() {
            progress.at_step(step);
        }
    }

    fn effect(&mut self, effect: Effect) {
        match effect {
            Effect::Report(report) => self.report(report),
            Effect::Prepare(world) => {
                let peers = self.peers.get(&world.id);
                self.setup.mesh.prepare(peers.map_or(&[][..], Vec::as_slice));
            }
            Effect::Read { place, records } => {
                self.records.insert(place, None);
                // A feeder that is gone says so by an event.
                let _ = self.setup.feed.send((place, read(records)));
            }
            Effect::Forget(place) => drop(self.records.remove(&place)),
            Effect::Finish(lease) => {
                let sums = self.shards.remove(&lease).ok_or("the shard is gone".to_owned());
                let finished = |Sums { measures, n_records }| Finished::Evaluation {
                    measures: Box::new(measures),
                    n_records,
                };
                self.answers.push_back(Event::Finished { lease, result: sums.map(finished) });
            }
            Effect::DropShard(lease) => drop(self.shards.remove(&lease)),
            Effect::Write(order) => self.write(order),
            Effect::DropState => self.replica = None,
            Effect::HangUp => self.setup.lanes.tables().hang_up(),
            Effect::Waste(time) => self.setup.progress.spending.waste(time),
            Effect::Start(activity) => {
                self.is_cancelled = false;
                self.todo = Some(activity);
            }
            Effect::Cancel => self.is_cancelled = true,
            Effect::End => self.is_over = true,
        }
    }

    fn write(&mut self, order: Order) {
        let Some(replica) = &self.replica else { return };
        let spending = &self.setup.progress.spending;
        spending.on(goodput::Kind::Checkpoint);
        let cut = order.cut;
        if let Err(error) = self.setup.writer.write(order, replica) {
            self.answers.push_back(Event::Written { cut, result: Err(error) });
        }
        spending.on(self.setup.member.status().spends);
    }
}

fn read(records: Records) -> Read {
    match records {
        Records::Lane(batch, lane) => Read::Lane(batch, lane),
        Records::Validation(range) => Read::Range(Source::Validation, range),
    }
}
