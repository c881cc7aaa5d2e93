// SPDX-License-Identifier: Apache-2.0
//! The losses of a job: batches whose loss or gradient is not finite, and a loss that explodes.
//!
//! Workers only report such a batch. Whether the job stops, skips it or goes back to a checkpoint
//! is decided here, and durable before any worker learns of it. So all workers skip the same
//! batches, no matter which of them found one.

use super::strategy::Strategy;
use super::{End, EventKind, Job, Suspect};
use crate::id::{BatchId, LeaseId, WorkerId};
use crate::optimizer;
use crate::spec::OnNonfinite;
use crate::text::decimal;
use crate::time::Time;

/// So many batches in a row that are not finite mean that the parameters are not.
const MAX_IN_A_ROW: u32 = 8;
/// The maximum number of batches that a job skips.
const MAX_SKIPPED: usize = 1000;
/// Rollbacks without a new checkpoint between them.
const MAX_ROLLBACKS: u32 = 8;
/// A loss this many times as high as the lowest one (or as 1, if that is higher) explodes.
const EXPLODED: f32 = 1000.0;

/// What is known about the losses.
#[derive(Clone, Debug, Default)]
pub(super) struct Losses {
    smoothed: Option<f32>,
    /// The lowest smoothed loss.
    lowest: Option<f32>,
    has_exploded: bool,
    /// Batches that were not finite since the last one that was.
    n_in_a_row: u32,
    n_rollbacks: u32,
}

impl Losses {
    pub(super) fn smoothed(&self) -> Option<f32> {
        self.smoothed
    }

    /// Adds the loss of a batch; the lowest loss before it if this one explodes, once.
    fn add(&mut self, loss: f32) -> Option<f32> {
        self.n_in_a_row = 0;
        let lowest = self.lowest.unwrap_or(loss);
        let smoothed = self.smoothed.map_or(loss, |before| 0.9 * before + 0.1 * loss);
        (self.smoothed, self.lowest) = (Some(smoothed), Some(lowest.min(smoothed)));
        let explodes = !self.has_exploded && loss > EXPLODED * lowest.abs().max(1.0);
        self.has_exploded |= explodes;
        explodes.then_some(lowest)
    }

    /// A new checkpoint is complete.
    pub(super) fn saved(&mut self) {
        self.n_rollbacks = 0;
    }
}

impl Job {
    /// Counts the loss of a batch that is done. One that was skipped has none.
    pub(super) fn count_loss(&mut self, batch: BatchId, loss: f32) {
        if self.durable.skipped.contains(&batch) || !loss.is_finite() {
            return;
        }
        if let Some(lowest) = self.losses.add(loss) {
            let (lowest, loss) = (decimal(lowest.into()), decimal(loss.into()));
            let text = format!("the loss grew from {lowest} to {loss}; {}", self.rate_hint());
            self.note(EventKind::LossExploded, text);
        }
    }

    /// A worker with parameter servers returns a batch that is not finite.
    pub(super) fn batch_nonfinite(
        &mut self,
        worker: WorkerId,
        lease: LeaseId,
        item: u32,
        error: &str,
        now: Time,
    ) {
        // While the servers load, all leases are void.
        if !self.servers().is_serving() {
            return;
        }
        self.assignments.add_idle([worker]);
        match self.assignments.failed(worker, lease, item) {
            Some(Suspect::Batch(batch)) if batch.index == item => {
                self.nonfinite(batch, worker, error, now);
            }
            Some(_) | None => {}
        }
    }

