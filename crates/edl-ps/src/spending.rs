// SPDX-License-Identifier: Apache-2.0
//! What a server spends its time on.
//!
//! A server's second is shared by its owner threads: one of two that is busy makes half a second
//! of work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use edl_core::goodput::{Spent, TimeKind, nanos};

/// Counted by all threads, read by the session.
#[derive(Debug)]
pub(crate) struct Spending {
    origin: Instant,
    n_owners: AtomicU64,
    compute: AtomicU64,
    checkpoint: AtomicU64,
    heal: AtomicU64,
    n_loads: AtomicU64,
}

impl Spending {
    pub(crate) fn new() -> Self {
        Self {
            origin: Instant::now(),
            n_owners: AtomicU64::new(1),
            compute: AtomicU64::new(0),
            checkpoint: AtomicU64::new(0),
            heal: AtomicU64::new(0),
            n_loads: AtomicU64::new(0),
        }
    }

    /// An owner worked on a task.
    pub(crate) fn worked(&self, time: Duration, is_copy: bool) {
        let total = if is_copy { &self.checkpoint } else { &self.compute };
        let share = nanos(time) / self.n_owners.load(Ordering::Relaxed).max(1);
        total.fetch_add(share, Ordering::Relaxed);
    }

    /// Partitions were made or loaded. The first time nothing had been lost.
    pub(crate) fn loaded(&self, time: Duration, n_owners: usize) {
        self.n_owners.store(n_owners as u64, Ordering::Relaxed);
        if self.n_loads.fetch_add(1, Ordering::Relaxed) > 0 {
            self.heal.fetch_add(nanos(time), Ordering::Relaxed);
        }
    }

    /// The time spent up to now.
    pub(crate) fn read(&self) -> Spent {
        let mut spent = Spent::default();
        for (kind, total) in [
            (TimeKind::Compute, &self.compute),
            (TimeKind::Checkpoint, &self.checkpoint),
            (TimeKind::Heal, &self.heal),
        ] {
            spent.add(kind, Duration::from_nanos(total.load(Ordering::Relaxed)));
        }
        spent.add(TimeKind::Idle, self.origin.elapsed().saturating_sub(spent.total()));
        spent
    }
}
