// SPDX-License-Identifier: Apache-2.0
//! Where a job stands, and the positions where training pauses or ends.

use std::time::Duration;

use super::Config;
use crate::evaluation::{Evaluated, is_stalled};
use crate::ledger::Ledger;
use crate::spec::JobType;
use crate::time::Time;

/// How long a stop may take, unless it is asked to be shorter or longer.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Writing the result counts as hung if nothing is written for this long.
pub(super) const EXPORT_TIMEOUT: Duration = Duration::from_secs(300);

/// Where a job stands. Whether the parameters are served is independent of this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Training (or predicting) up to the barrier.
    Working,
    /// At the barrier. `is_last`: there is nothing to train after it.
    Evaluating {
        is_last: bool,
    },
    /// A checkpoint of the best model so far is being written.
    BestCheckpoint,
    /// The final checkpoint is to be written.
    Finishing,
    Exporting {
        /// It must have progressed by then.
        deadline: Time,
    },
    /// The job was asked to stop, after one more checkpoint.
    Stopping(Stop),
    Ended,
}

/// A stop that was requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stop {
    pub reason: String,
    /// Batches that are in progress may be finished until then; the rest of the time is for the
    /// checkpoint.
    pub drain_until: Time,
    pub deadline: Time,
    /// Its checkpoint has begun.
    pub is_saving: bool,
}

/// What follows the work so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Work before the next stop is missing.
    Work,
    Evaluate {
        is_last: bool,
    },
    /// The next stop needs no evaluation: training continues after it.
    Pass,
    Finish,
}

/// The stage of a job and its next stops, as positions among the batches of all epochs.
#[derive(Clone, Debug)]
pub(super) struct Stages {
    job_type: JobType,
    num_epochs: u32,
    max_step: u64,
    max_time: Duration,
    has_validation: bool,
    evaluation_steps: u64,
    evaluation_every: Duration,
    evaluates_epochs: bool,
    patience: u32,
    stage: Stage,
    /// Nothing is assigned at or after this position.
    barrier: u64,
    /// Training ends here.
    limit: u64,
    last_eval_at: Time,
    started_at: Option<Time>,
}

impl Stages {
    pub(super) fn new(config: &Config, now: Time) -> Self {
        let spec = &config.spec;
        Self {
            job_type: spec.job_type,
            num_epochs: spec.num_epochs,
            max_step: spec.max_step,
            max_time: Duration::from_secs(spec.max_time.0),
            has_validation: config.n_validation_records > 0,
            evaluation_steps: u64::from(spec.evaluation_steps),
            evaluation_every: Duration::from_secs(u64::from(spec.evaluation_secs)),
            evaluates_epochs: spec.evaluation_epochs,
            patience: spec.early_stop_patience,
            stage: Stage::Working,
            barrier: 0,
            limit: 0,
            last_eval_at: now,
            started_at: None,
        }
    }

    pub(super) fn stage(&self) -> &Stage {
        &self.stage
    }

    pub(super) fn is_working(&self) -> bool {
        self.stage == Stage::Working
    }

    /// Whether batches are being trained.
    pub(super) fn is_training(&self) -> bool {
        self.job_type == JobType::Train && self.is_working()
    }

    pub(super) fn enter(&mut self, stage: Stage) {
        self.stage = stage;
    }

    /// The job stops within this time. A second request can only shorten the time of the first.
    /// From now on, no batch at or after `frontier` is assigned.
    pub(super) fn stop(&mut self, reason: &str, within: Duration, frontier: u64, now: Time) {
        let (drain_until, deadline) = (now + within / 2, now + within);
        if let Stage::Stopping(stop) = &mut self.stage {
            stop.drain_until = stop.drain_until.min(drain_until);
            stop.deadline = stop.deadline.min(deadline);
            return;
        }
        self.barrier = self.barrier.min(frontier);
        let reason = reason.into();
        self.stage = Stage::Stopping(Stop { reason, drain_until, deadline, is_saving: false });
    }

    pub(super) fn stopping(&self) -> Option<&Stop> {
        match &self.stage {
            Stage::Stopping(stop) => Some(stop),
            Stage::Working
            | Stage::Evaluating { .. }
            | Stage::BestCheckpoint
            | Stage::Finishing
            | Stage::Exporting { .. }
            | Stage::Ended => None,
        }
    }

