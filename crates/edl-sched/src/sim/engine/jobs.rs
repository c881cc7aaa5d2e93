// SPDX-License-Identifier: Apache-2.0
//! The progress of jobs: work done by running workers, pauses when they change, completion.

use std::time::Duration;

use super::{Engine, Event, PodId, PodPhase};
use crate::snapshot::Counts;

impl Engine<'_> {
    /// Accounts for the time since the job's last update.
    pub(super) fn accrue(&mut self, job: usize) {
        let now = self.now;
        let job = &mut self.jobs[job];
        let from = job.touched;
        job.touched = now;
        if job.workers.is_empty() || job.is_done() {
            return;
        }
        let n: u32 = job.workers.iter().sum();
        let all = now.since(from);
        let pause_end = job.paused_until.max(from).min(now);
        let paused = pause_end.since(from);
        let busy = all.saturating_sub(paused).as_secs_f64();
        job.ran += all;
        job.outcome.worker_secs += f64::from(n) * all.as_secs_f64();
        job.outcome.paused_worker_secs += f64::from(n) * paused.as_secs_f64();
        if busy > 0.0 {
            job.work.advance(&job.workers, busy);
        }
    }

    /// Continues jobs whose workers changed with their current workers.
    pub(super) fn settle_changed(&mut self) {
        while let Some(job) = self.changed.pop_first() {
            self.accrue(job);
            let now = self.now;
            let mut workers: Vec<u32> = self.jobs[job].live.values().copied().collect();
            // The fullest node first, as placement from the emptiest node lists them.
            workers.sort_unstable_by_key(|n| std::cmp::Reverse(*n));
            let life = &mut self.jobs[job];
            if life.is_done() {
                continue;
            }
            life.workers = workers;
            life.paused_until = now + self.scenario.rescale;
            life.work.placed(&life.workers);
            self.order_milestone(job);
        }
    }

    /// Schedules the next milestone of a job's work.
    fn order_milestone(&mut self, job: usize) {
        let life = &mut self.jobs[job];
        life.version += 1;
        let version = life.version;
        if let Some(secs) = life.work.secs_to_milestone(&life.workers) {
            let pause = life.paused_until.since(self.now);
            let wait = pause + Duration::from_secs_f64(secs.min(1e9));
            self.after(wait, Event::Milestone(job, version));
        }
    }

    pub(super) fn milestone(&mut self, job: usize, version: u64) {
        if self.jobs[job].version != version || self.jobs[job].is_done() {
            return;
        }
        self.accrue(job);
        let life = &mut self.jobs[job];
        life.work.pass_milestone(&life.workers);
        if life.work.is_done() {
            life.outcome.done = Some(self.now);
            let pods: Vec<PodId> = life.pods.iter().copied().collect();
            for id in pods {
                self.pod_gone(id);
            }
            self.request_plan();
        } else {
            self.order_milestone(job);
        }
    }

    /// Lets jobs adapt their batch before a plan is made.
    pub(super) fn refresh_work(&mut self) {
        for job in 0..self.jobs.len() {
            let life = &self.jobs[job];
            if life.is_active() && !life.workers.is_empty() && life.work.adapts() {
                self.accrue(job);
                let life = &mut self.jobs[job];
                life.work.refresh(&life.workers);
                self.order_milestone(job);
            }
        }
    }

    /// How many pods of a job are in phases that `is_in` accepts.
    pub(super) fn counts_in(&self, job: usize, is_in: impl Fn(PodPhase) -> bool) -> Counts {
        let mut counts = Counts::default();
        for pod in self.jobs[job].pods.iter().filter_map(|id| self.pods.get(id)) {
            if let super::Owner::Job(_, role) = pod.owner
                && is_in(pod.phase)
            {
                *counts.of_mut(role) += 1;
            }
        }
        counts
    }
}
