// SPDX-License-Identifier: Apache-2.0
//! Everything that a job's machine can want done.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::evaluation::Evaluated;
use crate::id::{CutId, EvalId, Generation, LeaseId, PsId, WorkerId, WorldId};
use crate::job::{CutFile, Refusal};
use crate::platform::Order;
use crate::world::World;

/// Something to do; effects are performed in the order in which they come.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make `Job::durable` durable before anything that follows.
    Persist,
    ToWorker(WorkerId, Command),
    ToPs(PsId, PsOrder),
    /// End this stream; its owner is told why.
    CloseWorker(WorkerId, String),
    /// The same for good: it shall not come back.
    RefuseWorker(WorkerId, String),
    ClosePs(PsId),
    Platform(Order),
    /// Make the folder of a cut; a failure is answered by `Event::CutFailed`.
    PrepareCut {
        cut: CutId,
        folder: String,
    },
    /// Write the manifest that makes a cut a checkpoint; answer `Committed` or `CutFailed`.
    Commit {
        cut: CutId,
        folder: String,
        version: u64,
        generation: Generation,
        files: Vec<CutFile>,
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
    /// The job is over: tell everybody, then exit.
    Ended(End),
}

/// What a worker is told.
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
    World {
        world: World,
        until: u64,
        generation: Generation,
        load: Option<LoadFrom>,
    },
    /// Train to this step.
    Go {
        world: WorldId,
        until: u64,
    },
    /// Write these partitions as they are after step `at`.
    Cut {
        cut: CutId,
        generation: Generation,
        folder: String,
        at: u64,
        partitions: Range<u32>,
    },
    Stop(String),
}

/// Where state comes from when nobody has it: a checkpoint, or first values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LoadFrom {
    pub checkpoint: Option<String>,
    /// False for another job's parameters: what that job has trained is no part of ours.
    pub keep_applied: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    Train { epoch: u32, range: Range<u32> },
    Eval { eval: EvalId, version: u64, shard: u32, records: Range<u64> },
    Predict { shard: u32, records: Range<u64> },
}

/// What a parameter server is told.
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
    Cut {
        cut: CutId,
        generation: Generation,
        folder: String,
        at: Option<u64>,
    },
    Stop(String),
}

/// Something that a person may want to know: a log line and an entry in the job's events.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Note {
    pub kind: &'static str,
    pub text: String,
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Succeeded,
    Failed(String),
    /// Before its end, by somebody's wish; it can be resumed.
    Stopped(String),
}
