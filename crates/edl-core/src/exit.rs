// SPDX-License-Identifier: Apache-2.0
//! The exit codes of `elasticdl` processes.

use crate::job::JobState;

/// How a process exits. `elasticdl --help` and the README list the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Success.
    Ok = 0,
    /// The job or command failed.
    Failed = 1,
    /// Invalid flags, files or data; nothing was started.
    BadInput = 2,
    /// The job was stopped early and can be resumed.
    Stopped = 3,
    /// No such job, process or file.
    NotFound = 4,
    /// The master failed, but restarting it may help; only supervisors see this code.
    Relaunch = 70,
    /// A bug: the process panicked.
    Panicked = 101,
    /// `elasticdl wait` gave up; the job keeps running.
    TimedOut = 124,
    /// Interrupted by Ctrl-C or SIGTERM; the job can be resumed.
    Interrupted = 130,
}

impl Exit {
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }

    #[must_use]
    pub fn from_code(code: i32) -> Option<Self> {
        match code {
            0 => Some(Self::Ok),
            1 => Some(Self::Failed),
            2 => Some(Self::BadInput),
            3 => Some(Self::Stopped),
            4 => Some(Self::NotFound),
            70 => Some(Self::Relaunch),
            101 => Some(Self::Panicked),
            124 => Some(Self::TimedOut),
            130 => Some(Self::Interrupted),
            _ => None,
        }
    }

    /// The exit of a process that reports a job in this state.
    #[must_use]
    pub fn of_state(state: JobState) -> Self {
        match state {
            JobState::Succeeded => Self::Ok,
            JobState::Failed => Self::Failed,
            JobState::Starting
            | JobState::Running
            | JobState::Evaluating
            | JobState::Recovering
            | JobState::Finishing
            | JobState::Stopped
            | JobState::Waiting
            | JobState::Interrupted => Self::Stopped,
        }
    }

    /// How the job of a master that exits like this ended; none if another master continues it.
    #[must_use]
    pub fn job_end(self) -> Option<JobState> {
        match self {
            Self::Ok => Some(JobState::Succeeded),
            Self::Failed => Some(JobState::Failed),
            Self::Stopped => Some(JobState::Stopped),
            Self::BadInput
            | Self::NotFound
            | Self::Relaunch
            | Self::Panicked
            | Self::TimedOut
            | Self::Interrupted => None,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_read_as_it_was_written() {
        let known: Vec<Exit> = (0..=255).filter_map(Exit::from_code).collect();
        assert_eq!(known.len(), 9);
        let codes = known.iter().map(|exit| exit.code().into());
        assert_eq!(
            codes.map(Exit::from_code).collect::<Vec<_>>(),
            known.iter().copied().map(Some).collect::<Vec<_>>()
        );
    }
}
