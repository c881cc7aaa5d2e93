// SPDX-License-Identifier: Apache-2.0
//! How a worker exits: it finishes the item in progress and waits a moment for acknowledgements.

use super::{Effect, Report, Worker};
use crate::time::Time;

/// A worker that was asked to exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exit {
    /// The master has no more work; what is in progress is not needed.
    is_stopped: bool,
    /// Asked by the platform, so the master must know.
    is_leaving: bool,
    limit: Time,
    /// Set once nothing is being computed anymore.
    answers_until: Option<Time>,
}

impl Exit {
    pub(super) fn deadline(&self) -> Time {
        self.answers_until.map_or(self.limit, |until| until.min(self.limit))
    }
}

impl Worker {
    pub(super) fn leave(&mut self, now: Time) {
        let limit = now + self.config.limits.hand_over;
        let exit = Exit { is_stopped: false, is_leaving: true, limit, answers_until: None };
        self.exit.get_or_insert(exit).is_leaving = true;
        self.hand_over();
    }

    /// Returns what is not computed at once; the rest is finished. In synchronous mode, all of it is
    /// finished: if every worker leaves, no other could complete the round.
    pub(super) fn hand_over(&mut self) {
        if self.config.mode.is_sync() {
            self.report_kept();
        } else {
            self.return_rest();
        }
    }

    /// Whether a worker that leaves still has batches of the open round to compute.
    pub(super) fn completes_round(&self) -> bool {
        let is_leaving = self.exit.is_some_and(|exit| exit.is_leaving && !exit.is_stopped);
        self.config.mode.is_sync() && is_leaving && self.work.has_open()
    }

    pub(super) fn stop(&mut self, now: Time) {
        let limit = now + self.config.limits.finish;
        let exit = Exit { is_stopped: true, is_leaving: false, limit, answers_until: None };
        let exit = self.exit.get_or_insert(exit);
        (exit.is_stopped, exit.limit) = (true, exit.limit.min(limit));
    }

    /// Whether a batch that was computed is still of use.
    pub(super) fn is_stopped(&self) -> bool {
        self.exit.is_some_and(|exit| exit.is_stopped)
    }

    pub(super) fn exit_if_done(&mut self, now: Time) {
        let is_busy = self.model.is_none()
            || self.pipeline.computing_item().is_some()
            || self.work.is_finishing()
            || self.completes_round();
        let n_pushed = self.work.n_pushed();
        let Some(exit) = &mut self.exit else { return };
        // In synchronous mode, answers come when other workers have completed the round.
        let is_answered_soon = !self.config.mode.is_sync();
        if !is_busy && is_answered_soon && exit.answers_until.is_none() {
            exit.answers_until = Some(now + self.config.limits.last_answers);
        }
        let is_done = !is_busy && (exit.is_stopped || n_pushed == 0);
        if !is_done && now < exit.deadline() {
            return;
        }
        if exit.is_leaving {
            self.effects.push(Effect::Report(Report::Leaving));
        }
        self.connection.abort(&mut self.effects);
        self.effects.push(Effect::End);
        self.is_over = true;
    }
}
