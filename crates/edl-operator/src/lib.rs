// SPDX-License-Identifier: Apache-2.0
//! `TrainingJob` and its operator, which carries out the plans of `edl-sched`.
//!
//! [`observe`] converts watched objects to the planner's input, [`edl_sched::plan()`] decides, [`act`]
//! turns the plan into actions, and [`apply`] performs them. All modules but `apply`, `lease`, `watch`,
//! `run`, `metrics`, `page_data`, `health` and `http` are pure. The futures of `run` are boxed to be compiled
//! here and not in the crate that awaits them.

pub mod act;
pub mod aliases;
pub mod apply;
mod capacity;
pub mod convert;
pub mod crd;
pub mod description;
pub mod explain;
pub mod health;
pub mod history;
pub mod http;
pub mod inquiry;
pub mod lease;
pub mod manifests;
pub mod metrics;
mod numbers;
pub mod observe;
pub mod overview;
pub mod page_data;
pub mod permissions;
pub mod queues;
pub mod run;
mod speed;
pub mod watch;

#[cfg(test)]
mod tests;
