// SPDX-License-Identifier: Apache-2.0
//! A cluster that exists only in numbers: discrete events, one seed, the planner that ships.
//!
//! [`run`] plays a [`Scenario`] under a policy and reports what happened. Kubernetes is there as
//! far as it matters: pods take time to start and to leave, a scheduler places those that the
//! plan does not, a job controller chooses victims where the plan does not. Nothing here does
//! I/O: traces come in as text, tables, CSV and SVG go out as text.

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

/// Plays a scenario under a policy. The same three always give the same report.
#[must_use]
pub fn run(scenario: &Scenario, policy: Policy, seed: u64) -> Report {
    engine::Engine::new(scenario, policy, seed).run()
}
