// SPDX-License-Identifier: Apache-2.0
//! Hybrid: workers hold the dense parameters and servers the embedding rows, both of one step.
//!
//! A step's rows are on all servers before any worker can finish it, and no server takes a step
//! that a member of the world has not begun. The two are never more than one step apart, and
//! servers keep what one step changed. If a process loses more than that, servers and workers load
//! one checkpoint under one generation.

use std::collections::BTreeMap;

use super::strategy::Strategy;
use super::{End, EventKind, Job, LoadFrom};
use crate::id::{WorkerId, WorldId};
use crate::time::Time;
use crate::world::{World, Worlds};

impl Job {
    /// The servers load: what workers hold no longer counts.
    pub(super) fn void_workers(&mut self) {
        self.strategy.void_workers();
        self.keep_holders();
    }

    /// Stops training while the servers are away. Members are informed at once, so they wait for
    /// the master and not for a server.
    pub(super) fn suspend_world(&mut self) {
        let involved = self.strategy.worlds().map(Worlds::involved).unwrap_or_default();
        let before: Vec<WorkerId> = involved.into_iter().collect();
        if before.is_empty() {
            return;
        }
        let id = WorldId::of(self.config.term, self.number());
        self.steps_mut().worlds_mut().form(id, &[], None, &BTreeMap::new());
        self.void_workers();
        self.take_back_from(&before, &[]);
        let empty = World { id, members: Vec::new(), after: None };
        self.send_world(&before, &empty, None);
    }

    /// All servers hold one generation. If they have loaded it, workers load the same before they
    /// train; if they continued through a restart of the master, so do the workers.
    pub(super) fn go_on_apart(&mut self, restored: bool) {
        self.strategy.set_fresh(restored);
        if restored {
            let (before, step) = (self.ledger().n_done(), self.loaded_step());
            self.go_back_to(step);
            if self.stages.has_started() {
                let lost = before.saturating_sub(step);
                let text = format!("restored step {step}; steps to train again: {lost}");
                self.note(EventKind::Restored, text);
            }
        }
        let workers = self.announce_servers();
        self.assignments.add_idle(workers);
    }

    /// What workers load to match the servers.
    pub(super) fn load_fresh(&mut self) -> LoadFrom {
        let step = self.loaded_step();
        let end = self.stages.next_stop();
        self.strategy.set_fresh(false);
        self.steps_mut().start_over(step, end);
        self.load_from()
    }

    /// A new master finds the members at `step`. They may have begun the step after it, and servers
    /// may have applied that: then no server can save `step`, so training must not end there.
    pub(super) fn allow_begun(&mut self, step: u64) {
        let Strategy::Hybrid { steps, .. } = &mut self.strategy else { return };
        let until = self.stages.next_stop().min(step + 1);
        if until > steps.worlds().until() {
            steps.worlds_mut().allow(until);
            self.send_go(until);
        }
    }

    /// The step that the servers have loaded.
    fn loaded_step(&self) -> u64 {
        let is_it = |folder: &String| {
            let all = self.durable.checkpoints.iter();
            all.filter(|checkpoint| checkpoint.folder == *folder).map(|c| c.version).next()
        };
        self.strategy.group().loading_from().and_then(is_it).unwrap_or(0)
    }

    /// No worker holds the model anymore, so the servers must load together with new workers.
    pub(super) fn restore_servers(&mut self, now: Time) {
        if self.stages.has_started() {
            let text = "all workers with a copy of the model are gone; reloading the servers";
            self.note(EventKind::WorkersLost, text);
        }
        self.reload_servers(now);
    }

    /// The servers load the last checkpoint.
    pub(super) fn reload_servers(&mut self, now: Time) {
        self.strategy.servers_mut().restore();
        self.begin_load(now);
    }

    /// A worker holds a step that the servers have no rows for.
    pub(super) fn step_mismatch(&mut self, worker: WorkerId, error: &str, now: Time) {
        if !self.servers().is_serving() {
            return;
        }
        self.note(
            EventKind::StepMismatch,
            format!("worker-{worker} and the servers disagree on the step: {error}"),
        );
        if self.steps_mut().is_mismatched_too_often() {
            let why = format!("workers and servers keep disagreeing on the step: {error}");
            return self.end(End::Failed(why));
        }
        self.restore_servers(now);
    }
}
