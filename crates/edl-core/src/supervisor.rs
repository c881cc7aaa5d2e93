// SPDX-License-Identifier: Apache-2.0
//! How soon a dead master is started again, and when it is given up.

use std::collections::VecDeque;

use std::time::Duration;

use tokio::time::Instant;

/// A master that dies this often within [`WINDOW`] will not live the next time either.
const MAX_DEATHS: usize = 12;
const WINDOW: Duration = Duration::from_secs(30);
/// The first relaunch is at once, later ones wait for twice as long each.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Remembers the deaths that count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Relaunch {
    deaths: VecDeque<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    After(Duration),
    GiveUp,
}

impl Relaunch {
    pub(super) fn died(&mut self, now: Instant) -> Next {
        self.deaths.retain(|death| now.duration_since(*death) < WINDOW);
        self.deaths.push_back(now);
        match self.deaths.len() {
            0 | 1 => Next::After(Duration::ZERO),
            n if n >= MAX_DEATHS => Next::GiveUp,
            n => {
                let doublings = u32::try_from(n - 2).unwrap_or(u32::MAX).min(16);
                Next::After((FIRST_WAIT * (1 << doublings)).min(LONGEST_WAIT))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_death_costs_no_wait_and_many_in_a_row_end_the_job() {
        let mut relaunch = Relaunch::default();
        let now = Instant::now();
        assert_eq!(relaunch.died(now), Next::After(Duration::ZERO));
        assert_eq!(relaunch.died(now), Next::After(FIRST_WAIT));
        assert_eq!(relaunch.died(now), Next::After(2 * FIRST_WAIT));
        let answers: Vec<_> = (3..MAX_DEATHS).map(|_| relaunch.died(now)).collect();
        assert_eq!(answers.last(), Some(&Next::GiveUp));
        assert!(answers.iter().rev().skip(1).all(|next| *next <= Next::After(LONGEST_WAIT)));
    }

    #[test]
    fn deaths_far_apart_are_never_too_many() {
        let mut relaunch = Relaunch::default();
        let start = Instant::now();
        for death in 0..100 {
            assert_eq!(relaunch.died(start + WINDOW * death), Next::After(Duration::ZERO));
        }
    }

    impl PartialOrd for Next {
        fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
            let wait = |next: &Self| match next {
                Self::After(wait) => *wait,
                Self::GiveUp => Duration::MAX,
            };
            wait(self).partial_cmp(&wait(other))
        }
    }
}
