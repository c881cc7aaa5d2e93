// SPDX-License-Identifier: Apache-2.0
//! Spares: workers that are ready but do not train. When a worker that trains is lost, frozen or
//! leaves, a spare takes its place at once, and its replacement becomes a spare.
//!
//! No worker is a spare for good. With servers, the roster keeps the workers that train as long as
//! they can; in steps, the world does. All others are spares.

use std::collections::BTreeSet;

use super::{EventKind, Job};
use crate::id::WorkerId;
use crate::platform::Role;
use crate::time::Time;

impl Job {
    /// With servers: fills the places of workers that no longer train.
    pub(super) fn choose_trainers(&mut self, now: Time) {
        let Some(most) = self.instances.max_trainers() else { return };
        if !self.strategy.trains_in_steps() {
            let chosen = self.roster.choose_trainers(most as usize, now);
            self.assignments.add_idle(chosen);
        }
    }

    /// Takes note of which workers are spares now.
    pub(super) fn update_spares(&mut self, now: Time) {
        if !self.instances.keeps_spares() {
            return;
        }
        let not_needed = self.not_needed();
        self.accounting.set_spares(&not_needed, now);
        let is_ready = |worker: &WorkerId| self.roster.is_ready(*worker);
        let spares: BTreeSet<WorkerId> = not_needed.into_iter().filter(is_ready).collect();
        let promoted = self.spares.difference(&spares).copied();
        let promoted: Vec<WorkerId> = promoted.filter(|worker| self.trains(*worker)).collect();
        self.spares = spares;
        for worker in promoted {
            let text = format!("worker-{worker} was a spare and is now training");
            self.note(EventKind::WorkerJoined, text);
        }
    }

    fn trains(&self, worker: WorkerId) -> bool {
        match self.strategy.worlds() {
            Some(worlds) => worlds.is_involved(worker),
            None => self.roster.is_trainer(worker),
        }
    }

    /// The workers that the job could do without, those that start included: all but those that
    /// train, and others where too few do. Those that are ready fill places first.
    fn not_needed(&self) -> BTreeSet<WorkerId> {
        let Some(most) = self.instances.max_trainers() else { return BTreeSet::new() };
        let running = self.instances.running().iter();
        let stays = running.filter(|(id, known)| id.role == Role::Worker && !known.is_leaving);
        let all: BTreeSet<WorkerId> =
            stays.map(|(id, _)| WorkerId(id.id)).chain(self.roster.worker_ids()).collect();
        let staying = all.into_iter().filter(|worker| !self.roster.is_leaving(*worker));
        let (trainers, mut others): (Vec<WorkerId>, Vec<WorkerId>) =
            staying.partition(|worker| self.trains(*worker));
        others.sort_by_key(|worker| (!self.roster.is_ready(*worker), *worker));
        others.into_iter().skip((most as usize).saturating_sub(trainers.len())).collect()
    }
}
