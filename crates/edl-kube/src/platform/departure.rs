// SPDX-License-Identifier: Apache-2.0
//! The deletion of a master's own pod: alone, or with all pods of its job.
//!
//! A user who deletes all pods deletes them one after another. A master whose pod is deleted alone
//! exits, and the next one continues the job. If all pods are deleted, the master saves the job first.

use std::time::{Duration, Instant};

/// How long after each deletion the next one may take.
const NEXT_DELETION: Duration = Duration::from_secs(1);
/// What a master needs of its pod's grace period after it has saved the job.
const EXIT_MARGIN: Duration = Duration::from_secs(6);
const MIN_SAVING: Duration = Duration::from_secs(1);

/// This master's pod is being deleted.
#[derive(Clone, Debug)]
pub(super) struct Departure {
    /// When the pod is killed.
    ends: Instant,
    /// The master knows of the deletion.
    has_warned: bool,
    n_left: usize,
    /// If no other pod is deleted until then, this one is deleted alone.
    until: Instant,
    /// All pods are deleted, and the master knows it.
    is_known: bool,
}

/// What follows for a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Wait,
    /// The master must learn of the deletion. Parameter servers that are deleted next exit soon, unless
    /// they know that they may be needed until all others are deleted, too.
    Warn,
    /// The job must be saved within this time.
    Save(Duration),
    /// The job continues with the next master.
    Exit,
}

impl Departure {
    /// A pod with this grace period is deleted.
    pub(super) fn new(grace: Duration, now: Instant) -> Self {
        Self {
            ends: now + grace,
            has_warned: false,
            n_left: usize::MAX,
            until: now + NEXT_DELETION,
            is_known: false,
        }
    }

    /// What to do while so many other pods are not being deleted.
    pub(super) fn next(&mut self, n_left: usize, now: Instant) -> Next {
        if !self.has_warned {
            self.has_warned = true;
            return Next::Warn;
        }
        if self.is_known {
            return Next::Wait;
        }
        if n_left == 0 {
            self.is_known = true;
            let left = self.ends.saturating_duration_since(now);
            return Next::Save(left.saturating_sub(EXIT_MARGIN).max(MIN_SAVING));
        }
        if n_left < self.n_left {
            self.until = now + NEXT_DELETION;
        }
        self.n_left = n_left;
        if now < self.until { Next::Wait } else { Next::Exit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(30);

    #[test]
    fn a_master_whose_pod_is_deleted_alone_exits_for_the_next_one() {
        let now = Instant::now();
        let mut departure = Departure::new(GRACE, now);
        assert_eq!(departure.next(3, now), Next::Warn);
        assert_eq!(departure.next(3, now), Next::Wait);
        assert_eq!(departure.next(3, now + NEXT_DELETION / 2), Next::Wait);
        assert_eq!(departure.next(3, now + NEXT_DELETION), Next::Exit);
    }

    #[test]
    fn a_master_whose_pod_is_deleted_with_all_others_saves_the_job_once() {
        let mut now = Instant::now();
        let mut departure = Departure::new(GRACE, now);
        assert_eq!(departure.next(4, now), Next::Warn);
        for n_left in (1..4).rev() {
            assert_eq!(departure.next(n_left, now), Next::Wait);
            now += NEXT_DELETION * 3 / 4;
        }
        let spent = NEXT_DELETION * 9 / 4;
        assert_eq!(departure.next(0, now), Next::Save(GRACE - spent - EXIT_MARGIN));
        assert_eq!(departure.next(0, now), Next::Wait);
        assert_eq!(
            departure.next(1, now + GRACE),
            Next::Wait,
            "a pod that comes late is not counted"
        );
    }

    #[test]
    fn a_short_grace_period_leaves_a_moment_for_a_checkpoint() {
        let now = Instant::now();
        let mut departure = Departure::new(Duration::from_secs(2), now);
        assert_eq!(
            [0, 0].map(|n_left| departure.next(n_left, now)),
            [Next::Warn, Next::Save(MIN_SAVING)]
        );
    }
}
