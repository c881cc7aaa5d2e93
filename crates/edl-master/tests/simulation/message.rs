// SPDX-License-Identifier: Apache-2.0
//! What processes say to each other, and what they wait for.

use std::ops::Range;
use std::sync::Arc;

use edl_core::id::{BatchId, CutId, EvalId, Generation, LeaseId, PartitionId, PsId, Term};
use edl_core::job::{CutFile, Event, Held, PsOrder, Work};
use edl_core::platform::{InstanceId, Order, Report};
use edl_core::rng;
use edl_core::servers::PartitionState;
use edl_tensor::push::Push;

use crate::kernel::Pid;

/// Where one server is, and what it holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Address {
    pub ps: PsId,
    pub pid: Pid,
    pub partitions: Range<u32>,
}

#[derive(Clone, Debug)]
pub(crate) enum Message {
    // Worker to master.
    WorkerHello {
        worker: u32,
        incarnation: u64,
        pid: Pid,
    },
    Ready {
        held: Vec<Held>,
    },
    Done {
        batch: BatchId,
        generation: Generation,
    },
    Evaluated {
        eval: EvalId,
        shard: u32,
        generation: Generation,
        value: f64,
        n_records: u32,
    },
    Failed {
        lease: LeaseId,
        item: u32,
    },
    Leaving,
    // Server to master.
    PsHello {
        ps: PsId,
        incarnation: u64,
        pid: Pid,
        generation: Generation,
        sets: Vec<PartitionState>,
    },
    Loaded {
        generation: Generation,
        sets: Vec<PartitionState>,
    },
    LoadFailed {
        generation: Generation,
        error: String,
    },
    CutDone {
        cut: CutId,
        generation: Generation,
        files: Vec<CutFile>,
    },
    CutFailed {
        cut: CutId,
        error: String,
    },
    // Both to the master.
    Heartbeat,
    // Master to worker and server.
    Welcome {
        term: Term,
    },
    Route {
        generation: Generation,
        servers: Vec<Address>,
    },
    Lease {
        lease: LeaseId,
        work: Work,
    },
    Revoke {
        lease: LeaseId,
    },
    Order(PsOrder),
    Stop,
    // Worker to server and back.
    Pull {
        request: u64,
        generation: Generation,
        min_round: u64,
    },
    Pulled {
        request: u64,
        version: u64,
        sum: f64,
        n: u64,
    },
    Push {
        generation: Generation,
        push: Arc<Push>,
    },
    Acked {
        batch: BatchId,
        generation: Generation,
    },
    /// The server is of another generation, or not told to serve yet.
    NotServing,
}

/// What a process, or the world, has set itself to do later.
#[derive(Debug)]
pub(crate) enum Timer {
    // Master.
    Tick,
    /// The answer to an effect.
    Answer(Box<Event>),
    Commit {
        cut: CutId,
        folder: String,
        files: Vec<CutFile>,
    },
    Export {
        folder: String,
    },
    Report(Report),
    // Server and worker.
    Reconnect,
    Heartbeat,
    Terminate,
    // Server.
    Load {
        generation: Generation,
        checkpoint: Option<String>,
    },
    Apply {
        partition: u32,
        generation: Generation,
        push: Arc<Push>,
    },
    Snapshot {
        cut: CutId,
        generation: Generation,
        folder: String,
        partition: PartitionId,
    },
    Written {
        cut: CutId,
        generation: Generation,
        folder: String,
        file: (u32, Vec<u8>, u64),
    },
    // Worker.
    Built,
    Computed {
        request: u64,
    },
    Redial {
        ps: PsId,
        generation: Generation,
    },
    // The world.
    Obey {
        master: Pid,
        order: Order,
    },
    StartMaster,
    Fault,
    Thaw {
        pid: Pid,
    },
    Kill {
        pid: Pid,
    },
    Launched {
        instance: InstanceId,
        pid: Pid,
    },
    DiskFree,
}

impl Message {
    /// A word for the trace.
    pub(crate) fn code(&self) -> u64 {
        let batch = |kind, batch: &BatchId, generation: &Generation| {
            rng::key(&[kind, u64::from(batch.epoch), u64::from(batch.index), generation.0])
        };
        match self {
            Self::WorkerHello { worker, .. } => rng::key(&[1, u64::from(*worker)]),
            Self::Ready { held } => rng::key(&[2, held.len() as u64]),
            Self::Done { batch: id, generation } => batch(3, id, generation),
            Self::Evaluated { shard, .. } => rng::key(&[4, u64::from(*shard)]),
            Self::Failed { lease, .. } => rng::key(&[5, lease.0]),
            Self::Leaving => 6,
            Self::PsHello { generation, .. } => rng::key(&[7, generation.0]),
            Self::Loaded { generation, .. } => rng::key(&[8, generation.0]),
            Self::LoadFailed { generation, .. } => rng::key(&[9, generation.0]),
            Self::CutDone { cut, .. } => rng::key(&[10, cut.0]),
            Self::CutFailed { cut, .. } => rng::key(&[11, cut.0]),
            Self::Heartbeat => 12,
            Self::Welcome { term } => rng::key(&[13, term.0]),
            Self::Route { generation, .. } => rng::key(&[14, generation.0]),
            Self::Lease { lease, .. } => rng::key(&[15, lease.0]),
            Self::Revoke { lease } => rng::key(&[16, lease.0]),
            Self::Order(_) => 17,
            Self::Stop => 18,
            Self::Pull { request, .. } => rng::key(&[19, *request]),
            Self::Pulled { request, version, .. } => rng::key(&[20, *request, *version]),
            Self::Push { generation, push } => batch(21, &push.batch, generation),
            Self::Acked { batch: id, generation } => batch(22, id, generation),
            Self::NotServing => 23,
        }
    }
}

impl Timer {
    /// A word for the trace.
    pub(crate) fn code(&self) -> u64 {
        match self {
            Self::Tick => 1,
            Self::Answer(_) => 2,
            Self::Commit { cut, .. } => rng::key(&[3, cut.0]),
            Self::Export { .. } => 4,
            Self::Report(_) => 5,
            Self::Reconnect => 6,
            Self::Heartbeat => 7,
            Self::Terminate => 8,
            Self::Load { generation, .. } => rng::key(&[9, generation.0]),
            Self::Apply { partition, .. } => rng::key(&[10, u64::from(*partition)]),
            Self::Snapshot { cut, .. } => rng::key(&[11, cut.0]),
            Self::Written { cut, .. } => rng::key(&[12, cut.0]),
            Self::Built => 13,
            Self::Computed { request } => rng::key(&[14, *request]),
            Self::Redial { .. } => 15,
            Self::Obey { .. } => 16,
            Self::StartMaster => 17,
            Self::Fault => 18,
            Self::Thaw { pid } => rng::key(&[19, u64::from(*pid)]),
            Self::Kill { pid } => rng::key(&[20, u64::from(*pid)]),
            Self::Launched { pid, .. } => rng::key(&[21, u64::from(*pid)]),
            Self::DiskFree => 22,
        }
    }
}
