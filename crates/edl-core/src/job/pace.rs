// SPDX-License-Identifier: Apache-2.0
//! How long a batch or a step takes, and how long a worker may therefore be silent or busy.

use std::collections::VecDeque;
use std::time::Duration;

/// The median is taken over this many of the last batches or steps.
const N_RECENT: usize = 31;
/// The first ones are slower than the rest, so they alone say little.
const N_LEAST: usize = 5;
/// Anything that takes this many times the median is unusually slow.
const FACTOR: u32 = 5;
/// A worker is not frozen before this, no matter how short the steps are.
const MIN_FREEZE: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// In the order in which they were measured.
    recent: VecDeque<Duration>,
    /// The same, the shortest first.
    sorted: Vec<Duration>,
    /// Of these, once there are enough: it is asked for at every event.
    median: Option<Duration>,
}

impl Pace {
    /// A batch or step took this long.
    pub(super) fn add(&mut self, time: Duration) {
        if self.recent.len() == N_RECENT
            && let Some(oldest) = self.recent.pop_front()
            && let Ok(place) = self.sorted.binary_search(&oldest)
        {
            self.sorted.remove(place);
        }
        self.recent.push_back(time);
        let place = self.sorted.partition_point(|shorter| *shorter < time);
        self.sorted.insert(place, time);
        if self.sorted.len() >= N_LEAST {
            self.median = Some(self.sorted[self.sorted.len() / 2]);
        }
    }

    /// A worker that computes nothing for this long hangs; `least` is what the user allows.
    pub(super) fn hang_timeout(&self, least: Duration) -> Duration {
        least.max(self.median.unwrap_or_default() * FACTOR)
    }

    /// A busy worker that answers nothing for this long is frozen, once steps have been measured.
    pub(super) fn freeze_timeout(&self) -> Option<Duration> {
        self.median.map(|median| MIN_FREEZE.max(median * FACTOR))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_limits_follow_the_median_of_the_last_steps() {
        let secs = Duration::from_secs;
        let mut pace = Pace::default();
        (0..N_LEAST - 1).for_each(|_| pace.add(secs(60)));
        assert_eq!((pace.freeze_timeout(), pace.hang_timeout(secs(4))), (None, secs(4)));
        (0..N_RECENT).for_each(|_| pace.add(Duration::from_millis(10)));
        assert_eq!((pace.freeze_timeout(), pace.hang_timeout(secs(4))), (Some(secs(1)), secs(4)));
        (0..N_RECENT / 2 + 1).for_each(|_| pace.add(secs(2)));
        assert_eq!((pace.freeze_timeout(), pace.hang_timeout(secs(4))), (Some(secs(10)), secs(10)));
    }
}
