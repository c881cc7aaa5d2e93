// SPDX-License-Identifier: Apache-2.0
//! A process that is made slower on purpose: it is stopped and woken many times a second.

use std::time::Duration;

use rustix::process::Signal;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::signals;

/// One turn of running and standing still: short enough that nobody misses the process, long
/// enough that it gets something done.
const TURN: Duration = Duration::from_millis(100);

/// Whoever slows one process down, if anybody does. Ends with it, so that the number of a process
/// that is gone is never used again.
#[derive(Default)]
pub(super) struct Slowed(JoinSet<()>);

impl Slowed {
    /// Slows `pid` down from now on, in place of whoever did so before.
    pub(super) fn begin(&mut self, pid: u32, factor: u32, time: Duration) {
        self.end();
        let until = Instant::now() + time;
        self.0.spawn(async move {
            let (run, stand) = parts(factor);
            while Instant::now() < until {
                let _gone = signals::send(pid, Signal::STOP);
                tokio::time::sleep(stand).await;
                let _gone = signals::send(pid, Signal::CONT);
                tokio::time::sleep(run).await;
            }
        });
    }

    /// Leaves the process as it is, which may be standing still.
    pub(super) fn end(&mut self) {
        // The supervisor has one thread: whoever is ended here is not at work just now.
        self.0 = JoinSet::new();
    }
}

/// Of one turn, how long it runs and how long it stands still.
fn parts(factor: u32) -> (Duration, Duration) {
    let run = TURN / factor.max(1);
    (run, TURN - run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_shared_by_the_factor() {
        let millis = Duration::from_millis;
        assert_eq!(parts(4), (millis(25), millis(75)));
        assert_eq!(parts(100), (millis(1), millis(99)));
        assert_eq!(parts(1), (TURN, Duration::ZERO));
    }

    #[tokio::test]
    async fn a_slowed_process_stands_still_now_and_then_and_runs_again_at_the_end() {
        // Reads the state of another process as the kernel tells it.
        let state = |pid: u32| -> Option<char> {
            let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            text.rsplit_once(") ")?.1.chars().next()
        };
        let mut child =
            tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
        let pid = child.id().unwrap();
        let mut slowed = Slowed::default();
        slowed.begin(pid, 20, Duration::from_millis(600));
        let mut seen = std::collections::BTreeSet::new();
        let look = Duration::from_millis(1);
        while tokio::time::timeout(look, slowed.0.join_next()).await.is_err() {
            seen.extend(state(pid));
        }
        assert!(seen.contains(&'T'), "it never stood still: {seen:?}");
        assert_ne!(state(pid), Some('T'), "it runs again");
        child.kill().await.unwrap();
    }
}
