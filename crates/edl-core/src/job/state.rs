// SPDX-License-Identifier: Apache-2.0
//! The state of a job, and how it ended.

use serde::{Deserialize, Serialize};

use super::EventKind;
use crate::exit::Exit;
use crate::named::named;

named! {
    /// The state of a job, as its status shows it.
    JobState {
        #[default]
        Starting = "starting",
        Running = "running",
        Evaluating = "evaluating",
        Recovering = "recovering",
        Finishing = "finishing",
        Succeeded = "succeeded",
        Failed = "failed",
        Stopped = "stopped",
        /// On a cluster, the master's pod does not run yet.
        Waiting = "waiting",
        /// The job has not ended, but no process runs it.
        Interrupted = "interrupted",
    }
}

impl JobState {
    /// Whether the job has ended.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Stopped)
    }
}

/// How a job ended, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Succeeded,
    Failed(String),
    /// Before its end, by request; it can be resumed.
    Stopped(String),
}

impl End {
    #[must_use]
    pub fn state(&self) -> JobState {
        match self {
            Self::Succeeded => JobState::Succeeded,
            Self::Failed(_) => JobState::Failed,
            Self::Stopped(_) => JobState::Stopped,
        }
    }

    /// The event that announces it.
    #[must_use]
    pub fn event(&self) -> EventKind {
        match self {
            Self::Succeeded => EventKind::Succeeded,
            Self::Failed(_) => EventKind::Failed,
            Self::Stopped(_) => EventKind::Stopped,
        }
    }

    /// The reason; none for a success.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Succeeded => None,
            Self::Failed(why) | Self::Stopped(why) => Some(why),
        }
    }

    /// How the master of the job exits.
    #[must_use]
    pub fn exit(&self) -> Exit {
        Exit::of_state(self.state())
    }
}
