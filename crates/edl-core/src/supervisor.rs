// SPDX-License-Identifier: Apache-2.0
//! What a supervisor does when the master of its job exits: end the job, restart the master, or
//! give up.

use std::collections::VecDeque;
use std::time::Duration;

use crate::exit::Exit;
use crate::platform::Ended;
use crate::time::Time;

/// A master that dies this often within [`WINDOW`] will not live the next time either.
const MAX_DEATHS: usize = 12;
const WINDOW: Duration = Duration::from_secs(30);
/// The first relaunch is at once, later ones wait for twice as long each.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Remembers the deaths that count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Relaunch {
    deaths: VecDeque<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The job is over, with the exit of its master.
    Over(Exit),
    After(Duration),
    GiveUp,
}

impl Relaunch {
    /// The master exited.
    pub fn master_ended(&mut self, how: Ended, now: Time) -> Next {
        match how.exit() {
            Some(exit) if exit.job_end().is_some() => Next::Over(exit),
            Some(_) | None => self.died(now),
        }
    }

    fn died(&mut self, now: Time) -> Next {
        self.deaths.retain(|death| now.since(*death) < WINDOW);
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
        let now = Time::ZERO;
        assert_eq!(relaunch.died(now), Next::After(Duration::ZERO));
        assert_eq!(relaunch.died(now), Next::After(FIRST_WAIT));
        assert_eq!(relaunch.died(now), Next::After(2 * FIRST_WAIT));
        let answers: Vec<_> = (3..MAX_DEATHS).map(|_| relaunch.died(now)).collect();
        assert_eq!(answers.last(), Some(&Next::GiveUp));
        let is_short = |next: &Next| matches!(next, Next::After(wait) if *wait <= LONGEST_WAIT);
        assert!(answers.iter().rev().skip(1).all(is_short));
    }

    #[test]
    fn a_master_that_says_how_its_job_ended_is_not_started_again() {
        let mut relaunch = Relaunch::default();
        for (code, exit) in [(0, Exit::Ok), (1, Exit::Failed), (3, Exit::Stopped)] {
            assert_eq!(relaunch.master_ended(Ended::Exit(code), Time::ZERO), Next::Over(exit));
        }
        let next = relaunch.master_ended(Exit::Relaunch.into(), Time::ZERO);
        assert_eq!(next, Next::After(Duration::ZERO));
    }

    #[test]
    fn deaths_far_apart_are_never_too_many() {
        let mut relaunch = Relaunch::default();
        let start = Time::ZERO;
        for death in 0..100 {
            assert_eq!(relaunch.died(start + WINDOW * death), Next::After(Duration::ZERO));
        }
    }
}
