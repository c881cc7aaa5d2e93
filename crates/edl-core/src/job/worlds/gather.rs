// SPDX-License-Identifier: Apache-2.0
//! Waiting for workers that join or leave: the state is not loaded while a worker may still bring
//! it, and it is not lost with the last worker that holds it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::id::{Incarnation, WorkerId};
use crate::instances::Instance;
use crate::job::{Job, Stage};
use crate::platform::{InstanceId, Role};
use crate::time::Time;
use crate::world::{Candidate, Member};

/// Workers that start together connect together: the first one waits this long for the others.
pub(in crate::job) const GATHERING: Duration = Duration::from_secs(1);

impl Job {
    /// Whether a first world should wait a moment for workers that are about to connect; longer if
    /// they may hold the only copy of the state.
    pub(super) fn must_gather(
        &mut self,
        workers: &[WorkerId],
        candidates: &BTreeMap<WorkerId, Candidate>,
        now: Time,
    ) -> bool {
        let since = self.steps_mut().gathering_since(now);
        let has_state = workers.iter().any(|worker| candidates[worker].step.is_some());
        if !workers.is_empty() && !has_state && self.is_state_expected(since, now) {
            return true;
        }
        let expected = self.instances.running().iter();
        let workers: BTreeSet<&WorkerId> = workers.iter().collect();
        let is_missing =
            |id: &InstanceId| id.role == Role::Worker && !workers.contains(&WorkerId(id.id));
        let is_late = now.since(since) >= GATHERING;
        let is_due = |instance: &Instance| !instance.is_leaving && !instance.is_stuck();
        let missing = expected.filter(|(_, instance)| is_due(instance));
        let is_first = self.steps().worlds().current().is_none();
        let is_full = self.instances.max_trainers().is_some_and(|n| workers.len() >= n as usize);
        let waits = is_first && !is_late && !is_full && missing.map(|(id, _)| id).any(is_missing);
        if !waits {
            self.steps_mut().stop_gathering();
        }
        waits
    }

    /// Whether a worker may still bring the state, or a checkpoint of it is being committed. The
    /// wait is never longer than the heartbeat timeout, counted from when others have connected.
    fn is_state_expected(&self, since: Time, now: Time) -> bool {
        let kept = self.durable.latest_checkpoint().map_or(0, |checkpoint| checkpoint.version);
        if self.stages.has_started() && kept >= self.ledger().n_done() {
            return false; // Nothing would be lost.
        }
        let is_early = now.since(since) < self.config.spec.heartbeat_timeout();
        // After a network failure, workers reconnect one by one, and the first ones may hold no
        // state that counts. A worker that is known to have exited is not a holder.
        let is_missed =
            |(id, incarnation): (&WorkerId, &Incarnation)| match self.roster.incarnation(*id) {
                Some(known) => known == *incarnation && self.roster.is_away(*id),
                None => self.stages.has_started(),
            };
        let is_awaited = |worker: &WorkerId| {
            let instance = InstanceId::from(*worker);
            let runs = self.instances.running().get(&instance).is_some_and(|i| !i.is_leaving);
            runs && self.roster.is_awaited(instance, now)
        };
        self.checkpoints.committing().is_some()
            || is_early && self.steps().worlds().holders().into_iter().flatten().any(is_missed)
            || !self.stages.has_started() && self.steps().survivors().iter().any(is_awaited)
    }

    /// Whether workers are about to form a world, or may have formed one that the master has not
    /// heard of: what they train must be saved.
    pub(in crate::job) fn is_world_expected(&self) -> bool {
        let Some(worlds) = self.strategy.worlds() else { return false };
        let is_holder = |id: WorkerId| {
            self.roster.incarnation(id).is_some_and(|incarnation| worlds.is_holder(id, incarnation))
        };
        let has_state =
            |id: WorkerId| self.roster.is_connected(id) && self.roster.step(id).is_some();
        worlds.current().is_some()
            || self.roster.worker_ids().any(|id| has_state(id) && is_holder(id))
    }

    /// If the last workers that hold the state leave, they write a checkpoint first. True while
    /// they must stay.
    pub(super) fn keep_last(
        &mut self,
        candidates: &BTreeMap<WorkerId, Candidate>,
        now: Time,
    ) -> bool {
        let members = self.strategy.members();
        let is_leaving = |m: &Member| self.roster.is_leaving(m.worker);
        let has_state = |m: &Member| candidates.get(&m.worker).is_some_and(|c| c.step.is_some());
        let at = self.strategy.last_step();
        let is_kept = self.durable.latest_checkpoint().is_some_and(|c| c.exact == at);
        if !members.iter().all(is_leaving) || !members.iter().any(has_state) || is_kept {
            return false;
        }
        self.steps_mut().begin_drain();
        if !self.checkpoints.can_begin(now) || *self.stages.stage() == Stage::Finishing {
            return true;
        }
        let is_next = self.steps_mut().next_drain_checkpoint();
        if is_next {
            self.begin_checkpoint(None, now);
        }
        is_next
    }
}
