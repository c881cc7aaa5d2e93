// SPDX-License-Identifier: Apache-2.0
//! Errors that a command reports, with their exit codes.

use std::fmt;

pub(crate) use edl_core::exit::Exit;

/// A sentence for the user that names the problem and the next step, and the exit code.
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

/// The exit code for an error.
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
