// SPDX-License-Identifier: Apache-2.0
//! The reads of a peer's memory, by themselves: Miri runs their tests.

#![allow(dead_code, reason = "only the tests are wanted here")]

#[path = "../../src/mesh/shm/numbers.rs"]
mod numbers;
