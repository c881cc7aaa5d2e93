// SPDX-License-Identifier: Apache-2.0
//! A parameter server under test: over real sockets, with intruders, with a master of straw.

#![expect(clippy::unwrap_used, reason = "a test fails by it")]

mod data_plane;
mod encryption;
mod harness;
mod intruders;
mod relay;
mod session;
mod steps;
mod waits;
