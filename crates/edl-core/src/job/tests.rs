// SPDX-License-Identifier: Apache-2.0
//! Whole jobs by script: a bench plays platform, workers, servers and disk around the machine.

mod adopted;
mod bench;
mod deadlines;
mod faults;
mod joining;
mod lifecycle;
mod members;
mod nonfinite;
mod requests;
mod restart;
mod spares;
mod stopping;
mod suspects;
