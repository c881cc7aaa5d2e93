// SPDX-License-Identifier: Apache-2.0
//! Types and pure state machines of the domain.
//!
//! Nothing here does I/O, reads a clock, waits, logs or depends on hash order: callers pass
//! `now` and perform the effects that a machine returns. A test can therefore repeat every decision
//! of a job.

pub mod acks;
pub mod activity;
pub mod applied;
pub mod audit;
pub mod batch;
pub mod checkpoint_name;
pub mod cluster;
pub mod error;
pub mod evaluation;
pub mod exit;
pub mod goodput;
pub mod id;
pub mod instances;
pub mod job;
pub mod job_dir;
pub mod lanes;
pub mod layout;
pub mod ledger;
pub mod machine;
pub mod member;
pub mod metric;
pub mod model;
mod named;
pub mod nonfinite;
pub mod optimizer;
pub mod permutation;
pub mod platform;
pub mod pod;
pub mod pool;
pub mod rng;
pub mod route;
pub mod runs;
pub mod series;
pub mod server;
pub mod servers;
pub mod spec;
pub mod supervisor;
pub mod text;
pub mod time;
pub mod upcoming;
pub mod verdict;
pub mod worker;
pub mod world;
