// SPDX-License-Identifier: Apache-2.0
//! How far each hosted partition is, for those who wait without owning it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use edl_tensor::partition::Partition;

/// How often a wait looks up, besides being woken.
const TICK: Duration = Duration::from_millis(250);

/// Versions and rounds of the partitions of one generation. Owners write, waiters read.
#[derive(Debug)]
pub(crate) struct Progress {
    first: u32,
    versions: Vec<AtomicU64>,
    rounds: Vec<AtomicU64>,
    rows: Vec<AtomicU64>,
    is_over: AtomicBool,
    /// Held for a moment by who changes something, so that no waiter misses it.
    gate: Mutex<()>,
    changed: Condvar,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    Met,
    /// The generation is over, or nobody is interested any more.
    Over,
    Expired,
}

impl Progress {
    pub(crate) fn new(partitions: &Range<u32>) -> Self {
        let zeros = || partitions.clone().map(|_| AtomicU64::new(0)).collect();
        Self {
            first: partitions.start,
            versions: zeros(),
            rounds: zeros(),
            rows: zeros(),
            is_over: AtomicBool::new(false),
            gate: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Takes down how far a partition is.
    pub(crate) fn note(&self, partition: &Partition) {
        let place = (partition.id().0 - self.first) as usize;
        self.versions[place].store(partition.version(), Ordering::Release);
        self.rounds[place].store(partition.round(), Ordering::Release);
        self.rows[place].store(partition.n_rows(), Ordering::Relaxed);
    }

    /// Wakes everybody who waits for a change.
    pub(crate) fn announce(&self) {
        drop(self.gate.lock().expect("the gate lock is poisoned"));
        self.changed.notify_all();
    }

    /// Like `announce`, from inside the condition of a wait, which holds the gate already.
    pub(crate) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Ends every wait.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.announce();
    }

    /// Optimizer steps of the partition that has taken the fewest.
    pub(crate) fn version(&self) -> u64 {
        self.versions.iter().map(|version| version.load(Ordering::Acquire)).min().unwrap_or(0)
    }

    /// The fewest and the most optimizer steps of any partition.
    pub(crate) fn versions(&self) -> (u64, u64) {
        let versions = || self.versions.iter().map(|version| version.load(Ordering::Acquire));
        (versions().min().unwrap_or(0), versions().max().unwrap_or(0))
    }

    /// Embedding rows of all partitions.
    pub(crate) fn n_rows(&self) -> u64 {
        self.rows.iter().map(|rows| rows.load(Ordering::Relaxed)).sum()
    }

    /// The partition that has applied the fewest rounds, and how many.
    pub(crate) fn slowest(&self) -> Option<(u32, u64)> {
        let rounds = self.rounds.iter().map(|round| round.load(Ordering::Acquire));
        (self.first..).zip(rounds).min_by_key(|(_, round)| *round)
    }

    /// Waits until `is_met`; `is_wanted` is asked now and then whether anybody still cares.
    pub(crate) fn wait(
        &self,
        deadline: Instant,
        is_wanted: &dyn Fn() -> bool,
        mut is_met: impl FnMut() -> bool,
    ) -> Waited {
        let mut gate = self.gate.lock().expect("the gate lock is poisoned");
        loop {
            if is_met() {
                return Waited::Met;
            }
            if self.is_over.load(Ordering::Acquire) || !is_wanted() {
                return Waited::Over;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Waited::Expired;
            }
            let woken = self.changed.wait_timeout(gate, left.min(TICK));
            (gate, _) = woken.expect("the gate lock is poisoned");
        }
    }
}
