// SPDX-License-Identifier: Apache-2.0
//! The course of a job: work up to a barrier, evaluate there, continue, finish, end.

use std::time::Duration;

use super::stages::{EXPORT_TIMEOUT, Next, Stage};
use super::{CheckpointRef, Command, Durable, Effect, End, EventKind, Job};
use crate::id::{EvalId, PsId, WorkerId};
use crate::platform::{InstanceId, Order, Role};
use crate::server;
use crate::spec::JobType;
use crate::time::{Time, millis};

/// How long processes may take to exit when the job is over.
const END_GRACE: Duration = Duration::from_millis(1500);
/// How long a script may run after its training loop.
pub const CUSTOM_LOOP_GRACE: Duration = Duration::from_secs(600);

impl Job {
    /// Sets where training ends and where it pauses next, from what is done.
    pub(super) fn set_limits(&mut self) {
        let (ledger, durable) = (self.assignments.ledger(), &self.durable);
        self.stages.restart(ledger, &durable.evaluations, durable.last_step);
    }

    /// Forgets evaluations of versions that were lost: they are of another model.
    pub(super) fn forget_lost_evaluations(&mut self) {
        let version = self.ledger().version() + self.config.evaluated_version;
        if self.durable.evaluations.iter().any(|evaluated| evaluated.version > version) {
            self.change(|facts| facts.evaluations.retain(|e| e.version <= version));
        }
    }

    /// Saves the best model if that was begun and lost before it was complete.
    pub(super) fn keep_best(&mut self, now: Time) {
        let Some(last) = self.durable.evaluations.last().cloned() else { return };
        let n_done = self.ledger().n_done();
        let is_kept = |checkpoint: &CheckpointRef| {
            checkpoint.version == last.version
                && self.durable.best.as_ref() == Some(&checkpoint.folder)
        };
        if last.is_best
            && self.stages.is_training()
            && self.ledger().version() == last.version
            && self.ledger().position_of(last.version) == n_done
            && !self.durable.checkpoints.iter().any(is_kept)
        {
            let is_it = |c: &&CheckpointRef| c.exact == Some(n_done) && !c.is_bad;
            if let Some(checkpoint) = self.durable.checkpoints.iter().find(is_it) {
                let best = Some(checkpoint.folder.clone());
                self.change(|facts| facts.best = best);
            } else if self.strategy.last_step().is_none_or(|step| step == n_done) {
                self.stages.enter(Stage::BestCheckpoint);
                self.begin_checkpoint(Some(n_done), now);
            }
        }
    }

    /// Advances the job as far as the state of the parameters allows.
    pub(super) fn advance_stage(&mut self, now: Time) {
        self.check_checkpoint(now);
        if self.config.spec.job_type == JobType::Predict {
            self.assignments.begin_predictions();
        }
        self.pause_for_time(now);
        match self.stages.stage() {
            Stage::Working => self.advance_work(now),
            Stage::Evaluating { .. } => {
                if !self.assignments.is_evaluating() {
                    self.finish_evaluation(now);
                } else if self.stages.is_time_up(self.elapsed(now)) {
                    self.end_evaluation_early(now);
                }
            }
            Stage::Finishing => self.finish(now),
            Stage::Stopping(_) => self.advance_stop(now),
            Stage::BestCheckpoint | Stage::Exporting { .. } | Stage::Ended => {}
        }
        let assigns = matches!(self.stages.stage(), Stage::Working | Stage::Evaluating { .. });
        if assigns || self.completes_round() {
            self.assign_work(now);
        }
        if self.stages.is_training() && self.checkpoints.is_due(|| self.ledger().version(), now) {
            self.begin_checkpoint(None, now);
        }
    }

