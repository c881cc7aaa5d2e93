// SPDX-License-Identifier: Apache-2.0
//! What the compute thread is doing, for the heartbeats that the session sends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use edl_core::activity::{Activity, WaitingFor};

use crate::spending::Spending;

/// Whether a call waits for other members.
pub(crate) type IsBlocked = Box<dyn Fn() -> bool + Send + Sync>;

/// Shared by the compute thread and the session.
pub(crate) struct Progress {
    waiting_for: Mutex<WaitingFor>,
    /// Under AllReduce, the job's step.
    step: AtomicU64,
    /// Batches, lanes and minibatches that were computed.
    n_computed: AtomicU64,
    /// Records whose gradients were computed.
    n_records: AtomicU64,
    is_blocked: OnceLock<IsBlocked>,
    /// Where the compute thread's time goes.
    pub(crate) spending: Spending,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self {
            waiting_for: Mutex::new(WaitingFor::Nothing),
            step: AtomicU64::new(0),
            n_computed: AtomicU64::new(0),
            n_records: AtomicU64::new(0),
            is_blocked: OnceLock::new(),
            spending: Spending::new(),
        }
    }

    pub(crate) fn advance(&self, n_computed: u64, step: u64, n_records: u64) {
        self.n_computed.store(n_computed, Ordering::Relaxed);
        self.n_records.store(n_records, Ordering::Relaxed);
        self.step.store(step, Ordering::Relaxed);
    }

    pub(crate) fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    pub(crate) fn n_computed(&self) -> u64 {
        self.n_computed.load(Ordering::Relaxed)
    }

    pub(crate) fn n_records(&self) -> u64 {
        self.n_records.load(Ordering::Relaxed)
    }

    /// What the machine does or waits for.
    pub(crate) fn show(&self, activity: Activity) {
        *self.lock() = activity.waiting_for;
        self.spending.on(activity.spends);
    }

    /// Runs a call that waits for `waiting_for` within the activity that is shown.
    pub(crate) fn while_waiting<R>(&self, waiting_for: WaitingFor, call: impl FnOnce() -> R) -> R {
        *self.lock() = waiting_for;
        let result = call();
        *self.lock() = WaitingFor::Nothing;
        result
    }

    pub(crate) fn set_is_blocked(&self, is_blocked: IsBlocked) {
        assert!(self.is_blocked.set(is_blocked).is_ok(), "a worker opens one mesh");
    }

    /// An activity that counts as busy may be blocked in a call that waits for other workers.
    pub(crate) fn waiting_for(&self) -> WaitingFor {
        let is_blocked = || self.is_blocked.get().is_some_and(|is_blocked| is_blocked());
        let waiting_for = *self.lock();
        if waiting_for == WaitingFor::Nothing && is_blocked() {
            return WaitingFor::Members;
        }
        waiting_for
    }

    fn lock(&self) -> MutexGuard<'_, WaitingFor> {
        self.waiting_for.lock().expect("the lock on the progress is poisoned")
    }
}
