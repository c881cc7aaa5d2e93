// SPDX-License-Identifier: Apache-2.0
//! What the machines of workers and parameter servers have in common.

use crate::time::Time;

/// A pure state machine, driven by its shell.
pub trait Machine {
    type Event;
    type Effect;

    /// Takes one event and returns what to do, in order.
    #[must_use]
    fn handle(&mut self, event: Self::Event, now: Time) -> Vec<Self::Effect>;

    /// When a tick is due, if no other event comes before.
    #[must_use]
    fn next_deadline(&self) -> Option<Time>;

    /// Panics if no event leads to the present state.
    fn check_invariants(&self);
}
