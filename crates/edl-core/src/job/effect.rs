// SPDX-License-Identifier: Apache-2.0
//! Everything that a job can order.

use std::ops::Range;
use std::time::Duration;

use crate::evaluation::Evaluated;
use crate::id::{CheckpointId, EvalId, Generation, LeaseId, PsId, WorkerId, WorldId};
use crate::job::{CheckpointFile, End, EventKind, Refusal};
use crate::platform::Order;
use crate::world::Announced;

/// Something to do; effects are performed in the order in which they come.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make `Job::durable` durable before anything that follows.
    Persist,
    ToWorker(WorkerId, Command),
    ToPs(PsId, PsOrder),
    /// Close this stream with a reason.
    CloseWorker(WorkerId, String),
    /// The same, and the worker must not reconnect.
    RefuseWorker(WorkerId, String),
    ClosePs(PsId),
    Platform(Order),
    /// Make the folder of a checkpoint; a failure is answered by `Event::CheckpointFailed`.
    PrepareCheckpoint {
        checkpoint: CheckpointId,
        folder: String,
    },
    /// Write the manifest that completes a checkpoint; answer `Committed` or `CheckpointFailed`.
    Commit {
        checkpoint: CheckpointId,
        folder: String,
        version: u64,
        /// As in `CheckpointRef`.
        exact: Option<u64>,
        generation: Generation,
        files: Vec<CheckpointFile>,
    },
    /// Remove a folder below the checkpoints.
    Delete(String),
    /// Write the result from this checkpoint; answer `Exported` or `ExportFailed`.
    Export {
        checkpoint: String,
    },
    /// Join the part files of `n_shards` shards; answer `Exported` or `ExportFailed`.
    JoinPredictions {
        n_shards: u32,
    },
    EvaluationStarted {
        version: u64,
    },
    Evaluated(Evaluated),
    Note(Note),
    /// Answer the request that is being handled.
    Reply(Result<(), Refusal>),
    /// The job is over: inform all processes, then exit.
    Ended(End),
}

/// An order to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    Welcome,
    /// The servers as `Job::servers` has them now.
    Route,
    Lease {
        lease: LeaseId,
        timeout: Duration,
        work: Work,
    },
    Revoke(LeaseId),
    /// AllReduce: who trains from now on, and how far. A worker that is not in it is done with
    /// the world before.
    World(Announced),
    /// Train to this step.
    Go {
        world: WorldId,
        until: u64,
    },
    /// Write these partitions as they are after step `at`.
    Checkpoint {
        checkpoint: CheckpointId,
        generation: Generation,
        folder: String,
        at: u64,
        partitions: Range<u32>,
    },
    /// Answer by a heartbeat, at once.
    Ping,
    Stop(String),
}

/// Where state comes from when no process has it: a checkpoint, or initial values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LoadFrom {
    pub checkpoint: Option<String>,
    /// False for another job's parameters: what that job has trained is no part of ours.
    pub keep_applied: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// `skipped` are those of `range` that change no parameters.
    Train {
        epoch: u32,
        range: Range<u32>,
        skipped: Vec<u32>,
    },
    Eval {
        eval: EvalId,
        version: u64,
        shard: u32,
        records: Range<u64>,
    },
    Predict {
        shard: u32,
        records: Range<u64>,
    },
}

/// An order to a parameter server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PsOrder {
    Welcome,
    Load {
        generation: Generation,
        from: LoadFrom,
    },
    Serve {
        generation: Generation,
    },
    /// With `at`, as it is after that step; otherwise as it is now.
    Checkpoint {
        checkpoint: CheckpointId,
        generation: Generation,
        folder: String,
        at: Option<u64>,
    },
    Stop(String),
}

/// A log line and an entry in the job's events.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Note {
    pub kind: EventKind,
    pub text: String,
}
