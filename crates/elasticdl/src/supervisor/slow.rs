// SPDX-License-Identifier: Apache-2.0
//! A process that is slowed down on purpose: it is paused and resumed many times a second.

use std::time::Duration;

use rustix::process::Signal;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::signals;

/// One period of running and pausing: short enough that the process is not declared lost, long
/// enough for it to make progress.
const PERIOD: Duration = Duration::from_millis(100);

/// The task that slows a process down, if there is one. It ends with the process, so the id of a
/// dead process is never used again.
#[derive(Default)]
pub(super) struct Slowed(JoinSet<()>);

impl Slowed {
    /// Slows `pid` down from now on; replaces an earlier slowdown.
    pub(super) fn begin(&mut self, pid: u32, factor: u32, time: Duration) {
        self.end();
        let until = Instant::now() + time;
        self.0.spawn(async move {
            let (run, pause) = parts(factor);
            while Instant::now() < until {
                let _gone = signals::send(pid, Signal::STOP);
                tokio::time::sleep(pause).await;
                let _gone = signals::send(pid, Signal::CONT);
                tokio::time::sleep(run).await;
            }
        });
    }

    /// Stops the slowdown. The process may stay paused.
    pub(super) fn end(&mut self) {
        // The supervisor has one thread, so the task is not running now.
        self.0 = JoinSet::new();
    }
}

/// How long the process runs and pauses in one period.
fn parts(factor: u32) -> (Duration, Duration) {
    let run = PERIOD / factor.max(1);
    (run, PERIOD - run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_is_divided_by_the_factor() {
        let millis = Duration::from_millis;
        assert_eq!(parts(4), (millis(25), millis(75)));
        assert_eq!(parts(100), (millis(1), millis(99)));
        assert_eq!(parts(1), (PERIOD, Duration::ZERO));
    }

    #[tokio::test]
    async fn a_slowed_process_pauses_repeatedly_and_runs_at_the_end() {
        // The state of another process, from the kernel.
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
        let poll = Duration::from_millis(1);
        while tokio::time::timeout(poll, slowed.0.join_next()).await.is_err() {
            seen.extend(state(pid));
        }
        assert!(seen.contains(&'T'), "it never paused: {seen:?}");
        assert_ne!(state(pid), Some('T'), "it runs again");
        child.kill().await.unwrap();
    }
}
