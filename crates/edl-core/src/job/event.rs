// SPDX-License-Identifier: Apache-2.0
//! Everything that can happen to a job: a closed list of all triggers.

use std::time::Duration;

use crate::id::{CheckpointId, Generation, Incarnation, LeaseId, PsId, WorkerId, WorldId};
use crate::platform::{self, ChaosAction, InstanceId};
use crate::server;
use crate::servers::ServerMember;
use crate::worker;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Time has passed.
    Tick,
    Platform(platform::Report),

    WorkerConnected {
        worker: WorkerId,
        incarnation: Incarnation,
        pid: u32,
    },
    /// Its stream broke; it may be dead or come back.
    WorkerGone {
        worker: WorkerId,
        incarnation: Incarnation,
    },
    FromWorker {
        worker: WorkerId,
        incarnation: Incarnation,
        report: worker::Report,
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
    FromPs {
        ps: PsId,
        incarnation: Incarnation,
        report: server::Report,
    },

    /// Answers to effects.
    Committed {
        checkpoint: CheckpointId,
    },
    CheckpointFailed {
        checkpoint: CheckpointId,
        error: String,
    },
    Exported,
    /// The result is being written, and more of it is done.
    ExportProgressed,
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
        /// The time for finishing the work in progress and for a checkpoint; if zero, for neither.
        within: Duration,
    },
    Chaos {
        instance: InstanceId,
        action: ChaosAction,
    },
}

impl Event {
    /// Whether it shows no more than that time has passed or that a process lives.
    pub(super) fn is_sign_of_life(&self) -> bool {
        let is_heartbeat = matches!(
            self,
            Self::FromWorker { report: worker::Report::Heartbeat { .. }, .. }
                | Self::FromPs { report: server::Report::Heartbeat, .. }
        );
        matches!(self, Self::Tick) || is_heartbeat || self.is_time_report()
    }

    /// Whether it is a report that all members send again and again, or that many of them send
    /// about the same.
    pub(super) fn is_routine(&self) -> bool {
        use worker::Report;
        matches!(
            self,
            Self::FromWorker {
                report: Report::Heartbeat { .. } | Report::Spending(_) | Report::Member(_),
                ..
            }
        )
    }

    /// Whether workers may have come or gone, or another number of them is wanted.
    pub(super) fn changes_workers(&self) -> bool {
        matches!(
            self,
            Self::Platform(_)
                | Self::WorkerConnected { .. }
                | Self::WorkerGone { .. }
                | Self::Scale { .. }
                | Self::FromWorker {
                    report: worker::Report::Ready { .. }
                        | worker::Report::Leaving
                        | worker::Report::Member(
                            MemberReport::Formed { .. } | MemberReport::PeerLost { .. },
                        ),
                    ..
                }
        )
    }

    pub(super) fn is_time_report(&self) -> bool {
        matches!(
            self,
            Self::FromWorker { report: worker::Report::Spending(_), .. }
                | Self::FromPs { report: server::Report::Spending(_), .. }
        )
    }
}

/// What a member of a world reports.
#[derive(Clone, Debug, PartialEq)]
pub enum MemberReport {
    /// It holds the state that its world begins with.
    Formed { world: WorldId, step: u64, pause_secs: f64, state_bytes: u64 },
    /// It holds the state after `step`.
    Stepped { world: WorldId, step: u64, hash: u64, loss: f32 },
    /// It was asked to pause, by the request with this number, and begins no step after `step`
    /// before it is allowed again.
    Paused { world: WorldId, number: u64, step: u64 },
    /// It takes this long to train a lane.
    Pace { lane_secs: f64 },
    /// It cannot continue because of another member.
    PeerLost { world: WorldId, suspect: WorkerId, error: String },
    /// It cannot train the records after `step`.
    StepFailed { world: WorldId, step: u64, error: String },
    /// The loss or the gradient of the records after `step` is not finite.
    NonFinite { world: WorldId, step: u64, error: String },
    /// Its training script has left the loop, with the state after `step`.
    Quit { world: WorldId, step: u64 },
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
    /// A worker drops what it holds when it learns of another one.
    pub generation: Generation,
    pub epoch: u32,
    pub indices: Vec<u32>,
}
