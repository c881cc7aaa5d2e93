// SPDX-License-Identifier: Apache-2.0
//! What is kept from one plan to the next: options, and when each job was last resized.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use edl_core::time::Time;
use serde::{Deserialize, Serialize};

use crate::snapshot::JobId;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannerState {
    pub options: Options,
    pub jobs: BTreeMap<JobId, JobMemory>,
    /// How many jobs were demoted so far (Tiresias).
    pub n_demoted: u64,
    /// When sizes were last distributed (goodput).
    pub shared_out: Option<Time>,
}

/// What is remembered about a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct JobMemory {
    pub resized: Option<Time>,
    pub n_resizes: u32,
    /// Its position among demoted jobs (Tiresias).
    pub demoted: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    pub policy: Policy,
    /// Jobs grow until this many thousandths of each resource are requested.
    pub max_load_permille: u32,
    /// Jobs above their minimum shrink when the load exceeds `max_load_permille` by this much. The
    /// band keeps jobs from growing and shrinking in turn.
    pub load_band_permille: u32,
    /// A resized job is not resized again for this long, unless its capacity is needed. Free
    /// capacity can be used after a quarter of it.
    pub freeze: Duration,
    /// A running job grows at most by this factor at once.
    pub growth: u32,
    /// After waiting this long, a job is not overtaken anymore.
    pub patience: Duration,
    /// A job grows only if that saves this many times the cost of the resize.
    pub gain: u32,
    /// Random seed of policies that search.
    pub seed: u64,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// No planner: all pods of every job are created at once, and Kubernetes schedules them.
    Off,
    /// Whole jobs at full size, in order of arrival.
    Fifo,
    /// The queue and job with the smallest dominant share first; no job gives workers back.
    Drf,
    /// Least attained service, two queues, at full size.
    Tiresias,
    /// Largest marginal gain of remaining time.
    Optimus,
    /// PaddlePaddle EDL's rules, with its faults fixed.
    Edl,
    /// PaddlePaddle EDL's rules as they were published, faults included; for calibration.
    EdlPublished,
    /// Genetic search for the best mean speed-up.
    Pollux,
    #[default]
    ElasticFair,
    /// Largest marginal gain over the fair share, by measured speeds.
    Goodput,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            max_load_permille: 970,
            load_band_permille: 20,
            freeze: Duration::from_secs(60),
            growth: 4,
            patience: Duration::from_secs(600),
            gain: 4,
            seed: 0,
        }
    }
}

impl PlannerState {
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self { options, ..Self::default() }
    }

    #[must_use]
    pub fn of(policy: Policy) -> Self {
        Self::new(Options { policy, ..Options::default() })
    }
}

impl Policy {
    pub const ALL: [Self; 10] = [
        Self::Off,
        Self::Fifo,
        Self::Drf,
        Self::Tiresias,
        Self::Optimus,
        Self::Edl,
        Self::EdlPublished,
        Self::Pollux,
        Self::ElasticFair,
        Self::Goodput,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Fifo => "fifo",
            Self::Drf => "drf",
            Self::Tiresias => "tiresias",
            Self::Optimus => "optimus",
            Self::Edl => "edl",
            Self::EdlPublished => "edl-published",
            Self::Pollux => "pollux",
            Self::ElasticFair => "elastic-fair",
            Self::Goodput => "goodput",
        }
    }

    /// Whether the policy only gives numbers and leaves nodes and victims to Kubernetes.
    #[must_use]
    pub fn leaves_placing_to_kubernetes(self) -> bool {
        matches!(self, Self::Off | Self::EdlPublished)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A policy that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy `{0}`")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| UnknownPolicy(text.to_owned()))
    }
}
