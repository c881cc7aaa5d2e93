// SPDX-License-Identifier: Apache-2.0
//! What a member is doing, for heartbeats and time accounting.

use super::train::Stage;
use super::{Doing, Member, Next};
use crate::activity::{Activity, Phase, WaitingFor};
use crate::goodput::TimeKind;
use crate::id::WorldId;

impl Member {
    /// What it is doing. A collective operation may wait for other members while it is busy.
    #[must_use]
    pub fn activity(&self) -> Activity {
        let busy = |phase, spends| Activity { phase, waiting_for: WaitingFor::Nothing, spends };
        let waiting = |phase, waiting_for, spends| Activity { phase, waiting_for, spends };
        if self.announcement.is_none() {
            return busy(Phase::BuildingModel, TimeKind::Idle);
        }
        match (&self.doing, &self.training) {
            (Some(Doing::Parting(_) | Doing::Forming(..)), _) => {
                busy(Phase::FormingWorld, self.healing())
            }
            (Some(Doing::Connecting(_)), _) => {
                waiting(Phase::ExchangingRows, WaitingFor::Servers, TimeKind::Compute)
            }
            (Some(Doing::Training), Some(training)) => match training.stage {
                Stage::Lane(_) | Stage::Apply { .. } => busy(Phase::Training, TimeKind::Compute),
                Stage::Settle => {
                    waiting(Phase::ExchangingRows, WaitingFor::Servers, TimeKind::Compute)
                }
                Stage::Reduce => busy(Phase::Reducing, TimeKind::Communicate),
            },
            (Some(Doing::Training | Doing::Hashing), _) => busy(Phase::Training, TimeKind::Compute),
            (Some(Doing::Evaluating(_)), _) => busy(Phase::Evaluating, TimeKind::Compute),
            (None, Some(_)) => busy(Phase::Training, TimeKind::DataWait),
            (None, None) => self.idle(),
        }
    }

    /// Nothing is under way.
    fn idle(&self) -> Activity {
        let waiting = |phase, waiting_for, spends| Activity { phase, waiting_for, spends };
        match self.choose() {
            Next::End => {
                waiting(Phase::WritingLastCheckpoint, WaitingFor::Nothing, TimeKind::Checkpoint)
            }
            Next::Train | Next::Evaluate(_) if self.lacks_servers() => {
                waiting(Phase::WaitingForServers, WaitingFor::Servers, TimeKind::Compute)
            }
            Next::Evaluate(_) => {
                waiting(Phase::Evaluating, WaitingFor::Nothing, TimeKind::DataWait)
            }
            Next::Train | Next::Enter => {
                waiting(Phase::Training, WaitingFor::Nothing, TimeKind::Compute)
            }
            Next::Wait => match (&self.world, self.is_leaving) {
                (Some(_), false) => {
                    waiting(Phase::WaitingForStep, WaitingFor::Master, TimeKind::Idle)
                }
                (Some(_), true) => waiting(Phase::Leaving, WaitingFor::Master, TimeKind::Idle),
                (None, _) => waiting(Phase::BetweenWorlds, WaitingFor::Master, self.healing()),
            },
        }
    }

    /// Between worlds a worker recovers, unless it has never been in any.
    fn healing(&self) -> TimeKind {
        if self.held == WorldId(0) { TimeKind::Idle } else { TimeKind::Heal }
    }
}
