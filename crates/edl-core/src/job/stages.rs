// SPDX-License-Identifier: Apache-2.0
//! The course of a job: work up to a barrier, evaluate there, go on, finish, end.

use std::time::Duration;

use super::{CheckpointRef, Command, Durable, Effect, End, Job, PsOrder};
use crate::evaluation::is_stalled;
use crate::id::EvalId;
use crate::platform::{InstanceId, Order};
use crate::spec::JobType;
use crate::time::Time;

/// How long a stop waits for its checkpoint.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// How long processes may take to leave when the job is over.
const END_GRACE: Duration = Duration::from_millis(1500);
/// What a training loop of the user's own gets for what it does after its last step.
pub const OWN_LOOP_GRACE: Duration = Duration::from_secs(600);

/// Where a job stands. Whether the servers serve is apart from this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Training (or predicting) up to the barrier.
    Working,
    /// At the barrier. `is_last`: there is nothing to train after it.
    Evaluating {
        is_last: bool,
    },
    /// The best model so far is being kept.
    BestCut,
    /// The final checkpoint is to be written.
    Finishing,
    Exporting,
    /// Somebody wants an end, after one more checkpoint.
    Stopping {
        reason: String,
        deadline: Time,
    },
    Ended,
}

impl Job {
    /// Fixes where training ends and where it pauses next, from what is done.
    pub(super) fn set_limits(&mut self) {
        let spec = &self.config.spec;
        let all = match spec.num_epochs {
            0 => u64::MAX,
            n => self.ledger().position_of(u64::from(n) * self.ledger().versions_per_epoch()),
        };
        let by_step = match spec.max_step {
            0 => u64::MAX,
            n => self.ledger().position_of(n),
        };
        self.limit = match spec.job_type {
            JobType::Train => all.min(by_step),
            JobType::Evaluate | JobType::Predict => 0,
        };
        if is_stalled(spec.early_stop_patience, &self.durable.evaluations) {
            self.limit = self.limit.min(self.ledger().n_done());
        }
        self.set_barrier();
        // An export needs no servers, and must not be begun twice.
        if !matches!(self.stage, Stage::Stopping { .. } | Stage::Exporting) {
            self.stage = Stage::Working;
        }
    }

    /// The position that training must not pass now.
    pub(super) fn next_stop(&self) -> u64 {
        self.barrier.min(self.limit)
    }

    /// Evaluations of a history that is no more say nothing about the model that is trained now.
    pub(super) fn forget_lost_evaluations(&mut self) {
        let version = self.ledger().version();
        if self.durable.evaluations.iter().any(|evaluated| evaluated.version > version) {
            self.change(|facts| facts.evaluations.retain(|e| e.version <= version));
        }
    }

    /// Cuts the best model if that was begun and lost before it was complete.
    pub(super) fn keep_best(&mut self, now: Time) {
        let Some(last) = self.durable.evaluations.last().cloned() else { return };
        let n_done = self.ledger().n_done();
        let is_kept = |checkpoint: &CheckpointRef| {
            checkpoint.version == last.version
                && self.durable.best.as_ref() == Some(&checkpoint.folder)
        };
        if last.is_best
            && self.stage == Stage::Working
            && self.config.spec.job_type == JobType::Train
            && self.ledger().version() == last.version
            && self.ledger().position_of(last.version) == n_done
            && !self.durable.checkpoints.iter().any(is_kept)
        {
            let is_it = |c: &&CheckpointRef| c.exact == Some(n_done) && !c.is_bad;
            if let Some(checkpoint) = self.durable.checkpoints.iter().find(is_it) {
                let best = Some(checkpoint.folder.clone());
                self.change(|facts| facts.best = best);
            } else if self.strategy.last_step().is_none_or(|step| step == n_done) {
                self.stage = Stage::BestCut;
                self.begin_cut(Some(n_done), now);
            }
        }
    }

