// SPDX-License-Identifier: Apache-2.0
//! What a simulated job has to do, and how fast it gets on where it is.

use crate::sim::adaptdl::Training;
use crate::snapshot::{RoleSpec, Speed};

/// What is left of a job.
#[derive(Clone, Debug)]
pub enum Work {
    /// Never ends.
    Endless,
    /// So many seconds of one worker; more workers are as much faster as there are more of them,
    /// to the power of `scaling` (1: twice as many, twice as fast).
    WorkerSeconds { left: f64, scaling: f64 },
    /// A job of the AdaptDL artifact.
    Training(Box<Training>),
}

impl Work {
    /// How much is done in a second with so many workers on each node.
    #[must_use]
    pub fn rate(&self, workers: &[u32]) -> f64 {
        let n: u32 = workers.iter().sum();
        match self {
            Self::Endless => 0.0,
            Self::WorkerSeconds { scaling, .. } => f64::from(n).powf(*scaling),
            Self::Training(training) => training.rate(),
        }
    }

    /// Seconds until something happens to the work itself (its end), if nothing else does.
    #[must_use]
    pub fn secs_to_milestone(&self, workers: &[u32]) -> Option<f64> {
        let rate = self.rate(workers);
        match self {
            Self::Endless => None,
            Self::WorkerSeconds { left, .. } => (rate > 0.0).then(|| left / rate),
            Self::Training(training) => training.secs_to_epoch_end(),
        }
    }

    /// Does so many seconds of work.
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

    /// What the job tells the planner of its speed.
    #[must_use]
    pub fn speed(&self, max_workers: u32) -> Option<Speed> {
        match self {
            Self::Endless => None,
            Self::Training(training) => training.speed(max_workers),
            Self::WorkerSeconds { left, scaling } => {
                let curve: Vec<f64> =
                    (1..=max_workers).map(|n| f64::from(n).powf(*scaling)).collect();
                Some(Speed {
                    together: curve.clone(),
                    apart: curve,
                    remaining: *left,
                    measured_to: max_workers,
                })
            }
        }
    }

    /// The job's workers changed.
    pub fn placed(&mut self, workers: &[u32]) {
        match self {
            Self::Endless | Self::WorkerSeconds { .. } => {}
            Self::Training(training) => training.placed(workers),
        }
    }

    /// What [`Self::secs_to_milestone`] foretold has come.
    pub fn pass_milestone(&mut self, workers: &[u32]) {
        match self {
            Self::Endless => {}
            // Whatever rounding left over is done.
            Self::WorkerSeconds { left, .. } => *left = 0.0,
            Self::Training(training) => training.end_epoch(workers),
        }
    }

    /// Whether the work changes its own ways between milestones.
    #[must_use]
    pub fn adapts(&self) -> bool {
        matches!(self, Self::Training(_))
    }

    /// Lets work that adapts do so.
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
