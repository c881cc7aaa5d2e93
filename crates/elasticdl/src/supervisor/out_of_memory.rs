// SPDX-License-Identifier: Apache-2.0
//! Whether the kernel killed a process because memory ran out. The process cannot say so itself, but
//! the kernel counts such kills.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

/// Processes that are killed together are reaped within this time.
const TOGETHER: Duration = Duration::from_secs(1);

/// The kernel's count of processes killed because memory ran out.
pub(super) struct Kills {
    counter: Option<PathBuf>,
    n: u64,
    risen_at: Option<Instant>,
}

impl Kills {
    /// The count of this process's control group, or else of the whole machine.
    pub(super) fn watch() -> Self {
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let counter = counters(&groups).find(|path| count(path).is_some());
        Self::of(counter)
    }

    fn of(counter: Option<PathBuf>) -> Self {
        let mut kills = Self { counter, n: 0, risen_at: None };
        kills.n = kills.count();
        kills
    }

    #[cfg(test)]
    pub(super) fn counted_in(counter: PathBuf) -> Self {
        Self::of(Some(counter))
    }

    fn count(&self) -> u64 {
        self.counter.as_deref().and_then(count).unwrap_or(0)
    }

    /// A new process is not among those killed before.
    pub(super) fn forget(&mut self) {
        self.n = self.count();
    }

    /// Looks at the count; whether it has risen since the last time, or a moment ago.
    pub(super) fn has_risen(&mut self, now: Instant) -> bool {
        let n = self.count();
        if std::mem::replace(&mut self.n, n) < n {
            self.risen_at = Some(now);
        }
        self.risen_at.is_some_and(|at| now.duration_since(at) < TOGETHER)
    }
}

/// Files that may have the count, the narrowest first; `groups` is the text of `/proc/self/cgroup`.
fn counters(groups: &str) -> impl Iterator<Item = PathBuf> {
    let of_group = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let path = path.trim_start_matches('/');
        let root = PathBuf::from("/sys/fs/cgroup");
        match controllers {
            "" => Some(root.join(path).join("memory.events")),
            "memory" => Some(root.join("memory").join(path).join("memory.oom_control")),
            _ => None,
        }
    };
    groups.lines().filter_map(of_group).chain([PathBuf::from("/proc/vmstat")])
}

/// The number in the line `oom_kill 3`.
fn count(path: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_that_of_the_control_group_or_of_the_machine() {
        let paths = |groups: &str| counters(groups).collect::<Vec<_>>();
        let machine = PathBuf::from("/proc/vmstat");
        let second = PathBuf::from("/sys/fs/cgroup/a/b/memory.events");
        assert_eq!(paths("0::/a/b\n"), [second, machine.clone()]);
        let first = PathBuf::from("/sys/fs/cgroup/memory/c/memory.oom_control");
        assert_eq!(paths("5:cpu:/\n4:memory:/c\n"), [first, machine]);
    }

    #[test]
    fn a_count_that_rises_explains_the_processes_that_end_just_then() {
        let folder = tempfile::tempdir().unwrap();
        let counter = folder.path().join("memory.events");
        std::fs::write(&counter, "oom 9\noom_kill 1\n").unwrap();
        let mut kills = Kills::counted_in(counter.clone());
        let now = Instant::now();
        assert!(!kills.has_risen(now), "that was before");
        std::fs::write(&counter, "oom 9\noom_kill 2\n").unwrap();
        assert!(kills.has_risen(now));
        assert!(kills.has_risen(now + TOGETHER / 2), "another one was killed with it");
        assert!(!kills.has_risen(now + TOGETHER));
    }
}
