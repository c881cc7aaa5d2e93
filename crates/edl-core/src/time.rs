// SPDX-License-Identifier: Apache-2.0
//! A point in time as the machines see it: a distance from the start of the process.

use std::ops::{Add, Sub};
use std::time::Duration;

/// Nanoseconds since an origin that the caller chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    pub const ZERO: Self = Self(0);

    #[must_use]
    pub fn since_origin(distance: Duration) -> Self {
        Self(u64::try_from(distance.as_nanos()).unwrap_or(u64::MAX))
    }

    /// The time from `earlier` to `self`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Whole milliseconds, as messages carry them.
#[must_use]
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, distance: Duration) -> Self {
        Self(self.0.saturating_add(Self::since_origin(distance).0))
    }
}

impl Sub for Time {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.since(earlier)
    }
}