    /// The next position at which the model is evaluated.
    fn set_barrier(&mut self) {
        let spec = &self.config.spec;
        let n_done = self.ledger().n_done();
        self.barrier = self.limit;
        if self.config.n_validation_records == 0 {
            return;
        }
        let mut candidates = Vec::new();
        let version = self.ledger().version();
        if spec.evaluation_steps > 0 {
            let steps = u64::from(spec.evaluation_steps);
            let first = (version / steps + u64::from(self.is_evaluated(n_done))).max(1) * steps;
            let mut next = self.ledger().position_of(first);
            for step in 1.. {
                if self.ledger().can_be_exact(next) {
                    break;
                }
                next = self.ledger().position_of(first + step * steps);
            }
            candidates.push(next);
        }
        if spec.evaluation_epochs {
            let per_epoch = self.ledger().versions_per_epoch();
            let epoch = u64::from(self.ledger().epoch());
            let is_border = n_done > 0 && self.ledger().n_done_in_epoch() == 0;
            let next = if is_border && !self.is_evaluated(n_done) { epoch } else { epoch + 1 };
            let border = |epoch: u64| self.ledger().position_of(epoch * per_epoch);
            // At most the epoch after is touched already.
            let borders = [border(next), border(next + 1), border(next + 2)];
            candidates.extend(borders.into_iter().find(|at| self.ledger().can_be_exact(*at)));
        }
        let next = candidates.into_iter().min();
        self.barrier = next.unwrap_or(u64::MAX).min(self.limit);
    }

    /// Whether the model at `position` was evaluated (position zero is nothing to evaluate).
    fn is_evaluated(&self, position: u64) -> bool {
        let version = self.ledger().version_at(position);
        position == 0 || self.durable.evaluations.iter().any(|e| e.version == version)
    }

    /// Goes as far as the servers' state allows.
    pub(super) fn advance_stage(&mut self, now: Time) {
        self.check_cut(now);
        if self.config.spec.job_type == JobType::Predict {
            self.lending.begin_predictions();
        }
        self.pause_for_time(now);
        match &self.stage {
            Stage::Working => self.advance_work(now),
            Stage::Evaluating { is_last } => {
                let is_last = *is_last;
                if !self.lending.is_evaluating() {
                    self.finish_evaluation(is_last, now);
                }
            }
            Stage::Finishing => self.finish(now),
            Stage::Stopping { reason, deadline } => {
                if now >= *deadline {
                    let end = End::Stopped(reason.clone());
                    return self.end(end);
                }
            }
            Stage::BestCut | Stage::Exporting | Stage::Ended => {}
        }
        if matches!(self.stage, Stage::Working | Stage::Evaluating { .. }) {
            self.lend(now);
        }
        let is_training = self.config.spec.job_type == JobType::Train;
        if is_training
            && self.stage == Stage::Working
            && self.checkpoints.is_due(self.ledger().version(), now)
        {
            self.begin_cut(None, now);
        }
    }

    fn advance_work(&mut self, now: Time) {
        if let Some(predictions) = self.lending.predictions() {
            if predictions.is_finished() {
                let n_shards = predictions.n();
                self.stage = Stage::Exporting;
                self.effects.push(Effect::JoinPredictions { n_shards });
            }
            return;
        }
        if !self.ledger().is_reached(self.next_stop()) {
            return;
        }
        let n_done = self.ledger().n_done();
        let is_last = n_done >= self.limit;
        let has_data = self.config.n_validation_records > 0;
        let is_known = self.config.spec.job_type == JobType::Train && self.is_evaluated(n_done);
        if has_data && !is_known {
            // What is decided by an evaluation must not be lost with the one that came first.
            if self.is_together() {
                self.begin_evaluation(is_last);
            }
        } else if is_last {
            self.stage = Stage::Finishing;
            self.finish(now);
        } else {
            self.set_barrier();
        }
    }

    fn begin_evaluation(&mut self, is_last: bool) {
        let id = EvalId::of(self.config.term, self.number());
        let version = self.lending.begin_evaluation(id);
        self.stage = Stage::Evaluating { is_last };
        self.effects.push(Effect::EvaluationStarted { version });
    }

    fn finish_evaluation(&mut self, is_last: bool, now: Time) {
        let evaluation = self.lending.end_evaluation().filter(|_| self.durable.model.is_some());
        let Some(evaluation) = evaluation else {
            self.stage = Stage::Working;
            return;
        };
        let evaluated = self.change(|facts| facts.add_evaluation(&evaluation));
        let is_best = evaluated.is_best;
        self.last_eval_at = now;
        self.effects.push(Effect::Evaluated(evaluated));
        let is_training = self.config.spec.job_type == JobType::Train;
        let patience = self.config.spec.early_stop_patience;
        if !is_last && is_training && is_stalled(patience, &self.durable.evaluations) {
            self.note(
                "early_stop",
                format!("stopping early: no improvement (--early_stop_patience={patience})"),
            );
            self.limit = self.ledger().n_done();
        }
        if is_best && is_training {
            self.stage = Stage::BestCut;
            // Servers write one cut at a time: one of an earlier moment is waited for.
            if !self.checkpoints.is_writing() {
                self.begin_cut(Some(self.ledger().n_done()), now);
            }
        } else {
            self.resume_training();
        }
    }

