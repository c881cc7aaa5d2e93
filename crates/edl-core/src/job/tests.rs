// SPDX-License-Identifier: Apache-2.0
//! Whole jobs by script: a bench plays platform, workers, servers and disk around the machine.

mod bench;
mod course;
mod deadlines;
mod faults;
mod restart;
mod wishes;
