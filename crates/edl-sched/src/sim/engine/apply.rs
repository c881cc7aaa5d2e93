// SPDX-License-Identifier: Apache-2.0
//! Carries out a plan. Decisions are made here only if the plan leaves them to Kubernetes.

use super::{Engine, Owner, PodId, PodPhase};
use crate::plan::{AllocationPlan, Change, Placing};
use crate::snapshot::{Counts, Placed, Role};

impl Engine<'_> {
    pub(super) fn apply(&mut self, plan: &AllocationPlan) {
        // Stops come first, because what they free can be used at once.
        for change in &plan.changes {
            let Some(job) = self.job_of(change) else { continue };
            self.note_resize(job, change);
            if let Placing::Named { stop, .. } = &change.placing {
                for placed in stop {
                    self.stop_named(job, placed);
                }
            }
        }
        for change in &plan.changes {
            let Some(job) = self.job_of(change) else { continue };
            match &change.placing {
                Placing::Named { start, .. } => {
                    for placed in start {
                        self.start_named(job, placed);
                    }
                }
                Placing::Kubernetes => self.fit_job(job, change.target),
            }
        }
    }

    fn job_of(&self, change: &Change) -> Option<usize> {
        self.jobs.iter().position(|life| life.script.job.id == change.job)
    }

    fn note_resize(&mut self, job: usize, change: &Change) {
        let has = self.counts_in(job, |phase| phase != PodPhase::Leaving);
        let outcome = &mut self.jobs[job].outcome;
        let changes_workers = match &change.placing {
            Placing::Named { start, stop } => {
                start.iter().chain(stop).any(|placed| placed.role == Role::Worker)
            }
            Placing::Kubernetes => change.target.worker != has.worker,
        };
        if has.worker > 0 && changes_workers {
            if change.target.worker == 0 {
                outcome.n_stops += 1;
            }
            outcome.n_resizes += 1;
        }
    }

    fn start_named(&mut self, job: usize, placed: &Placed) {
        let node = self.nodes.iter().position(|node| node.spec.id == placed.node);
        for _ in 0..placed.n {
            let id = self.create(Owner::Job(job, placed.role), node);
            self.try_to_bind(id);
        }
    }

    /// Pods that do not run yet are stopped first, then the newest.
    fn stop_named(&mut self, job: usize, placed: &Placed) {
        let node = self.nodes.iter().position(|node| node.spec.id == placed.node);
        let mut there = self.pods_of(job, placed.role);
        there.retain(|(_, id)| self.pods.get(id).is_some_and(|pod| pod.node == node));
        for (_, id) in there.into_iter().take(placed.n as usize) {
            self.remove(id);
        }
    }

    /// Does what Kubernetes' controllers do to reach the target.
    fn fit_job(&mut self, job: usize, target: Counts) {
        for role in Role::ALL {
            let there = self.pods_of(job, role);
            let wanted = target.of(role) as usize;
            for (_, id) in there.iter().take(there.len().saturating_sub(wanted)) {
                self.remove(*id);
            }
            for _ in there.len()..wanted {
                let id = self.create(Owner::Job(job, role), None);
                self.try_to_schedule(id);
            }
        }
    }

    /// A job's pods of one role that are not leaving, in the order in which they would be stopped:
    /// without a node, not running, running; the newest first.
    fn pods_of(&self, job: usize, role: Role) -> Vec<(u8, PodId)> {
        let mut pods: Vec<(u8, PodId)> = Vec::new();
        for id in self.jobs[job].pods.iter().rev() {
            let Some(pod) = self.pods.get(id) else { continue };
            if pod.owner != Owner::Job(job, role) {
                continue;
            }
            let rank = match pod.phase {
                PodPhase::Unscheduled => 0,
                PodPhase::Pinned => 1,
                PodPhase::Starting => 2,
                PodPhase::Running => 3,
                PodPhase::Leaving => continue,
            };
            pods.push((rank, *id));
        }
        pods.sort_by_key(|(rank, id)| (*rank, std::cmp::Reverse(*id)));
        pods
    }
}
