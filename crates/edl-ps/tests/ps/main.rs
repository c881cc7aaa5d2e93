// SPDX-License-Identifier: Apache-2.0
//! Tests of a parameter server: over real sockets, with intruders, with a fake master.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod data_plane;
mod encryption;
mod harness;
mod intruders;
mod relay;
mod session;
mod steps;
mod waits;
