// SPDX-License-Identifier: Apache-2.0
//! A parameter server under test: over real sockets, with intruders, with a master of straw.

mod data_plane;
mod harness;
mod intruders;
mod relay;
mod session;
mod waits;