    /// The checkpoint of the stop begins.
    pub(super) fn begin_saving(&mut self) {
        if let Stage::Stopping(stop) = &mut self.stage {
            stop.is_saving = true;
        }
    }

    /// The reason for the end also says what the stop has lost.
    pub(super) fn note_loss(&mut self, lost: &str) {
        if let Stage::Stopping(stop) = &mut self.stage {
            stop.reason = format!("{}; {lost}", stop.reason);
        }
    }

    /// The result is written from now on.
    pub(super) fn export(&mut self, now: Time) {
        self.stage = Stage::Exporting { deadline: now + EXPORT_TIMEOUT };
    }

    pub(super) fn export_progressed(&mut self, now: Time) {
        if let Stage::Exporting { deadline } = &mut self.stage {
            *deadline = now + EXPORT_TIMEOUT;
        }
    }

    pub(super) fn has_started(&self) -> bool {
        self.started_at.is_some()
    }

    /// The parameters are available for the first time under this master, or again.
    pub(super) fn start(&mut self, now: Time) {
        self.started_at.get_or_insert(now);
    }

    /// How long the job has worked under this master.
    pub(super) fn elapsed(&self, now: Time) -> Duration {
        self.started_at.map_or(Duration::ZERO, |start| now.since(start))
    }

    /// When an evaluation is due, and when the job's time is over. It has worked for `before` under
    /// earlier masters.
    pub(super) fn deadlines(&self, before: Duration) -> impl Iterator<Item = Time> {
        let stop = match &self.stage {
            Stage::Stopping(stop) => [Some(stop.drain_until), Some(stop.deadline)],
            Stage::Exporting { deadline } => [Some(*deadline), None],
            Stage::Working
            | Stage::Evaluating { .. }
            | Stage::BestCheckpoint
            | Stage::Finishing
            | Stage::Ended => [None, None],
        };
        let every = self.evaluation_every;
        let evaluation = (!every.is_zero()).then(|| self.last_eval_at + every);
        let start = self.started_at.filter(|_| !self.max_time.is_zero());
        let end = start.map(|start| start + self.max_time.saturating_sub(before));
        stop.into_iter().flatten().chain(evaluation).chain(end)
    }

    /// Where training ends, if it does.
    pub(super) fn limit(&self) -> Option<u64> {
        (self.limit < u64::MAX).then_some(self.limit)
    }

    /// The position that training must not pass now.
    pub(super) fn next_stop(&self) -> u64 {
        self.barrier.min(self.limit)
    }

    /// Starts from what is done: sets where training ends, at `last` at the latest, and where it
    /// pauses next.
    pub(super) fn restart(
        &mut self,
        ledger: &Ledger,
        evaluations: &[Evaluated],
        last: Option<u64>,
    ) {
        let last = last.map_or(u64::MAX, |step| ledger.position_of(step));
        self.limit = self.end_of_training(ledger).min(last);
        if is_stalled(self.patience, evaluations) {
            self.limit = self.limit.min(ledger.n_done());
        }
        self.set_barrier(ledger, evaluations);
        // An export needs no servers, and must not be started twice.
        if !matches!(self.stage, Stage::Stopping(_) | Stage::Exporting { .. }) {
            self.stage = Stage::Working;
        }
    }

    fn end_of_training(&self, ledger: &Ledger) -> u64 {
        let all = match self.num_epochs {
            0 => u64::MAX,
            n => ledger.position_of(u64::from(n) * ledger.versions_per_epoch()),
        };
        let by_step = if self.max_step == 0 { u64::MAX } else { ledger.position_of(self.max_step) };
        match self.job_type {
            JobType::Train => all.min(by_step),
            JobType::Evaluate | JobType::Predict => 0,
        }
    }

    /// Leaves a barrier: training continues, or ends.
    pub(super) fn resume(&mut self, ledger: &Ledger, evaluations: &[Evaluated]) {
        let is_last = ledger.n_done() >= self.limit;
        self.stage = if is_last { Stage::Finishing } else { Stage::Working };
        self.set_barrier(ledger, evaluations);
    }

