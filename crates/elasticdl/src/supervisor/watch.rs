// SPDX-License-Identifier: Apache-2.0
//! Detects a master that runs but does nothing, such as one that was paused by a signal.
//!
//! A working master writes `status.json` about every second. If it has not for too long, it is
//! probed over the network, because a full disk prevents a healthy master from writing. It is
//! replaced only if it does not answer the probe either.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// A master may have to scan much data before it writes its first status.
const FIRST_WRITE: Duration = Duration::from_secs(120);

/// When one master last showed that it works.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    limit: Duration,
    last_sign: Instant,
    last_write: Option<SystemTime>,
    has_written: bool,
}

impl Watch {
    /// A master that starts now; `written` is when the status was written by the one before.
    pub(super) fn new(limit: Duration, written: Option<SystemTime>, now: Instant) -> Self {
        Self { limit, last_sign: now, last_write: written, has_written: false }
    }

    /// Takes the time of the last write of the status; returns whether the master must be probed.
    pub(super) fn is_silent(&mut self, written: Option<SystemTime>, now: Instant) -> bool {
        if written != self.last_write {
            self.last_write = written;
            self.answered(now);
        }
        let limit = if self.has_written { self.limit } else { self.limit.max(FIRST_WRITE) };
        now.duration_since(self.last_sign) > limit
    }

    /// The master wrote its status or answered a probe.
    pub(super) fn answered(&mut self, now: Instant) {
        self.last_sign = now;
        self.has_written = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn a_master_that_stops_writing_is_silent_until_it_answers() {
        let start = Instant::now();
        let first = Some(SystemTime::UNIX_EPOCH);
        let mut watch = Watch::new(PATIENCE, None, start);
        assert!(!watch.is_silent(first, start));
        assert!(!watch.is_silent(first, start + PATIENCE));
        assert!(watch.is_silent(first, start + PATIENCE + Duration::from_millis(1)));
        watch.answered(start + PATIENCE * 2);
        assert!(!watch.is_silent(first, start + PATIENCE * 3));
    }

    #[test]
    fn a_new_master_has_more_time_for_its_first_status() {
        let start = Instant::now();
        let old = Some(SystemTime::UNIX_EPOCH);
        let mut watch = Watch::new(PATIENCE, old, start);
        assert!(!watch.is_silent(old, start + PATIENCE * 3));
        assert!(watch.is_silent(old, start + FIRST_WRITE * 2));
    }
}
