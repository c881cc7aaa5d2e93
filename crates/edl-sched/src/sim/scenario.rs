// SPDX-License-Identifier: Apache-2.0
//! What is played: a cluster, the jobs and services that come to it, and what goes wrong.

use std::time::Duration;

use edl_core::rng::Rng;
use edl_core::time::Time;

use crate::resources::Resources;
use crate::sim::kubernetes::Kubernetes;
use crate::sim::work::Work;
use crate::snapshot::{Job, Node, NodeId, Queue};
use crate::state::Options;

/// A week: faults need an end even where jobs have none.
const FAULTS_UNTIL: Duration = Duration::from_secs(7 * 24 * 3600);
const NODE_BACK_AFTER: Duration = Duration::from_secs(600);
const RECLAIM_NOTICE: Duration = Duration::from_secs(120);

#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: String,
    pub nodes: Vec<Node>,
    pub queues: Vec<Queue>,
    pub jobs: Vec<JobScript>,
    pub services: Vec<ServiceScript>,
    pub faults: Vec<Fault>,
    pub kubernetes: Kubernetes,
    /// The planner is asked at this rate …
    pub plan_every: Duration,
    /// … and, if so, whenever a job comes or goes, a node changes or an online pod waits.
    pub plans_on_events: bool,
    /// What a job does not get on for when its workers change.
    pub rescale: Duration,
    /// The end; none: when every job is done.
    pub end: Option<Time>,
    /// How often the state is written down.
    pub row_every: Duration,
    pub options: Options,
}

/// A job and when it comes.
#[derive(Clone, Debug)]
pub struct JobScript {
    pub name: String,
    /// As it is submitted: without pods.
    pub job: Job,
    pub work: Work,
}

/// An online service: equal pods, as many as the script says at the time.
#[derive(Clone, Debug)]
pub struct ServiceScript {
    pub name: String,
    pub shape: Resources,
    /// How many pods there are before anything else happens.
    pub at_start: u32,
    pub targets: Vec<(Time, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub at: Time,
    pub node: NodeId,
    pub kind: FaultKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The node is gone at once, and back after a while.
    Loss { back_after: Duration },
    /// The node is announced to go, goes, and is back after a while.
    Reclaim { notice: Duration, back_after: Duration },
}

impl Scenario {
    /// Adds losses and reclaims of random nodes, so many an hour over the whole cluster; each is
    /// back after ten minutes.
    #[must_use]
    pub fn with_losses(self, losses_per_hour: f64, reclaims_per_hour: f64, seed: u64) -> Self {
        let until = self.end.unwrap_or(Time::ZERO + FAULTS_UNTIL);
        let back_after = NODE_BACK_AFTER;
        let kinds = [
            (losses_per_hour, FaultKind::Loss { back_after }),
            (reclaims_per_hour, FaultKind::Reclaim { notice: RECLAIM_NOTICE, back_after }),
        ];
        let happening = kinds.into_iter().filter(|(per_hour, _)| *per_hour > 0.0);
        happening.fold(self, |scenario, (per_hour, kind)| {
            scenario.with_faults(per_hour, until, kind, seed)
        })
    }

    /// Adds losses (or reclaims) of random nodes, so many an hour over the whole cluster.
    #[must_use]
    pub fn with_faults(mut self, per_hour: f64, until: Time, kind: FaultKind, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut at = Time::ZERO;
        loop {
            let gap = -(1.0 - rng.unit()).ln() * 3600.0 / per_hour;
            at = at + Duration::from_secs_f64(gap);
            if at >= until || self.nodes.is_empty() {
                return self;
            }
            let which = rng.below(self.nodes.len() as u64);
            let node = self.nodes[usize::try_from(which).unwrap_or(0)].id;
            self.faults.push(Fault { at, node, kind });
        }
    }
}
