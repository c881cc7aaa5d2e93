// SPDX-License-Identifier: Apache-2.0
//! What a worker reports to its master, and the queue of what is not sent yet.

use std::collections::VecDeque;

use crate::goodput::Told;
use crate::id::{BatchId, CutId, EvalId, Generation, LeaseId, WorldId};
use crate::job::{CutFile, Held, News, Peer};
use crate::metric::Measures;
use crate::model::ModelSpec;

/// What a worker reports, with parameter servers or as a member of a world.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// The model is built, and work can be assigned. Repeated after every welcome.
    Ready {
        model: Box<ModelSpec>,
        /// Leases to hold at once.
        capacity: u32,
        /// Batches that are assigned and not yet acknowledged by every server.
        held: Vec<Held>,
        /// AllReduce: how other workers reach this one, and the step whose state it holds.
        peer: Option<Box<Peer>>,
        /// AllReduce: the last world that it was in; 0 without state.
        world: WorldId,
    },
    /// Every server has acknowledged the batch in `generation`.
    BatchDone {
        lease: LeaseId,
        batch: BatchId,
        generation: Generation,
        loss: f32,
        n_records: u32,
    },
    EvalDone {
        lease: LeaseId,
        eval: EvalId,
        shard: u32,
        generation: Generation,
        measures: Box<Measures>,
        n_records: u64,
    },
    PredictDone {
        lease: LeaseId,
        shard: u32,
        file: String,
        n_records: u64,
    },
    /// The work cannot be done here; the lease is returned.
    Failed {
        lease: LeaseId,
        /// Batch index or shard.
        index: u32,
        error: String,
    },
    /// The worker was asked to exit and returns its leases.
    Leaving,
    Heartbeat {
        step: u64,
        phase: String,
        /// Empty while the worker itself is busy.
        waiting_for: String,
    },
    /// Where the time of the process went.
    Spending(Told),
    /// A member of a world has news.
    Member(News),
    CheckpointDone {
        cut: CutId,
        generation: Generation,
        files: Vec<CutFile>,
    },
    CheckpointFailed {
        cut: CutId,
        generation: Generation,
        error: String,
    },
}

/// Reports that are not sent yet, across all streams to the master.
///
/// It needs no limit: reports answer assigned work, and without a master no work is assigned.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outbox {
    reports: VecDeque<Report>,
}

impl Outbox {
    /// Queues a report. `Ready` goes first, so the master knows the leases that later reports
    /// name, and replaces one that was not sent. Of unsent steps only the last one matters.
    pub fn push(&mut self, report: Report) {
        match report {
            Report::Ready { .. } => {
                self.reports.retain(|report| !matches!(report, Report::Ready { .. }));
                self.reports.push_front(report);
            }
            Report::Member(News::Stepped { .. }) => {
                let is_step =
                    |last: &mut Report| matches!(last, Report::Member(News::Stepped { .. }));
                self.reports.pop_back_if(is_step);
                self.reports.push_back(report);
            }
            Report::BatchDone { .. }
            | Report::EvalDone { .. }
            | Report::PredictDone { .. }
            | Report::Failed { .. }
            | Report::Leaving
            | Report::Heartbeat { .. }
            | Report::Spending(_)
            | Report::Member(_)
            | Report::CheckpointDone { .. }
            | Report::CheckpointFailed { .. } => self.reports.push_back(report),
        }
    }

    /// The next report to send. It is lost if the stream breaks before the master reads it.
    pub fn pop(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.reports.is_empty()
    }
}
