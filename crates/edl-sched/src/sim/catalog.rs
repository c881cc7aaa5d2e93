// SPDX-License-Identifier: Apache-2.0
//! Scenarios by name. Those that replay a trace need its files, which the caller reads.

use crate::sim::adaptdl::{self, BatchRule, Files, Profiles};
use crate::sim::edl_cases::{self, Size};
use crate::sim::kubernetes::Kubernetes;
use crate::sim::{Scenario, philly};
use crate::state::Policy;

/// The names of all scenarios, as text.
pub const NAMES: &str = "edl-case-1, edl-case-2 (-nodes-20, -28 or -59: CPUs of the large nodes); \
from traces: adaptdl-1 to adaptdl-4 (-0.5, -1.5 or -2.0: load; -adaptive: jobs choose their batch \
size), philly-PERCENT (percentage of elastic jobs)";

/// CPUs of the larger nodes of the EDL experiment.
const LARGE_CPUS: u64 = 28;
/// The replayed part of the Philly trace: the beginning of a busy month.
const PHILLY_FIRST: usize = 20_000;
const PHILLY_JOBS: usize = 400;
const PHILLY_NODES: u32 = 16;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("unknown scenario `{0}`")]
    Unknown(String),
    #[error(transparent)]
    Trace(#[from] adaptdl::Error),
}

/// Whether a scenario of this name replays a trace.
#[must_use]
pub fn needs_traces(name: &str) -> bool {
    name.starts_with("adaptdl-") || name.starts_with("philly-")
}

/// A scenario for a policy. If Kubernetes itself decides, the default `kubernetes` is that of 2017.
/// Fails if there is no such scenario, or a trace is missing or malformed.
pub fn scenario(
    name: &str,
    policy: Policy,
    kubernetes: Option<Kubernetes>,
    files: &Files,
) -> Result<Scenario, Error> {
    let unknown = || Error::Unknown(name.to_owned());
    let by_kubernetes = policy.leaves_placing_to_kubernetes();
    let usual = if by_kubernetes { Kubernetes::of_2017() } else { Kubernetes::of_today() };
    let kubernetes = kubernetes.unwrap_or(usual);
    let size = |fixed| if policy == Policy::Off { Size::Fixed(fixed) } else { Size::Elastic };
    let parts: Vec<&str> = name.split('-').collect();
    match parts.as_slice() {
        ["edl", "case", which, rest @ ..] => {
            let large = match rest {
                [] => LARGE_CPUS,
                ["nodes", cpus] => cpus.parse().map_err(|_| unknown())?,
                _ => return Err(unknown()),
            };
            let scenario = match *which {
                "1" => edl_cases::case_1(size(60), kubernetes),
                "2" => edl_cases::case_2(size(15), kubernetes),
                _ => return Err(unknown()),
            };
            let nodes = edl_cases::nodes_with(large).ok_or_else(unknown)?;
            Ok(Scenario { name: name.to_owned(), nodes, ..scenario })
        }
        ["philly", percent] => {
            let percent = percent.parse().map_err(|_| unknown())?;
            let path = "traces/philly.csv";
            let text = files.get(path).ok_or_else(|| adaptdl::Error::Missing(path.to_owned()))?;
            let entries = philly::parse(text)?;
            Ok(philly::scenario(&entries, PHILLY_FIRST, PHILLY_JOBS, PHILLY_NODES, percent))
        }
        ["adaptdl", which, rest @ ..] => {
            let (rest, rule) = match rest {
                [rest @ .., "adaptive"] => (rest, BatchRule::Adaptive),
                rest => (rest, BatchRule::Fixed),
            };
            let path = match rest {
                [] => format!("workloads/workload-{which}.csv"),
                [load] => format!("workloads-{load}/workload-{which}.csv"),
                _ => return Err(unknown()),
            };
            let entries = adaptdl::parse_workload(files, &path)?;
            let profiles = Profiles::parse(files)?;
            Ok(adaptdl::scenario(name, &entries, &profiles, policy, rule)?)
        }
        _ => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_not_there_is_named() {
        let find = |name| scenario(name, Policy::ElasticFair, None, &Files::new());
        for name in ["edl-case-3", "edl-case-1-nodes-x", "edl-case-1-nodes-12", "x", "philly-some"]
        {
            assert_eq!(find(name).unwrap_err(), Error::Unknown(name.into()));
        }
        let error = find("adaptdl-1-0.5").unwrap_err().to_string();
        assert_eq!(error, "file `workloads-0.5/workload-1.csv` not found");
    }

    #[test]
    fn the_experiment_keeps_its_totals_with_other_nodes() {
        for name in ["edl-case-1", "edl-case-1-nodes-20", "edl-case-2-nodes-59"] {
            let found = scenario(name, Policy::Fifo, None, &Files::new()).unwrap();
            let cpus: u64 = found.nodes.iter().map(|node| node.capacity.cpu_milli).sum();
            assert_eq!((found.nodes.len(), cpus), (133, 2_348_000), "{name}");
        }
    }
}