    fn advance_work(&mut self, now: Time) {
        if let Some(predictions) = self.assignments.predictions() {
            if predictions.is_finished() && !self.checkpoints.is_paused(now) {
                let n_shards = predictions.n();
                self.stages.export(now);
                self.effects.push(Effect::JoinPredictions { n_shards });
            }
            return;
        }
        let (ledger, evaluations) = (self.assignments.ledger(), &self.durable.evaluations);
        match self.stages.next(ledger, evaluations) {
            Next::Work => {}
            Next::Evaluate { .. } if self.stages.is_time_up(self.elapsed(now)) => {
                self.end_evaluation_early(now);
            }
            Next::Evaluate { is_last } => {
                // A decision based on an evaluation must not be lost with the first worker there.
                if self.is_together() {
                    self.begin_evaluation(is_last);
                }
            }
            Next::Finish => {
                self.stages.enter(Stage::Finishing);
                self.finish(now);
            }
            Next::Pass => self.stages.set_barrier(ledger, evaluations),
        }
    }

    fn begin_evaluation(&mut self, is_last: bool) {
        let id = EvalId::of(self.config.term, self.number());
        let version = self.assignments.begin_evaluation(id);
        self.stages.enter(Stage::Evaluating { is_last });
        self.effects.push(Effect::EvaluationStarted { version });
    }

    fn finish_evaluation(&mut self, now: Time) {
        let evaluation = self.assignments.end_evaluation().filter(|_| self.durable.model.is_some());
        let Some(mut evaluation) = evaluation else {
            return self.stages.enter(Stage::Working);
        };
        evaluation.version += self.config.evaluated_version;
        let evaluated = self.change(|facts| facts.add_evaluation(&evaluation));
        let is_best = evaluated.is_best;
        self.effects.push(Effect::Evaluated(evaluated));
        let n_done = self.ledger().n_done();
        if self.stages.evaluated(n_done, &self.durable.evaluations, now) {
            let patience = self.config.spec.early_stop_patience;
            self.note(
                EventKind::EarlyStop,
                format!("stopping early: no improvement (--early_stop_patience={patience})"),
            );
        }
        if is_best && self.config.spec.job_type == JobType::Train {
            self.stages.enter(Stage::BestCheckpoint);
            // Only one is written at a time: an earlier one is finished first.
            if !self.checkpoints.is_writing() {
                self.begin_checkpoint(Some(n_done), now);
            }
        } else {
            self.resume_training();
        }
    }

    /// The time is up: an evaluation ends without a result, or is not begun.
    fn end_evaluation_early(&mut self, now: Time) {
        let reached = format!("--max_time={} reached", self.config.spec.max_time.0);
        if self.config.spec.job_type != JobType::Train {
            return self.end(End::Stopped(reached));
        }
        self.note(EventKind::MaxTime, format!("{reached}; skipping the evaluation"));
        self.assignments.end_evaluation();
        self.stages.end_training(self.assignments.ledger().n_done());
        self.finish(now);
    }

    /// Continues after a barrier.
    pub(super) fn resume_training(&mut self) {
        self.stages.resume(self.assignments.ledger(), &self.durable.evaluations);
    }

    /// Writes the final checkpoint unless there is one of exactly this state.
    fn finish(&mut self, now: Time) {
        if self.config.spec.job_type == JobType::Evaluate {
            return self.end(End::Succeeded);
        }
        if self.checkpoints.is_paused(now) {
            return;
        }
        if self.is_exportable() {
            return self.export(now);
        }
        if self.checkpoints.can_begin(now) {
            self.begin_checkpoint(Some(self.ledger().n_done()), now);
        }
    }

    /// Whether there is a checkpoint of exactly what is trained.
    pub(super) fn is_exportable(&self) -> bool {
        self.durable.exact_checkpoint(self.ledger().n_done()).is_some()
    }

    /// The result could not be written. On a full disk it is tried again.
    pub(super) fn export_failed(&mut self, error: &str, is_disk_full: bool, now: Time) {
        let is_retry = self.checkpoints.is_retrying_final();
        if !is_disk_full || !self.checkpoints.retry_final(now) {
            return self.end(End::Failed(format!("cannot write the result: {error}")));
        }
        self.checkpoints.failed(error);
        if !is_retry {
            self.note_unwritten(error);
        }
        let is_predicting = self.config.spec.job_type == JobType::Predict;
        self.stages.enter(if is_predicting { Stage::Working } else { Stage::Finishing });
    }