    /// Leaves a barrier behind.
    pub(super) fn resume_training(&mut self) {
        let is_last = self.ledger().n_done() >= self.limit;
        self.stage = if is_last { Stage::Finishing } else { Stage::Working };
        self.set_barrier();
    }

    /// Writes the final checkpoint unless there is one of exactly this state.
    fn finish(&mut self, now: Time) {
        if self.config.spec.job_type == JobType::Evaluate {
            return self.end(End::Succeeded);
        }
        if self.durable.exact_checkpoint(self.ledger().n_done()).is_some() {
            return self.export();
        }
        if self.checkpoints.can_begin(now) {
            self.begin_cut(Some(self.ledger().n_done()), now);
        }
    }

    pub(super) fn export(&mut self) {
        let checkpoint = self.durable.exact_checkpoint(self.ledger().n_done());
        let Some(checkpoint) = checkpoint else { return };
        let checkpoint = checkpoint.folder.clone();
        self.stage = Stage::Exporting;
        self.effects.push(Effect::Export { checkpoint });
    }

    /// Limits by the clock: a pause for an evaluation, or the end.
    fn pause_for_time(&mut self, now: Time) {
        let spec = &self.config.spec;
        if self.stage != Stage::Working || spec.job_type != JobType::Train {
            return;
        }
        let every = Duration::from_secs(u64::from(spec.evaluation_secs));
        let max_time = Duration::from_secs(spec.max_time);
        let is_due = !every.is_zero() && now.since(self.last_eval_at) >= every;
        if is_due && self.config.n_validation_records > 0 {
            // Not before the first version: a part of a round alone would never be applied.
            let soonest = self.frontier().max(self.ledger().position_of(1));
            self.barrier = self.barrier.min(soonest);
        }
        if !max_time.is_zero() && self.elapsed(now) >= max_time && self.limit > self.frontier() {
            self.limit = self.frontier();
            self.barrier = self.barrier.min(self.limit);
            self.note("max_time", format!("--max_time={} reached; stopping", max_time.as_secs()));
        }
    }

    /// The first position that nothing under way lies behind.
    fn frontier(&self) -> u64 {
        self.strategy.last_step().unwrap_or_else(|| self.ledger().frontier())
    }

    /// How long the job has worked, earlier masters included.
    #[must_use]
    pub fn elapsed(&self, now: Time) -> Duration {
        let ours = self.started_at.map_or(Duration::ZERO, |start| now.since(start));
        Duration::from_secs_f64(self.durable.elapsed_secs.max(0.0)) + ours
    }

    pub(super) fn stop(&mut self, reason: &str, with_checkpoint: bool, now: Time) {
        let is_training = self.config.spec.job_type == JobType::Train;
        let can_cut = self.is_serving() || self.is_world_expected();
        if !with_checkpoint || !is_training || !can_cut {
            return self.end(End::Stopped(reason.into()));
        }
        self.lending.end_evaluation();
        self.stage = Stage::Stopping { reason: reason.into(), deadline: now + STOP_TIMEOUT };
        if !self.checkpoints.is_writing() {
            self.begin_cut(None, now);
        }
    }

    pub(super) fn end(&mut self, end: End) {
        self.end_with(end, |_| {});
    }

    /// Ends the job: informs every process, then stops it. `change` is made durable with the end.
    pub(super) fn end_with(&mut self, end: End, change: impl FnOnce(&mut Durable)) {
        if self.stage == Stage::Ended {
            return;
        }
        self.stage = Stage::Ended;
        self.change(|facts| {
            change(facts);
            facts.end = Some(end.clone());
        });
        let reason = match &end {
            End::Succeeded => "job finished".to_owned(),
            End::Failed(why) | End::Stopped(why) => why.clone(),
        };
        for worker in self.roster.workers().keys() {
            self.effects.push(Effect::ToWorker(*worker, Command::Stop(reason.clone())));
        }
        for ps in self.strategy.servers().members().keys() {
            self.effects.push(Effect::ToPs(*ps, PsOrder::Stop(reason.clone())));
        }
        let running: Vec<InstanceId> = self.instances.running().keys().copied().collect();
        let has_more = self.config.spec.is_own_loop() && end == End::Succeeded;
        let grace = if has_more { OWN_LOOP_GRACE } else { END_GRACE };
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        for instance in running {
            self.effects.push(Effect::Platform(Order::Dismiss { instance, grace_ms }));
        }
        self.effects.push(Effect::Ended(end));
    }
}
