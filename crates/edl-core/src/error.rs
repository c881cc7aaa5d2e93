// SPDX-License-Identifier: Apache-2.0
//! Errors in the words that users and logs read.

/// An error and its causes, in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
