// SPDX-License-Identifier: Apache-2.0
//! Interleavings of a job with parameter servers that were found important, by name: the real job
//! and real partitions, while a test decides what happens when. `edl-sim` simulates whole jobs.

mod counter;
mod disk;
mod interleavings;
mod site;
