// SPDX-License-Identifier: Apache-2.0
//! One step with all members of a world: lane by lane, then the sum of all, then the update.

use std::collections::btree_map::Entry;
use std::time::Duration;

use super::{Activity, Doing, Effect, Failure, Member, Outcome, Place, Reading, Step};
use crate::batch::batch_of;
use crate::id::BatchId;
use crate::job::MemberReport;
use crate::lanes;
use crate::time::Time;
use crate::worker::{Records, Report};
use crate::world::Announced;

/// Servers that cannot be reached are tried again after this time.
const SERVERS_RETRY: Duration = Duration::from_millis(50);
/// Steps whose records are read beyond the one that is trained.
const READ_AHEAD: u64 = 1;

/// A step that is under way.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Training {
    pub(super) step: Step,
    pub(super) stage: Stage,
    started: Time,
    /// How long all lanes of this member took, once they are done.
    computed: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Stage {
    /// This lane comes next, or is under way.
    Lane(u32),
    /// The servers must acknowledge all lanes before the sum.
    Settle,
    Reduce,
    Apply {
        loss: f32,
    },
}

impl Training {
    pub(super) fn check(&self, world: &Announced) {
        assert_eq!(self.step.world, world.world.id, "a step belongs to its world");
        if let Stage::Lane(lane) = self.stage {
            assert!(lane <= self.step.mine.end, "it trains its own lanes");
        }
    }
}

impl Member {
    pub(super) fn begin_step(&mut self, now: Time) -> bool {
        if !self.can_use_servers() {
            return false;
        }
        let (Some(state), Some(world)) = (self.state, &self.world) else { return false };
        let place = self.place_in(world).expect("a member is in its world");
        let mine = world.world.members[place].lanes.clone();
        let is_alone = world.world.members.len() == 1;
        let batch = batch_of(state.step, self.config.plan.n_batches());
        let step = Step {
            world: world.world.id,
            number: state.step,
            batch,
            n_records: self.config.plan.n_records_of(batch.index),
            n_active: self.n_active(state.step),
            mine,
            is_alone,
        };
        self.begun = self.begun.max(step.number + 1);
        self.read_ahead(&step);
        let stage = Stage::Lane(step.mine.start);
        self.training = Some(Training { step, stage, started: now, computed: Duration::ZERO });
        true
    }

    /// Lanes of a step that have records to train.
    fn n_active(&self, step: u64) -> u32 {
        if self.world.as_ref().is_some_and(|world| world.skipped.contains(&step)) {
            return 0;
        }
        let BatchId { index, .. } = batch_of(step, self.config.plan.n_batches());
        let n_records = self.config.plan.n_records_of(index) as usize;
        lanes::n_active(n_records, self.config.n_lanes, self.config.minibatch_size)
    }

    /// Requests the records of this worker's lanes in a step and in those after it.
    fn read_ahead(&mut self, step: &Step) {
        let (n_batches, mine) = (self.config.plan.n_batches(), step.mine.clone());
        let steps = step.number..=step.number + READ_AHEAD;
        let batches: Vec<_> =
            steps.map(|number| (batch_of(number, n_batches), self.n_active(number))).collect();
        self.forget(|place| match place {
            Place::Piece(..) => false,
            Place::Lane(of, lane) => {
                !batches.iter().any(|(batch, _)| *batch == of) || !mine.contains(&lane)
            }
        });
        let num_epochs = self.config.num_epochs;
        let is_past_end = |epoch: u32| num_epochs > 0 && epoch >= num_epochs;
        for (batch, n_active) in batches {
            if batch != step.batch && is_past_end(batch.epoch) {
                continue;
            }
            for lane in mine.start..mine.end.min(n_active) {
                self.read(Place::Lane(batch, lane), Records::Lane(batch, lane));
            }
        }
    }

    /// Begins the next activity of the step that is under way.
    pub(super) fn continue_step(&mut self, now: Time) -> bool {
        // A sum that is complete is never thrown away.
        let has_sum = |training: &Training| matches!(training.stage, Stage::Apply { .. });
        if self.is_interrupted() && !self.training.as_ref().is_some_and(has_sum) {
            self.abandon_step(now);
            return true;
        }
        let has_tables = self.config.has_tables;
        let Some(Training { step, stage, .. }) = &mut self.training else { return false };
        let step = step.clone();
        let activity = match *stage {
            Stage::Lane(lane) if step.mine_active().contains(&lane) => {
                match self.take_records(Place::Lane(step.batch, lane)) {
                    Reading::Asked => return false,
                    Reading::Failed(error) => {
                        self.halt(Failure::Failed(error), now);
                        return true;
                    }
                    Reading::Decoded => Activity::Train { step, lane },
                }
            }
            // The servers wait for every lane. So every member takes part in every step, and no
            // member can be two steps behind them.
            Stage::Lane(lane) if has_tables && lane < step.mine.end => {
                Activity::Skip { step, lane }
            }
            Stage::Lane(_) if has_tables => {
                *stage = Stage::Settle;
                Activity::Settle(step)
            }
            Stage::Lane(_) | Stage::Reduce if step.is_skipped() => {
                *stage = Stage::Apply { loss: f32::NAN };
                Activity::Pass(step)
            }
            Stage::Lane(_) | Stage::Reduce => {
                self.computed(now);
                Activity::Reduce(step)
            }
            Stage::Settle => Activity::Settle(step),
            Stage::Apply { .. } => Activity::Apply(step),
        };
        self.reports.overwrite();
        self.start(Doing::Training, activity);
        false
    }

