// SPDX-License-Identifier: Apache-2.0
//! End-to-end tests: the real command, real processes, real signals.

#![allow(clippy::print_stdout, reason = "a skipped test prints the reason")]

mod accuracy;
mod allreduce;
mod bad_input;
mod chaos;
mod chaos_actions;
mod commands;
mod data;
mod description;
mod disk;
mod goodput;
mod harness;
mod hybrid;
mod manual;
mod metrics;
mod nonfinite;
mod oracle;
mod partition;
mod poison;
mod progress;
mod resume;
mod security;
mod spans;
mod spares;
mod stop;
mod store;
mod sync;
mod terminal;
mod verdict;
