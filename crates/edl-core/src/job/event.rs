// SPDX-License-Identifier: Apache-2.0
//! Everything that can happen to a job: a closed list, so that all triggers are seen in one place.

use crate::goodput::Told;
use crate::id::{
    BatchId, CutId, EvalId, Generation, Incarnation, LeaseId, PsId, WorkerId, WorldId,
};
use crate::job::{CutFile, Holder};
use crate::metric::Measures;
use crate::model::ModelSpec;
use crate::platform::{Harm, InstanceId, Report};
use crate::servers::{Member, PartitionState};

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
        held: Vec<Held>,
        /// Under AllReduce, how others reach it and what it holds.
        peer: Option<Box<Peer>>,
    },
    /// Its stream broke; it may be dead or come back.
    WorkerGone {
        worker: WorkerId,
        incarnation: Incarnation,
    },
    /// It was told to go and has given everything back.
    WorkerLeaving {
        worker: WorkerId,
        incarnation: Incarnation,
    },
    WorkerHeard {
        worker: WorkerId,
        incarnation: Incarnation,
        /// Whom it waits for; empty while it is busy itself.
        waiting_for: String,
    },
    /// A process measures what it spends its time on.
    Told {
        instance: InstanceId,
        incarnation: Incarnation,
        told: Told,
    },
    /// Every partition has acknowledged the batch in `generation`: a fact, whoever brings it.
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

    /// A member of a world has news, under AllReduce.
    Member {
        worker: WorkerId,
        incarnation: Incarnation,
        news: News,
    },

    PsConnected {
        ps: PsId,
        pid: u32,
        member: Box<Member>,
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
    CutDone {
        holder: Holder,
        cut: CutId,
        generation: Generation,
        files: Vec<CutFile>,
    },
    CutFailed {
        cut: CutId,
        error: String,
    },

    /// Answers to effects.
    Committed {
        cut: CutId,
    },
    Exported,
    ExportFailed {
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
    Harm {
        instance: InstanceId,
        harm: Harm,
    },
}

/// What a member of a world tells.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// It holds the state that its world begins with.
    Formed { world: WorldId, step: u64, pause_secs: f64, state_bytes: u64 },
    /// It holds the state after `step`.
    Stepped { world: WorldId, step: u64, hash: u64, loss: f32 },
    /// A lane takes it so long.
    Pace { lane_secs: f64 },
    /// It cannot go on because of another member.
    PeerLost { world: WorldId, suspect: WorkerId, error: String },
    /// It cannot train the records after `step`.
    StepFailed { world: WorldId, step: u64, error: String },
    /// The servers have no rows for the step that it holds.
    Torn { world: WorldId, error: String },
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
pub struct Held {
    pub lease: LeaseId,
    pub epoch: u32,
    pub indices: Vec<u32>,
}
