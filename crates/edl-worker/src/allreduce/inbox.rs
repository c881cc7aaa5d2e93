// SPDX-License-Identifier: Apache-2.0
//! What the training loop has heard and not yet acted upon.
//!
//! The loop looks in here between two lanes; so nothing that it hears can find it in the middle
//! of something.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Duration;

use edl_core::id::{BatchId, LeaseId, WorldId};
use edl_core::metric::Metric;
use edl_net::data::Route;
use edl_net::proto;
use tracing::{debug, info, warn};

use super::world::World;
use crate::compute::shard::Shard;
use crate::compute::{self, Died, Loan};
use crate::feed::{Decoded, Read};

/// What only this strategy hears.
pub(crate) enum Event {
    World(World),
    Go { world: WorldId, until: u64 },
    Cut(proto::CutAt),
    Decoded(Place, Result<Decoded, String>),
}

/// What records are read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Place {
    /// A minibatch of a shard that is evaluated.
    Piece(LeaseId, u32),
    Lane(BatchId, u32),
}

/// Why records do not come.
pub(super) enum Halt {
    /// Something else must be done first.
    Interrupted,
    Failed(String),
    /// The parameter servers cannot be reached now.
    Servers(String),
    /// The parameter servers hold another step than this worker.
    Torn(String),
    Died(Died),
}

/// A shard to evaluate.
pub(super) struct Lent {
    /// The step whose state is to be measured.
    pub(super) version: u64,
    pub(super) shard: Shard,
    pub(super) n_done: u32,
}

pub(super) struct Inbox {
    events: Receiver<compute::Event>,
    feed: Sender<(Place, Read)>,
    /// Records asked for; with the answer once it is there.
    reading: BTreeMap<Place, Option<Result<Decoded, String>>>,
    /// The highest world heard of, until it is entered.
    pub(super) next: Option<World>,
    highest: WorldId,
    /// The last grant heard, of whichever world.
    go: Option<(WorldId, u64)>,
    /// Cuts whose step has not come.
    pub(super) cuts: Vec<proto::CutAt>,
    /// Shards lent for evaluation.
    pub(super) shards: BTreeMap<LeaseId, Lent>,
    /// What shards are measured by, and in which pieces.
    metrics: Vec<Metric>,
    minibatch: u32,
    /// Reports may have been lost with a stream.
    pub(super) is_rejoined: bool,
    pub(super) is_leaving: bool,
    pub(super) is_over: bool,
    /// Where embedding tables are.
    pub(super) route: Option<Route>,
}

impl Inbox {
    pub(super) fn new(
        events: Receiver<compute::Event>,
        feed: Sender<(Place, Read)>,
        metrics: Vec<Metric>,
        minibatch: u32,
    ) -> Self {
        Self {
            events,
            feed,
            reading: BTreeMap::new(),
            next: None,
            highest: WorldId(0),
            go: None,
            cuts: Vec::new(),
            shards: BTreeMap::new(),
            metrics,
            minibatch,
            is_rejoined: false,
            is_leaving: false,
            is_over: false,
            route: None,
        }
    }

    /// Hears everything that has been said.
    pub(super) fn drain(&mut self) -> Result<(), Died> {
        loop {
            match self.events.try_recv() {
                Ok(event) => self.hear(event)?,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => {
                    self.is_over = true;
                    return Ok(());
                }
            }
        }
    }

    /// Waits for the next thing that is said.
    pub(super) fn wait(&mut self) -> Result<(), Died> {
        match self.events.recv() {
            Ok(event) => self.hear(event),
            Err(_) => {
                self.is_over = true;
                Ok(())
            }
        }
    }

    /// Like `wait`, for at most so long.
    pub(super) fn wait_for(&mut self, limit: Duration) -> Result<(), Died> {
        match self.events.recv_timeout(limit) {
            Ok(event) => self.hear(event),
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => {
                self.is_over = true;
                Ok(())
            }
        }
    }

    /// Hears everything, and says whether to go on.
    pub(super) fn look_up(&mut self) -> Result<(), Halt> {
        self.drain().map_err(Halt::Died)?;
        if self.is_interrupted() { Err(Halt::Interrupted) } else { Ok(()) }
    }

    /// Whether what is being done is for nothing.
    pub(super) fn is_interrupted(&self) -> bool {
        self.is_over || self.next.as_ref().is_some_and(|next| next.after.is_none())
    }

    /// The step that a member of `world` may train to.
    pub(super) fn until(&self, world: &World) -> u64 {
        match self.go {
            Some((id, until)) if id == world.id => until.max(world.until),
            Some(_) | None => world.until,
        }
    }

    /// Asks for records, once.
    pub(super) fn ask(&mut self, place: Place, read: impl FnOnce() -> Read) {
        if !self.reading.contains_key(&place) {
            // A feeder that is gone says so by an event.
            let _ = self.feed.send((place, read()));
            self.reading.insert(place, None);
        }
    }

    /// Forgets records that are not `wanted` any more.
    pub(super) fn keep(&mut self, wanted: impl Fn(Place) -> bool) {
        self.reading.retain(|place, _| wanted(*place));
    }

    /// Waits for records that were asked for.
    pub(super) fn records(&mut self, place: Place) -> Result<Decoded, Halt> {
        self.drain().map_err(Halt::Died)?;
        loop {
            if self.is_interrupted() {
                return Err(Halt::Interrupted);
            }
            // What they were read for may have been revoked.
            let Some(answer) = self.reading.get_mut(&place) else {
                return Err(Halt::Interrupted);
            };
            if let Some(answer) = answer.take() {
                self.reading.remove(&place);
                return answer.map_err(Halt::Failed);
            }
            self.wait().map_err(Halt::Died)?;
        }
    }

    fn hear(&mut self, event: compute::Event) -> Result<(), Died> {
        match event {
            compute::Event::AllReduce(event) => self.hear_member(*event),
            compute::Event::Lease(lease, Loan::Evaluate(work)) => {
                debug!(%lease, ?work, "lease received");
                let version = work.version;
                let shard = Shard::evaluation(work, &self.metrics, self.minibatch);
                self.shards.insert(lease, Lent { version, shard, n_done: 0 });
            }
            compute::Event::Revoke(lease) => {
                debug!(%lease, "lease revoked");
                self.shards.remove(&lease);
                self.keep(|place| !matches!(place, Place::Piece(of, _) if of == lease));
            }
            // The master has lent its shards to others meanwhile.
            compute::Event::Rejoined => {
                self.is_rejoined = true;
                self.shards.clear();
                self.keep(|place| !matches!(place, Place::Piece(..)));
            }
            compute::Event::Route(route) => self.route = Some(route),
            compute::Event::Leave => self.is_leaving = true,
            compute::Event::Stop => self.is_over = true,
            compute::Event::Died(thread) => return Err(Died(thread)),
            compute::Event::Lease(_, Loan::Other) => {
                warn!("ignored a command for another strategy");
            }
        }
        Ok(())
    }

    fn hear_member(&mut self, event: Event) {
        match event {
            Event::World(world) => {
                let (id, n_members) = (world.id, world.members.len());
                info!(world = %id, n_members, after = world.after, "new world announced");
                if id > self.highest {
                    self.highest = id;
                    self.next = Some(world);
                }
            }
            Event::Go { world, until } => {
                if self.go.is_none_or(|before| before <= (world, until)) {
                    self.go = Some((world, until));
                }
            }
            Event::Cut(cut) => self.cuts.push(cut),
            Event::Decoded(place, answer) => {
                if let Some(slot) = self.reading.get_mut(&place) {
                    *slot = Some(answer);
                }
            }
        }
    }
}
