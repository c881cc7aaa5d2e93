// SPDX-License-Identifier: Apache-2.0
//! What a member is doing, for heartbeats and time accounting.

use super::train::Stage;
use super::{Doing, Member, Next};
use crate::goodput::Kind;
use crate::id::WorldId;
use crate::worker::Activity;

const SERVERS: &str = "parameter servers";

impl Member {
    /// What it is doing. A collective operation may wait for other members while it is busy.
    #[must_use]
    pub fn status(&self) -> Activity {
        let busy = |phase, spends| Activity { phase, waiting_for: "", spends };
        let waiting = |phase, waiting_for, spends| Activity { phase, waiting_for, spends };
        match (&self.doing, &self.training) {
            (Some(Doing::Parting(_) | Doing::Forming(..)), _) => {
                busy("forming a world", self.healing())
            }
            (Some(Doing::Connecting(_)), _) => waiting("exchanging rows", SERVERS, Kind::Compute),
            (Some(Doing::Training), Some(training)) => match training.stage {
                Stage::Lane(_) | Stage::Apply { .. } => busy("training", Kind::Compute),
                Stage::Settle => waiting("exchanging rows", SERVERS, Kind::Compute),
                Stage::Reduce => busy("reducing", Kind::Communicate),
            },
            (Some(Doing::Training | Doing::Hashing), _) => busy("training", Kind::Compute),
            (Some(Doing::Evaluating(_)), _) => busy("evaluating", Kind::Compute),
            (None, Some(_)) => busy("training", Kind::DataWait),
            (None, None) => self.idle(),
        }
    }

    /// Nothing is under way.
    fn idle(&self) -> Activity {
        let waiting = |phase, waiting_for, spends| Activity { phase, waiting_for, spends };
        match self.choose() {
            Next::End => waiting("writing the last checkpoint", "", Kind::Checkpoint),
            Next::Train | Next::Evaluate(_) if self.lacks_servers() => {
                waiting("waiting for servers", SERVERS, Kind::Compute)
            }
            Next::Evaluate(_) => waiting("evaluating", "", Kind::DataWait),
            Next::Train | Next::Enter => waiting("training", "", Kind::Compute),
            Next::Wait => match (&self.world, self.is_leaving) {
                (Some(_), false) => waiting("waiting for the next step", "master", Kind::Idle),
                (Some(_), true) => waiting("leaving", "master", Kind::Idle),
                (None, _) => waiting("between worlds", "master", self.healing()),
            },
        }
    }

    /// Between worlds a worker recovers, unless it has never been in any.
    fn healing(&self) -> Kind {
        if self.held == WorldId(0) { Kind::Idle } else { Kind::Heal }
    }
}
