// SPDX-License-Identifier: Apache-2.0
//! What processes say to each other, and what they wait for.

use std::ops::Range;

use edl_core::id::{CutId, EvalId, Generation, Incarnation, LeaseId, Term, WorkerId, WorldId};
use edl_core::job::{Command, CutFile, Event, News};
use edl_core::lanes::Span;
use edl_core::platform::{InstanceId, Order, Report};

use crate::history::State;
use crate::kernel::Pid;

#[derive(Clone, Debug)]
pub(crate) enum Message {
    // Worker to master.
    Hello {
        worker: WorkerId,
        incarnation: Incarnation,
    },
    Ready {
        step: Option<u64>,
    },
    Leaving,
    Heartbeat {
        waiting_for: String,
    },
    /// With the state that the worker holds, for the judge alone.
    News(News, Option<State>),
    CutDone {
        cut: CutId,
        generation: Generation,
        files: Vec<CutFile>,
    },
    CutFailed {
        cut: CutId,
    },
    EvalDone {
        eval: EvalId,
        shard: u32,
        generation: Generation,
        value: f64,
    },
    Failed {
        lease: LeaseId,
        shard: u32,
    },
    // Master to worker.
    Told {
        term: Term,
        command: Command,
    },
    // Worker to worker.
    Level {
        world: WorldId,
        step: Option<u64>,
    },
    State {
        world: WorldId,
        state: State,
    },
    Gradient {
        world: WorldId,
        step: u64,
        nodes: Vec<(Span, u64)>,
    },
    Farewell {
        world: WorldId,
    },
}

impl Message {
    /// The world that a worker's message to another one is of.
    pub(crate) fn world(&self) -> Option<WorldId> {
        match self {
            Self::Level { world, .. }
            | Self::State { world, .. }
            | Self::Gradient { world, .. }
            | Self::Farewell { world } => Some(*world),
            _ => None,
        }
    }
}

/// Files of a cut on their way to the disk.
#[derive(Clone, Debug)]
pub(crate) struct Writing {
    pub(crate) cut: CutId,
    pub(crate) generation: Generation,
    pub(crate) folder: String,
    pub(crate) partitions: Range<u32>,
    pub(crate) state: State,
}

/// A worker's timers carry the number of what it did then: by now it may do something else.
#[derive(Clone, Debug)]
pub(crate) enum Timer {
    // Master.
    Tick,
    Answer(Box<Event>),
    Report(Report),
    Commit { cut: CutId, folder: String, version: u64, files: Vec<CutFile> },
    Export { folder: String },
    // Worker.
    Reconnect,
    Built,
    Heartbeat,
    Terminate,
    Loaded { act: u64 },
    Computed { act: u64 },
    Reduced { act: u64 },
    Silence { act: u64 },
    Measured { act: u64, lease: LeaseId },
    Written(Box<Writing>),
    // Site.
    StartMaster,
    Launched { instance: InstanceId, pid: Pid },
    Kill { pid: Pid },
    Thaw { pid: Pid },
    Obey { master: Pid, order: Order },
    DiskFree,
    Fault,
}
