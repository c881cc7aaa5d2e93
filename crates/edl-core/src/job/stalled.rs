// SPDX-License-Identifier: Apache-2.0
//! Workers that make no progress, as a user sees them. Nothing is decided by it: a worker that
//! hangs is replaced when its lease is overdue.

use std::time::Duration;

use super::{Job, Suspect};
use crate::activity::WaitingFor;
use crate::id::WorkerId;
use crate::text::secs;
use crate::time::Time;

/// Shorter waits are not reported, no matter how short batches are.
const STALLED: Duration = Duration::from_secs(10);

impl Job {
    /// What a worker does, if it makes no progress for much longer than a batch or step takes.
    #[must_use]
    pub fn stalled(&self, worker: WorkerId, now: Time) -> Option<String> {
        let doing = self.roster.doing(worker, now)?;
        let limit = self.pace.hang_timeout(STALLED);
        if doing.silence >= limit {
            return Some(format!("silent for {}", secs(doing.silence)));
        }
        if doing.time < limit {
            return None;
        }
        let time = secs(doing.time);
        match doing.waiting_for {
            // Others have to move first, or there is nothing to do.
            WaitingFor::Master | WaitingFor::Route | WaitingFor::Work => None,
            WaitingFor::Nothing if !doing.has_model => {
                Some(format!("building the model for {time}"))
            }
            WaitingFor::Nothing => {
                let step =
                    || self.steps_of(worker).map(|steps| self.ledger().batch_at(steps.start));
                let held = self.assignments.first_held(worker);
                let held = held.or_else(|| step().map(Suspect::Batch))?;
                let (does, what) = (activity(held), self.describe(held));
                Some(format!("{does} for {time} without progress: {what}"))
            }
            waiting_for @ (WaitingFor::Members
            | WaitingFor::Servers
            | WaitingFor::Parameters
            | WaitingFor::Acknowledgements) => {
                Some(format!("waiting for {waiting_for} for {time}"))
            }
        }
    }

    /// Why a worker is replaced that makes no progress with this work.
    pub(super) fn hang(
        &self,
        worker: WorkerId,
        work: Suspect,
        timeout: Duration,
        now: Time,
    ) -> String {
        let doing = self.roster.doing(worker, now);
        match doing.is_some_and(|doing| doing.waiting_for == WaitingFor::Nothing) {
            true => format!("no progress for {timeout:?} while {}", activity(work)),
            false => format!("no progress for {timeout:?}"),
        }
    }
}

/// What a worker does with such work.
fn activity(work: Suspect) -> &'static str {
    match work {
        Suspect::Batch(_) => "training",
        Suspect::EvalShard(_) => "evaluating",
        Suspect::PredictShard(_) => "predicting",
    }
}
