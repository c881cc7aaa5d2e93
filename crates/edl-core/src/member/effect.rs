// SPDX-License-Identifier: Apache-2.0
//! Everything that a member can ask for.

use std::time::Duration;

use super::event::{Order, Place};
use super::level::Move;
use super::report::Report;
use crate::id::{BatchId, Generation, LeaseId, WorldId};
use crate::job::LoadFrom;
use crate::lanes::Span;
use crate::world::World;

/// Something to do; effects are performed in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Tell the master.
    Report(Report),
    /// Tell the master the result of a shard, which lies with its sums, and forget the shard.
    ReportShard { lease: LeaseId, generation: Generation },
    /// Forget the sums of a shard.
    DropShard(LeaseId),
    /// Begin to link with members of a world that is not entered yet.
    Prepare(World),
    /// Read and decode records; answered by `Event::Decoded`.
    Read(Place),
    /// Forget records that were asked for, decoded or not.
    Forget(Place),
    /// Copy partitions and write them while training continues; answered by `Event::Written` or
    /// `Event::NotWritten`.
    Write(Order),
    /// Forget the parameters.
    Drop,
    /// Close the connections to the parameter servers.
    HangUp,
    /// So much computing was for nothing.
    Waste(Duration),
    /// Begin this; answered by `Event::Ended`. One activity is under way at a time.
    Start(Activity),
    /// Interrupt the activity that is under way, if it can be; it still ends with an event.
    Cancel,
    /// Hand the parameters to the model and exit.
    End,
}

/// Something that takes time. Most activities involve other processes.
#[derive(Clone, Debug, PartialEq)]
pub enum Activity {
    /// Wait until every member of the world has the last step, before some of them leave.
    Farewell { world: WorldId },
    /// Load the parameters.
    Load { from: LoadFrom, generation: Generation },
    /// Link with all members of the world; `place` is this worker's among them.
    Enter { world: World, place: usize },
    /// Tell all members of the world the step that this worker holds, and hear theirs.
    Exchange { world: WorldId, step: Option<u64> },
    /// Send and receive partitions. Every member has the same list. A member that is behind
    /// receives all partitions and holds `generation` afterwards.
    Transfer { world: WorldId, moves: Vec<Move>, is_behind: bool, generation: Generation },
    /// Connect to the parameter servers along the last route.
    Connect,
    /// Train one lane on its records. Under Hybrid, pull the rows before and push their gradients
    /// afterwards, without waiting for the answers.
    Train { step: Step, lane: u32 },
    /// Hybrid: tell the servers that a lane has no records in this step.
    Skip { step: Step, lane: u32 },
    /// Hybrid: wait until the servers have acknowledged every lane of this member.
    Settle,
    /// Add up the gradients of all members.
    Reduce(Step),
    /// Update the parameters by the mean gradient.
    Apply(Step),
    /// Hash the mean gradient of the last step.
    Hash,
    /// Evaluate a minibatch of a shard; rows are read as of step `version`.
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
    /// Lanes that have records.
    pub n_active: u32,
    /// The lanes of this member, with or without records.
    pub mine: Span,
    /// The world has no other member.
    pub is_alone: bool,
}
