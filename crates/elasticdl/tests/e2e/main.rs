// SPDX-License-Identifier: Apache-2.0
//! The whole product, from outside: the real command, real processes, real signals.

#![allow(clippy::print_stdout, reason = "a test that is left out says why")]

mod accuracy;
mod allreduce;
mod bad_input;
mod by_hand;
mod chaos;
mod commands;
mod data;
mod description;
mod disk;
mod goodput;
mod harms;
mod harness;
mod hybrid;
mod metrics;
mod oracle;
mod partition;
mod poison;
mod resume;
mod security;
mod spans;
mod sync;
mod terminal;
