// SPDX-License-Identifier: Apache-2.0
//! How long a lane takes this worker, reported once in a while where lanes follow speed.

use std::time::Duration;

use crate::time::Time;

const REPORT_EVERY: Duration = Duration::from_secs(1);
/// How much the last step counts.
const WEIGHT: f64 = 0.2;

/// A smoothed measurement.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pace {
    is_wanted: bool,
    lane_secs: Option<f64>,
    reported: Time,
}

impl Pace {
    pub(super) fn new(is_wanted: bool, now: Time) -> Self {
        Self { is_wanted, lane_secs: None, reported: now }
    }

    /// Some lanes took this long together; what is to be reported now.
    pub(super) fn measure(&mut self, elapsed: Duration, n_lanes: u32, now: Time) -> Option<f64> {
        if n_lanes > 0 {
            let last = elapsed.as_secs_f64() / f64::from(n_lanes);
            let before = self.lane_secs.unwrap_or(last);
            self.lane_secs = Some(before + WEIGHT * (last - before));
        }
        if !self.is_wanted || now.since(self.reported) < REPORT_EVERY {
            return None;
        }
        self.reported = now;
        self.lane_secs
    }
}
