// SPDX-License-Identifier: Apache-2.0
//! The stack of the process in which it began: of its error, or of its log.

use super::{Facts, Found};

/// Python's tracebacks, its stacks of threads, the frames of a panic, and the states of threads.
const MARKS: [&str; 4] =
    ["Traceback (most recent call last)", "(most recent call first)", "panicked at", "threads:"];
/// Lines of a stack that are kept: those nearest to the error.
const MAX_LINES: usize = 40;

pub(super) fn of(facts: &Facts, found: &Found) -> Option<String> {
    let process = found.process?;
    let logged = facts.logged.iter().filter(|entry| entry.instance == process);
    let in_text = MARKS.iter().find_map(|mark| from(&found.text, mark));
    // Events about failed work leave the traceback to the reason for the end of the job.
    let in_reason = || from(&facts.reason, MARKS[0]);
    // In the log, the surest kind first, and the newest of it.
    let in_log = |mark: &str| logged.clone().rev().find_map(|entry| from(&entry.text, mark));
    in_text.or_else(in_reason).or_else(|| MARKS.iter().find_map(|mark| in_log(mark)))
}

fn from(text: &str, mark: &str) -> Option<String> {
    let at = text.find(mark)?;
    let start = text[..at].rfind('\n').map_or(0, |end| end + 1);
    let start = if mark.starts_with("Traceback") { at } else { start };
    let lines: Vec<&str> = text[start..].lines().collect();
    let n_left_out = lines.len().saturating_sub(MAX_LINES);
    let kept = match mark.starts_with("Traceback") {
        true => &lines[n_left_out..],
        false => &lines[..lines.len() - n_left_out],
    };
    Some(kept.join("\n").trim_end().to_owned())
}
