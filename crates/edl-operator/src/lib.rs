// SPDX-License-Identifier: Apache-2.0
//! `TrainingJob` and its operator: looks at a cluster, asks the planner of `edl-sched` what every
//! job should have, and does what it says.
//!
//! [`observe`] turns what watches show into numbers, [`edl_sched::plan()`] decides, [`act`] turns the
//! plan into actions, and [`apply`] performs them: it has nothing left to decide. All but
//! `apply`, `lease`, `watch`, `run`, `metrics`, `window` and `http` is pure. The futures of `run`
//! are boxed, so that they are compiled here and not in the crate that awaits them.

pub mod act;
pub mod aliases;
pub mod apply;
pub mod convert;
pub mod crd;
pub mod explain;
#[cfg(test)]
mod fake_api;
#[cfg(test)]
mod fixture;
pub mod history;
pub mod http;
pub mod inquiry;
pub mod lease;
pub mod manifests;
pub mod metrics;
mod numbers;
pub mod observe;
pub mod overview;
pub mod queues;
mod room;
pub mod run;
mod speed;
pub mod tell;
pub mod watch;
pub mod window;
pub mod words;
