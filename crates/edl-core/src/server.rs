// SPDX-License-Identifier: Apache-2.0
//! One parameter server as a machine: events in, effects out.
//!
//! `Server` decides which generation is held and served, which requests wait and for how long, when
//! a push is acknowledged, and which checkpoint is written. It never sees a number of the model:
//! the shell (`edl-ps`) and its owner threads keep those, and report what became of them. The
//! master's view of all servers is [`crate::servers`].

mod checkpoints;
mod effect;
mod event;
mod held;
mod load;
mod requests;
#[cfg(test)]
mod tests;
mod window;

use std::collections::BTreeMap;
use std::ops::Range;

pub use self::effect::{Effect, Note, Refusal, Report};
pub use self::event::{
    Client, Event, Inspection, Order, Outcome, Part, Progress, Pull, Push, Request,
};
use self::held::Held;
pub use self::load::Load;
use self::requests::Waiting;
use crate::id::{CheckpointId, Generation, PartitionId};
use crate::machine::Machine;
use crate::servers::PartitionState;
use crate::spec::Mode;
use crate::time::Time;

/// Why a server did not do what its master ordered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("generation {asked} is outdated: this server is at generation {ours}")]
    Older { asked: Generation, ours: Generation },
    #[error("the server has not loaded generation {0}")]
    NotHeld(Generation),
    #[error("another generation was loaded in the meantime")]
    Superseded,
    #[error("another checkpoint is still being written")]
    CheckpointRunning,
    #[error("the server was reloaded or received another command during the checkpoint")]
    Overtaken,
    #[error("step {at} has passed: partition {partition} is at step {step}")]
    Past { at: u64, partition: PartitionId, step: u64 },
    #[error("invalid layout: partitions {}..{} of {n_partitions} with {n_batches} batches per epoch", partitions.start, partitions.end)]
    Layout { partitions: Range<u32>, n_partitions: u32, n_batches: u32 },
    #[error("{0}")]
    Model(String),
    #[error("the server has stopped")]
    Stopped,
}

/// The machine of one parameter server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Server {
    phase: ServerPhase,
    /// Requests without a verdict, in the order in which they came.
    waiting: BTreeMap<Request, Waiting>,
    n_pulls: u64,
    n_pushes: u64,
    /// The time of the last event.
    now: Time,
    effects: Vec<Effect>,
}

#[derive(Clone, Debug, Default, PartialEq)]
enum ServerPhase {
    #[default]
    Empty,
    Loading {
        load: Loading,
        next: Option<Box<Load>>,
    },
    Held(Held),
    /// The last load failed.
    Failed(Generation),
    Stopped,
}

/// What to keep of a load while the shell works on it.
#[derive(Clone, Debug, PartialEq)]
struct Loading {
    generation: Generation,
    partitions: Range<u32>,
    mode: Mode,
}

impl Machine for Server {
    type Event = Event;
    type Effect = Effect;

    fn handle(&mut self, event: Event, now: Time) -> Vec<Effect> {
        self.now = self.now.max(now);
        match event {
            Event::Tick => self.review(),
            Event::Order(Order::Load(load)) => self.load(load),
            Event::Order(Order::Serve(generation)) => self.serve(generation),
            Event::Order(Order::Checkpoint { checkpoint, generation, folder, at }) => {
                self.checkpoint(checkpoint, generation, folder, at);
            }
            Event::Order(Order::Stop(_)) => self.stop(),
            // The session takes these.
            Event::Order(Order::Welcome | Order::Drain) => {}
            Event::Inspect(inspection) => self.inspect(inspection),
            Event::Pull(pull) => self.pull(pull),
            Event::Push(push) => self.push(push),
            Event::Left(client) => self.left(client),
            Event::Loaded { generation, progress, states } => {
                self.loaded(generation, progress, states);
            }
            Event::LoadFailed { generation, error } => self.load_failed(generation, error),
            Event::Pushed { generation, request, parts } => self.pushed(generation, request, parts),
            Event::Unfit { request, error } => self.unfit(request, error),
            Event::Copied { checkpoint, partition, updates } => {
                self.copied(checkpoint, partition, updates);
            }
            Event::Written { checkpoint, file } => self.written(checkpoint, file),
            Event::WriteFailed { checkpoint, error } => self.write_failed(checkpoint, error),
            Event::Inspected { inspection, generation, states } => {
                self.inspected(inspection, generation, states);
            }
        }
        std::mem::take(&mut self.effects)
    }

    /// When `Tick` is due; `None` while nothing waits.
    fn next_deadline(&self) -> Option<Time> {
        let due = |waiting: &Waiting| waiting.due(self.is_serving(waiting.generation()));
        let expiry = self.held().and_then(|held| held.window_expiry(self.now));
        self.waiting.values().map(due).chain(expiry).min()
    }

