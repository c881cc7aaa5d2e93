// SPDX-License-Identifier: Apache-2.0
//! What the compute thread is at, as the heartbeats tell it.
//!
//! Heartbeats come from another thread, so a busy loop does not silence them; but they repeat
//! what the loop said last, so that the master sees a loop that is stuck.

use std::borrow::Cow;
use std::sync::{Mutex, MutexGuard};

use edl_core::worker::Activity;

use crate::spending::Spending;

/// The state behind the heartbeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// Batches trained by this process; under AllReduce the job's step.
    pub(crate) step: u64,
    pub(crate) phase: &'static str,
    /// Whom the worker waits for; empty while it is busy itself.
    pub(crate) waiting_for: Cow<'static, str>,
}

/// Shared by the compute thread and the session.
#[derive(Debug)]
pub(crate) struct Progress {
    state: Mutex<State>,
    /// Where the compute thread's time goes.
    pub(crate) spending: Spending,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let state = State { step: 0, phase: "starting", waiting_for: "".into() };
        Self { state: Mutex::new(state), spending: Spending::new() }
    }

    /// The loop does something of its own.
    pub(crate) fn busy(&self, phase: &'static str) {
        let mut state = self.lock();
        (state.phase, state.waiting_for) = (phase, "".into());
    }

    /// The loop can do nothing until somebody else has.
    pub(crate) fn waiting(&self, phase: &'static str, waiting_for: &'static str) {
        let mut state = self.lock();
        (state.phase, state.waiting_for) = (phase, waiting_for.into());
    }

    /// What the machine does or waits for.
    pub(crate) fn show(&self, activity: Activity) {
        let Activity { phase, waiting_for, spends } = activity;
        self.waiting(phase, waiting_for);
        self.spending.on(spends);
    }

    /// The job's step, where all workers take it together; otherwise the batches trained here.
    pub(crate) fn at_step(&self, step: u64) {
        self.lock().step = step;
    }

    pub(crate) fn state(&self) -> State {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the lock on the progress is poisoned")
    }
}
