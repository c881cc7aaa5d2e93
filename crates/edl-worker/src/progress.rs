// SPDX-License-Identifier: Apache-2.0
//! What the compute thread is doing, for the heartbeats that the session sends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use edl_core::activity::{Activity, Phase, WaitingFor};

use crate::spending::Spending;

/// The state behind the heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// Batches trained by this process; under AllReduce the job's step.
    pub(crate) step: u64,
    pub(crate) phase: Phase,
    pub(crate) waiting_for: WaitingFor,
}

/// Whether a call waits for other members.
pub(crate) type IsBlocked = Box<dyn Fn() -> bool + Send + Sync>;

/// Shared by the compute thread and the session.
pub(crate) struct Progress {
    state: Mutex<State>,
    /// Batches, lanes and minibatches that were computed.
    n_computed: AtomicU64,
    is_blocked: OnceLock<IsBlocked>,
    /// Where the compute thread's time goes.
    pub(crate) spending: Spending,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let state =
            State { step: 0, phase: Phase::BuildingModel, waiting_for: WaitingFor::Nothing };
        Self {
            state: Mutex::new(state),
            n_computed: AtomicU64::new(0),
            is_blocked: OnceLock::new(),
            spending: Spending::new(),
        }
    }

    pub(crate) fn set_computed(&self, n_computed: u64) {
        self.n_computed.store(n_computed, Ordering::Relaxed);
    }

    pub(crate) fn n_computed(&self) -> u64 {
        self.n_computed.load(Ordering::Relaxed)
    }

    /// What the machine does or waits for, and at which step.
    pub(crate) fn show(&self, activity: Activity, step: u64) {
        let Activity { phase, waiting_for, spends } = activity;
        *self.lock() = State { step, phase, waiting_for };
        self.spending.on(spends);
    }

    /// Runs a call that waits for `waiting_for` within the activity that is shown.
    pub(crate) fn while_waiting<R>(&self, waiting_for: WaitingFor, call: impl FnOnce() -> R) -> R {
        self.lock().waiting_for = waiting_for;
        let result = call();
        self.lock().waiting_for = WaitingFor::Nothing;
        result
    }

    pub(crate) fn set_is_blocked(&self, is_blocked: IsBlocked) {
        assert!(self.is_blocked.set(is_blocked).is_ok(), "a worker opens one mesh");
    }

    pub(crate) fn state(&self) -> State {
        *self.lock()
    }

    /// An activity that counts as busy may be blocked in a call that waits for other workers.
    pub(crate) fn waiting_for(&self) -> WaitingFor {
        let is_blocked = || self.is_blocked.get().is_some_and(|is_blocked| is_blocked());
        let waiting_for = self.state().waiting_for;
        if waiting_for == WaitingFor::Nothing && is_blocked() {
            return WaitingFor::Members;
        }
        waiting_for
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the lock on the progress is poisoned")
    }
}
