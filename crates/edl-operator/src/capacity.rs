// SPDX-License-Identifier: Apache-2.0
//! The free capacity of a cluster once a plan is carried out: why a job does not get more.

use std::collections::BTreeMap;

use edl_sched::names::Names;
use edl_sched::plan::AllocationPlan;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{Job, JobId, Node, NodeId, NodeState, QueueId, Snapshot};
use edl_sched::state::Options;

use crate::observe::{JobView, Observed};

/// The cluster after a plan. It is computed once for all jobs, because large clusters take time.
pub(crate) struct Capacity<'a> {
    after: Snapshot,
    sums: Sums,
    options: &'a Options,
    names: &'a Names,
}

/// What a cluster has, and what its jobs and other pods request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    /// Of all nodes that stay.
    pub(crate) total: Resources,
    pub(crate) of_jobs: Resources,
    pub(crate) of_others: Resources,
    pub(crate) by_queue: BTreeMap<QueueId, Resources>,
    by_node: BTreeMap<NodeId, Resources>,
}

impl Sums {
    pub(crate) fn new(snapshot: &Snapshot) -> Self {
        let stays = |node: &&Node| node.state != NodeState::Leaving;
        let mut sums = Self {
            total: snapshot.nodes.iter().filter(stays).map(|node| node.capacity).sum(),
            of_others: snapshot.nodes.iter().map(|node| node.taken).sum(),
            by_node: snapshot.nodes.iter().map(|node| (node.id, node.taken)).collect(),
            ..Self::default()
        };
        for job in &snapshot.jobs {
            for placed in &job.placed {
                let held = job.roles.of(placed.role).shape * u64::from(placed.n);
                *sums.by_node.entry(placed.node).or_default() += held;
                sums.of_jobs += held;
            }
            *sums.by_queue.entry(job.queue).or_default() += job.resources(job.counts());
        }
        sums
    }
}

impl<'a> Capacity<'a> {
    pub(crate) fn new(observed: &'a Observed, plan: &'a AllocationPlan) -> Self {
        let after = edl_sched::applied(&observed.snapshot, plan);
        let sums = Sums::new(&after);
        Self { after, sums, options: &plan.state.options, names: &observed.names }
    }

    /// Why a job that gets `planned` workers does not get one more; none if it has none at all, or
    /// cannot be planned.
    pub(crate) fn not_more(&self, view: &JobView, planned: u32) -> Option<String> {
        let (_, max) = view.limits()?;
        let job = self.job(view.id).filter(|_| planned > 0)?;
        if planned >= max {
            return Some("at its maximum".into());
        }
        let shape = job.roles.worker.shape;
        let asked = self.sums.of_jobs + self.sums.of_others;
        let may_be = self.sums.total.permille(self.options.max_load_permille);
        // Pods limit nodes, not the load.
        if let Some(kind) = (asked + shape).with_pods(0).lacks(may_be) {
            let percent = f64::from(self.options.max_load_permille) / 10.0;
            return Some(format!(
                "not scaling up: cluster {kind} is at the {percent} % load limit"
            ));
        }
        if let Some(why) = self.queue_is_full(job.queue, shape) {
            return Some(why);
        }
        if !self.fits(job, shape) {
            return Some(format!("not scaling up: no node can fit another worker ({shape})"));
        }
        let secs = self.options.freeze.as_secs();
        Some(format!("not scaling up yet: jobs grow in steps, and wait {secs} s after a resize"))
    }

    fn job(&self, id: JobId) -> Option<&Job> {
        self.after.jobs.iter().find(|job| job.id == id)
    }

    fn queue_is_full(&self, id: QueueId, shape: Resources) -> Option<String> {
        let queue = self.after.queues.iter().find(|queue| queue.id == id)?;
        let may_use = queue.quota? + queue.borrow?;
        let used = self.sums.by_queue.get(&id).copied().unwrap_or_default();
        let kind = (used + shape).lacks(may_use)?;
        let name = self.names.queues.get(&id).cloned().unwrap_or_default();
        Some(format!("not scaling up: {kind} quota of queue `{name}` exhausted"))
    }

    fn fits(&self, job: &Job, shape: Resources) -> bool {
        self.after.nodes.iter().any(|node| {
            let taken = self.sums.by_node.get(&node.id).copied().unwrap_or_default();
            let free = node.capacity.saturating_sub(taken);
            node.state == NodeState::Ready && job.may_use(node) && shape.fits_in(free)
        })
    }
}
