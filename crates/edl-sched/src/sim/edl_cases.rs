// SPDX-License-Identifier: Apache-2.0
//! The published EDL experiment: 133 nodes, 2,348 CPUs; twenty jobs in a row (case 1), and six
//! jobs beside a web service of varying size (case 2).
//!
//! What the report does not state is fitted to its logs. The nodes: 86 of 12 CPUs (one such node is
//! in the logs) and 47 of 28, which match both totals and the logged packing of 347 trainers and 69
//! servers. The scripts: a submission takes 3.5 s in addition to its pause, and the last pause of
//! case 1 takes 39 s more than 300, because each query of the cluster also took time.

use std::time::Duration;

use edl_core::time::Time;

use crate::resources::Resources;
use crate::sim::kubernetes::Kubernetes;
use crate::sim::scenario::{JobScript, Scenario, ServiceScript};
use crate::sim::work::Work;
use crate::snapshot::{Job, JobId, Node, NodeId, RoleSpec, Roles};

const N_SMALL: u32 = 86;
const N_LARGE: u32 = 47;
const SMALL_CPU_MILLI: u64 = 12_000;
const LARGE_CPU_MILLI: u64 = 28_000;
/// 13,665,210 MB over 133 nodes, in MiB.
const NODE_MEMORY_MIB: u64 = 97_985;
/// The network agent on every node.
const AGENT_CPU_MILLI: u64 = 250;
/// Other pods of the system, 17.25 CPUs in all: the logs show 50.5 with the agents.
const SYSTEM_CPU_MILLI: u64 = 17_250;
/// How many of the large nodes hold them.
const N_SYSTEM_NODES: u64 = 23;

const TRAINER: Resources = Resources::new(0, 5000, 8192);
const SERVER: Resources = Resources::new(0, 4000, 5120);
const MASTER: Resources = Resources::new(0, 1000, 512);
const NGINX: Resources = Resources::new(0, 3000, 3072);

/// How long the command that submits a job takes.
const SUBMISSION: Duration = Duration::from_millis(3500);

/// Whether jobs have 2 to 60 trainers, or a fixed number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    Elastic,
    Fixed(u32),
}

/// The cluster of the experiment.
#[must_use]
pub fn nodes() -> Vec<Node> {
    nodes_of(N_SMALL, SMALL_CPU_MILLI, N_LARGE, LARGE_CPU_MILLI)
}

/// The experiment's totals with large nodes of another size beside those of 12 CPUs; none if that is
/// impossible.
#[must_use]
pub fn nodes_with(large_cpus: u64) -> Option<Vec<Node>> {
    let above = 1000 * large_cpus.checked_sub(SMALL_CPU_MILLI / 1000)?;
    let missing = u64::from(N_LARGE) * (LARGE_CPU_MILLI - SMALL_CPU_MILLI);
    let n_large = missing.checked_div(above).filter(|n| n * above == missing)?;
    let n_large = u32::try_from(n_large).ok().filter(|n| *n <= N_SMALL + N_LARGE)?;
    Some(nodes_of(N_SMALL + N_LARGE - n_large, SMALL_CPU_MILLI, n_large, 1000 * large_cpus))
}

/// A cluster with two sizes of nodes and the system's pods; the smaller nodes come first.
#[must_use]
pub fn nodes_of(n_small: u32, small_milli: u64, n_large: u32, large_milli: u64) -> Vec<Node> {
    let node = |id: u32| {
        let cpu_milli = if id < n_small { small_milli } else { large_milli };
        let rank = u64::from((n_small + n_large - 1) - id);
        let holds_system = rank < N_SYSTEM_NODES;
        let system = if holds_system { SYSTEM_CPU_MILLI / N_SYSTEM_NODES } else { 0 };
        let taken = Resources::new(0, AGENT_CPU_MILLI + system, 256);
        Node { taken, ..Node::new(NodeId(id), Resources::new(0, cpu_milli, NODE_MEMORY_MIB)) }
    };
    (0..n_small + n_large).map(node).collect()
}

/// Twenty jobs, one after the other; nothing ever ends.
#[must_use]
pub fn case_1(size: Size, kubernetes: Kubernetes) -> Scenario {
    let gap = Duration::from_secs(10) + SUBMISSION;
    let jobs: Vec<JobScript> = (0..20).map(|id| job(id, Time::ZERO + gap * id, size)).collect();
    let hold = Duration::from_secs(339);
    let end = Some(Time::ZERO + gap * 20 + hold);
    Scenario { end, jobs, ..Scenario::new("edl-case-1", nodes(), kubernetes) }
}

/// Six jobs beside nginx, which goes from 400 pods to 100 and back.
#[must_use]
pub fn case_2(size: Size, kubernetes: Kubernetes) -> Scenario {
    let gap = Duration::from_secs(5) + SUBMISSION;
    let jobs = (0..6).map(|id| job(id, Time::ZERO + gap * id, size)).collect();
    let mut at = Time::ZERO + gap * 6 + Duration::from_secs(60);
    let mut targets = Vec::new();
    for n in [300, 200, 100, 200, 300, 400] {
        targets.push((at, n));
        at = at + Duration::from_secs(90);
    }
    let nginx = ServiceScript { name: "nginx".into(), shape: NGINX, at_start: 400, targets };
    Scenario {
        end: Some(at + Duration::from_secs(30)),
        jobs,
        services: vec![nginx],
        ..Scenario::new("edl-case-2", nodes(), kubernetes)
    }
}

fn job(id: u32, submitted: Time, size: Size) -> JobScript {
    let fixed = |shape, n| RoleSpec { shape, min: n, max: n };
    let worker = match size {
        Size::Elastic => RoleSpec { shape: TRAINER, min: 2, max: 60 },
        Size::Fixed(n) => fixed(TRAINER, n),
    };
    let job = Job::new(
        JobId(id),
        submitted,
        Roles { master: fixed(MASTER, 1), ps: fixed(SERVER, 10), worker },
    );
    JobScript { name: format!("mnist-{id}"), job, work: Work::Endless }
}