    /// The loss or the gradient of a batch is not finite.
    pub(super) fn nonfinite(&mut self, batch: BatchId, worker: WorkerId, error: &str, now: Time) {
        let step = match self.strategy.trains_in_steps() {
            true => self.ledger().position(batch),
            false => self.ledger().version(),
        };
        let batch_name = self.describe(Suspect::Batch(batch));
        let what = format!("{batch_name}, step {}, worker-{worker}: {error}", step + 1);
        self.losses.n_in_a_row += 1;
        if let Some(why) = self.why_not_skip() {
            return self.end(End::Failed(format!("{what}; {why}")));
        }
        let rolls_back = self.config.spec.on_nonfinite == OnNonfinite::Rollback;
        let before = self.trained_before(batch).filter(|_| rolls_back);
        self.change(|facts| facts.skipped.extend([batch].into_iter().chain(before)));
        let and = if rolls_back { " and loading the last checkpoint" } else { "" };
        self.note(EventKind::NonFinite, format!("{what}; skipping it{and}"));
        if rolls_back {
            self.roll_back(now);
        }
    }

    /// If the last rollback did not help, the step before may be the cause: its gradient was finite,
    /// but not the parameters that it led to.
    fn trained_before(&self, batch: BatchId) -> Option<BatchId> {
        let ledger = self.ledger();
        let is_again = self.strategy.trains_in_steps() && self.losses.n_rollbacks > 0;
        let mut before = (0..ledger.position(batch)).rev().map(|at| ledger.batch_at(at));
        before.find(|batch| !self.durable.skipped.contains(batch)).filter(|_| is_again)
    }

    /// Why the job fails instead of continuing without the batch, if so.
    fn why_not_skip(&self) -> Option<String> {
        let Losses { n_in_a_row, n_rollbacks, .. } = self.losses;
        let policy = self.config.spec.on_nonfinite;
        if policy == OnNonfinite::Stop {
            let saved = match self.durable.latest_checkpoint() {
                Some(checkpoint) => {
                    format!("the last checkpoint is from step {}", checkpoint.version)
                }
                None => "there is no checkpoint".into(),
            };
            let hint = self.rate_hint();
            return Some(format!(
                "{hint}, or skip such batches with --on_nonfinite=skip or rollback; {saved}"
            ));
        }
        if n_in_a_row >= MAX_IN_A_ROW {
            let hint = self.rate_hint();
            return Some(format!("{n_in_a_row} batches in a row are not finite; {hint}"));
        }
        if self.durable.skipped.len() >= MAX_SKIPPED {
            return Some(format!("{MAX_SKIPPED} batches were skipped; fix the data"));
        }
        if policy == OnNonfinite::Rollback && n_rollbacks >= MAX_ROLLBACKS {
            let hint = self.rate_hint();
            return Some(format!("{n_rollbacks} rollbacks without a new checkpoint; {hint}"));
        }
        None
    }

    /// The most likely remedy.
    fn rate_hint(&self) -> String {
        let model = self.durable.model.as_ref();
        let optimizer = model.and_then(|m| optimizer::resolve(&self.config.spec, m).ok());
        match optimizer.map(|optimizer| optimizer.rate(self.ledger().version())) {
            Some(rate) => format!("the learning rate is {rate:?}: try a lower --learning_rate"),
            None => "try a lower --learning_rate".into(),
        }
    }

    /// Loads the last checkpoint, or the initial values. What workers hold no longer counts.
    fn roll_back(&mut self, now: Time) {
        self.losses.n_rollbacks += 1;
        match &mut self.strategy {
            Strategy::Servers(_) | Strategy::Hybrid { .. } => self.reload_servers(now),
            // The world is broken; the next one finds no state, and loads it.
            Strategy::Worlds(_, steps) => {
                steps.worlds_mut().void();
                self.keep_holders();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_explodes_is_noticed_once() {
        let mut losses = Losses::default();
        for loss in [2.3, 2.1, 0.5, 40.0, 0.5] {
            assert_eq!(losses.add(loss), None);
        }
        assert_eq!(losses.add(1e6), losses.lowest);
        assert_eq!(losses.add(1e9), None);
        let mut negative = Losses::default();
        assert!((0..100_u8).all(|n| negative.add(-f32::from(n)).is_none()));
    }
}