    pub(super) fn note_unwritten(&mut self, error: &str) {
        let text = format!("cannot write the result; free some disk space: {error}");
        self.note(EventKind::CheckpointFailed, text);
    }

    /// Gives up on the result if its disk no longer accepts writes.
    pub(super) fn check_export(&mut self, now: Time) {
        if matches!(self.stages.stage(), Stage::Exporting { deadline } if now >= *deadline) {
            let why = format!("nothing was written for {EXPORT_TIMEOUT:?}; check the disk");
            self.export_failed(&why, false, now);
        }
    }

    pub(super) fn export(&mut self, now: Time) {
        let checkpoint = self.durable.exact_checkpoint(self.ledger().n_done());
        let Some(checkpoint) = checkpoint else { return };
        let checkpoint = checkpoint.folder.clone();
        self.stages.export(now);
        self.effects.push(Effect::Export { checkpoint });
    }

    /// Limits by the clock: a pause for an evaluation, or the end.
    fn pause_for_time(&mut self, now: Time) {
        if !self.stages.has_time_limit() {
            return;
        }
        let (ledger, elapsed) = (self.assignments.ledger(), self.elapsed(now));
        let frontier = self.strategy.last_step().unwrap_or_else(|| ledger.frontier());
        if self.stages.pause_for_time(frontier, ledger, elapsed, now) {
            let max_time = self.config.spec.max_time.0;
            self.note(EventKind::MaxTime, format!("--max_time={max_time} reached; stopping"));
        }
    }

    /// How long the job has worked, earlier masters included.
    #[must_use]
    pub fn elapsed(&self, now: Time) -> Duration {
        let before = Duration::from_secs_f64(self.durable.elapsed_secs.max(0.0));
        before + self.stages.elapsed(now)
    }

    pub(super) fn end(&mut self, end: End) {
        self.end_with(end, |_| {});
    }

    /// Ends the job: informs every process, then stops it. `change` is made durable with the end.
    pub(super) fn end_with(&mut self, end: End, change: impl FnOnce(&mut Durable)) {
        if self.is_ended() {
            return;
        }
        self.stages.enter(Stage::Ended);
        self.change(|facts| {
            change(facts);
            facts.end = Some(end.clone());
        });
        let reason = match &end {
            End::Succeeded => "job finished".to_owned(),
            End::Failed(why) | End::Stopped(why) => why.clone(),
        };
        for worker in self.roster.worker_ids() {
            self.effects.push(Effect::ToWorker(worker, Command::Stop(reason.clone())));
        }
        for ps in self.strategy.servers().members().keys() {
            self.effects.push(Effect::ToPs(*ps, server::Order::Stop(reason.clone())));
        }
        let has_more = self.config.spec.is_custom_loop() && end == End::Succeeded;
        let grace = if has_more { CUSTOM_LOOP_GRACE } else { END_GRACE };
        let running: Vec<InstanceId> = self.instances.running().keys().copied().collect();
        for instance in running {
            // A process without a stream does not learn of the end.
            let order = if self.is_connected(instance) {
                Order::Dismiss { instance, grace_ms: millis(grace) }
            } else {
                Order::Stop { instance, grace_ms: millis(END_GRACE) }
            };
            self.effects.push(Effect::Platform(order));
        }
        self.effects.push(Effect::Ended(end));
    }

    fn is_connected(&self, instance: InstanceId) -> bool {
        match instance.role {
            Role::Worker => self.roster.is_connected(WorkerId(instance.id)),
            Role::Ps => self.strategy.servers().members().contains_key(&PsId(instance.id)),
            Role::Master => false,
        }
    }
}