    pub(super) fn set_barrier(&mut self, ledger: &Ledger, evaluations: &[Evaluated]) {
        let next = self.next_evaluation(ledger, evaluations);
        self.barrier = next.map_or(self.limit, |next| next.min(self.limit));
    }

    /// The next position at which the model is evaluated.
    fn next_evaluation(&self, ledger: &Ledger, evaluations: &[Evaluated]) -> Option<u64> {
        if !self.has_validation {
            return None;
        }
        let n_done = ledger.n_done();
        let is_known = is_evaluated(n_done, ledger, evaluations);
        let by_step = (self.evaluation_steps > 0).then(|| {
            let first = (ledger.version() / self.evaluation_steps + u64::from(is_known)).max(1);
            let mut next = (first..).map(|n| ledger.position_of(n * self.evaluation_steps));
            next.find(|at| ledger.can_be_exact(*at)).expect("a position after all that are touched")
        });
        let by_epoch = self.evaluates_epochs.then(|| {
            let epoch = u64::from(ledger.epoch());
            let is_border = n_done > 0 && ledger.n_done_in_epoch() == 0;
            let next = if is_border && !is_known { epoch } else { epoch + 1 };
            // Servers have applied batches of the epoch after it at most.
            let mut borders =
                (next..next + 3).map(|n| ledger.position_of(n * ledger.versions_per_epoch()));
            borders.find(|at| ledger.can_be_exact(*at))
        });
        by_step.into_iter().chain(by_epoch.flatten()).min()
    }

    /// What follows the work that is done.
    pub(super) fn next(&self, ledger: &Ledger, evaluations: &[Evaluated]) -> Next {
        if !ledger.is_reached(self.next_stop()) {
            return Next::Work;
        }
        let n_done = ledger.n_done();
        let is_last = n_done >= self.limit;
        let is_known = self.job_type == JobType::Train && is_evaluated(n_done, ledger, evaluations);
        match is_last {
            _ if self.has_validation && !is_known => Next::Evaluate { is_last },
            true => Next::Finish,
            false => Next::Pass,
        }
    }

    /// An evaluation is finished; whether training stops early because of it.
    pub(super) fn evaluated(&mut self, n_done: u64, history: &[Evaluated], now: Time) -> bool {
        self.last_eval_at = now;
        let is_last = matches!(self.stage, Stage::Evaluating { is_last: true });
        let is_training = self.job_type == JobType::Train;
        let stops = !is_last && is_training && is_stalled(self.patience, history);
        if stops {
            self.limit = n_done;
        }
        stops
    }

    /// Whether the job has worked as long as it may.
    pub(super) fn is_time_up(&self, elapsed: Duration) -> bool {
        !self.max_time.is_zero() && elapsed >= self.max_time
    }

    /// Training ends with what is done.
    pub(super) fn end_training(&mut self, n_done: u64) {
        self.limit = n_done;
        self.stage = Stage::Finishing;
    }

    /// Whether the clock can pause or end training.
    pub(super) fn has_time_limit(&self) -> bool {
        !self.max_time.is_zero() || !self.evaluation_every.is_zero()
    }

    /// Limits by the clock: a pause for an evaluation, or the end. `frontier` is the first position
    /// after all work in progress. Whether the maximum time has just passed.
    pub(super) fn pause_for_time(
        &mut self,
        frontier: u64,
        ledger: &Ledger,
        elapsed: Duration,
        now: Time,
    ) -> bool {
        if !self.is_training() {
            return false;
        }
        let every = self.evaluation_every;
        let is_due = !every.is_zero() && now.since(self.last_eval_at) >= every;
        if is_due && self.has_validation {
            // Not before the first version: a part of a round alone would never be applied.
            self.barrier = self.barrier.min(frontier.max(ledger.position_of(1)));
        }
        let is_over = self.is_time_up(elapsed) && self.limit > frontier;
        if is_over {
            self.limit = frontier;
            self.barrier = self.barrier.min(frontier);
        }
        is_over
    }
}

/// Whether the model at `position` was evaluated (at position zero there is nothing to evaluate).
fn is_evaluated(position: u64, ledger: &Ledger, evaluations: &[Evaluated]) -> bool {
    let version = ledger.version_at(position);
    position == 0 || evaluations.iter().any(|evaluated| evaluated.version == version)
}
