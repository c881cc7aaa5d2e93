// SPDX-License-Identifier: Apache-2.0
//! Signals to processes of this machine.

use rustix::io;
use rustix::process::{Pid, Signal, kill_process};

/// Sends a signal to a process; none if no process can have this number.
pub(crate) fn send(pid: u32, signal: Signal) -> Option<io::Result<()>> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    Some(kill_process(pid, signal))
}
