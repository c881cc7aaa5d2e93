// SPDX-License-Identifier: Apache-2.0
//! What a master and the platform under it say to each other: who shall run, and who ended.
//!
//! On one machine the platform is the supervisor process, and these messages are JSON lines on
//! the master's standard output and input.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A process of the job, by its part and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct InstanceId {
    pub role: Role,
    pub id: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Master,
    Ps,
    Worker,
}

/// Master → platform.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    Launch(InstanceId),
    /// Asks it to leave, and ends it for good after the grace.
    Stop {
        instance: InstanceId,
        grace_ms: u64,
    },
    /// Does it harm on purpose, to see the job heal.
    Harm {
        instance: InstanceId,
        harm: Harm,
    },
}

/// What can be done to a process on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Harm {
    Kill,
    /// It stands still, as if its machine did.
    Stop,
    Wake,
}

impl Harm {
    /// By its word on the command line.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "kill" => Some(Self::Kill),
            "stop" => Some(Self::Stop),
            "wake" => Some(Self::Wake),
            _ => None,
        }
    }
}

/// Platform → master.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// Everything that runs now: the first report to every new master.
    Running(Vec<(InstanceId, u32)>),
    Started {
        instance: InstanceId,
        pid: u32,
    },
    NotStarted {
        instance: InstanceId,
        error: String,
    },
    Ended {
        instance: InstanceId,
        pid: u32,
        how: Ended,
    },
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    Exit(i32),
    Signal(i32),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Master => "master",
            Self::Ps => "ps",
            Self::Worker => "worker",
        })
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            Role::Master => f.write_str("master"),
            Role::Ps | Role::Worker => write!(f, "{}-{}", self.role, self.id),
        }
    }
}
