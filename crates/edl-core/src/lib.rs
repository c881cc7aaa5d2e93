// SPDX-License-Identifier: Apache-2.0
//! The words and the pure machines of the domain.
//!
//! Nothing here does I/O, reads a clock, waits, logs or depends on hash order: callers pass
//! `now` and perform the effects that a machine returns. That makes every decision of a job
//! repeatable in a test.

pub mod acks;
pub mod applied;
pub mod audit;
pub mod batch;
pub mod cluster;
pub mod error;
pub mod evaluation;
pub mod goodput;
pub mod id;
pub mod instances;
pub mod job;
pub mod job_dir;
pub mod lanes;
pub mod layout;
pub mod ledger;
pub mod member;
pub mod metric;
pub mod model;
pub mod optimizer;
pub mod platform;
pub mod pod;
pub mod pool;
pub mod rng;
pub mod route;
pub mod series;
pub mod server;
pub mod servers;
pub mod spec;
pub mod supervisor;
pub mod text;
pub mod time;
pub mod worker;
pub mod world;
