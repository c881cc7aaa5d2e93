// SPDX-License-Identifier: Apache-2.0
//! What a mesh promises, over each transport.

#![expect(clippy::unwrap_used, reason = "a test fails by it")]

mod aborts;
mod deaths;
mod eavesdropper;
mod harness;
mod intruders;
mod processes;
mod sums;
mod talk;
