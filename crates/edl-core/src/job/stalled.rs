// SPDX-License-Identifier: Apache-2.0
//! Workers that make no progress, as a user sees them. Nothing is decided by it: a worker that
//! hangs is replaced when its lease is overdue.

use std::time::Duration;

use super::Job;
use crate::activity::{Phase, WaitingFor};
use crate::id::WorkerId;
use crate::text::secs;
use crate::time::Time;

/// Less is no news, no matter how short batches are.
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
        match (doing.waiting_for, doing.phase) {
            // Others have to move first, or there is nothing to do.
            (WaitingFor::Nothing, Phase::Idle | Phase::Leaving)
            | (WaitingFor::Master | WaitingFor::Route | WaitingFor::Work, _) => None,
            (WaitingFor::Nothing, phase) => {
                let held = self.assignments.first_held(worker).or_else(|| self.step_of(worker));
                let what = held.map(|held| format!(": {}", self.describe(held)));
                Some(format!("{phase} for {time} without progress{}", what.unwrap_or_default()))
            }
            (waiting_for, _) => Some(format!("waiting for {waiting_for} for {time}")),
        }
    }

    /// Why a worker is replaced that makes no progress.
    pub(super) fn hang(&self, worker: WorkerId, timeout: Duration, now: Time) -> String {
        let doing = self.roster.doing(worker, now);
        let busy = doing.filter(|doing| doing.waiting_for == WaitingFor::Nothing);
        match busy.map(|doing| doing.phase) {
            Some(phase) => format!("no progress for {timeout:?} while {phase}"),
            None => format!("no progress for {timeout:?}"),
        }
    }
}
