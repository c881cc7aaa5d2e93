// SPDX-License-Identifier: Apache-2.0
//! Everything that can happen to a parameter server.

use std::ops::Range;
use std::time::Duration;

use crate::id::{BatchId, CheckpointId, Generation, PartitionId};
use crate::job::CheckpointFile;
use crate::server::Load;
use crate::servers::PartitionState;

/// One pull or push. The shell numbers them, and never uses a number twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Request(pub u64);

/// One client of the data plane, with all its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client(pub [u8; 16]);

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Time has passed; due at `Server::next_deadline`.
    Tick,
    /// The master that the process follows sent an order.
    Order(Order),
    /// The state of the partitions is needed; the answer is a report or a hello.
    Inspect(Inspection),
    /// A client wants parameters.
    Pull(Pull),
    /// A client brings gradients.
    Push(Push),
    /// A client closed one of its connections.
    Left(Client),

    /// All partitions of a load exist, in ascending order.
    Loaded {
        generation: Generation,
        progress: Vec<Progress>,
        states: Vec<PartitionState>,
    },
    /// The partitions cannot be created, or the order cannot be read.
    LoadFailed {
        generation: Generation,
        error: String,
    },
    /// An owner has passed a push to all its partitions. One event per owner and push.
    Pushed {
        generation: Generation,
        request: Request,
        parts: Vec<Part>,
    },
    /// The gradients of a push do not fit the model: no owner has seen them.
    Unfit {
        request: Request,
        error: String,
    },
    /// An owner copies a partition for a checkpoint, between two pushes, after this many updates.
    Copied {
        checkpoint: CheckpointId,
        partition: PartitionId,
        updates: u64,
    },
    /// A copy is on disk.
    Written {
        checkpoint: CheckpointId,
        file: CheckpointFile,
    },
    WriteFailed {
        checkpoint: CheckpointId,
        error: String,
    },
    /// The states of all partitions, in ascending order, or none if the owners have stopped.
    Inspected {
        inspection: Inspection,
        generation: Generation,
        states: Vec<PartitionState>,
    },
}

/// What a master can order.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    Welcome,
    /// Replace what is held by the partitions of a new generation.
    Load(Box<Load>),
    /// Workers know the route to this generation: answer them.
    Serve(Generation),
    /// Write all partitions to `folder`: with `at` as they are after that step, otherwise as they
    /// are now.
    Checkpoint {
        checkpoint: CheckpointId,
        generation: Generation,
        folder: String,
        at: Option<u64>,
    },
    /// The job stops, or may stop: stay for its checkpoint, even if asked to exit.
    Drain,
    /// Stop for good, for this reason: nothing more is answered.
    Stop(String),
}

/// Who asks for the state of the partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Inspection {
    /// The next hello to a master; numbered by the shell.
    Hello(u64),
    /// The master, which numbers its requests.
    Master(u64),
    /// The master, which ordered a load of the generation that is held already.
    Load,
}

/// A request for parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pull {
    pub request: Request,
    pub client: Client,
    pub generation: Generation,
    pub partitions: Range<u32>,
    /// The pull waits until this many rounds are applied.
    pub min_round: Option<u64>,
    /// The rows as they are after this step; refused if the server is at another step.
    pub step: Option<u64>,
    /// A push of a batch trained on these parameters will follow.
    pub will_push: bool,
    /// How long the client waits.
    pub patience: Duration,
}

/// A request to apply gradients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Push {
    pub request: Request,
    pub client: Client,
    pub generation: Generation,
    pub batch: BatchId,
    pub partitions: Range<u32>,
    /// The version that the batch was trained on.
    pub base_version: u64,
}

/// How far a partition is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Progress {
    /// Optimizer steps.
    pub version: u64,
    /// Rounds applied, in synchronous mode.
    pub round: u64,
    pub n_rows: u64,
}

/// What a push did to one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub partition: PartitionId,
    pub outcome: Outcome,
    pub progress: Progress,
}

/// What became of a push at one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The batch was applied before.
    Already,
    Applied,
    /// A lane, kept until its step is complete and acknowledged before: the other lanes will follow.
    Kept,
    /// Kept until its round or step is complete, and acknowledged then.
    Staged,
    /// The push completed a step, a round, or several: all these batches are applied now.
    Round(Vec<BatchId>),
    /// Nothing changed.
    Refused(String),
}
