// SPDX-License-Identifier: Apache-2.0
//! A deterministic discrete-event simulation of a cluster, with the real planner.
//!
//! [`run`] simulates a [`Scenario`] under a policy and reports what happened. Kubernetes is modeled as
//! far as it matters: pods take time to start and to leave, a scheduler places pods and a job
//! controller chooses victims if the plan does not. Nothing here does I/O: traces, tables, CSV and SVG
//! are text.

pub mod adaptdl;
pub mod bound;
pub mod catalog;
pub mod edl_cases;
pub mod engine;
pub mod file;
pub mod kubernetes;
pub mod metrics;
pub mod philly;
pub mod report;
pub mod scenario;
pub mod svg;
pub mod work;

pub use report::Report;
pub use scenario::Scenario;

use crate::state::Policy;

/// Simulates a scenario. The same arguments always give the same report.
#[must_use]
pub fn run(scenario: &Scenario, policy: Policy, seed: u64) -> Report {
    engine::Engine::new(scenario, policy, seed).run()
}
