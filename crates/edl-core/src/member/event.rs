// SPDX-License-Identifier: Apache-2.0
//! Everything that can happen to a member.

use crate::id::{BatchId, CheckpointId, LeaseId, WorkerId};
use crate::job::{CheckpointFile, Command, Peer};
use crate::model::ModelSpec;
use crate::worker::Finished;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A deadline may have passed.
    Tick,
    /// The model is built, and other workers can reach this one as `peer` says.
    Built { model: Box<ModelSpec>, peer: Box<Peer> },

    /// From the master.
    Command(Command),
    /// A master has admitted this worker again. It has assigned the shards to other workers, and
    /// may have missed the last reports.
    Rejoined,
    /// The stream to the master broke.
    MasterLost,
    /// Asked to exit as soon as the other members do not need this one.
    Leave,

    /// Answer to `Effect::Read`.
    Decoded { place: Place, result: Result<(), String> },
    /// Answer to `Effect::Finish`.
    Finished { lease: LeaseId, result: Result<Finished, String> },
    /// Answer to `Effect::Write`.
    Written { checkpoint: CheckpointId, result: Result<Vec<CheckpointFile>, String> },
    /// Answer to `Effect::Start`: the activity has ended.
    Ended(Result<Outcome, Failure>),
}

/// What records are read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// One lane of a step.
    Lane(BatchId, u32),
    /// A minibatch of a shard that is evaluated.
    Piece(LeaseId, u32),
}

/// What an activity yields.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Nothing but that it is done: `Farewell`, `Enter`, `Connect`, `Train`, `Skip`, `Settle`,
    /// `Apply`, `Pass`, `Evaluate`.
    Done,
    /// `Load`: the state of this step is loaded.
    Loaded { step: u64 },
    /// `Exchange`: the step that each member holds, in the order of the members.
    Levels(Vec<Option<u64>>),
    /// `Transfer`: all partitions are where they belong.
    Transferred(Transferred),
    /// `Reduce`: the mean gradient of the step is complete; this is its mean loss.
    Reduced { loss: f32 },
    /// `Hash`: of the mean gradient of the last step.
    Hashed(u64),
}

/// What a transfer of partitions yields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transferred {
    /// The step of the state that this worker holds now.
    pub step: u64,
    /// Bytes that arrived.
    pub state_bytes: u64,
}

/// Why an activity did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// A later world or the end of the process interrupted it.
    Cancelled,
    /// Another member of the world is lost.
    Lost { peer: WorkerId, error: String },
    /// The parameter servers cannot be reached now.
    Servers(String),
    /// The parameter servers have no rows for the step of this worker.
    OtherStep(String),
    /// The loss or the gradient of a lane is not finite.
    NonFinite(String),
    /// The training script has left its loop.
    Quit,
    /// It cannot be done here: bad records, a model that fails, a corrupt checkpoint.
    Failed(String),
}
