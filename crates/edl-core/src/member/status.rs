// SPDX-License-Identifier: Apache-2.0
//! What a member is doing, for heartbeats and time accounting.

use super::train::Stage;
use super::{Doing, Member, Next};
use crate::activity::{Activity, WaitingFor};
use crate::goodput::TimeKind;
use crate::id::WorldId;

impl Member {
    /// What it is doing. A collective operation may wait for other members while it is busy.
    #[must_use]
    pub fn activity(&self) -> Activity {
        let (waiting_for, spends) = match (&self.doing, &self.training) {
            _ if self.announcement.is_none() => (WaitingFor::Nothing, TimeKind::Idle),
            (Some(Doing::Parting(_) | Doing::Forming(..)), _) => {
                (WaitingFor::Nothing, self.healing())
            }
            (Some(Doing::Connecting(_)), _) => (WaitingFor::Servers, TimeKind::Compute),
            (Some(Doing::Training), Some(training)) => match training.stage {
                Stage::Lane(_) | Stage::Apply { .. } => (WaitingFor::Nothing, TimeKind::Compute),
                Stage::Settle => (WaitingFor::Servers, TimeKind::Compute),
                Stage::Reduce => (WaitingFor::Nothing, TimeKind::Communicate),
            },
            (Some(Doing::Training | Doing::Hashing | Doing::Evaluating(_)), _) => {
                (WaitingFor::Nothing, TimeKind::Compute)
            }
            (None, Some(_)) => (WaitingFor::Nothing, TimeKind::DataWait),
            (None, None) => self.idle(),
        };
        Activity { waiting_for, spends }
    }

    /// Nothing is under way.
    fn idle(&self) -> (WaitingFor, TimeKind) {
        match self.choose() {
            Next::End => (WaitingFor::Nothing, TimeKind::Checkpoint),
            Next::Train | Next::Evaluate(_) if self.lacks_servers() => {
                (WaitingFor::Servers, TimeKind::Compute)
            }
            Next::Evaluate(_) => (WaitingFor::Nothing, TimeKind::DataWait),
            Next::Train | Next::Enter => (WaitingFor::Nothing, TimeKind::Compute),
            Next::Wait if self.world.is_some() => (WaitingFor::Master, TimeKind::Idle),
            Next::Wait => (WaitingFor::Master, self.healing()),
        }
    }

    /// Between worlds a worker recovers, unless it has never been in any.
    fn healing(&self) -> TimeKind {
        if self.held == WorldId(0) { TimeKind::Idle } else { TimeKind::Heal }
    }
}
