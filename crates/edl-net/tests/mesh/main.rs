// SPDX-License-Identifier: Apache-2.0
//! The guarantees of a mesh, over each transport.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod aborts;
mod eavesdropper;
mod failures;
mod harness;
mod intruders;
mod messages;
mod planned;
mod processes;
mod sums;
