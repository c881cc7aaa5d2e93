// SPDX-License-Identifier: Apache-2.0
//! Exit codes, and the refusals that carry one.

use std::fmt;
use std::process::ExitCode;

/// The exit codes. `elasticdl --help` and the README list them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Success.
    Ok,
    /// The job or command failed.
    Failed,
    /// Invalid flags, files or data; nothing was started.
    BadInput,
    /// The job was stopped early and can be resumed.
    Stopped,
    /// No such job, process or file.
    NotFound,
    /// The master failed, but restarting it may help; only supervisors see this code.
    Relaunch,
    /// Interrupted by Ctrl-C or SIGTERM; the job can be resumed.
    Interrupted,
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Failed => 1,
            Self::BadInput => 2,
            Self::Stopped => 3,
            Self::NotFound => 4,
            Self::Relaunch => 70,
            Self::Interrupted => 130,
        }
    }

    /// The exit code of a job in this state of its status.
    pub(crate) fn of_state(state: &str) -> Self {
        match state {
            "succeeded" => Self::Ok,
            "failed" => Self::Failed,
            _ => Self::Stopped,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// A sentence for the user that names the thing and the next step, and the code to leave with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) exit: Exit,
    pub(crate) text: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Refusal {}

/// Bad input: nothing was started.
pub(crate) fn refuse(text: impl Into<String>) -> anyhow::Error {
    Refusal { exit: Exit::BadInput, text: text.into() }.into()
}

/// There is no such thing.
pub(crate) fn not_found(text: impl Into<String>) -> anyhow::Error {
    Refusal { exit: Exit::NotFound, text: text.into() }.into()
}

/// The code that an error leaves the process with.
pub(crate) fn of_error(error: &anyhow::Error) -> Exit {
    error.downcast_ref::<Refusal>().map_or(Exit::Failed, |refusal| refusal.exit)
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn a_refusal_keeps_its_code_under_more_context() {
        let error = Err::<(), _>(not_found("no job `x`")).context("cannot show it").unwrap_err();
        assert_eq!(of_error(&error), Exit::NotFound);
        assert_eq!(of_error(&anyhow::anyhow!("disk on fire")), Exit::Failed);
    }
}
