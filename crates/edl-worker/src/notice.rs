// SPDX-License-Identifier: Apache-2.0
//! Tells user code that this process will exit soon, so that it can save something. There is one
//! worker in a process.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

static ENDS_AT: Mutex<Option<Instant>> = Mutex::new(None);

/// The process ends within this time. A second notice can only shorten it.
pub(crate) fn give(within: Duration) {
    let mut ends_at = ENDS_AT.lock().unwrap_or_else(PoisonError::into_inner);
    let at = Instant::now() + within;
    *ends_at = Some(ends_at.map_or(at, |before| before.min(at)));
}

/// The time until the end, once the job was asked to stop or this worker was asked to exit.
#[must_use]
pub fn time_left() -> Option<Duration> {
    let ends_at = *ENDS_AT.lock().unwrap_or_else(PoisonError::into_inner);
    ends_at.map(|at| at.saturating_duration_since(Instant::now()))
}
