// SPDX-License-Identifier: Apache-2.0
//! What a worker reports to its master, and the queue of what is not sent yet.

use std::collections::VecDeque;

use crate::activity::WaitingFor;
use crate::goodput::TimeReport;
use crate::id::{BatchId, CheckpointId, EvalId, Generation, LeaseId};
use crate::job::{CheckpointFile, HeldLease, MemberReport, Peer};
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
        held: Vec<HeldLease>,
        /// AllReduce: how other workers reach this one, and the step whose state it holds.
        peer: Option<Box<Peer>>,
    },
    /// The batch is computed and sent to the servers, where it waits for the rest of its round.
    BatchPushed {
        batch: BatchId,
    },
    /// Every server has acknowledged the batch in `generation`.
    BatchDone {
        batch: BatchId,
        generation: Generation,
        loss: f32,
    },
    EvalDone {
        eval: EvalId,
        shard: u32,
        measures: Box<Measures>,
    },
    PredictDone {
        shard: u32,
    },
    /// The work cannot be done here; the lease is returned.
    Failed {
        lease: LeaseId,
        /// Batch index or shard.
        index: u32,
        error: String,
    },
    /// The loss or the gradient of a batch is not finite; the lease is returned.
    NonFinite {
        lease: LeaseId,
        /// Batch index.
        index: u32,
        error: String,
    },
    /// There is no room for the output of a shard; the lease is returned.
    DiskFull {
        lease: LeaseId,
        /// Shard.
        index: u32,
        error: String,
    },
    /// The worker drains: it finishes these batches, and returns all others that it holds.
    Returned {
        kept: Vec<BatchId>,
    },
    /// The worker was asked to exit and returns its leases.
    Leaving,
    Heartbeat {
        waiting_for: WaitingFor,
        /// Batches, lanes and minibatches that the process has computed.
        progress: u64,
    },
    /// Where the time of the process went.
    Spending(TimeReport),
    /// A member of a world has news.
    Member(MemberReport),
    CheckpointDone {
        checkpoint: CheckpointId,
        generation: Generation,
        files: Vec<CheckpointFile>,
    },
    CheckpointFailed {
        checkpoint: CheckpointId,
        error: String,
    },
}

/// Where a report goes among those that are not sent yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Before all others, in place of an unsent one: the master must know the leases that later
    /// reports name.
    First,
    /// Last, in place of an unsent one that is the last: only the newest matters.
    Newest,
    Last,
}

impl Report {
    /// Whether it counts from every process of the worker, not only from the one that the master
    /// knows.
    #[must_use]
    pub fn counts_from_any_process(&self) -> bool {
        matches!(
            self,
            Self::BatchDone { .. }
                | Self::EvalDone { .. }
                | Self::PredictDone { .. }
                | Self::Spending(_)
                | Self::CheckpointDone { .. }
                | Self::CheckpointFailed { .. }
        )
    }

    #[must_use]
    pub fn priority(&self) -> Priority {
        if matches!(self, Self::Ready { .. }) {
            Priority::First
        } else if matches!(self, Self::Member(MemberReport::Stepped { .. })) {
            Priority::Newest
        } else {
            Priority::Last
        }
    }
}

/// Reports that are not sent yet, across all streams to the master; `M` is a report or its
/// encoding.
///
/// It needs no limit: reports answer assigned work, and without a master no work is assigned.
#[derive(Clone, Debug, PartialEq)]
pub struct Outbox<M>(VecDeque<(Priority, M)>);

impl<M> Default for Outbox<M> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<M> Outbox<M> {
    pub fn push(&mut self, priority: Priority, message: M) {
        match priority {
            Priority::First => {
                self.0.retain(|(other, _)| *other != Priority::First);
                self.0.push_front((priority, message));
            }
            Priority::Newest => {
                self.0.pop_back_if(|(last, _)| *last == Priority::Newest);
                self.0.push_back((priority, message));
            }
            Priority::Last => self.0.push_back((priority, message)),
        }
    }

    /// The next message to send. It is lost if the stream breaks before the master reads it.
    pub fn pop(&mut self) -> Option<M> {
        self.0.pop_front().map(|(_, message)| message)
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_goes_first_and_an_unsent_one_is_replaced() {
        let mut outbox = Outbox::default();
        outbox.push(Priority::Last, "done");
        outbox.push(Priority::First, "held: 1, 2");
        outbox.push(Priority::Last, "done too");
        outbox.push(Priority::First, "held: 2");
        let sent: Vec<_> = std::iter::from_fn(|| outbox.pop()).collect();
        assert_eq!(sent, ["held: 2", "done", "done too"]);
        assert!(outbox.is_empty());
    }

    #[test]
    fn only_the_newest_of_consecutive_steps_is_sent() {
        let mut outbox = Outbox::default();
        for step in ["step 1", "step 2"] {
            outbox.push(Priority::Newest, step);
        }
        outbox.push(Priority::Last, "formed");
        outbox.push(Priority::Newest, "step 3");
        let sent: Vec<_> = std::iter::from_fn(|| outbox.pop()).collect();
        assert_eq!(sent, ["step 2", "formed", "step 3"]);
    }
}
