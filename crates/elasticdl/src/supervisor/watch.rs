// SPDX-License-Identifier: Apache-2.0
//! Notices a master that lives but does nothing, such as one that was stopped by a signal.
//!
//! A working master writes `status.json` about every second. One that has not for too long is
//! asked over the wire, because a full disk keeps a healthy one from writing; only when it does
//! not answer either is it to be replaced.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// A master may have to read through much data before its first word.
const FIRST_WORD: Duration = Duration::from_secs(120);

/// Follows the signs of life of one master.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    patience: Duration,
    last_sign: Instant,
    last_write: Option<SystemTime>,
    has_spoken: bool,
}

impl Watch {
    /// A master that starts now; `written` is when the status was written by the one before.
    pub(super) fn new(patience: Duration, written: Option<SystemTime>, now: Instant) -> Self {
        Self { patience, last_sign: now, last_write: written, has_spoken: false }
    }

    /// Takes the time of the last write of the status; says whether the master must be asked.
    pub(super) fn is_silent(&mut self, written: Option<SystemTime>, now: Instant) -> bool {
        if written != self.last_write {
            self.last_write = written;
            self.answered(now);
        }
        let patience = if self.has_spoken { self.patience } else { self.patience.max(FIRST_WORD) };
        now.duration_since(self.last_sign) > patience
    }

    /// The master gave a sign of life.
    pub(super) fn answered(&mut self, now: Instant) {
        self.last_sign = now;
        self.has_spoken = true;
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
    fn a_new_master_has_longer_to_say_its_first_word() {
        let start = Instant::now();
        let old = Some(SystemTime::UNIX_EPOCH);
        let mut watch = Watch::new(PATIENCE, old, start);
        assert!(!watch.is_silent(old, start + PATIENCE * 3));
        assert!(watch.is_silent(old, start + FIRST_WORD * 2));
    }
}
