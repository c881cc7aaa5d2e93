// SPDX-License-Identifier: Apache-2.0
//! Workers that are frozen: a busy worker that is silent for a while is pinged, and if it does not
//! answer, the others continue without it. It comes back when it is heard again; a worker that
//! stays silent is replaced after the heartbeat timeout.

use std::time::Duration;

use super::roster::Watch;
use super::{Command, Effect, EventKind, Job, TICK};
use crate::id::WorkerId;
use crate::time::Time;

impl Job {
    /// On every tick.
    pub(super) fn check_frozen(&mut self, now: Time) {
        let Some(timeout) = self.freeze_timeout() else { return };
        let quiet = self.roster.quiet_workers(timeout, now);
        let owing: Vec<WorkerId> = quiet.filter(|worker| self.owes(*worker)).collect();
        for worker in owing {
            match self.roster.watch(worker, timeout, TICK, now) {
                Watch::Heard => {}
                Watch::Silent => self.effects.push(Effect::ToWorker(worker, Command::Ping)),
                Watch::Frozen => self.continue_without(worker, timeout),
            }
        }
    }

    /// None until steps have been measured, or if no other worker could continue.
    pub(super) fn freeze_timeout(&self) -> Option<Duration> {
        let has_others = self.roster.ready_workers().nth(1).is_some();
        let timeout = self.pace.freeze_timeout().filter(|_| has_others)?;
        Some(timeout).filter(|timeout| *timeout < self.config.spec.heartbeat_timeout())
    }

    /// Whether others wait for what a worker does.
    fn owes(&self, worker: WorkerId) -> bool {
        let n_done = self.ledger().n_done();
        let is_awaited = self.strategy.steps().is_some_and(|s| s.is_awaited(worker, n_done));
        is_awaited || self.assignments.n_held(worker) > 0
    }

    fn continue_without(&mut self, worker: WorkerId, timeout: Duration) {
        let text =
            format!("worker-{worker} did not respond for {timeout:?}; continuing without it");
        self.note(EventKind::Stuck, text);
        self.assignments.release_worker(worker, false);
        if let Some(steps) = self.strategy.steps_mut() {
            let world = steps.worlds().current().map(|world| world.id);
            if steps.worlds().is_involved(worker) {
                world.map(|world| steps.worlds_mut().broken(world));
            }
        }
    }
}
