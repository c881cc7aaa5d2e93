// SPDX-License-Identifier: Apache-2.0
//! Errors and stacks in the log of a process.

use std::time::{Duration, UNIX_EPOCH};

use edl_core::platform::InstanceId;
use edl_core::verdict::Logged;
use jiff::Timestamp;

use crate::logs::time_of;
use crate::telemetry;

/// Lines of one entry that are kept.
const MAX_LINES: usize = 200;
/// How lines without a time begin that are more than the rest of the line before.
const STARTS: [&str; 5] =
    ["error: ", "Fatal Python error", "Thread 0x", "Current thread 0x", "Traceback (most recent"];

/// The errors and stacks in a log, the oldest first.
pub(super) fn entries(instance: InstanceId, text: &str) -> Vec<Logged> {
    let mut found: Vec<Logged> = Vec::new();
    // Whether the next lines without a time belong to the last entry.
    let mut is_open = false;
    let mut at_secs = 0.0;
    for line in text.lines() {
        if let Some(time) = time_of(line) {
            at_secs = unix_secs(time).unwrap_or(at_secs);
            let message = line.splitn(4, "] ").last().unwrap_or_default();
            is_open = line.contains("] [ERROR] [") || message == "threads:";
            if is_open {
                found.push(Logged { at_secs, instance, text: message.to_owned() });
            }
            continue;
        }
        let is_start = STARTS.iter().any(|start| line.starts_with(start));
        match found.last_mut().filter(|_| is_open) {
            Some(entry) if entry.text.lines().count() < MAX_LINES => {
                entry.text.push('\n');
                entry.text.push_str(line);
            }
            Some(_) => {}
            None if is_start => {
                found.push(Logged { at_secs, instance, text: line.to_owned() });
                is_open = true;
            }
            None => {}
        }
    }
    found
}

/// `2026-11-15 02:46:40,750`, which is in UTC.
fn unix_secs(time: &str) -> Option<f64> {
    let time: Timestamp = format!("{}Z", time.replace(',', ".")).parse().ok()?;
    Some(time.as_duration().as_secs_f64())
}

/// A time as logs show it.
pub(super) fn stamp(at_secs: f64) -> String {
    telemetry::stamp(UNIX_EPOCH + Duration::from_secs_f64(at_secs.max(0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_stacks_are_found_with_all_their_lines() {
        let log = "\
[2025-11-15 02:46:40,250] [INFO] [a.rs:1:a] fine
Thread 0x01 (most recent call first):
  File \"m.py\", line 3 in feed
[2025-11-15 02:46:41,000] [WARNING] [stacks.rs:1:stacks] threads:
  compute: waiting
[2025-11-15 02:46:42,000] [INFO] [a.rs:1:a] still fine
  with more
[2025-11-15 02:46:43,500] [ERROR] [a.rs:1:a] cannot [open] it: Traceback (most recent call last):
  File \"m.py\", line 3
ValueError: x
";
        let found = entries(InstanceId::MASTER, log);
        let texts: Vec<&str> = found.iter().map(|entry| entry.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "Thread 0x01 (most recent call first):\n  File \"m.py\", line 3 in feed",
                "threads:\n  compute: waiting",
                "cannot [open] it: Traceback (most recent call last):\n  File \"m.py\", line 3\n\
                 ValueError: x",
            ]
        );
        let times: Vec<f64> = found.iter().map(|entry| entry.at_secs - 1_763_174_800.0).collect();
        assert_eq!(times, [0.25, 1.0, 3.5]);
        assert_eq!(stamp(found[0].at_secs), "2025-11-15 02:46:40,250");
    }
}