    fn check_invariants(&self) {
        assert!(self.effects.is_empty(), "every effect was returned");
        if let ServerPhase::Held(held) = &self.phase {
            held.check_invariants();
        }
        for (request, waiting) in &self.waiting {
            assert!(!self.could_go_on(waiting), "{request:?} waits for nothing: {waiting:?}");
        }
    }
}

impl Server {
    /// A server that holds nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What is held, served or not; generation 0 is nothing.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.held().map_or(Generation(0), |held| held.generation)
    }

    /// Embedding rows of all partitions.
    #[must_use]
    pub fn n_rows(&self) -> u64 {
        self.held().map_or(0, Held::n_rows)
    }

    /// Pulls answered and pushes passed to the owners so far.
    #[must_use]
    pub fn n_requests(&self) -> (u64, u64) {
        (self.n_pulls, self.n_pushes)
    }

    #[must_use]
    pub fn is_loading(&self) -> bool {
        matches!(self.phase, ServerPhase::Loading { .. })
    }

    /// Whether the copies of this checkpoint are still needed.
    #[must_use]
    pub fn is_writing(&self, checkpoint: CheckpointId) -> bool {
        self.held().is_some_and(|held| held.checkpoints.contains_key(&checkpoint))
    }

    fn serve(&mut self, generation: Generation) {
        let held = self.held_mut().filter(|held| held.generation == generation);
        let Some(held) = held else {
            // The master learns it from the next hello, and orders a load.
            return self.effects.push(Effect::Note(Note::CannotServe(generation)));
        };
        held.is_served = true;
        self.effects.push(Effect::Note(Note::Serving(generation)));
        self.review();
    }

    fn stop(&mut self) {
        self.end_held();
        self.phase = ServerPhase::Stopped;
        self.review();
    }

    /// Ends what is held: no push in progress will be acknowledged, no checkpoint completed.
    fn end_held(&mut self) {
        let ServerPhase::Held(held) = std::mem::replace(&mut self.phase, ServerPhase::Empty) else {
            return;
        };
        let pushes = held.pushes.keys();
        self.effects.extend(pushes.map(|push| Effect::Refuse(*push, Refusal::NotServing)));
        for checkpoint in held.checkpoints.keys() {
            self.report_checkpoint_failed(*checkpoint, &Error::Overtaken);
        }
        self.effects.push(Effect::Drop(held.generation));
    }

    fn inspect(&mut self, inspection: Inspection) {
        match self.held() {
            Some(held) => self.effects.push(Effect::Inspect(inspection, held.generation)),
            None => self.answer_inspection(inspection, Generation(0), Vec::new()),
        }
    }

    /// What was ended in the meantime is no longer held.
    fn inspected(
        &mut self,
        inspection: Inspection,
        generation: Generation,
        states: Vec<PartitionState>,
    ) {
        let held = self.held().filter(|held| held.generation == generation);
        if held.is_some_and(|held| held.partitions.len() == states.len()) {
            return self.answer_inspection(inspection, generation, states);
        }
        match inspection {
            Inspection::Hello(_) | Inspection::Master(_) => {
                self.answer_inspection(inspection, Generation(0), Vec::new());
            }
            Inspection::Load => {
                self.report_load_failed(generation, Error::Superseded.to_string());
            }
        }
    }

    fn answer_inspection(
        &mut self,
        inspection: Inspection,
        generation: Generation,
        states: Vec<PartitionState>,
    ) {
        self.effects.push(match inspection {
            Inspection::Hello(hello) => Effect::Hello { hello, generation, states },
            Inspection::Master(request) => {
                Effect::Report(Report::States { request, generation, states })
            }
            Inspection::Load => Effect::Report(Report::Loaded { generation, states }),
        });
    }

    /// The latest generation that the server holds, loads or could not load; `None` if it has
    /// stopped.
    fn newest(&self) -> Option<Generation> {
        match &self.phase {
            ServerPhase::Empty => Some(Generation(0)),
            ServerPhase::Loading { next: Some(next), .. } => Some(next.generation),
            ServerPhase::Loading { load, next: None } => Some(load.generation),
            ServerPhase::Held(held) => Some(held.generation),
            ServerPhase::Failed(generation) => Some(*generation),
            ServerPhase::Stopped => None,
        }
    }

    fn is_serving(&self, generation: Generation) -> bool {
        self.held().is_some_and(|held| held.is_served && held.generation == generation)
    }

    fn held(&self) -> Option<&Held> {
        match &self.phase {
            ServerPhase::Held(held) => Some(held),
            ServerPhase::Empty
            | ServerPhase::Loading { .. }
            | ServerPhase::Failed(_)
            | ServerPhase::Stopped => None,
        }
    }

    fn held_mut(&mut self) -> Option<&mut Held> {
        match &mut self.phase {
            ServerPhase::Held(held) => Some(held),
            ServerPhase::Empty
            | ServerPhase::Loading { .. }
            | ServerPhase::Failed(_)
            | ServerPhase::Stopped => None,
        }
    }
}
