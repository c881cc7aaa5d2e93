// SPDX-License-Identifier: Apache-2.0
//! A worker with parameter servers as one machine: events in, effects out, in order.
//!
//! An item goes read → pull → compute, and a batch further → push → acknowledged. While one item
//! is computed, the parameters of the next are pulled and those after it are read. Whatever fails
//! on the way leaves the item where the servers' applied sets make a second attempt harmless.

mod effect;
mod event;
mod report;

use std::time::Duration;

pub use self::effect::{Effect, Records, Wants};
pub use self::event::{Computed, Event, Finished, Item, Pass, Shard, Task};
pub use self::report::{Outbox, Report};
use crate::goodput;
use crate::spec::{JobSpec, Mode};

/// Leases held at once where acknowledgements come soon: one in progress and the next one.
const CAPACITY: u32 = 2;

/// What a worker knows when its first master has described the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub mode: Mode,
    /// Batches of an epoch.
    pub n_batches: u32,
    /// Records of a piece.
    pub minibatch_size: u32,
    /// Batches that share one pull of the dense parameters.
    pub dense_steps: u32,
    pub limits: Limits,
}

/// How long a worker that exits waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Until the item in progress is computed, acknowledgements included.
    pub finish: Duration,
    /// Until the servers have acknowledged the last gradients.
    pub last_answers: Duration,
}

/// What a worker is doing, for heartbeats and time accounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Activity {
    pub phase: &'static str,
    /// Empty while the worker itself is busy.
    pub waiting_for: &'static str,
    pub spends: goodput::Kind,
}

impl Config {
    #[must_use]
    pub fn new(spec: &JobSpec, n_records: u64, limits: Limits) -> Self {
        let mode = spec.mode();
        Self {
            mode,
            n_batches: spec.plan(n_records).n_batches(),
            minibatch_size: spec.minibatch_size,
            dense_steps: match mode {
                Mode::Async => spec.get_model_steps,
                // Where the age of parameters matters, a pull brings all of them.
                Mode::Bounded { .. } | Mode::Sync { .. } | Mode::Steps { .. } => 1,
            },
            limits,
        }
    }

    /// The leases to hold at once. A round of batches is acknowledged together, so a worker that
    /// is alone must be able to hold all of one.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        match self.mode {
            Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => CAPACITY,
            Mode::Sync { grads_to_wait } => CAPACITY.max(grads_to_wait),
        }
    }
}
