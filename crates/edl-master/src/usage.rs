// SPDX-License-Identifier: Apache-2.0
//! CPU time and memory of the processes on this machine, as the kernel counts them. Processes on
//! other machines are not known here.

use std::collections::BTreeMap;
use std::fs;

use edl_net::proto::JobStatus;
use serde::Serialize;

/// Ticks of CPU time per second: on Linux, every program sees the same number.
const TICKS_PER_SEC: f64 = 100.0;

/// What a process has used.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Usage {
    /// CPU time of all its threads since its start.
    pub cpu_secs: f64,
    /// Physical memory that it uses at present, memory that it shares with others included.
    pub memory_bytes: u64,
}

/// The usage of each process of a job, by its name.
#[must_use]
pub fn of_job(status: &JobStatus) -> BTreeMap<String, Usage> {
    let known = status.instances.iter().filter(|instance| instance.pid != 0);
    known.filter_map(|instance| Some((instance.name(), of(instance.pid)?))).collect()
}

/// The usage of a process, unless it is gone.
fn of(pid: u32) -> Option<Usage> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).ok();
    parse(&read("stat")?, &read("status")?)
}

#[expect(clippy::cast_precision_loss, reason = "a time needs no more than 53 bits")]
fn parse(stat: &str, status: &str) -> Option<Usage> {
    // The name of the program, in brackets, can contain anything.
    let (_, numbers) = stat.rsplit_once(") ")?;
    let mut ticks = numbers.split(' ').skip(11).map_while(|number| number.parse::<u64>().ok());
    let (user, system) = (ticks.next()?, ticks.next()?);
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    // A process that has just exited has no memory.
    let kilobytes = resident.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    Some(Usage {
        cpu_secs: (user + system) as f64 / TICKS_PER_SEC,
        memory_bytes: kilobytes.map_or(0, |kilobytes: u64| kilobytes * 1024),
    })
}

#[cfg(test)]
mod tests {
    use edl_core::platform::Role;
    use edl_net::proto::Instance;

    use super::*;

    #[test]
    fn user_and_system_time_count_whatever_the_name_of_the_program_is() {
        let stat = "77 (a) b 1 (c) S 1 77 77 0 -1 4194560 5 0 0 0 250 50 9 9 20 0 1 0 1 2 3";
        let status = "Name:\ta) b 1 (c\nVmPeak:\t 9000 kB\nVmRSS:\t    2048 kB\nThreads:\t1\n";
        let expected = Usage { cpu_secs: 3.0, memory_bytes: 2 << 20 };
        assert_eq!(parse(stat, status), Some(expected));
        assert_eq!(parse(stat, "Name:\tx\n").map(|usage| usage.memory_bytes), Some(0));
        assert_eq!(parse("77 (x) S 1", status), None);
    }

    #[test]
    fn processes_that_are_gone_are_left_out_and_work_counts() {
        let own =
            Instance { role: Role::Master.into(), pid: std::process::id(), ..Instance::default() };
        // No process has this number.
        let gone = Instance { role: Role::Worker.into(), pid: u32::MAX, ..Instance::default() };
        let status = JobStatus { instances: vec![own, gone], ..JobStatus::default() };
        let before = of_job(&status);
        assert_eq!(before.keys().collect::<Vec<_>>(), ["master"]);
        assert!(before["master"].memory_bytes > 100_000, "{before:?}");
        let mut after = of_job(&status);
        while after["master"].cpu_secs <= before["master"].cpu_secs {
            std::hint::black_box((0..100_000_u64).fold(0, |sum, n| sum ^ n));
            after = of_job(&status);
        }
    }
}
