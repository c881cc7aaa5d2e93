// SPDX-License-Identifier: Apache-2.0
//! What a process was doing, in its log: the frames of a panic, and the states of its threads when
//! it is asked by a signal, because it hangs. A Python worker adds the stacks of its Python threads
//! (`elasticdl._stacks`).

use std::backtrace::Backtrace;
use std::fs;

use anyhow::Context as _;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::signals;

/// Frames of a panic that are kept: those nearest to it.
const MAX_FRAMES: usize = 24;

/// Asks a process to log what its threads do; false if it does not handle the signal, which would
/// then kill it.
pub(crate) fn ask(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    catches(&status, Signal::USR1) && matches!(signals::send(pid, Signal::USR1), Some(Ok(())))
}

/// Whether a process with this `/proc/PID/status` handles a signal.
fn catches(status: &str, signal: Signal) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal.as_raw() - 1)) != 0
}

/// Logs the threads of this process whenever it is asked to.
pub(crate) fn log_when_asked() -> anyhow::Result<impl Future<Output = ()> + Send> {
    let mut asked = signal(SignalKind::user_defined1()).context("cannot listen for signals")?;
    Ok(async move {
        while asked.recv().await.is_some() {
            tracing::warn!("threads:\n{}", threads());
        }
    })
}

/// The threads of this process, one per line.
fn threads() -> String {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut lines: Vec<String> = tasks
        .map(|task| {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            thread(read("comm").trim(), &read("stat"), read("wchan").trim())
        })
        .collect();
    lines.sort();
    lines.join("\n")
}

/// A thread by its files in `/proc`: its name, what it does, and where in the kernel it waits.
fn thread(name: &str, stat: &str, wchan: &str) -> String {
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    let doing = match state {
        Some('R') => "computing",
        Some('S') => "waiting",
        Some('D') => "waiting for a disk or device",
        Some('T' | 't') => "stopped",
        Some(_) | None => "ending",
    };
    match wchan {
        "" | "0" => format!("  {name}: {doing}"),
        place => format!("  {name}: {doing} in {place}"),
    }
}

/// Panics of this process go to its log, with the frames of our own code.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let what = panic.to_string().replacen(":\n", ": ", 1);
        let frames = frames(&Backtrace::force_capture().to_string());
        tracing::error!("thread `{}` {what}\n{frames}", thread.name().unwrap_or("unnamed"));
    }));
}

/// The functions of our own crates in a backtrace, the innermost first.
fn frames(backtrace: &str) -> String {
    let functions = backtrace.lines().filter_map(|line| line.trim_start().split_once(": "));
    let is_ours = |function: &&str| {
        ["edl_", "elasticdl"]
            .iter()
            .any(|name| function.trim_start_matches(['<', '&']).starts_with(name))
            && !function.contains("stacks::log_panics")
    };
    let ours = functions.map(|(_, function)| function).filter(is_ours).take(MAX_FRAMES);
    ours.map(|function| format!("  {function}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_only_asked_if_it_handles_the_signal() {
        assert!(catches("Name:\tx\nSigCgt:\t0000000000000200\n", Signal::USR1));
        assert!(!catches("SigCgt:\t0000000000000100\n", Signal::USR1));
        assert!(!catches("", Signal::USR1));
        assert!(!ask(u32::MAX), "there is no such process");
    }

    #[test]
    fn a_thread_is_described_by_what_it_does() {
        let stat = "7 (a) b) S 1 2 3";
        assert_eq!(thread("compute", stat, "futex_wait"), "  compute: waiting in futex_wait");
        assert_eq!(thread("compute", "7 (a) R 1", "0"), "  compute: computing");
        assert!(!threads().is_empty());
    }

    #[test]
    fn the_frames_of_a_panic_are_those_of_our_own_code() {
        let backtrace = "   0: elasticdl::stacks::log_panics::{{closure}}\n   1: core::panicking\n   \
                         2: <edl_zoo::count::Count as edl_tensor::model::Model>::train\n             \
                         at ./src/count.rs:7\n   3: edl_worker::compute::Compute::run\n   4: main\n";
        let expected = "  <edl_zoo::count::Count as edl_tensor::model::Model>::train\n  \
                        edl_worker::compute::Compute::run";
        assert_eq!(frames(backtrace), expected);
    }
}
