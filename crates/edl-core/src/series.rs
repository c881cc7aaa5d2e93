// SPDX-License-Identifier: Apache-2.0
//! A curve that never grows beyond its limit: when it is full every second point is dropped, and
//! from then on only every second new one is kept.

use serde::{Deserialize, Serialize};

/// Points in the order of time, the last one always among them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series<T> {
    points: Vec<T>,
    /// The last point that came, if it is not to be kept.
    last: Option<T>,
    limit: usize,
    /// One point of this many is kept.
    stride: u64,
    n_pushed: u64,
}

impl<T: Clone> Series<T> {
    /// # Panics
    /// If fewer than two points are allowed: such a curve could not be thinned out.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        assert!(limit >= 2, "a curve has at least two points");
        Self { points: Vec::new(), last: None, limit, stride: 1, n_pushed: 0 }
    }

    pub fn push(&mut self, point: T) {
        if self.n_pushed.is_multiple_of(self.stride) {
            if self.points.len() >= self.limit {
                let mut place = 0;
                self.points.retain(|_| {
                    place += 1;
                    place % 2 == 1
                });
                self.stride *= 2;
            }
            // After a thinning this point may be one of those that are left out.
            if self.n_pushed.is_multiple_of(self.stride) {
                self.points.push(point.clone());
            }
        }
        self.n_pushed += 1;
        self.last = Some(point);
    }

    /// All points that are kept, and the last one.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let is_kept = (self.n_pushed.wrapping_sub(1)).is_multiple_of(self.stride);
        self.points.iter().chain(self.last.iter().filter(move |_| !is_kept))
    }

    #[must_use]
    pub fn last(&self) -> Option<&T> {
        self.last.as_ref()
    }

    /// How many points one that is kept stands for.
    #[must_use]
    pub fn stride(&self) -> u64 {
        self.stride
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_stays_small_and_keeps_equal_distances_and_the_last(
            limit in 2usize..20, n in 1u64..2000
        ) {
            let mut series = Series::new(limit);
            for point in 0..n {
                series.push(point);
                let points: Vec<u64> = series.iter().copied().collect();
                prop_assert!(points.len() <= limit + 1);
                prop_assert_eq!(points.last(), Some(&point));
                prop_assert_eq!(points[0], 0);
                let stride = series.stride();
                for pair in points.windows(2).rev().skip(1) {
                    prop_assert_eq!(pair[1] - pair[0], stride);
                }
            }
        }
    }
}
