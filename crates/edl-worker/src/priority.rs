// SPDX-License-Identifier: Apache-2.0
//! Low priority for a process that is starting but not needed yet: importing libraries and building
//! a model would take CPU time from the workers that train.
//!
//! The process that starts a worker lowers its priority, and the worker takes the normal one back
//! when it is ready. Only some users may raise a priority; for others, nothing is lowered.

use std::fs;

use rustix::process::{Pid, getpriority_process, setpriority_process};

/// The variable that tells a worker which priority it gets when it is ready.
pub const NORMAL_PRIORITY: &str = "ELASTICDL_NORMAL_PRIORITY";

/// How much lower the priority is. Next to two workers on two cores, a process that starts still
/// gets half of the CPU time that it would get otherwise, and training loses almost nothing.
const STEPS: i32 = 10;

/// The priority of this process, if it could be taken back after it was lowered.
#[must_use]
pub fn normal() -> Option<i32> {
    // Each thread has its own priority, so a thread can try it.
    let tried = std::thread::spawn(|| {
        let normal = getpriority_process(None)?;
        setpriority_process(None, normal + 1)?;
        setpriority_process(None, normal)?;
        rustix::io::Result::Ok(normal)
    });
    tried.join().ok().and_then(Result::ok)
}

/// Lowers the priority of a process that was just started; its threads inherit it.
pub fn lower(pid: u32, normal: i32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    // It may have just ended; and if this fails, the start only takes more CPU time from others.
    let _ignored = pid.map(|pid| setpriority_process(Some(pid), normal + STEPS));
}

/// Gives all threads of this process the normal priority, if it was started with a lower one.
pub(crate) fn restore() {
    let normal = std::env::var(NORMAL_PRIORITY).ok().and_then(|text| text.parse::<i32>().ok());
    let (Some(normal), Ok(threads)) = (normal, fs::read_dir("/proc/self/task")) else { return };
    for thread in threads.flatten() {
        let id = thread.file_name().to_str().and_then(|id| id.parse().ok());
        if let Some(id) = id.and_then(Pid::from_raw)
            && let Err(error) = setpriority_process(Some(id), normal)
        {
            tracing::warn!(%error, "cannot raise the priority of this worker");
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_started_with_a_lower_priority_if_that_can_be_taken_back() {
        let Some(normal) = normal() else { return };
        assert_eq!(getpriority_process(None), Ok(normal), "only a thread tried it");
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        lower(child.id(), normal);
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        let expected = (normal + STEPS).min(19);
        assert_eq!(getpriority_process(pid), Ok(expected));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
