// SPDX-License-Identifier: Apache-2.0
//! Connections whose peers have not proven the job's key yet: how many there can be, and what is
//! logged about them.
//!
//! When there is no room for a new connection, the oldest is closed. A peer with the key proves it
//! within milliseconds, so the oldest is the least likely to have it. If the newest were refused
//! instead, a few silent connections per second would keep every peer out. A peer that is closed in
//! a crowd connects again.
//!
//! Nothing that a stranger sends is logged: only its address and a reason from this source code, and
//! only a few lines per minute.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::open_files;

/// The most strangers at once: as many as the largest jobs have workers, which connect to a new
/// server or member at the same time.
const MAX: usize = 1024;
/// Their share of the descriptors that this process can open, as a divisor.
const SHARE: u64 = 4;
/// Log lines about strangers in one [`WINDOW`].
const MAX_LINES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);

/// The strangers at the listeners of one process.
pub struct Strangers {
    max: usize,
    admitted: Mutex<Admitted>,
}

type Close = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Admitted {
    next: u64,
    by_age: BTreeMap<u64, Close>,
    lines: LineLimit,
}

/// The place of one stranger, until it is dropped.
pub struct Place {
    strangers: Arc<Strangers>,
    number: u64,
}

impl Strangers {
    #[must_use]
    pub fn new() -> Arc<Self> {
        let share = open_files::limit().map_or(MAX, |n| usize::try_from(n / SHARE).unwrap_or(MAX));
        Self::at_most(MAX.min(share))
    }

    fn at_most(max: usize) -> Arc<Self> {
        Arc::new(Self { max, admitted: Mutex::default() })
    }

    /// Admits a stranger. `close` ends its connection, if newer ones need its place.
    #[must_use]
    pub fn admit(self: &Arc<Self>, close: impl FnOnce() + Send + 'static) -> Place {
        let mut admitted = self.admitted();
        let oldest =
            (admitted.by_age.len() >= self.max).then(|| admitted.by_age.pop_first()).flatten();
        let number = admitted.next;
        admitted.next += 1;
        admitted.by_age.insert(number, Box::new(close));
        drop(admitted);
        if let Some((_, close)) = oldest {
            close();
        }
        Place { strangers: Arc::clone(self), number }
    }

    /// Logs why a stranger was refused.
    pub fn log_refusal(&self, peer: Option<SocketAddr>, reason: &'static str) {
        let Some(left_out) = self.next_line() else { return };
        let peer = peer.map_or_else(|| "a local process".to_owned(), |peer| peer.to_string());
        warn("refused a connection", &peer, reason, left_out);
    }

    /// Logs that no connection can be accepted.
    pub fn log_failure(&self, error: &io::Error) {
        let Some(left_out) = self.next_line() else { return };
        warn("cannot accept a connection", "unknown", error, left_out);
    }

    fn next_line(&self) -> Option<u64> {
        self.admitted().lines.next(Instant::now())
    }

    fn admitted(&self) -> MutexGuard<'_, Admitted> {
        self.admitted.lock().expect("the lock on the strangers is poisoned")
    }
}

fn warn(what: &str, peer: &str, reason: impl Display, left_out: u64) {
    match left_out {
        0 => tracing::warn!(peer, %reason, "{what}"),
        n => tracing::warn!(peer, %reason, "{what} ({n} similar lines omitted)"),
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.strangers.admitted().by_age.remove(&self.number);
    }
}

/// Limits the lines that strangers can cause.
#[derive(Default)]
struct LineLimit {
    since: Option<Instant>,
    n_lines: u32,
    n_left_out: u64,
}

impl LineLimit {
    /// How many lines were left out since the last one, if one can be written now.
    fn next(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.duration_since(since) >= WINDOW) {
            (self.since, self.n_lines) = (Some(now), 0);
        }
        if self.n_lines >= MAX_LINES {
            self.n_left_out += 1;
            return None;
        }
        self.n_lines += 1;
        Some(std::mem::take(&mut self.n_left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_stranger_makes_room_for_the_newest() {
        let strangers = Strangers::at_most(2);
        let closed = Arc::new(Mutex::new(Vec::new()));
        let admit = |name: u32| {
            let closed = Arc::clone(&closed);
            strangers.admit(move || closed.lock().unwrap().push(name))
        };
        let (_first, second, _third) = (admit(1), admit(2), admit(3));
        assert_eq!(*closed.lock().unwrap(), [1]);
        // It has proven the key, and counts no longer.
        drop(second);
        let _fourth = admit(4);
        assert_eq!(*closed.lock().unwrap(), [1]);
        let _fifth = admit(5);
        assert_eq!(*closed.lock().unwrap(), [1, 3]);
    }

    #[test]
    fn lines_are_limited_and_those_left_out_are_counted() {
        let (mut lines, start) = (LineLimit::default(), Instant::now());
        let written = (0..1000).filter(|_| lines.next(start).is_some()).count();
        assert_eq!(written, MAX_LINES as usize);
        let almost = start + WINDOW - Duration::from_millis(1);
        assert_eq!(lines.next(almost), None);
        assert_eq!(lines.next(start + WINDOW), Some(1001 - u64::from(MAX_LINES)));
        assert_eq!(lines.next(start + WINDOW), Some(0));
    }
}
