// SPDX-License-Identifier: Apache-2.0
//! Where a job's pods are, those on their way included.
//!
//! A master that was told to have four workers will have four. Until their pods are there, their
//! room is kept for them where they fit best, so that a plan does not give it away and does not
//! ask twice for what it asked before. Those that are too many are as good as gone.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::platform::Role as PodRole;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{Counts, Job, Node, NodeId, NodeState, Placed, Role};

use super::pods::JobPod;

/// How many pods of each role a job shall have, and which workers shall go first.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    pub(super) counts: Counts,
    /// Numbers of workers that were asked to leave.
    pub(super) leave: BTreeSet<u32>,
}

/// The nodes while jobs are seated.
pub(super) struct Seats<'a> {
    nodes: &'a mut [Node],
    ids: &'a BTreeMap<String, NodeId>,
}

impl<'a> Seats<'a> {
    /// `nodes` are in order of their ids.
    pub(super) fn new(nodes: &'a mut [Node], ids: &'a BTreeMap<String, NodeId>) -> Self {
        Self { nodes, ids }
    }

    /// Books pods that nobody plans: those of others, and of jobs that are over.
    pub(super) fn book(&mut self, node: &str, asks: Resources, is_leaving: bool) {
        let Some(node) = self.node_mut(node) else { return };
        if is_leaving {
            node.leaving += asks;
        } else {
            node.taken += asks;
        }
    }

    /// Seats the pods that a job has; says how many of those it shall have are not bound yet.
    pub(super) fn seat(&mut self, job: &mut Job, pods: &[JobPod], wanted: &Wanted) -> Counts {
        let mut missing = wanted.counts;
        let mut on: BTreeMap<(NodeId, Role), u32> = BTreeMap::new();
        for pod in in_order(pods, &wanted.leave) {
            let role = role(pod.role);
            if pod.is_running() {
                *job.running.of_mut(role) += 1;
            }
            let Some(name) = &pod.node else { continue };
            let Some(id) = self.ids.get(name).copied() else { continue };
            let left = missing.of_mut(role);
            if !pod.is_active() || *left == 0 {
                let holds = !matches!(pod.life, super::pods::Life::Ended(_));
                self.book(name, if holds { pod.asks } else { Resources::ZERO }, true);
                continue;
            }
            *left -= 1;
            *on.entry((id, role)).or_default() += 1;
            // A pod that ran out of memory may have more of it than its job asks for.
            let more = pod.asks.saturating_sub(job.roles.of(role).shape);
            self.book(name, more, false);
        }
        job.placed = on.into_iter().map(|((node, role), n)| Placed { role, node, n }).collect();
        missing
    }

    /// Keeps room for pods that are on their way; those that fit nowhere are not placed.
    pub(super) fn reserve(&mut self, jobs: &mut [(Job, Counts)]) {
        let mut free: BTreeMap<NodeId, Resources> = self.nodes.iter().map(free).collect();
        for (job, _) in jobs.iter() {
            for placed in &job.placed {
                let asks = job.roles.of(placed.role).shape * u64::from(placed.n);
                let free = free.entry(placed.node).or_default();
                *free = free.saturating_sub(asks);
            }
        }
        for (job, missing) in jobs {
            for role in Role::ALL {
                for _ in 0..missing.of(role) {
                    let shape = job.roles.of(role).shape;
                    match self.tightest(&free, job, shape) {
                        Some(node) => {
                            *free.entry(node).or_default() -= shape;
                            add(&mut job.placed, Placed { role, node, n: 1 });
                        }
                        None => *job.unplaced.of_mut(role) += 1,
                    }
                }
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
        let room = |node: &Node| Some((*free.get(&node.id)?, node.id));
        let fitting = self.nodes.iter().filter(takes).filter_map(room);
        fitting.filter(|(room, _)| shape.fits_in(*room)).min().map(|(_, node)| node)
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

/// Those that stay come first: workers that were not asked to leave, the oldest before the newest.
fn in_order<'a>(pods: &'a [JobPod], leave: &BTreeSet<u32>) -> Vec<&'a JobPod> {
    let mut ordered: Vec<&JobPod> = pods.iter().collect();
    let is_asked = |pod: &JobPod| pod.role == PodRole::Worker && leave.contains(&pod.index);
    ordered.sort_by_key(|pod| (pod.role, is_asked(pod), pod.index));
    ordered
}

pub(super) fn role(role: PodRole) -> Role {
    match role {
        PodRole::Master => Role::Master,
        PodRole::Ps => Role::Ps,
        PodRole::Worker => Role::Worker,
    }
}
