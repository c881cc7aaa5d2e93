// SPDX-License-Identifier: Apache-2.0
//! The nodes of a job's pods, including pods that do not exist yet.
//!
//! A job that was granted four workers will have four. Until their pods exist, capacity is reserved
//! for them where they fit best, so a plan neither gives it away nor requests it twice. Surplus pods
//! count as leaving.

use std::collections::BTreeMap;

use edl_sched::resources::Resources;
use edl_sched::snapshot::{Counts, Job, Node, NodeId, NodeState, Placed, Role};

use super::pods::JobPod;

/// How many pods of each role a job should have, and which workers to remove first.
pub(super) struct Wanted<'a> {
    pub(super) counts: Counts,
    pub(super) leave: &'a [u32],
}

/// The nodes while pods are placed.
pub(super) struct Placement<'a> {
    nodes: &'a mut [Node],
    ids: &'a BTreeMap<String, NodeId>,
}

impl<'a> Placement<'a> {
    /// `nodes` are in order of their ids.
    pub(super) fn new(nodes: &'a mut [Node], ids: &'a BTreeMap<String, NodeId>) -> Self {
        Self { nodes, ids }
    }

    /// Counts a pod that is not planned: of others, or of a job that is over.
    pub(super) fn occupy(&mut self, node: &str, requests: Resources, is_leaving: bool) {
        let Some(node) = self.node_mut(node) else { return };
        if is_leaving {
            node.leaving += requests;
        } else {
            node.taken += requests;
        }
    }

    /// Places a job's existing pods. Returns how many of the wanted ones have no node yet.
    pub(super) fn place(&mut self, job: &mut Job, pods: &[JobPod], wanted: &Wanted<'_>) -> Counts {
        let mut missing = wanted.counts;
        let mut on: BTreeMap<(NodeId, Role), u32> = BTreeMap::new();
        for pod in in_order(pods, wanted.leave) {
            let role = pod.role;
            if pod.is_running() {
                *job.running.of_mut(role) += 1;
            }
            let Some(name) = &pod.node else { continue };
            let Some(id) = self.ids.get(name).copied() else { continue };
            let left = missing.of_mut(role);
            if !pod.is_active() || *left == 0 {
                if !pod.has_ended() {
                    self.occupy(name, pod.requests, true);
                }
                continue;
            }
            *left -= 1;
            *on.entry((id, role)).or_default() += 1;
            // After running out of memory, a pod may have more of it than its job requests.
            let more = pod.requests.saturating_sub(job.roles.of(role).shape);
            self.occupy(name, more, false);
        }
        job.placed = on.into_iter().map(|((node, role), n)| Placed { role, node, n }).collect();
        missing
    }

    /// Reserves capacity for missing pods. Those that fit on no node are not placed.
    pub(super) fn reserve(&mut self, jobs: &mut [(Job, Counts)]) {
        let mut free: BTreeMap<NodeId, Resources> = self.nodes.iter().map(free).collect();
        for (job, _) in jobs.iter() {
            for placed in &job.placed {
                let requests = job.roles.of(placed.role).shape * u64::from(placed.n);
                let free = free.entry(placed.node).or_default();
                *free = free.saturating_sub(requests);
            }
        }
        for (job, missing) in jobs {
            for role in Role::ALL {
                let shape = job.roles.of(role).shape;
                let mut left = missing.of(role);
                // A node that has become tighter is still the tightest, so it is filled at once.
                while let Some(node) = self.tightest(&free, job, shape).filter(|_| left > 0) {
                    let free = free.entry(node).or_default();
                    let n = u32::try_from(shape.times_in(*free)).unwrap_or(u32::MAX).min(left);
                    *free -= shape * u64::from(n);
                    add(&mut job.placed, Placed { role, node, n });
                    left -= n;
                }
                *job.unplaced.of_mut(role) += left;
            }
        }
    }

    fn tightest(
        &self,
        free: &BTreeMap<NodeId, Resources>,
        job: &Job,
        shape: Resources,
    ) -> Option<NodeId> {
        let takes = |node: &&Node| node.state == NodeState::Ready && job.may_use(node);
        let with_free = |node: &Node| Some((*free.get(&node.id)?, node.id));
        let fitting = self.nodes.iter().filter(takes).filter_map(with_free);
        fitting.filter(|(free, _)| shape.fits_in(*free)).min().map(|(_, node)| node)
    }

    fn node_mut(&mut self, name: &str) -> Option<&mut Node> {
        let id = *self.ids.get(name)?;
        let at = self.nodes.binary_search_by_key(&id, |node| node.id).ok()?;
        Some(&mut self.nodes[at])
    }
}

fn free(node: &Node) -> (NodeId, Resources) {
    (node.id, node.capacity.saturating_sub(node.taken))
}

fn add(placed: &mut Vec<Placed>, new: Placed) {
    match placed.iter_mut().find(|old| old.role == new.role && old.node == new.node) {
        Some(old) => old.n += new.n,
        None => placed.push(new),
    }
}

/// Pods that stay come first: workers not asked to leave, the oldest before the newest.
fn in_order<'a>(pods: &'a [JobPod], leave: &[u32]) -> Vec<&'a JobPod> {
    let mut ordered: Vec<&JobPod> = pods.iter().collect();
    let is_asked = |pod: &JobPod| pod.role == Role::Worker && leave.contains(&pod.index);
    ordered.sort_by_key(|pod| (pod.role, is_asked(pod), pod.index));
    ordered
}
