// SPDX-License-Identifier: Apache-2.0
//! Everything that can happen to a job: a closed list of all triggers.

use crate::activity::{Phase, WaitingFor};
use crate::goodput::TimeReport;
use crate::id::{
    BatchId, CheckpointId, EvalId, Generation, Incarnation, LeaseId, PsId, WorkerId, WorldId,
};
use crate::job::{CheckpointFile, CheckpointWriter};
use crate::metric::Measures;
use crate::model::ModelSpec;
use crate::platform::{ChaosAction, InstanceId, Report};
use crate::servers::{PartitionState, ServerMember};

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Time has passed.
    Tick,
    Platform(Report),

    WorkerConnected {
        worker: WorkerId,
        incarnation: Incarnation,
        pid: u32,
    },
    WorkerReady {
        worker: WorkerId,
        incarnation: Incarnation,
        model: Box<ModelSpec>,
        capacity: u32,
        held: Vec<HeldLease>,
        /// Under AllReduce, how others reach it and what it holds.
        peer: Option<Box<Peer>>,
    },
    /// Its stream broke; it may be dead or come back.
    WorkerGone {
        worker: WorkerId,
        incarnation: Incarnation,
    },
    /// It was asked to exit and has returned its leases.
    WorkerLeaving {
        worker: WorkerId,
        incarnation: Incarnation,
    },
    WorkerHeard {
        worker: WorkerId,
        incarnation: Incarnation,
        phase: Phase,
        waiting_for: WaitingFor,
        /// Batches, lanes and minibatches that it has computed.
        progress: u64,
    },
    /// A process reports where its time went.
    TimeReport {
        instance: InstanceId,
        incarnation: Incarnation,
        report: TimeReport,
    },
    /// Every partition has acknowledged the batch in `generation`. It counts from any process.
    BatchDone {
        worker: WorkerId,
        batch: BatchId,
        generation: Generation,
        loss: f32,
    },
    EvalDone {
        worker: WorkerId,
        eval: EvalId,
        shard: u32,
        generation: Generation,
        measures: Box<Measures>,
    },
    PredictDone {
        worker: WorkerId,
        shard: u32,
    },
    Failed {
        worker: WorkerId,
        incarnation: Incarnation,
        lease: LeaseId,
        item: u32,
        error: String,
    },

    /// The loss or the gradient of a batch is not finite.
    NonFinite {
        worker: WorkerId,
        incarnation: Incarnation,
        lease: LeaseId,
        item: u32,
        error: String,
    },

    /// A report of a member of a world, under AllReduce.
    Member {
        worker: WorkerId,
        incarnation: Incarnation,
        report: MemberReport,
    },

    PsConnected {
        ps: PsId,
        pid: u32,
        member: Box<ServerMember>,
    },
    PsGone {
        ps: PsId,
        incarnation: Incarnation,
    },
    PsHeard {
        ps: PsId,
        incarnation: Incarnation,
    },
    Loaded {
        ps: PsId,
        generation: Generation,
        sets: Vec<PartitionState>,
    },
    LoadFailed {
        ps: PsId,
        generation: Generation,
        error: String,
    },
    /// A server will copy the step of a checkpoint: workers may pass it.
    CheckpointStarted {
        ps: PsId,
        checkpoint: CheckpointId,
    },
    CheckpointDone {
        holder: CheckpointWriter,
        checkpoint: CheckpointId,
        generation: Generation,
        files: Vec<CheckpointFile>,
    },
    CheckpointFailed {
        checkpoint: CheckpointId,
        error: String,
    },

    /// Answers to effects.
    Committed {
        checkpoint: CheckpointId,
    },
    Exported,
    ExportFailed {
        /// It may succeed later.
        is_disk_full: bool,
        error: String,
    },

    /// A request; answered by `Effect::Reply`.
    Scale {
        workers: u32,
    },
    Stop {
        reason: String,
        with_checkpoint: bool,
    },
    Chaos {
        instance: InstanceId,
        action: ChaosAction,
    },
}

impl Event {
    /// The worker whose report this is, if it counts from the known process alone.
    pub(super) fn sender(&self) -> Option<(WorkerId, Incarnation)> {
        if let Self::WorkerReady { worker, incarnation, .. }
        | Self::WorkerLeaving { worker, incarnation }
        | Self::WorkerHeard { worker, incarnation, .. }
        | Self::Member { worker, incarnation, .. }
        | Self::Failed { worker, incarnation, .. }
        | Self::NonFinite { worker, incarnation, .. } = self
        {
            return Some((*worker, *incarnation));
        }
        None
    }
}

/// What a member of a world reports.
#[derive(Clone, Debug, PartialEq)]
pub enum MemberReport {
    /// It holds the state that its world begins with.
    Formed { world: WorldId, step: u64, pause_secs: f64, state_bytes: u64 },
    /// It holds the state after `step`.
    Stepped { world: WorldId, step: u64, hash: u64, loss: f32 },
    /// A lane takes it so long.
    Pace { lane_secs: f64 },
    /// It cannot continue because of another member.
    PeerLost { world: WorldId, suspect: WorkerId, error: String },
    /// It cannot train the records after `step`.
    StepFailed { world: WorldId, step: u64, error: String },
    /// The loss or the gradient of the records after `step` is not finite.
    NonFinite { world: WorldId, step: u64, error: String },
    /// The servers have no rows for the step that it holds.
    StepMismatch { world: WorldId, error: String },
    /// It cannot load the state of this generation.
    NotLoaded { generation: Generation, error: String },
}

/// A worker as other workers see it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    pub address: String,
    pub unix_path: String,
    /// Hash of a gradient that every worker of the job must agree on.
    pub probe: u64,
    /// The step whose state it holds.
    pub step: Option<u64>,
}

/// What a worker that comes back still works on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HeldLease {
    pub lease: LeaseId,
    pub epoch: u32,
    pub indices: Vec<u32>,
}
