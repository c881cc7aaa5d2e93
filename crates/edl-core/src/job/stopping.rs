// SPDX-License-Identifier: Apache-2.0
//! A stop: what is computed now is finished and saved, so nothing is computed again after a resume.
//!
//! Workers with parameter servers finish the batch that they compute and return the others. In
//! synchronous mode, the open round is completed, because a round is applied as a whole. Members of
//! a world begin no further step; the checkpoint is of the last step that any of them has begun.

use std::time::Duration;

use super::{Command, Effect, End, Job};
use crate::id::{PsId, WorkerId};
use crate::server;
use crate::spec::JobType;
use crate::time::Time;

impl Job {
    /// Stops the job within this time.
    pub(super) fn stop(&mut self, reason: &str, within: Duration, now: Time) {
        let is_training = self.config.spec.job_type == JobType::Train;
        let can_save = is_training && (self.is_serving() || self.is_world_expected());
        if within.is_zero() || !can_save {
            return self.end(End::Stopped(reason.into()));
        }
        self.assignments.end_evaluation();
        let is_first = self.stages.stopping().is_none();
        if is_first && self.strategy.trains_in_steps() {
            // Members that wait for others to pause would not get to a checkpoint that is ordered.
            self.cancel_pause();
        }
        self.stages.stop(reason, within, self.assignments.ledger().frontier(), now);
        if !is_first {
            return;
        }
        self.keep_servers();
        if let Some(steps) = self.strategy.steps_mut() {
            steps.pause_again();
        }
        if !self.strategy.trains_in_steps() {
            let workers: Vec<WorkerId> = self.roster.worker_ids().collect();
            self.drain(workers, now);
        }
    }

    /// Makes servers that are asked to exit stay for the checkpoint of a stop. If the master is deleted,
    /// the stop may follow later than they would stay otherwise; if it does not, the next master's
    /// welcome cancels this.
    pub(super) fn keep_servers(&mut self) {
        self.keeps_servers = true;
        let servers = self.strategy.servers().members().keys();
        self.effects.extend(servers.map(|ps| Effect::ToPs(*ps, server::Order::Drain)));
    }

    /// A server has connected: it may have missed this, and a welcome cancels it.
    pub(super) fn keep_server_again(&mut self, ps: PsId) {
        if self.keeps_servers {
            self.effects.push(Effect::ToPs(ps, server::Order::Drain));
        }
    }

    fn drain(&mut self, workers: Vec<WorkerId>, now: Time) {
        let Some(stop) = self.stages.stopping() else { return };
        let command = Command::Drain { within: stop.deadline.since(now) };
        let drain = |worker| Effect::ToWorker(worker, command.clone());
        self.effects.extend(workers.into_iter().map(drain));
    }

    /// A worker is ready while the job stops: it may not know of it.
    pub(super) fn drain_again(&mut self, worker: WorkerId, now: Time) {
        if self.stages.stopping().is_none() {
            return;
        }
        match self.strategy.steps_mut() {
            Some(steps) => steps.pause_again(),
            None => self.drain(vec![worker], now),
        }
    }

    /// Whether the job stops after the open round, whose batches are still assigned.
    pub(super) fn completes_round(&self) -> bool {
        let is_draining = self.stages.stopping().is_some_and(|stop| !stop.is_saving);
        is_draining && self.ledger().is_sync()
    }

    /// Takes the checkpoint of the stop when nothing is in progress anymore, or when it is time.
    pub(super) fn advance_stop(&mut self, now: Time) {
        let Some(stop) = self.stages.stopping().cloned() else { return };
        if now >= stop.deadline {
            let saved = self.durable.latest_checkpoint().map_or(0, |checkpoint| checkpoint.version);
            let lost = format!("no time to save a checkpoint after step {saved}");
            return self.end_stop(Some(&lost));
        }
        // One that was begun before is finished first.
        if self.checkpoints.is_writing() {
            return;
        }
        if self.strategy.trains_in_steps() {
            return self.advance_pause(now);
        }
        let ledger = self.assignments.ledger();
        let n_open = ledger.pool().n_assigned();
        let is_whole = !ledger.is_sync() || ledger.is_reached(self.stages.next_stop());
        if !stop.is_saving && n_open + usize::from(!is_whole) > 0 {
            if now < stop.drain_until {
                return;
            }
            let batches = match n_open {
                0 => None,
                1 => Some("1 batch was".to_owned()),
                n => Some(format!("{n} batches were")),
            };
            if let Some(batches) = batches {
                let lost = format!("{batches} not finished in time and will be trained again");
                self.stages.note_loss(&lost);
            }
        }
        self.stages.begin_saving();
        self.begin_checkpoint(None, now);
    }

    /// Asks the members of the world to pause, and saves the last step that any of them has begun.
    fn advance_pause(&mut self, now: Time) {
        if !self.steps_mut().worlds().is_settled() {
            return;
        }
        if self.ask_to_pause(now) {
            let members = self.strategy.members().iter().map(|member| member.worker);
            return self.drain(members.collect(), now);
        }
        let Some(step) = self.steps_mut().paused_at() else { return };
        let step = step.max(self.ledger().n_done());
        self.steps_mut().end_at(step);
        if step == 0 || self.durable.exact_checkpoint(step).is_some() {
            return self.end_stop(None);
        }
        self.send_go(step);
        self.stages.begin_saving();
        self.begin_checkpoint(None, now);
    }

    /// The job stops now; `lost` is what could not be saved.
    pub(super) fn end_stop(&mut self, lost: Option<&str>) {
        lost.into_iter().for_each(|lost| self.stages.note_loss(lost));
        if let Some(stop) = self.stages.stopping() {
            let end = End::Stopped(stop.reason.clone());
            self.end(end);
        }
    }
}
