// SPDX-License-Identifier: Apache-2.0
//! Files of a checkpoint, written while training continues. They are copied at an exact step, and
//! one checkpoint is written at a time: an order that comes too early is refused, never queued.

use super::{Effect, HeldState, Member};
use crate::id::CheckpointId;
use crate::job::{CheckpointFile, MemberCheckpoint};
use crate::worker::Report;

impl MemberCheckpoint {
    fn is_due(&self, state: HeldState) -> bool {
        self.at <= state.step || self.generation != state.generation
    }
}

impl Member {
    pub(super) fn has_due_orders(&self) -> bool {
        self.state.is_some_and(|state| self.orders.iter().any(|order| order.is_due(state)))
    }

    /// Copies what was ordered for the step that it holds, and refuses what can never be written.
    pub(super) fn obey_orders(&mut self) {
        let Some(state) = self.state else { return };
        let due: Vec<MemberCheckpoint> =
            self.orders.extract_if(.., |order| order.is_due(state)).collect();
        for order in due {
            match self.refuse(&order, state) {
                Some(error) => {
                    let checkpoint = order.checkpoint;
                    self.report(Report::CheckpointFailed { checkpoint, error });
                }
                None => {
                    self.writing = Some((order.checkpoint, order.generation));
                    self.effects.push(Effect::Write(order));
                }
            }
        }
    }

    fn refuse(&self, order: &MemberCheckpoint, state: HeldState) -> Option<String> {
        let MemberCheckpoint { generation, at, partitions, .. } = order;
        let HeldState { step, .. } = state;
        if *generation != state.generation {
            return Some(format!("this worker does not hold generation {generation}"));
        }
        if *at < step {
            return Some(format!("step {at} has passed: this worker is at step {step}"));
        }
        if partitions.start > partitions.end || partitions.end > self.config.n_partitions {
            return Some(format!("invalid partitions {partitions:?}"));
        }
        self.writing.is_some().then(|| "another checkpoint is still being written".into())
    }

    pub(super) fn written(
        &mut self,
        checkpoint: CheckpointId,
        result: Result<Vec<CheckpointFile>, String>,
    ) {
        let Some((_, generation)) = self.writing.take_if(|(writing, _)| *writing == checkpoint)
        else {
            return;
        };
        self.report(match result {
            Ok(files) => Report::CheckpointDone { checkpoint, generation, files },
            Err(error) => Report::CheckpointFailed { checkpoint, error },
        });
    }
}
