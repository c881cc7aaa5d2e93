// SPDX-License-Identifier: Apache-2.0
//! Everything that a job can order.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::evaluation::Evaluated;
use crate::id::{CheckpointId, Generation, LeaseId, PsId, WorkerId, WorldId};
use crate::job::{CheckpointFile, End, EventKind, Fact, Refusal};
use crate::platform::Order;
use crate::route::Route;
use crate::server;
use crate::worker::Task;
use crate::world::Announced;

/// Something to do; effects are performed in the order in which they come.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Write these facts, all or none, before anything that follows.
    Persist(Vec<Fact>),
    ToWorker(WorkerId, Command),
    ToPs(PsId, server::Order),
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
    /// Where the parameter servers are.
    Route(Route),
    Lease {
        lease: LeaseId,
        task: Task,
    },
    Revoke(LeaseId),
    /// AllReduce: who trains from now on, and how far. A worker that is not in it is done with
    /// the world before.
    World(Arc<Announced>),
    /// Members of `world` may train up to this step.
    Go {
        world: WorldId,
        until: u64,
    },
    Checkpoint(MemberCheckpoint),
    /// Answer by a heartbeat, at once.
    Ping,
    /// Members of `world` begin no further step, until a `Go` allows it again. They answer `Paused`
    /// with this number.
    Pause {
        world: WorldId,
        number: u64,
    },
    /// The job stops within this time. A worker with parameter servers begins nothing more and
    /// answers `Returned`; a member of a world drops its shards.
    Drain {
        within: Duration,
    },
    /// There is no more work.
    Stop(String),
}

/// Files of a checkpoint that a member of a world writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemberCheckpoint {
    pub checkpoint: CheckpointId,
    pub generation: Generation,
    pub folder: String,
    /// The step whose state is written.
    pub at: u64,
    pub partitions: Range<u32>,
}

/// Where state comes from when no process has it: a checkpoint, or initial values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LoadFrom {
    pub checkpoint: Option<String>,
    /// False for another job's parameters: what that job has trained does not count here.
    pub keep_applied: bool,
}

/// A log line and an entry in the job's events.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Note {
    pub kind: EventKind,
    pub text: String,
}
