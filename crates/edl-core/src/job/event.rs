// SPDX-License-Identifier: Apache-2.0
//! Everything that can happen to a job: a closed list, so that all triggers are seen in one place.

use crate::id::{BatchId, CutId, EvalId, Generation, Incarnation, LeaseId, PsId, WorkerId};
use crate::job::cuts::CutFile;
use crate::metric::Measures;
use crate::model::ModelSpec;
use crate::platform::Report;
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
        ps: PsId,
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

    /// Somebody's wish.
    Scale {
        workers: u32,
    },
    Stop {
        reason: String,
        with_checkpoint: bool,
    },
}

/// What a worker that comes back still works on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Held {
    pub lease: LeaseId,
    pub epoch: u32,
    pub indices: Vec<u32>,
}
