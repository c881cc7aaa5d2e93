// SPDX-License-Identifier: Apache-2.0
//! What is simulated: a cluster, its jobs and services, and node faults.

use std::time::Duration;

use edl_core::rng::Rng;
use edl_core::time::Time;

use crate::resources::Resources;
use crate::sim::kubernetes::Kubernetes;
use crate::sim::work::Work;
use crate::snapshot::{Job, Node, NodeId, Queue};
use crate::state::Options;

/// A week, in case the simulation has no end.
const FAULTS_UNTIL: Duration = Duration::from_secs(7 * 24 * 3600);
const NODE_BACK_AFTER: Duration = Duration::from_secs(600);
const RECLAIM_NOTICE: Duration = Duration::from_secs(120);
/// The most faults of one kind.
const MAX_FAULTS: f64 = 1e6;

/// A rate of faults that cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} `{rate}` must be a number from 0 to {most}")]
pub struct InvalidRate {
    name: &'static str,
    rate: f64,
    most: f64,
}

#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: String,
    pub nodes: Vec<Node>,
    pub queues: Vec<Queue>,
    pub jobs: Vec<JobScript>,
    pub services: Vec<ServiceScript>,
    pub faults: Vec<NodeFault>,
    pub kubernetes: Kubernetes,
    /// The interval of plans.
    pub plan_every: Duration,
    /// Whether to plan also when a job arrives or ends, a node changes or an online pod waits.
    pub plans_on_events: bool,
    /// How long a job pauses when its workers change.
    pub rescale: Duration,
    /// None to end when all jobs are done.
    pub end: Option<Time>,
    /// The interval of the rows of the report.
    pub row_every: Duration,
    pub options: Options,
}

/// A job and its work.
#[derive(Clone, Debug)]
pub struct JobScript {
    pub name: String,
    /// As submitted, without pods.
    pub job: Job,
    pub work: Work,
}

/// An online service of equal pods, with a target over time.
#[derive(Clone, Debug)]
pub struct ServiceScript {
    pub name: String,
    pub shape: Resources,
    /// The number of pods at the start.
    pub at_start: u32,
    pub targets: Vec<(Time, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeFault {
    pub at: Time,
    pub node: NodeId,
    pub kind: NodeFaultKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeFaultKind {
    /// The node is lost at once, and comes back later.
    Loss { back_after: Duration },
    /// The node is removed after a notice, and comes back later.
    Reclaim { notice: Duration, back_after: Duration },
}

impl Scenario {
    /// A cluster without jobs, whose planner runs every five seconds and on every event.
    #[must_use]
    pub fn new(name: impl Into<String>, nodes: Vec<Node>, kubernetes: Kubernetes) -> Self {
        Self {
            name: name.into(),
            nodes,
            queues: Vec::new(),
            jobs: Vec::new(),
            services: Vec::new(),
            faults: Vec::new(),
            kubernetes,
            plan_every: Duration::from_secs(5),
            plans_on_events: true,
            rescale: Duration::ZERO,
            end: None,
            row_every: Duration::from_secs(5),
            options: Options::default(),
        }
    }

    /// Adds losses and reclaims of random nodes, at hourly rates for the whole cluster; each node
    /// comes back after ten minutes. Fails if a rate is not a number, negative or far too high.
    pub fn with_losses(
        mut self,
        losses_per_hour: f64,
        reclaims_per_hour: f64,
        seed: u64,
    ) -> Result<Self, InvalidRate> {
        let until = self.end.unwrap_or(Time::ZERO + FAULTS_UNTIL);
        let hours = until.since(Time::ZERO).as_secs_f64() / 3600.0;
        let most = (MAX_FAULTS / hours.max(1.0)).floor();
        let back_after = NODE_BACK_AFTER;
        let reclaim = NodeFaultKind::Reclaim { notice: RECLAIM_NOTICE, back_after };
        for (name, rate, kind) in [
            ("losses_per_hour", losses_per_hour, NodeFaultKind::Loss { back_after }),
            ("reclaims_per_hour", reclaims_per_hour, reclaim),
        ] {
            if !(0.0..=most).contains(&rate) {
                return Err(InvalidRate { name, rate, most });
            }
            if rate > 0.0 {
                self = self.with_faults(rate, until, kind, seed);
            }
        }
        Ok(self)
    }

    /// Adds faults of random nodes, at an hourly rate for the whole cluster.
    #[must_use]
    pub fn with_faults(
        mut self,
        per_hour: f64,
        until: Time,
        kind: NodeFaultKind,
        seed: u64,
    ) -> Self {
        let mut rng = Rng::new(seed);
        let mut at = Time::ZERO;
        loop {
            let gap = -(1.0 - rng.unit()).ln() * 3600.0 / per_hour;
            at = at + Duration::try_from_secs_f64(gap).unwrap_or(Duration::MAX);
            if at >= until || self.nodes.is_empty() {
                return self;
            }
            let which = rng.below(self.nodes.len() as u64);
            let node = self.nodes[usize::try_from(which).unwrap_or(0)].id;
            self.faults.push(NodeFault { at, node, kind });
        }
    }
}
