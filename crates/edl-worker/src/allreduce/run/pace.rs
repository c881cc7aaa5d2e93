// SPDX-License-Identifier: Apache-2.0
//! How long a lane takes this worker, told once in a while where lanes follow speed.

use std::time::{Duration, Instant};

use edl_net::proto;

const TELL_EVERY: Duration = Duration::from_secs(1);
/// How much the last step counts.
const WEIGHT: f64 = 0.2;

/// A smoothed measure.
#[derive(Debug)]
pub(super) struct Pace {
    is_wanted: bool,
    lane_secs: Option<f64>,
    told: Instant,
}

impl Pace {
    pub(super) fn new(is_wanted: bool) -> Self {
        Self { is_wanted, lane_secs: None, told: Instant::now() }
    }

    /// Some lanes took so long together.
    pub(super) fn measure(&mut self, elapsed: Duration, n_lanes: u32) {
        if n_lanes > 0 {
            let now = elapsed.as_secs_f64() / f64::from(n_lanes);
            let before = self.lane_secs.unwrap_or(now);
            self.lane_secs = Some(before + WEIGHT * (now - before));
        }
    }

    /// What is to be told now.
    pub(super) fn due(&mut self) -> Option<proto::Pace> {
        if !self.is_wanted || self.told.elapsed() < TELL_EVERY {
            return None;
        }
        self.told = Instant::now();
        self.lane_secs.map(|lane_secs| proto::Pace { lane_secs })
    }
}
