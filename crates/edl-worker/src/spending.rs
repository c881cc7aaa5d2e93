// SPDX-License-Identifier: Apache-2.0
//! What the compute thread spends its time on: one clock read per change, no lock.
//!
//! One thread writes at a time, another reads now and then. A reader may see half of a change; its
//! next read corrects that, because only totals are reported.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use edl_core::goodput::{Spent, TimeKind, nanos};

/// A stopwatch that always runs, for one kind at a time.
#[derive(Debug)]
pub(crate) struct Spending {
    origin: Instant,
    totals: [AtomicU64; 8],
    kind: AtomicU8,
    /// When the kind began, in nanoseconds from the origin.
    since: AtomicU64,
    /// Work thrown away: this much of the next is done for the second time.
    wasted: AtomicU64,
}

impl Spending {
    pub(crate) fn new() -> Self {
        Self {
            origin: Instant::now(),
            totals: Default::default(),
            kind: AtomicU8::new(place(TimeKind::Idle)),
            since: AtomicU64::new(0),
            wasted: AtomicU64::new(0),
        }
    }

    /// From now on time goes to `kind`.
    pub(crate) fn on(&self, kind: TimeKind) {
        let before = self.kind.load(Ordering::Relaxed);
        if before == place(kind) {
            return;
        }
        let now = nanos(self.origin.elapsed());
        let mut time = now.saturating_sub(self.since.load(Ordering::Relaxed));
        if before == place(TimeKind::Compute) {
            let again = time.min(self.wasted.load(Ordering::Relaxed));
            self.wasted.fetch_sub(again, Ordering::Relaxed);
            self.totals[usize::from(place(TimeKind::Redo))].fetch_add(again, Ordering::Relaxed);
            time -= again;
        }
        self.totals[usize::from(before)].fetch_add(time, Ordering::Relaxed);
        self.since.store(now, Ordering::Relaxed);
        self.kind.store(place(kind), Ordering::Release);
    }

    /// This much computing was wasted.
    pub(crate) fn waste(&self, time: Duration) {
        self.wasted.fetch_add(nanos(time), Ordering::Relaxed);
    }

    /// The time spent up to now, and the current kind.
    pub(crate) fn read(&self) -> (Spent, TimeKind) {
        let at_hand = self.kind.load(Ordering::Acquire);
        let kind = TimeKind::ALL.get(usize::from(at_hand)).copied().unwrap_or_default();
        let mut spent = Spent::from_nanos(std::array::from_fn(|place| {
            self.totals[place].load(Ordering::Relaxed)
        }));
        let since = Duration::from_nanos(self.since.load(Ordering::Relaxed));
        spent.add(kind, self.origin.elapsed().saturating_sub(since));
        (spent, kind)
    }
}

fn place(kind: TimeKind) -> u8 {
    kind as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_time_goes_somewhere_and_wasted_work_is_redone() {
        let spending = Spending::new();
        spending.on(TimeKind::Compute);
        spending.on(TimeKind::DataWait);
        // Longer than this test can take: all that is computed from now on was computed before.
        spending.waste(Duration::from_secs(3600));
        let computed = spending.read().0.get(TimeKind::Compute);
        spending.on(TimeKind::Compute);
        spending.on(TimeKind::Idle);
        let (before, after) = (spending.origin.elapsed(), spending.read());
        assert_eq!(after.0.get(TimeKind::Compute), computed);
        assert!(after.0.get(TimeKind::Redo) > Duration::ZERO);
        assert_eq!(after.1, TimeKind::Idle);
        assert!(after.0.total() >= before && after.0.total() <= spending.origin.elapsed());
    }
}
