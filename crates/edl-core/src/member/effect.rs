// SPDX-License-Identifier: Apache-2.0
//! Everything that a member's machine requests.

use std::time::Duration;

use super::event::Place;
use super::level::Move;
use crate::id::{BatchId, Generation, LeaseId, WorldId};
use crate::job::{LoadFrom, MemberCheckpoint};
use crate::lanes::Span;
use crate::route::Route;
use crate::worker::{Records, Report};
use crate::world::World;

/// Something to do; effects are performed in order.
///
/// Parameters, gradients, records and sums stay with the shell, which finds them by step, lane,
/// lease and partition.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Put this into the outbox.
    Report(Report),
    /// Link with the members of a world that is not entered yet, in the background.
    Prepare(World),

    /// Read and decode records; answer `Decoded`, and keep them until they are used or forgotten.
    Read { place: Place, records: Records },
    /// Drop records that were requested, decoded or not.
    Forget(Place),
    /// Every piece of the shard is evaluated: answer `Finished`.
    Finish(LeaseId),
    /// Drop the sums of a shard.
    DropShard(LeaseId),

    /// Copy partitions now and write them while training continues; answer `Written`.
    Write(MemberCheckpoint),
    /// Drop the parameters.
    DropState,
    /// Close the connections to the parameter servers.
    HangUp,
    /// So much computing has to be done again.
    Waste(Duration),

    /// Begin this; answer `Ended`. At most one activity is unanswered at a time.
    Start(Activity),
    /// Interrupt the activity that is under way, if it waits for another process, because of this
    /// world or because the worker exits. The activity still answers `Ended`.
    Cancel(Option<WorldId>),
    /// Pass the last parameters to the model and exit, after a last attempt to empty the outbox.
    End,
    /// Exit without waiting for the activity that is under way.
    ExitNow,
}

/// Something that takes time. Most activities involve other processes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Activity {
    /// Wait until every member of the world has the last step, because some of them leave.
    Farewell { world: WorldId },
    /// Load the parameters.
    Load { from: LoadFrom, generation: Generation },
    /// Link with all members of the world; `place` is this worker's place among them.
    Enter { world: World, place: usize },
    /// Tell all members of the world the step that this worker holds, and learn theirs.
    Exchange { world: WorldId, step: Option<u64> },
    /// Send and receive partitions; every member has the same list. A member that is behind
    /// replaces its parameters by what it receives.
    Transfer { world: WorldId, moves: Vec<Move>, is_behind: bool },
    /// Hybrid: connect to the parameter servers.
    Connect(Route),
    /// Train one lane on its records. Under Hybrid, pull the rows first and push their gradients
    /// afterwards, without waiting for the acknowledgements.
    Train { step: Step, lane: u32 },
    /// Hybrid: tell the servers that a lane has no gradient in this step.
    Skip { step: Step, lane: u32 },
    /// Hybrid: wait until the servers have acknowledged every lane of this member.
    Settle(Step),
    /// Add up the gradients of all members.
    Reduce(Step),
    /// Update the parameters by the mean gradient.
    Apply(Step),
    /// Count a step that is skipped: the parameters stay as they are.
    Pass(Step),
    /// Hash the mean gradient of the last step.
    Hash,
    /// Evaluate one minibatch of a shard on the state after step `version`.
    Evaluate { lease: LeaseId, piece: u32, version: u64 },
}

/// A step of a world.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Step {
    pub world: WorldId,
    /// Steps before it.
    pub number: u64,
    pub batch: BatchId,
    pub n_records: u32,
    /// Lanes that have records; none if the step is skipped.
    pub n_active: u32,
    /// The lanes of this member, with or without records.
    pub mine: Span,
    /// The world has no other member.
    pub is_alone: bool,
}

impl Step {
    /// Whether it changes no parameters: its loss or gradient was not finite.
    #[must_use]
    pub fn is_skipped(&self) -> bool {
        self.n_active == 0
    }

    /// Whether this member leads its world: it trains the first lane. A probe has no leader.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.world != WorldId(0) && self.mine.contains(&0)
    }

    /// The lanes of this member that have records.
    #[must_use]
    pub fn mine_active(&self) -> Span {
        let end = self.mine.end.min(self.n_active);
        self.mine.start.min(end)..end
    }
}
