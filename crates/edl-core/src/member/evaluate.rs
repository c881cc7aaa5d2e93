// SPDX-License-Identifier: Apache-2.0
//! Shards of the validation data, evaluated on the state of one exact step.

use super::{Activity, Doing, Effect, Failure, Member, Outcome, Place, Reading};
use crate::id::{EvalId, LeaseId, WorldId};
use crate::time::Time;
use crate::worker::{Finished, Pass, Records, Report, Shard, Task};

/// Minibatches of a shard that are read beyond the one that is evaluated.
const PIECES_AHEAD: u32 = 2;

/// A shard to evaluate.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Assigned {
    eval: EvalId,
    /// The step whose state is evaluated.
    version: u64,
    shard: Shard,
    n_done: u32,
    /// Every piece is evaluated.
    is_finishing: bool,
}

impl Member {
    pub(super) fn assigned(&mut self, lease: LeaseId, task: Task) {
        let Task::Shard(shard) = task else { return };
        let Pass::Evaluate { eval, version } = shard.pass else { return };
        let assigned = Assigned { eval, version, shard, n_done: 0, is_finishing: false };
        self.shards.insert(lease, assigned);
    }

    /// The first shard whose step has come.
    pub(super) fn due_shard(&self, step: u64) -> Option<LeaseId> {
        let is_due = |shard: &Assigned| shard.version <= step && !shard.is_finishing;
        self.shards.iter().find(|(_, shard)| is_due(shard)).map(|(lease, _)| *lease)
    }

    /// Evaluates the next minibatch of a shard.
    pub(super) fn evaluate(&mut self, lease: LeaseId) -> bool {
        let minibatch_size = self.config.minibatch_size;
        let (Some(state), Some(assigned)) = (self.state, self.shards.get_mut(&lease)) else {
            return false;
        };
        let (version, step) = (assigned.version, state.step);
        if version != step {
            let error = format!("step {version} has passed: this worker is at step {step}");
            self.fail_shard(lease, error);
            return true;
        }
        let (piece, n_pieces) = (assigned.n_done, assigned.shard.n_pieces(minibatch_size));
        if piece >= n_pieces {
            assigned.is_finishing = true;
            self.effects.push(Effect::Finish(lease));
            return true;
        }
        for piece in piece..n_pieces.min(piece + 1 + PIECES_AHEAD) {
            let records = self.shards[&lease].shard.piece(piece, minibatch_size);
            self.read(Place::Piece(lease, piece), Records::Validation(records));
        }
        if !self.can_use_servers() {
            return false;
        }
        match self.take_records(Place::Piece(lease, piece)) {
            Reading::Asked => false,
            Reading::Failed(error) => {
                self.fail_shard(lease, error);
                true
            }
            Reading::Decoded => {
                let evaluate = Activity::Evaluate { lease, piece, version };
                self.start(Doing::Evaluating(lease), evaluate);
                false
            }
        }
    }

    pub(super) fn evaluated(
        &mut self,
        lease: LeaseId,
        result: Result<Outcome, Failure>,
        now: Time,
    ) {
        match result {
            Ok(_) => {
                // It may have been revoked meanwhile.
                if let Some(assigned) = self.shards.get_mut(&lease) {
                    assigned.n_done += 1;
                }
            }
            Err(Failure::Cancelled | Failure::Quit) => {}
            // Nothing is wrong with the records: they are evaluated when the servers are back.
            Err(failure @ Failure::Servers(_)) => self.servers_failed(failure, now),
            Err(Failure::OtherStep(error)) => {
                self.fail_shard(lease, error.clone());
                self.servers_failed(Failure::OtherStep(error), now);
            }
            Err(
                Failure::Failed(error) | Failure::NonFinite(error) | Failure::Lost { error, .. },
            ) => {
                self.fail_shard(lease, error);
            }
        }
    }

    pub(super) fn finished(&mut self, lease: LeaseId, result: Result<Finished, String>) {
        let Some(assigned) = self.shards.get(&lease).filter(|it| it.is_finishing) else { return };
        let (eval, shard) = (assigned.eval, assigned.shard.number);
        let report = match result {
            Ok(Finished::Evaluation(measures)) => Report::EvalDone { eval, shard, measures },
            Ok(Finished::Prediction) => panic!("a member predicts nothing"),
            Err(error) => Report::Failed { lease, index: shard, error },
        };
        self.shards.remove(&lease);
        self.report(report);
    }

    fn fail_shard(&mut self, lease: LeaseId, error: String) {
        let Some(index) = self.shards.get(&lease).map(|assigned| assigned.shard.number) else {
            return;
        };
        self.drop_shard(lease);
        self.report(Report::Failed { lease, index, error });
    }

    /// Forgets a shard, and what was read for it.
    pub(super) fn drop_shard(&mut self, lease: LeaseId) {
        if self.shards.remove(&lease).is_some() {
            self.forget(|place| matches!(place, Place::Piece(of, _) if of == lease));
            self.effects.push(Effect::DropShard(lease));
        }
    }

    pub(super) fn drop_shards(&mut self) {
        let leases: Vec<LeaseId> = self.shards.keys().copied().collect();
        leases.into_iter().for_each(|lease| self.drop_shard(lease));
    }

    /// The world of this worker, if it is in one.
    pub(super) fn world_id(&self) -> WorldId {
        self.world.as_ref().map_or(WorldId(0), |world| world.world.id)
    }
}
