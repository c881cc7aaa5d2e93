// SPDX-License-Identifier: Apache-2.0
//! Interleavings of jobs under AllReduce and Hybrid that random faults may miss, by name: the real
//! job, while a test plays all workers and servers. `edl-sim` simulates whole jobs.

#![allow(clippy::wildcard_enum_match_arm, reason = "a test looks at a few messages of each kind")]

mod hybrid;
mod interleavings;
mod table;
