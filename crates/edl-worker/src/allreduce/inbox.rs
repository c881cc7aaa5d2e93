// SPDX-License-Identifier: Apache-2.0
//! What the training loop is told, and where.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use edl_core::id::WorldId;
use edl_core::member::{Order, Place};
use edl_core::world::Announced;
use edl_net::mesh::Peer;

use super::writer::Written;
use crate::compute;
use crate::feed::Decoded;

/// What only this strategy is told.
pub(crate) enum Event {
    /// A world, and how its members are reached.
    World(Announced, Vec<Peer>),
    Go {
        world: WorldId,
        until: u64,
    },
    Checkpoint(Order),
    Decoded(Place, Result<Decoded, String>),
    Written(Written),
}

pub(super) struct Inbox {
    events: Receiver<compute::Event>,
    /// What came before the loop began.
    early: VecDeque<compute::Event>,
}

impl Inbox {
    pub(super) fn new(events: Receiver<compute::Event>) -> Self {
        Self { events, early: VecDeque::new() }
    }

    /// The next event, if there is one.
    pub(super) fn look(&mut self) -> Option<compute::Event> {
        let early = self.early.pop_front();
        early.or_else(|| match self.events.try_recv() {
            Ok(event) => Some(event),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(compute::Event::Stop),
        })
    }

    /// Waits for the next event, at most for `limit` if there is one.
    pub(super) fn wait(&mut self, limit: Option<Duration>) -> Option<compute::Event> {
        if let Some(early) = self.early.pop_front() {
            return Some(early);
        }
        let Some(limit) = limit else {
            return Some(self.events.recv().unwrap_or(compute::Event::Stop));
        };
        match self.events.recv_timeout(limit) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(compute::Event::Stop),
        }
    }

    /// Waits for the first records, before the loop begins. None if the worker must exit.
    pub(super) fn first_records(
        &mut self,
    ) -> Result<Option<Result<Decoded, String>>, compute::Died> {
        loop {
            match self.events.recv().unwrap_or(compute::Event::Stop) {
                compute::Event::AllReduce(event) => match *event {
                    Event::Decoded(_, records) => return Ok(Some(records)),
                    other @ (Event::World(..)
                    | Event::Go { .. }
                    | Event::Checkpoint(_)
                    | Event::Written(_)) => {
                        self.early.push_back(compute::Event::AllReduce(Box::new(other)));
                    }
                },
                compute::Event::Stop => return Ok(None),
                compute::Event::Died(thread) => return Err(compute::Died(thread)),
                other @ (compute::Event::Route(_)
                | compute::Event::Lease(..)
                | compute::Event::Revoke(_)
                | compute::Event::Rejoined
                | compute::Event::Leave) => self.early.push_back(other),
            }
        }
    }
}
