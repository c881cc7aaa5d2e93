// SPDX-License-Identifier: Apache-2.0
//! From world to world: leave, load or link, compare, and bring each other to the highest step.

use std::time::Duration;

use super::level::level;
use super::{Activity, Doing, Effect, Failure, HeldState, Member, Outcome};
use crate::id::WorldId;
use crate::job::MemberReport;
use crate::time::Time;
use crate::world::Announced;

/// How far a world is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forming {
    Load,
    Enter,
    Exchange,
    /// All members get the state of this step.
    Transfer {
        step: u64,
        is_behind: bool,
    },
}

impl Member {
    /// Leaves the world before and enters the next one, if this worker is in it.
    pub(super) fn enter(&mut self, now: Time) -> bool {
        let Some(next) = self.next.take() else { return false };
        // What interrupted the calls of the world before has closed these, too.
        self.hang_up();
        self.reports.forget_news();
        if let Some(before) = self.world.take() {
            self.left = Some(now);
            if !self.is_due_at_once(&next) && before.world.loses_members_in(&next.world) {
                let farewell = Activity::Farewell { world: before.world.id };
                self.start(Doing::Parting(next), farewell);
                return false;
            }
        }
        self.join(next);
        true
    }

    /// Every member of the world before has its last step. If that failed, the next world
    /// finds it out.
    pub(super) fn parted(&mut self, next: Announced) {
        if !self.is_interrupted() {
            self.join(next);
        }
    }

    fn join(&mut self, next: Announced) {
        let Some(place) = self.place_in(&next) else { return };
        if next.load.is_some() || !next.world.members[place].has_state {
            self.drop_state();
        }
        let (forming, activity) = match next.load.clone() {
            Some(from) => (Forming::Load, Activity::Load { from, generation: next.generation }),
            None => (Forming::Enter, Activity::Enter { world: next.world.clone(), place }),
        };
        self.start(Doing::Forming(next, forming), activity);
    }

    /// Continues to enter `next` after one of the activities that this takes.
    pub(super) fn form_on(
        &mut self,
        next: Announced,
        forming: Forming,
        result: Result<Outcome, Failure>,
        now: Time,
    ) {
        let id = next.world.id;
        let Some(place) = self.place_in(&next) else { return };
        match (forming, result) {
            (Forming::Load, Ok(Outcome::Loaded { step })) => {
                self.state = Some(HeldState { step, generation: next.generation });
                let enter = Activity::Enter { world: next.world.clone(), place };
                self.proceed(next, Forming::Enter, enter, now);
            }
            (Forming::Load, Err(Failure::Failed(error))) => {
                let generation = next.generation;
                self.report_news(MemberReport::NotLoaded { generation, error });
            }
            (Forming::Enter, Ok(Outcome::Done)) => {
                let exchange = Activity::Exchange { world: id, step: self.step() };
                self.proceed(next, Forming::Exchange, exchange, now);
            }
            (Forming::Exchange, Ok(Outcome::Levels(steps))) => {
                let Some((step, moves)) = level(&steps, self.config.n_partitions) else {
                    let error = "no member of the world holds the model's state".into();
                    return self.lost(id, Failure::Failed(error), now);
                };
                let is_behind = steps[place] != Some(step);
                let transfer = Activity::Transfer { world: id, moves, is_behind };
                self.proceed(next, Forming::Transfer { step, is_behind }, transfer, now);
            }
            (Forming::Transfer { step, is_behind }, Ok(Outcome::Transferred(arrived))) => {
                if arrived.step != step {
                    let error = format!("received step {} instead of {step}", arrived.step);
                    return self.lost(id, Failure::Failed(error), now);
                }
                if is_behind {
                    self.state = Some(HeldState { step, generation: next.generation });
                    self.assume_begun(step, next.until);
                }
                self.formed(next, arrived.state_bytes, now);
            }
            (_, Err(failure)) => self.lost(id, failure, now),
            (_, Ok(outcome)) => panic!("{forming:?} ends with {outcome:?}"),
        }
    }

    /// The member that sent this state may have begun the next step with it. Servers may have
    /// applied that step, even if all members that have begun it are gone.
    fn assume_begun(&mut self, step: u64, until: u64) {
        if self.config.has_tables {
            self.begun = self.begun.max(until.min(step + 1));
        }
    }

    /// Begins the next activity of entering `next`, unless a later world is due at once.
    fn proceed(&mut self, next: Announced, forming: Forming, activity: Activity, now: Time) {
        if self.is_interrupted() {
            return self.lost(next.world.id, Failure::Cancelled, now);
        }
        self.start(Doing::Forming(next, forming), activity);
    }

    /// All members hold the same state.
    fn formed(&mut self, world: Announced, state_bytes: u64, now: Time) {
        let Some(state) = &mut self.state else { return };
        state.generation = world.generation;
        let (id, step) = (world.world.id, state.step);
        self.held = id;
        let pause = self.left.take().map_or(Duration::ZERO, |left| now.since(left));
        let pause_secs = pause.as_secs_f64();
        self.report_news(MemberReport::Formed { world: id, step, pause_secs, state_bytes });
        self.world = Some(world);
    }

    /// Leaves a world in which an activity failed, and reports why if the master cannot know.
    pub(super) fn lost(&mut self, world: WorldId, failure: Failure, now: Time) {
        self.leave(now);
        let (suspect, error) = match failure {
            Failure::Cancelled | Failure::Quit => return,
            Failure::Lost { peer, error } => (peer, error),
            Failure::Failed(error)
            | Failure::NonFinite(error)
            | Failure::Servers(error)
            | Failure::OtherStep(error) => (self.config.worker, error),
        };
        self.report_news(MemberReport::PeerLost { world, suspect, error });
    }

    /// Is between worlds from now on.
    pub(super) fn leave(&mut self, now: Time) {
        self.world = None;
        self.left.get_or_insert(now);
        self.flush(now);
    }

    fn drop_state(&mut self) {
        (self.state, self.held, self.begun) = (None, WorldId(0), 0);
        self.effects.push(Effect::DropState);
    }
}
