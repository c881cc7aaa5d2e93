// SPDX-License-Identifier: Apache-2.0
//! The work of a simulated job, and how fast it progresses.

use crate::sim::adaptdl::Training;
use crate::snapshot::RoleSpec;
use crate::speed::{Curve, Speed};

/// The remaining work of a job.
#[derive(Clone, Debug)]
pub enum Work {
    /// Never ends.
    Endless,
    /// Seconds of one worker; `n` workers are `n` to the power of `scaling` times faster.
    WorkerSeconds { left: f64, scaling: f64 },
    /// A job of the AdaptDL artifact.
    Training(Box<Training>),
}

impl Work {
    /// Work per second with these workers on each node.
    #[must_use]
    pub fn rate(&self, workers: &[u32]) -> f64 {
        let n: u32 = workers.iter().sum();
        match self {
            Self::Endless => 0.0,
            Self::WorkerSeconds { scaling, .. } => f64::from(n).powf(*scaling),
            Self::Training(training) => training.rate(),
        }
    }

    /// Seconds until the next milestone of the work, such as its end.
    #[must_use]
    pub fn secs_to_milestone(&self, workers: &[u32]) -> Option<f64> {
        let rate = self.rate(workers);
        match self {
            Self::Endless => None,
            Self::WorkerSeconds { left, .. } => (rate > 0.0).then(|| left / rate),
            Self::Training(training) => training.secs_to_epoch_end(),
        }
    }

    /// Does `secs` seconds of work.
    pub fn advance(&mut self, workers: &[u32], secs: f64) {
        let done = self.rate(workers) * secs;
        match self {
            Self::Endless => {}
            Self::WorkerSeconds { left, .. } => *left = (*left - done).max(0.0),
            Self::Training(training) => training.advance(secs),
        }
    }

    #[must_use]
    pub fn is_done(&self) -> bool {
        match self {
            Self::Endless => false,
            Self::WorkerSeconds { left, .. } => *left <= 1e-6,
            Self::Training(training) => training.is_done(),
        }
    }

    /// The speed that the job reports to the planner.
    #[must_use]
    pub fn speed(&self, max_workers: u32) -> Option<Speed> {
        match self {
            Self::Endless => None,
            Self::Training(training) => training.speed(max_workers),
            Self::WorkerSeconds { left, scaling } => Some(Speed {
                together: Curve::Power(*scaling),
                apart: Curve::Power(*scaling),
                remaining: *left,
                measured_to: max_workers,
            }),
        }
    }

    /// The job's workers changed.
    pub fn placed(&mut self, workers: &[u32]) {
        match self {
            Self::Endless | Self::WorkerSeconds { .. } => {}
            Self::Training(training) => training.placed(workers),
        }
    }

    /// The milestone of [`Self::secs_to_milestone`] is reached.
    pub fn pass_milestone(&mut self, workers: &[u32]) {
        match self {
            Self::Endless => {}
            // Only a rounding error is left.
            Self::WorkerSeconds { left, .. } => *left = 0.0,
            Self::Training(training) => training.end_epoch(workers),
        }
    }

    /// Whether the work adapts between milestones.
    #[must_use]
    pub fn adapts(&self) -> bool {
        matches!(self, Self::Training(_))
    }

    /// Lets the work adapt.
    pub fn refresh(&mut self, workers: &[u32]) {
        match self {
            Self::Endless | Self::WorkerSeconds { .. } => {}
            Self::Training(training) => training.refresh(workers),
        }
    }

    /// Narrows how many workers the planner may give.
    pub fn limit(&self, worker: &mut RoleSpec) {
        match self {
            Self::Endless | Self::WorkerSeconds { .. } => {}
            Self::Training(training) => training.limit(worker),
        }
    }
}