    /// All lanes of this member are trained.
    fn computed(&mut self, now: Time) {
        let Some(training) = &mut self.training else { return };
        training.stage = Stage::Reduce;
        training.computed = now.since(training.started);
        let mine = training.step.mine_active();
        let n_lanes = mine.end - mine.start;
        if let Some(lane_secs) = self.pace.measure(training.computed, n_lanes, now) {
            self.report(Report::Member(MemberReport::Pace { lane_secs }));
        }
    }

    /// An activity of the step has ended.
    pub(super) fn trained(&mut self, result: Result<Outcome, Failure>, now: Time) {
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(failure) => return self.halt(failure, now),
        };
        let Some(training) = &mut self.training else { return };
        match (training.stage, outcome) {
            (Stage::Lane(lane), Outcome::Done) => {
                training.stage = Stage::Lane(lane + 1);
                if training.step.mine_active().contains(&lane) {
                    let (n_lanes, minibatch) = (self.config.n_lanes, self.config.minibatch_size);
                    let n_records = training.step.n_records as usize;
                    let share = lanes::share_of(lane, n_records, n_lanes, minibatch);
                    self.n_records += share.map_or(0, |share| share.len() as u64);
                }
            }
            (Stage::Settle, Outcome::Done) => training.stage = Stage::Reduce,
            (Stage::Reduce, Outcome::Reduced { loss }) if loss.is_finite() => {
                training.stage = Stage::Apply { loss };
            }
            (Stage::Reduce, Outcome::Reduced { loss }) => {
                let batch = training.step.batch;
                let error = format!("the mean loss of all lanes is {loss} (batch {batch})");
                self.halt(Failure::NonFinite(error), now);
            }
            (Stage::Apply { loss }, Outcome::Done) => self.applied(loss),
            (stage, outcome) => panic!("{stage:?} ends with {outcome:?}"),
        }
    }

    fn applied(&mut self, loss: f32) {
        let (Some(training), Some(state)) = (self.training.take(), &mut self.state) else { return };
        state.step += 1;
        self.reports.stepped(training.step.world, state.step, loss);
        if training.step.is_skipped() {
            self.reports.overwrite();
        }
    }

    /// The step that is under way cannot be finished now, or not here.
    fn halt(&mut self, failure: Failure, now: Time) {
        let Some(step) = self.abandon_step(now) else { return };
        let world = step.world;
        match failure {
            Failure::Cancelled | Failure::Lost { .. } => self.lost(world, failure, now),
            Failure::Servers(_) | Failure::OtherStep(_) => self.servers_failed(failure, now),
            Failure::Quit => {
                self.leave(now);
                self.report_news(MemberReport::Quit { world, step: step.number });
            }
            Failure::Failed(error) => {
                self.leave(now);
                self.report_news(MemberReport::StepFailed { world, step: step.number, error });
            }
            Failure::NonFinite(error) => {
                self.leave(now);
                self.report_news(MemberReport::NonFinite { world, step: step.number, error });
            }
        }
    }

    /// Throws away what was computed of a step.
    fn abandon_step(&mut self, now: Time) -> Option<Step> {
        let Training { step, started, computed, .. } = self.training.take()?;
        let wasted = if computed.is_zero() { now.since(started) } else { computed };
        self.effects.push(Effect::Waste(wasted));
        Some(step)
    }

    /// The servers cannot be used: tries again after a moment, or leaves the world if they hold
    /// another step.
    pub(super) fn servers_failed(&mut self, failure: Failure, now: Time) {
        self.hang_up();
        if let Failure::OtherStep(error) = failure {
            let world = self.world_id();
            self.leave(now);
            return self.report_news(MemberReport::StepMismatch { world, error });
        }
        self.flush(now);
        self.retry_at = Some(now + SERVERS_RETRY);
    }

    pub(super) fn read(&mut self, place: Place, records: Records) {
        if let Entry::Vacant(entry) = self.reads.entry(place) {
            entry.insert(Reading::Asked);
            self.effects.push(Effect::Read { place, records });
        }
    }

    /// What has become of records that were requested; the shell uses them if they are decoded.
    pub(super) fn take_records(&mut self, place: Place) -> Reading {
        match self.reads.get(&place) {
            Some(Reading::Asked) | None => Reading::Asked,
            Some(Reading::Decoded | Reading::Failed(_)) => {
                self.reads.remove(&place).unwrap_or(Reading::Asked)
            }
        }
    }

    pub(super) fn forget(&mut self, is_over: impl Fn(Place) -> bool) {
        for (place, _) in self.reads.extract_if(.., |place, _| is_over(*place)) {
            self.effects.push(Effect::Forget(place));
        }
    }
}
